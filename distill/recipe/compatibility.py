"""Compatibility rules: properties that settings require, and that a recipe's teacher, student and data provide.

A feature, a choice of rows or a command requires properties (`REQUIREMENTS`, `COMMANDS`); a property is provided or not
by the rest of the recipe (`PROPERTIES`). One rule compares them, and all messages have one form: the requirement, the
recipe's conflicting setting, and the nearest choice that meets the requirement. `APART` lists the pairs that no
property explains.

The rules are data, read by `distill validate` without torch. Conflicts that depend on files, the GPU or the number of
processes are reported where these are known, before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distill.recipe.context_template import OF_THE_RUN, OTHERS
from distill.recipe.layer_terms import LAYERED_NAMES
from distill.recipe.loss import SEPARATE
from distill.recipe.reward import reward_of
from distill.recipe.teacher_config import LoadedTeacherConfig, StudentTeacherConfig, TeacherConfig
from distill.recipe.teachers import (
    Sections,
    first_teacher,
    mixed_teachers,
    teacher_prompt,
    written_teachers,
)
from distill.recipe.value_conflicts import value_conflicts


class Property(NamedTuple):
    """A property of a recipe that a feature may require.

    Attributes:
        what: the requirement, in words.
        missing: returns the settings that a recipe has instead; None where it provides the property.
        cure: the nearest choice that provides it.
    """

    what: str
    missing: Callable[[Sections], str | None]
    cure: str


def _instead(
    holds: Callable[[TeacherConfig], bool], text: Callable[[TeacherConfig], str]
) -> Callable[[Sections], str | None]:
    """Return a `missing` that names the first teacher that meets a condition."""

    def missing(recipe: Sections) -> str | None:
        found = first_teacher(recipe, holds)
        return None if found is None else f"{found[0]}.{text(found[1])}"

    return missing


def _or_none(holds: Callable[[Sections], bool], text: str) -> Callable[[Sections], str | None]:
    return lambda recipe: text if holds(recipe) else None


def _without_prompts(recipe: Sections) -> str | None:
    if recipe.data.is_synthetic:
        return f"data.source: {recipe.data.source} (random tokens)"
    if any(part.data.format == "text" for part in recipe.data.parts):
        return "data.format: text (running text)"
    return None


def _without_layers(recipe: Sections) -> str | None:
    """Return the setting for which a teacher's layers are not computed here: only its last outputs are."""
    if recipe.parallel.teacher == "served":
        return "parallel.teacher: served"
    found = first_teacher(
        recipe, lambda teacher: not teacher.is_loaded or teacher.store is not None or bool(teacher.top_k_setting)
    )
    if found is None:
        return None
    field, teacher = found
    if not teacher.is_loaded:
        return f"{field}.type: {teacher.type}"
    return f"{field}.{teacher.top_k_setting}" if teacher.store is None else f"{field}.online_cache: {teacher.store}"


def _other_prompts(recipe: Sections) -> str | None:
    found = first_teacher(recipe, lambda teacher: teacher_prompt(recipe.data, teacher) is not None)
    if found is None:
        return None
    field, teacher = found
    return f"{field}.{'chat_template_kwargs' if teacher.context is None else 'context'}"


def _students_own_prompt(recipe: Sections) -> str | None:
    found = first_teacher(
        recipe, lambda teacher: teacher.type == "student" and teacher_prompt(recipe.data, teacher) is None
    )
    return None if found is None else f"{found[0]}.chat_template_kwargs: the data's"


def _context_without_prompts(recipe: Sections) -> str | None:
    """Return the setting for which rows of a teacher with another prompt lack prompts; other routes need none."""
    if recipe.data.is_synthetic:
        return _without_prompts(recipe)
    for teacher in written_teachers(recipe):
        route = getattr(teacher, "route", None)
        prompt = teacher_prompt(recipe.data, teacher)
        parts = [part for part in recipe.data.parts if prompt is not None and part.teacher in (None, route)]
        if any(part.data.format == "text" for part in parts):
            return "data.format: text"
    return None


def _contexts_of_a_route(recipe: Sections) -> str | None:
    found: dict[str | None, object] = {}
    for number, teacher in enumerate(recipe.teachers):
        prompt = teacher_prompt(recipe.data, teacher)
        if prompt is not None and found.setdefault(teacher.route, prompt) != prompt:
            name = "chat_template_kwargs" if teacher.context is None else "context"
            return f"teachers.{number}.{name} other than that of another teacher of its route"
    return None


def _contexts_read(recipe: Sections, *names: str) -> bool:
    """Return whether the context of a teacher reads one of these names of a run's responses."""
    contexts = [teacher.context for teacher in written_teachers(recipe) if teacher.context is not None]
    return any(name in context.of_the_run for context in contexts for name in names)


def _without_reward(recipe: Sections) -> str | None:
    found = reward_of(recipe.loss, recipe.data.active_on_policy)
    return "no data.on_policy.reward" if found is None else None


def _without_feedback(recipe: Sections) -> str | None:
    own = recipe.data.active_on_policy
    return None if own is not None and own.environment is not None else _without_reward(recipe)


def _trained_in_4_bits(recipe: Sections) -> str | None:
    """Return the setting for which a running average of all weights would have to be in 4 bits."""
    found = first_teacher(recipe, lambda teacher: teacher.ema_decay is not None and teacher.dtype == "nf4")
    return None if found is None else f"{found[0]}.dtype: nf4"


PROPERTIES: dict[str, Property] = {
    "rollouts": Property(
        "student-generated responses, of which it is made",
        _or_none(lambda recipe: recipe.data.active_on_policy is None, "no data.on_policy"),
        "set data.on_policy, or give a template of the row's columns and the prompt",
    ),
    "several rollouts a prompt": Property(
        "several responses to each prompt",
        lambda recipe: None if recipe.data.samples > 1 else f"data.on_policy.samples: {recipe.data.samples}",
        "set data.on_policy.samples to 2 or more",
    ),
    "rewards": Property("a reward of each response", _without_reward, "set data.on_policy.reward"),
    "feedback": Property(
        "feedback on each response",
        _without_feedback,
        "set data.on_policy.reward to a function that returns a number and a text, or data.on_policy.environment",
    ),
    "prompts for the context": Property(
        "prompts", _context_without_prompts, "give chats, prompts with completions, or prompts alone"
    ),
    "one context a route": Property(
        "one context for the teachers of a route", _contexts_of_a_route, "give them the same, or routes of their own"
    ),
    "frozen weights": Property(
        "a teacher that stays as it is",
        _instead(lambda teacher: teacher.ema_decay is not None, lambda _: "ema"),
        "leave teacher.ema out",
    ),
    "new rows": Property(
        "a teacher that computes outputs for rows it has not seen",
        _instead(
            lambda teacher: teacher.is_cached or teacher.store is not None,
            lambda teacher: "type: cache" if teacher.store is None else f"online_cache: {teacher.store}",
        ),
        "set teacher.type to model or server, without teacher.online_cache",
    ),
    "hidden states": Property(
        "the whole distribution of a teacher, from its hidden states",
        _instead(lambda teacher: bool(teacher.top_k_setting), lambda teacher: teacher.top_k_setting),
        "leave top_k out (and online_cache_format: top_k), or cache with --hidden",
    ),
    "hidden states to mix": Property(
        "the whole distribution of each teacher of a mixture, from its hidden states",
        lambda recipe: next(
            (f"{field}.{own.top_k_setting}" for field, own in mixed_teachers(recipe) if own.top_k_setting), None
        ),
        "leave top_k out (and online_cache_format: top_k), or give the teacher a route of its own",
    ),
    "hidden states of layers": Property(
        "a teacher whose layers are computed in the run's own processes",
        _without_layers,
        "set teacher.type to model, leave online_cache out, and set parallel.teacher to auto, copied or sharded",
    ),
    "one teacher": Property(
        "one teacher", _or_none(lambda recipe: bool(recipe.teachers), "teachers"), "give teacher in its place"
    ),
    "one teacher a token": Property(
        "one teacher a token",
        _or_none(lambda recipe: bool(mixed_teachers(recipe)), "several teachers a token (a mixture)"),
        "give teacher, or each of the teachers a route of its own",
    ),
    "one teacher for all rows": Property(
        "one teacher for all rows",
        _or_none(lambda recipe: any(t.route is not None for t in recipe.teachers), "teachers with routes"),
        "give a recipe with teacher, or with teachers without routes",
    ),
    "student's tokens": Property(
        "a teacher of the student's tokenizer",
        _or_none(lambda recipe: recipe.student.vocabulary == "cross", "student.vocabulary: cross"),
        "set student.vocabulary to keep or extend",
    ),
    "student's prompts": Property(
        "a teacher that reads the student's prompts",
        _other_prompts,
        "leave teacher.context and teacher.chat_template_kwargs out",
    ),
    # rows of two tokenizers hold the teacher's prompt beside the student's
    "student's prompts or tokens of its own": Property(
        "a teacher that reads the student's prompts",
        lambda recipe: None if recipe.student.vocabulary == "cross" else _other_prompts(recipe),
        "leave teacher.context and teacher.chat_template_kwargs out",
    ),
    "student's messages": Property(
        "a teacher that reads the student's messages",
        _instead(lambda teacher: teacher.context is not None, lambda _: "context"),
        "leave teacher.context out",
    ),
    "prompt of its own": Property(
        "other prompts than the student's",
        _students_own_prompt,
        "give teacher.context, or teacher.chat_template_kwargs other than data.chat_template_kwargs",
    ),
    "weights": Property(
        "a teacher whose weights are loaded",
        _instead(lambda teacher: not teacher.is_loaded, lambda teacher: f"type: {teacher.type}"),
        "set teacher.type to model",
    ),
    "weights to shard": Property(  # of a cache, those of the model that makes it
        "a teacher whose weights are loaded, or that a cache is made by",
        _instead(lambda teacher: teacher.type == "server", lambda teacher: f"type: {teacher.type}"),
        "set teacher.type to model",
    ),
    "a model": Property(
        "a model to run over the data",
        _instead(
            lambda teacher: teacher.is_cached and not (teacher.model or teacher.config),
            lambda teacher: f"type: {teacher.type}",
        ),
        "set teacher.type to model",
    ),
    "weights in floating point": Property(
        "a teacher's weights in floating point",
        _instead(lambda teacher: teacher.dtype in ("int8", "nf4"), lambda teacher: f"dtype: {teacher.dtype}"),
        "set teacher.dtype to bfloat16, or fp8 with copies",
    ),
    "data of a known length": Property(
        "data that are read whole",
        _or_none(lambda recipe: recipe.data.streaming, "data.streaming: true"),
        "set data.streaming to false, with data.max_rows for a part of the data",
    ),
    "text": Property(
        "text",
        _or_none(lambda recipe: recipe.data.is_synthetic, "data.source: random tokens"),
        "give a file or a data set of the hub",
    ),
    "prompts": Property("prompts with answers", _without_prompts, "give chats, or prompts with completions"),
    "a divergence in every step": Property(
        "a divergence of weight above 0 in every step, since outputs are queried ahead",
        _or_none(lambda recipe: recipe.loss.leaves_the_teacher_out, "a loss.schedule that leaves it out"),
        "give the divergence a weight in every step of loss.schedule",
    ),
    "student's checkpoint": Property(
        "a student with a checkpoint of its own",
        _or_none(lambda recipe: recipe.student.is_cut, "student.from_teacher"),
        "give student.model",
    ),
    "weights to average": Property(
        "a student that trains all its weights, or adapters beside its head and over weights that stay as they are",
        lambda recipe: (
            _trained_in_4_bits(recipe)
            if recipe.student.lora is None
            else "student.lora.head: true"
            if recipe.student.lora.head
            else "student.lora with student.quantise"
            if recipe.student.quantise is not None
            else None
        ),
        "leave teacher.ema, student.lora.head, student.quantise or teacher.dtype: nf4 out",
    ),
    "whole student": Property(
        "a student that each process holds whole",
        _or_none(lambda recipe: recipe.parallel.strategy == "fsdp", "parallel.strategy: fsdp"),
        "set parallel.strategy to ddp",
    ),
    "student of its checkpoint's shape": Property(
        "a student of its checkpoint's shape, layer by layer and token by token",
        lambda recipe: (
            "student.from_teacher"
            if recipe.student.cut is not None
            else "student.vocabulary: extend"
            if recipe.student.vocabulary == "extend"
            else None
        ),
        "leave teacher.ema out, or train a student as it is saved",
    ),
    "whole teacher": Property(
        "a teacher that each process holds whole",
        _or_none(lambda recipe: recipe.parallel.teacher == "sharded", "parallel.teacher: sharded"),
        "set parallel.teacher to copied",
    ),
}


class Requirement(NamedTuple):
    """A setting and the properties that it requires.

    Attributes:
        field: field of the recipe, as in messages.
        present: Whether a recipe has the setting.
        properties: names in `PROPERTIES`.
    """

    field: str
    present: Callable[[Sections], bool]
    properties: tuple[str, ...]


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "data.on_policy",
        lambda recipe: recipe.data.active_on_policy is not None,
        ("new rows", "prompts"),
    ),
    Requirement(
        "data.on_policy.environment",
        lambda recipe: (
            recipe.data.active_on_policy is not None and recipe.data.active_on_policy.environment is not None
        ),
        ("text", "student's tokens", "data of a known length"),
    ),
    Requirement(  # the turns of a chat stand in neighbouring rows, which a plan of all rows keeps together
        "data.on_policy.turns: all", lambda recipe: recipe.data.generates_every_turn, ("data of a known length",)
    ),
    Requirement("data.streaming", lambda recipe: recipe.data.streaming, ("new rows", "text")),
    Requirement("train.epochs", lambda recipe: recipe.train.epochs is not None, ("data of a known length",)),
    Requirement(  # which is given the row that a prompt comes from, by its number
        "a reward",
        lambda recipe: reward_of(recipe.loss, recipe.data.active_on_policy) is not None,
        ("data of a known length",),
    ),
    Requirement(
        f"loss.terms: {' and '.join(SEPARATE)}",
        lambda recipe: recipe.loss.has(*SEPARATE),
        ("one teacher a token", "student's tokens"),
    ),
    Requirement(
        f"loss.terms: {' and '.join(SEPARATE)}",  # except for a sampled tail, for which a teacher's top K suffice
        lambda recipe: recipe.loss.has(*SEPARATE) and (recipe.loss.tailed is None or recipe.loss.has(SEPARATE[0])),
        ("hidden states",),
    ),
    Requirement(
        f"loss.terms: {LAYERED_NAMES}",
        lambda recipe: recipe.loss.reads_layers,
        ("one teacher", "hidden states of layers", "student's tokens", "student's prompts"),
    ),
    Requirement(
        "loss.terms: divergences other than forward_kl alone or reverse_kl alone",
        lambda recipe: not recipe.loss.divergences <= {"forward_kl"} and not recipe.loss.divergences <= {"reverse_kl"},
        ("hidden states",),
    ),
    Requirement(
        "loss.terms: tail: sampled beside other terms or with loss.temperature other than 1",
        lambda recipe: recipe.loss.tails_beside_others,
        ("hidden states",),
    ),
    Requirement("loss.schedule: temperature", lambda recipe: recipe.loss.schedules_temperature, ("hidden states",)),
    Requirement("loss.label_smoothing", lambda recipe: recipe.loss.label_smoothing > 0, ("student's tokens",)),
    Requirement("loss.z_loss", lambda recipe: recipe.loss.z_loss > 0, ("student's tokens",)),
    Requirement("loss.plugin", lambda recipe: recipe.loss.runs_terms, ("one teacher", "student's tokens")),
    Requirement(
        "student.vocabulary: cross",
        lambda recipe: recipe.student.vocabulary == "cross",
        ("one teacher a token", "hidden states", "text", "student's messages"),
    ),
    Requirement("student.from_teacher", lambda recipe: recipe.student.is_cut, ("weights in floating point",)),
    Requirement(  # on routes the rows of a teacher are made by its tokenizer or after its prompt
        "student.vocabulary: cross",
        lambda recipe: recipe.student.vocabulary == "cross" and bool(recipe.teachers),
        ("student's prompts",),
    ),
    Requirement(
        "teacher.context",
        lambda recipe: any(teacher.context is not None for teacher in written_teachers(recipe)),
        ("prompts for the context", "one context a route"),
    ),
    Requirement(
        f"teacher.context.template: {', '.join(OF_THE_RUN)}",
        lambda recipe: _contexts_read(recipe, *OF_THE_RUN),
        ("rollouts", "data of a known length"),
    ),
    Requirement(
        f"teacher.context.template: {', '.join(OTHERS)}",
        lambda recipe: recipe.data.active_on_policy is not None and _contexts_read(recipe, *OTHERS),
        ("several rollouts a prompt",),
    ),
    Requirement(
        "teacher.context.template: best, failed, reward",
        lambda recipe: recipe.data.active_on_policy is not None and _contexts_read(recipe, "best", "failed", "reward"),
        ("rewards",),
    ),
    Requirement(
        "teacher.context.template: feedback",
        lambda recipe: recipe.data.active_on_policy is not None and _contexts_read(recipe, "feedback"),
        ("feedback",),
    ),
    Requirement(
        "teacher.chat_template_kwargs",
        lambda recipe: (
            recipe.student.vocabulary != "cross"
            and any(
                teacher.context is None and teacher_prompt(recipe.data, teacher) is not None
                for teacher in written_teachers(recipe)
            )
        ),
        ("prompts for the context", "one context a route"),
    ),
    Requirement(
        "teacher.online_cache",
        lambda recipe: any(teacher.store is not None for teacher in written_teachers(recipe)),
        ("frozen weights",),
    ),
    Requirement(
        "teachers with routes",
        lambda recipe: any(teacher.route is not None for teacher in recipe.teachers),
        ("text",),
    ),
    Requirement("teachers of one route", lambda recipe: bool(mixed_teachers(recipe)), ("hidden states to mix",)),
    Requirement(
        "teacher.type: student",
        lambda recipe: any(isinstance(teacher, StudentTeacherConfig) for teacher in written_teachers(recipe)),
        ("student's checkpoint", "prompt of its own"),
    ),
    Requirement(
        "teacher.ema",
        lambda recipe: any(teacher.ema_decay is not None for teacher in written_teachers(recipe)),
        ("weights to average", "student of its checkpoint's shape", "whole student", "whole teacher"),
    ),
    Requirement(
        "student.quantise with student.lora",  # a merged weight is made of all rows of A, which shards are not
        lambda recipe: recipe.student.quantise is not None and recipe.student.lora is not None,
        ("whole student",),
    ),
    Requirement(
        "student.lora.dora",  # the length of each row of the merged weight is made of all rows of A
        lambda recipe: recipe.student.lora is not None and recipe.student.lora.dora,
        ("whole student",),
    ),
    Requirement(
        "student.dtype: nf4",  # codes and scales of a weight are not rows that FSDP2 could cut
        lambda recipe: recipe.student.dtype == "nf4",
        ("whole student",),
    ),
    Requirement(
        "export.tokens",
        lambda recipe: recipe.export is not None and recipe.export.tokens > 0,
        ("one teacher", "weights", "text", "student's tokens", "student's prompts"),
    ),
    Requirement(
        "teacher.type: server",
        lambda recipe: any(teacher.type == "server" for teacher in written_teachers(recipe)),
        ("a divergence in every step",),
    ),
    Requirement(
        "parallel.teacher: sharded",
        lambda recipe: recipe.parallel.teacher == "sharded",
        ("one teacher", "weights to shard", "weights in floating point"),
    ),
    Requirement(
        "parallel.teacher: served",
        lambda recipe: recipe.parallel.teacher == "served",
        ("one teacher", "weights", "frozen weights", "a divergence in every step"),
    ),
)


class Apart(NamedTuple):
    """Two settings that exclude each other.

    Attributes:
        field: field of the recipe, as in the message.
        both: Whether a recipe has both settings.
        reason: the reason, and the alternatives.
    """

    field: str
    both: Callable[[Sections], bool]
    reason: str


APART: tuple[Apart, ...] = (
    Apart(
        "data.on_policy",
        lambda recipe: recipe.data.active_on_policy is not None and recipe.loss.has("cross_entropy"),
        "the labels of a cross_entropy term would be the student's own responses; set its weight to 0 "
        "and keep a divergence such as reverse_kl or jsd",
    ),
    Apart(
        "teacher.offload",
        lambda recipe: (
            isinstance(recipe.teacher, LoadedTeacherConfig)
            and recipe.teacher.offload is not None
            and recipe.parallel.teacher == "sharded"
        ),
        "cpu and parallel.teacher: sharded are two ways of holding the same weights; give one",
    ),
    Apart(
        "data.streaming",
        lambda recipe: recipe.data.streaming and bool(recipe.train.arguments.get("auto_find_batch_size")),
        "train.arguments.auto_find_batch_size would change the number of rows of a micro-batch, by which each process "
        "reads its rows and a checkpoint has their place; set train.batch_size",
    ),
    Apart(
        "teachers",
        lambda recipe: sum(teacher.ema_decay is not None for teacher in recipe.teachers) > 1,
        "there is one student to follow; expected one running average (ema) at most",
    ),
)

# properties that each command requires
COMMANDS: dict[str, tuple[str, ...]] = {
    "serve": ("one teacher", "weights"),
    "cache": ("one teacher", "a model", "frozen weights", "data of a known length"),
    "sample --from teacher": ("one teacher for all rows", "weights", "student's messages"),
    "inspect --shade": ("one teacher", "weights", "student's tokens", "student's prompts"),
    "eval": ("one teacher", "student's prompts or tokens of its own", "student's messages"),
    "eval --tasks": ("one teacher", "student's messages"),
    "bench": ("weights",),
    "generate": ("one teacher", "student's messages"),
}


def lacking(recipe: Sections, field: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a message for each required property that a recipe does not provide.

    Args:
        field: field or command that requires them.
        names: names in `PROPERTIES`.
    """
    for name in names:
        what, missing, cure = PROPERTIES[name]
        instead = missing(recipe)
        if instead is not None:
            yield f"{field}: requires {what}; got {instead}; {cure}"


def conflicts(recipe: Sections) -> Iterator[str]:
    for requirement in REQUIREMENTS:
        if requirement.present(recipe):
            yield from lacking(recipe, requirement.field, requirement.properties)
    for pair in APART:
        if pair.both(recipe):
            yield f"{pair.field}: {pair.reason}"
    yield from value_conflicts(recipe)


def require_command(recipe: Sections, command: str) -> None:
    """Raise an error unless a command supports the recipe's teacher."""
    way_out = "; or name a teacher by --teacher" if command in ("eval", "eval --tasks", "generate") else ""
    for message in lacking(recipe, f"distill {command}", COMMANDS[command]):
        raise ValueError(message + way_out)
