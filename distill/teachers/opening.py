"""Loading of a recipe's teacher and student, and the checks that they can be compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from distill.models.gpu_specs import family_in, fp8_problem, runs_our_kernels
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.models.load.shared_weights import SharedCheckpoints
from distill.models.loading import load_student
from distill.models.patch.attention import stop_fused_attention, use_fused_attention
from distill.models.patch.packed import packing_problem
from distill.models.routers import freeze_parts
from distill.objectives.hidden import HiddenFormat
from distill.objectives.plugin import PluginTermLoss
from distill.teachers.calibration import cut_from
from distill.teachers.load_context import CutRequest
from distill.teachers.sharing import sharing_text, student_weights

if TYPE_CHECKING:
    from distill.objectives.plugin import Plugin
    from distill.recipe import Recipe
    from distill.teachers.base import Teacher, TeacherPlan
    from distill.teachers.load_context import LoadContext
    from distill.teachers.vocabulary import Vocabulary


class ModelPair(NamedTuple):
    """Teacher and student, ready for training, with their vocabularies.

    Attributes:
        teacher, student: Both models on the device; a sharded teacher is already patched.
        vocabulary: Tokenizers of both models.
        vocab_size: Number of vocabulary columns that are compared; None for the columns of the teacher's targets.
        vocabulary_note: Result of comparing the two vocabularies, one line.
        layer_indices: Indices of the teacher's layers in a student that is cut from it; None for any other student.
        sharing: Which models hold one copy of weights, or why they do not; one line, empty where none could.
    """

    teacher: Teacher
    student: Any
    vocabulary: Vocabulary
    vocab_size: int | None
    vocabulary_note: str
    layer_indices: list[int] | None
    sharing: str = ""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the data; None for random tokens."""
        return self.vocabulary.tokenizer

    def models(self) -> list[tuple[str, nn.Module]]:
        """Every model that is loaded, by the recipe's field, the student last."""
        return [*self.teacher.models.items(), ("student", self.student)]


@contextlib.contextmanager
def opened_pair(source: TeacherPlan, vocabulary: Vocabulary, context: LoadContext) -> Iterator[ModelPair]:
    """Yield the pair of `open_pair`, and close its teacher at the end, also after an error."""
    pair = open_pair(source, vocabulary, context)
    try:
        yield pair
    finally:
        pair.teacher.close()


def open_pair(source: TeacherPlan, vocabulary: Vocabulary, context: LoadContext) -> ModelPair:
    """Load teacher and student, and check that they can be compared.

    Args:
        source: Plan of the recipe's teacher.
        vocabulary: Vocabulary of the source; tokenizers are compared before weights are read.
        context: device, dtypes and placement.
    """
    recipe = source.recipe
    section = source.recipe.student
    vocabulary.prepare()
    device = context.device
    sharded = context.placement.teacher_sharded
    for problem in loading_problems(source, cuda=device.type == "cuda", sharded=sharded, family=family_in(device)):
        raise ValueError(f"{problem} ({context.placement.why})" if sharded else problem)
    dtype = context.precision.student
    planned = source.frozen_weights(context.precision, sharded=sharded)
    frozen = student_weights(section, dtype, sharded=context.placement.student_sharded)
    checkpoints = SharedCheckpoints([*planned, frozen] if frozen is not None else planned)
    teacher = source.open(context._replace(checkpoints=checkpoints), vocabulary)
    without_lora = section.model_copy(update={"lora": None})
    layer_indices = None
    request = CutRequest(without_lora.model_copy(update={"model": None}), device, dtype, context.calibration)
    if section.is_cut:
        student, layer_indices = teacher.cut_student(request)
    else:
        once = functools.partial(checkpoints.load, frozen)
        student = load_student(without_lora, device=device, dtype=dtype, once=once)
        student = student if section.cut is None else cut_from(student, request).model
    vocabulary.fit(student)
    for field, model in (*teacher.models.items(), ("student", student)):
        too_long = length_problem(recipe, unwrap_peft(model).config, field)
        if too_long:
            raise ValueError(too_long)
        check_packing(recipe, model, field)
    rows = len(find_head(student).linear.weight)  # type: ignore[arg-type]
    vocab_size, verdict = vocabulary.match(list(teacher.format.properties.columns), rows)
    if section.lora is not None:
        from distill.models.adapters import add_lora  # imports peft, a second

        student = add_lora(student, section.lora, seed=recipe.train.seed)
    freeze_parts(student, section.freeze)
    sharing = sharing_text(planned, frozen, {**teacher.models, "student": student})
    return ModelPair(teacher, student, vocabulary, vocab_size, verdict, layer_indices, sharing)


def loading_problems(source: TeacherPlan, *, cuda: bool, sharded: bool, family: str | None) -> list[str]:
    """Return why the models of a recipe cannot be loaded on such devices, before weights are read; empty if they can.

    Args:
        family: Architecture family of the GPUs; None for a CPU and an unknown GPU.
    """
    student_problem = fp8_problem(source.recipe.student, family)
    problems = source.problems(cuda=cuda, sharded=sharded, family=family)
    return [*problems, student_problem] if student_problem else problems


def use_plugin(teacher: Teacher, plugin: Plugin) -> None:
    """Add a plugin's loss functions to a teacher's target format.

    Raises:
        ValueError: a kind of teacher whose logits the functions cannot be given.
    """
    if not isinstance(teacher.format, HiddenFormat):
        raise ValueError("--plugin: expected one teacher with hidden states, got several, or top-k outputs")
    teacher.format.makers["plugin"] = functools.partial(PluginTermLoss, plugin.terms)


def longest_sequence(config: Any) -> int | None:
    """Return how many positions a model has; None where its configuration sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def length_problem(recipe: Recipe, config: Any, field: str) -> str | None:
    """Return the error of sequences that are longer than the positions of a model; None where they fit."""
    most = longest_sequence(config)
    if most is None or recipe.data.max_length <= most:
        return None
    return f"data.max_length: expected at most {most}, the {field}'s longest sequence; got {recipe.data.max_length}"


def attention_of(recipe: Recipe, field: str) -> str:
    """Return the attention that the recipe names for the model of a field: `teacher`, `teachers.N` or `student`."""
    number = int(field.partition(".")[2] or 0)
    if field == "student":
        return recipe.student.attention
    return (recipe.teachers[number] if recipe.teachers else recipe.teacher).attention


def check_packing(recipe: Recipe, model: Any, field: str) -> None:
    """Raise ValueError for packed rows and a model in which documents of one row attend to each other."""
    if not recipe.data.packing or any(p.is_meta for p in model.parameters()):
        return
    attention = attention_of(recipe, field)
    # transformers' flash attention keeps documents apart only in a batch of one row
    one_row = recipe.train.batch_size == 1 and "flash" in attention
    problem = packing_problem(model, longest=recipe.data.max_length, row_by_row=one_row)
    if problem is None:
        return
    # there our attention will take the place of the model's own
    on_gpu = runs_our_kernels(find_head(model).linear.weight.device)  # type: ignore[arg-type]
    if not (on_gpu and attention == "auto" and isolates_documents_with_kernels(model, recipe.data.max_length)):
        raise ValueError(
            f"data.packing: expected false, since the {field} ({type(unwrap_peft(model)).__name__}) {problem}"
        )


def isolates_documents_with_kernels(model: Any, longest: int | None = None) -> bool:
    """Return whether our attention, where `patch` can install it, keeps documents apart; the model is not changed.

    Some models do not pass document boundaries to their own attention, but do to ours (AFMoE, OPT).
    """
    if not getattr(unwrap_peft(model), "_supports_attention_backend", False):
        return False
    decoder = decoder_of(model)
    use_fused_attention(unwrap_peft(model), decoder)
    try:
        return packing_problem(model, longest=longest) is None
    finally:
        stop_fused_attention(unwrap_peft(model), decoder)
