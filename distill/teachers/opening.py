"""What a run loads before it writes anything: the tokenizer, both models, and the proof that they can be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from distill.core import console
from distill.core.ranks import is_first
from distill.data.chat import with_template
from distill.data.load import Splits, load_data
from distill.models.adapters import add_lora
from distill.models.attention_choice import AttentionChoices
from distill.models.head import bare, decoder_of, find_head
from distill.models.load import kept_layers, load_config, load_student, load_teacher, load_tokenizer
from distill.models.packed import keeps_apart
from distill.models.patching import Role
from distill.models.precision import Precision
from distill.models.sharding import ALONE, Sharing, is_sharded
from distill.models.vocabulary import compare, extend_student, shared_columns
from distill.recipe import Recipe
from distill.teachers.cache.read import TeacherCache
from distill.teachers.objective import DistillationObjective
from distill.teachers.plugin import Plugin, PluginObjective


class Models(NamedTuple):
    """What was loaded, and what is known of it.

    Attributes:
        teacher, student: the models; no teacher where it is a cache.
        tokenizer: of both, or of the student where theirs differ; None for synthetic data.
        vocab_size: columns of the vocabulary that are compared; None for all.
        vocabulary: the verdict on the two vocabularies, a line.
        kept: layers of the teacher that a student cut from it has.
        objective: what makes the objective, as `DistillationTrainer` takes it.
        cache: what a teacher said, where none is loaded.
        teacher_tokenizer: the teacher's own, where it differs.
    """

    teacher: Any
    student: Any
    tokenizer: Any
    vocab_size: int | None
    vocabulary: str
    kept: list[int] | None
    objective: Callable[..., DistillationObjective] = DistillationObjective
    cache: TeacherCache | None = None
    teacher_tokenizer: Any = None


def is_synthetic(recipe: Recipe) -> bool:
    """Whether the data are random tokens."""
    return recipe.data.source.partition(":")[0] == "synthetic"


def read_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer that makes the data: the teacher's, or the student's where it keeps its own; None for random data.

    It holds the chat template that the recipe names, so that prompts are put, and the student is saved, as it learned.

    Raises:
        ValueError: random tokens for two tokenizers, or a template that cannot be read.
    """
    if recipe.student.vocabulary == "cross":
        if is_synthetic(recipe):
            raise ValueError(
                f"data.source: {recipe.data.source} has no text, by which student.vocabulary: cross compares"
            )
        return with_template(load_tokenizer(recipe.student, "student"), recipe.data.chat_template)
    return None if is_synthetic(recipe) else with_template(load_tokenizer(recipe.teacher), recipe.data.chat_template)


def read_data(recipe: Recipe, tokenizer: Any) -> Splits:
    """The recipe's data, tokenised by `tokenizer`, and by the teacher's own where the student keeps its own."""
    if recipe.student.vocabulary == "cross":
        from distill.teachers.cross.data import load_cross_data

        return load_cross_data(recipe.data, tokenizer, load_tokenizer(recipe.teacher), seed=recipe.train.seed)
    size = synthetic_size(recipe, tokenizer)
    return load_data(recipe.data, tokenizer, seed=recipe.train.seed, vocab_size=size)


def synthetic_size(recipe: Recipe, tokenizer: Any) -> int | None:
    """Ids of random tokens stay below the smaller of the two vocabularies."""
    if tokenizer is not None:
        return None
    if recipe.teacher.path is not None:
        return int(TeacherCache(recipe.teacher.path).manifest["ids_below"])
    sections: list[tuple[Any, str]] = [(recipe.teacher, "teacher")]
    if recipe.student.init == "random" or recipe.student.from_teacher is None:
        sections.append((recipe.student, "student"))
    return min(load_config(section, field).get_text_config().vocab_size for section, field in sections)


def load_models(
    recipe: Recipe,
    tokenizer: Any,
    device: torch.device,
    precision: Precision,
    sharing: Sharing = ALONE,
    choices: AttentionChoices | None = None,
) -> Models:
    """Load both models and hold that they can be compared token by token; a sharded teacher is patched here."""
    if recipe.teachers:
        from distill.teachers.mixture import load_several

        return load_several(recipe, tokenizer, device, precision, sharing, choices)
    if recipe.student.vocabulary == "cross":
        from distill.teachers.cross.objective import load_cross

        return load_cross(recipe, tokenizer, device, precision, sharing, choices)
    if recipe.teacher.is_cached:
        from distill.teachers.cache.models import load_cached

        return load_cached(recipe, tokenizer, device, precision)
    section = recipe.student
    own = section.init == "pretrained" and section.from_teacher is None and tokenizer is not None
    student_tokenizer = load_tokenizer(section, "student") if own else tokenizer
    extend = section.vocabulary == "extend"
    if own and not extend:  # before gigabytes are read
        compare(tokenizer, student_tokenizer).require()
    if sharing.teacher_sharded:
        teacher = _sharded_teacher(recipe, device, precision, choices or AttentionChoices(recipe))
    elif _fits_only_in_fp8(recipe, device, precision):
        from distill.models.fp8_teacher import load_a_layer_at_a_time

        teacher = load_a_layer_at_a_time(recipe.teacher, device=device, dtype=precision.teacher)
    else:
        teacher = load_teacher(recipe.teacher, device=device, dtype=precision.teacher)
    bare_section = section.model_copy(update={"lora": None})
    student = load_student(bare_section, teacher=teacher, device=device, dtype=precision.student)
    if own and extend:
        extend_student(student, student_tokenizer, tokenizer)
        student_tokenizer = tokenizer
    for model, field in ((teacher, "teacher"), (student, "student")):
        check_length(recipe, model, field)
        check_packing(recipe, model, field)
    rows = [len(find_head(model).linear.weight) for model in (teacher, student)]  # type: ignore[arg-type]
    shared, verdict = shared_columns(tokenizer, student_tokenizer, *rows)
    if section.lora is not None:
        student = add_lora(student, section.lora, seed=recipe.train.seed)
    kept = kept_layers(section, teacher) if section.init == "pretrained" and section.from_teacher else None
    return Models(teacher, student, tokenizer, shared, verdict, kept)


def _sharded_teacher(recipe: Recipe, device: torch.device, precision: Precision, choices: AttentionChoices) -> Any:
    """A teacher in shards, with our kernels in it where there is a GPU; the same on every process."""
    from distill.teachers.sharded import load_sharded_teacher

    if recipe.student.init == "pretrained" and recipe.student.from_teacher is not None:
        raise ValueError(
            "student.from_teacher: layers cannot be cut out of a teacher that is sharded over the devices; cut the "
            "student where the teacher fits and name it by student.model, or set parallel.teacher to copied"
        )
    model, report = load_sharded_teacher(
        recipe.teacher, device=device, dtype=precision.teacher,
        attention=(lambda model: choices.of(model, "teacher")) if device.type == "cuda" else None,
    )  # fmt: skip
    if report is not None and is_first():
        console.say(f"{'kernels':<12}teacher: {report}")
    return model


def _by_role(models: Models) -> list[tuple[Any, Role]]:
    """Every model that is loaded: the teacher, or several, and the student."""
    teachers = [teacher for teacher in getattr(models.teacher, "members", [models.teacher]) if teacher is not None]
    return [*((teacher, "teacher") for teacher in teachers), (models.student, "student")]


def compile_models(models: Models) -> None:
    """Have the decoder layers of both models compiled when training first calls them."""
    from distill.models.compiling import compile_layers

    counts: dict[str, int] = {}
    for model, role in _by_role(models):
        counts[role] = counts.get(role, 0) + compile_layers(model)
    if is_first():
        told = ", ".join(f"{count} layers of the {role}" for role, count in counts.items())
        console.say(f"{'compile':<12}{told}, when they are first called")


def with_plugin(models: Models, plugin: Plugin) -> Models:
    """The same models, compared by a plugin's functions too.

    Raises:
        ValueError: a kind of teacher whose logits the functions cannot be given.
    """
    if models.objective is not DistillationObjective:
        raise ValueError("--plugin: its functions take one teacher's logits; this recipe's teacher is of another kind")
    return models._replace(objective=functools.partial(PluginObjective, functions=plugin.terms))


def _fits_only_in_fp8(recipe: Recipe, device: torch.device, precision: Precision) -> bool:
    """Whether an fp8 teacher is too large to be loaded whole before it is quantised."""
    if recipe.teacher.dtype != "fp8" or device.type != "cuda":
        return False
    from distill.models.meta import meta_models
    from distill.models.shape import USABLE, shape_of
    from distill.planning.memory import loaded_whole

    teacher, student = (shape_of(model) for model in meta_models(recipe))
    total = torch.cuda.get_device_properties(device).total_memory
    return loaded_whole(teacher, student, precision) > USABLE * total


def check_length(recipe: Recipe, model: Any, field: str) -> None:
    """Refuse sequences that are longer than the model's positions."""
    most = getattr(bare(model).config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    if most and recipe.data.max_length > most:
        raise ValueError(
            f"data.max_length: expected at most {most}, the {field}'s longest sequence; came {recipe.data.max_length}"
        )


def check_packing(recipe: Recipe, model: Any, field: str) -> None:
    """Refuse packed rows for a model in which documents of one row see each other."""
    if not recipe.data.packing or any(p.is_meta for p in model.parameters()):
        return
    sections = {f"teachers.{number}": section for number, section in enumerate(recipe.teachers)}
    attention = (sections | {"teacher": recipe.teacher, "student": recipe.student})[field].attention
    # by transformers' flash attention documents stay apart in a batch of one row alone
    if keeps_apart(model, row_by_row=recipe.train.batch_size == 1 and "flash" in attention):
        return
    on_gpu = find_head(model).linear.weight.is_cuda  # there our attention will take the place of the model's own
    if not (on_gpu and attention == "auto" and keeps_apart_by_ours(model)):
        raise ValueError(
            f"data.packing: expected false, since the {field} ({type(bare(model)).__name__}) does not keep documents "
            "of one row apart: its layers carry something from one into the next, or its attention is not told where "
            "they end"
        )


def keeps_apart_by_ours(model: Any) -> bool:
    """Whether documents of a row stay apart by our attention, where `patch` can put it in; the model stays as it is.

    Some models do not tell their own attention where documents end, but hand it on to ours (AFMoE, OPT).
    """
    from distill.models.attention import stop_fused_attention, use_fused_attention

    if not getattr(bare(model), "_supports_attention_backend", False):
        return False
    decoder = decoder_of(model)
    use_fused_attention(bare(model), decoder)
    try:
        return keeps_apart(model)
    finally:
        stop_fused_attention(bare(model), decoder)


def patch_models(models: Models, recipe: Recipe, choices: AttentionChoices | None = None) -> None:
    """Put our kernels into both models (a sharded teacher has them already); on a CPU they stay as they are."""
    from distill.models.patching import patch

    choices = choices or AttentionChoices(recipe)
    for place, (model, role) in enumerate(_by_role(models)):  # teachers first
        if is_sharded(model):
            continue
        choice = choices.of(model, role, place if role == "teacher" else 0)
        report = patch(model, role, attention=choice)
        if is_first():
            console.say(f"{'kernels':<12}{role}: {report}")
