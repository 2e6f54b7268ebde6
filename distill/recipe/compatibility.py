"""Which settings go together, and what each kind of teacher can: data, read by `distill validate` without torch.

What follows from the recipe's text alone is refused here. What depends on files, the GPU or the number of processes is
refused where that is known, before weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from distill.recipe.loss import SEPARATE
from distill.recipe.models import Teacher
from distill.recipe.teachers import Kind, Sections, kind_of


def _teachers(recipe: Sections) -> Sequence[Teacher]:
    return recipe.teachers or [recipe.teacher]


FEATURES: dict[str, Callable[[Sections], bool]] = {
    "on-policy": lambda recipe: recipe.data.own_answers is not None,
    "hard labels": lambda recipe: recipe.loss.has("cross_entropy"),
    "separate terms": lambda recipe: recipe.loss.has(*SEPARATE),
    "teacher's top k": lambda recipe: recipe.teacher.top_k is not None or recipe.teacher.keep_as == "top_k",
    "label smoothing": lambda recipe: recipe.loss.label_smoothing > 0,
    "z-loss": lambda recipe: recipe.loss.z_loss > 0,
    "plugin": lambda recipe: recipe.loss.runs_terms,
    "running text": lambda recipe: any(part.data.format == "text" for part in recipe.data.parts),
    "random tokens": lambda recipe: recipe.data.source.partition(":")[0] == "synthetic",
    "fp8 teacher": lambda recipe: recipe.teacher.dtype == "fp8",
    "int8 teacher": lambda recipe: recipe.teacher.dtype == "int8",
    "offloaded teacher": lambda recipe: recipe.teacher.offload is not None,
    "sharded teacher": lambda recipe: recipe.parallel.teacher == "sharded",
    "launched server": lambda recipe: recipe.parallel.teacher == "served",
    "kept teacher": lambda recipe: recipe.teacher.keep is not None,
    "cut student": lambda recipe: recipe.student.is_cut,
    "teacher's context": lambda recipe: recipe.teacher.context is not None,
    "student as teacher": lambda recipe: any(teacher.type == "student" for teacher in _teachers(recipe)),
    "running average": lambda recipe: any(teacher.ema is not None for teacher in _teachers(recipe)),
    "teacher for some steps": lambda recipe: recipe.loss.leaves_the_teacher_out,
    "LoRA": lambda recipe: recipe.student.lora is not None,
    "fp8 student": lambda recipe: recipe.student.compute == "fp8",
    "compiled layers": lambda recipe: recipe.train.compile,
}


class Conflict(NamedTuple):
    """A kind of teacher or a feature, a feature that does not go with it, and what to tell the person."""

    first: str
    second: str
    message: str


_LAUNCHED = "parallel.teacher: served is for one loaded teacher that reads the student's own rows and no cache; got {0}"
_ONE = (
    "loss.terms: policy_gradient and top_k_reverse_kl need one teacher a token, which gives hidden states and not its "
    "top k, of the student's tokenizer"
)
_ACROSS = "{0}: expected 0 with student.vocabulary: cross, whose cross-entropy is that of spans of text"
CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "on-policy", "hard labels",
        "data.on_policy: the loss has a cross_entropy term, whose labels would be the student's own answers: it would "
        "learn whatever it says; set its weight to 0 and keep a divergence such as reverse_kl or jsd",
    ),
    Conflict(
        "on-policy", "running text",
        "data.on_policy: running text (data.format: text) has no prompts to answer",
    ),
    Conflict(
        "on-policy", "random tokens",
        "data.on_policy: needs prompts to answer, and the data are random tokens; give chats, or prompts with "
        "completions (whose completions are not used where fraction is 1)",
    ),
    Conflict(
        "int8 teacher", "sharded teacher",
        "teacher.dtype: int8 cannot be sharded (parallel.teacher); use bfloat16, or copies",
    ),
    Conflict(
        "offloaded teacher", "sharded teacher",
        "teacher.offload: cpu and parallel.teacher: sharded are two ways of holding it; give one",
    ),
    Conflict(
        "int8 teacher", "cut student",
        "student.from_teacher: layers cannot be cut out of a teacher in int8; set teacher.dtype to bfloat16 or fp8, or "
        "name a student that is cut already by student.model",
    ),
    Conflict(
        "cache", "on-policy",
        "data.on_policy: a cached teacher has not read what the student will say; give teacher.model",
    ),
    Conflict(
        "server", "sharded teacher",
        "parallel.teacher: sharded has no meaning with teacher.type: server; no teacher is loaded here",
    ),
    Conflict(
        "keep", "on-policy",
        "data.on_policy: what the student says is new in every step, and teacher.keep stores what comes again; leave "
        "keep out",
    ),
    Conflict(
        "cross", "kept teacher",
        "teacher.keep: stores a teacher's own tokens, and student.vocabulary: cross compares those of two; leave keep "
        "out",
    ),
    Conflict(
        "context", "kept teacher",
        "teacher.keep: stores what is said of the student's own rows, and teacher.context reads others; leave keep out",
    ),
    Conflict(
        "cross", "on-policy",
        "data.on_policy: not with student.vocabulary: cross, whose batches hold each text twice",
    ),
    Conflict(
        "cross", "random tokens",
        "data.source: random tokens have no text, by which student.vocabulary: cross compares",
    ),
    Conflict(
        "cross", "fp8 teacher",
        "teacher.dtype: fp8 does not work with student.vocabulary: cross; use bfloat16",
    ),
    Conflict("cache", "launched server", _LAUNCHED.format("teacher.type: cache")),
    Conflict("server", "launched server", _LAUNCHED.format("teacher.type: server")),
    Conflict("keep", "launched server", _LAUNCHED.format("teacher.keep")),
    Conflict("mixture", "launched server", _LAUNCHED.format("several teachers")),
    Conflict("routed", "launched server", _LAUNCHED.format("several teachers")),
    Conflict("cross", "launched server", _LAUNCHED.format("student.vocabulary: cross")),
    Conflict("context", "launched server", _LAUNCHED.format("teacher.context")),
    *(Conflict(other, "separate terms", _ONE) for other in ("mixture", "cross", "teacher's top k")),
    Conflict("cross", "label smoothing", _ACROSS.format("loss.label_smoothing")),
    Conflict("cross", "z-loss", _ACROSS.format("loss.z_loss")),
    Conflict(
        "cross", "plugin",
        "loss.plugin: its functions take one teacher's logits; they do not work with student.vocabulary: cross",
    ),
    Conflict(
        "cache", "teacher's context",
        "teacher.context: not with type: cache, which holds what the teacher said of the student's own rows",
    ),
    Conflict(
        "server", "teacher's context",
        "teacher.context: not with type: server, which is asked about the student's own rows",
    ),
    Conflict(
        "cross", "teacher's context",
        "teacher.context: not with student.vocabulary: cross, whose answers are not the same tokens to both",
    ),
    Conflict(
        "routed", "random tokens",
        "data.source: random tokens name no teacher, by which rows go to one of several (teachers with routes)",
    ),
    Conflict(
        "routed", "plugin",
        "loss.plugin: its functions take one teacher's logits; they do not work with several teachers",
    ),
    Conflict(
        "server", "teacher for some steps",
        "loss.schedule: with type: server, which is asked ahead, expected a divergence of weight above 0 in every step",
    ),
    Conflict(
        "launched", "teacher for some steps",
        "loss.schedule: with parallel.teacher: served, asked ahead, expected a divergence of weight above 0 in every "
        "step",
    ),
    Conflict(
        "context", "running text",
        "teacher.context: running text (data.format: text) has no answers that could be read after another prompt",
    ),
    Conflict(
        "context", "random tokens",
        "teacher.context: random tokens have no answers that could be read after another prompt",
    ),
    Conflict(
        "student as teacher", "cut student",
        "teacher.type: student is the student's checkpoint, and student.from_teacher has none; give student.model",
    ),
    Conflict(
        "running average", "LoRA",
        "teacher.ema: a running average is of all weights, and student.lora trains adapters; leave ema out",
    ),
    Conflict(
        "running average", "sharded teacher",
        "teacher.ema: a running average cannot be sharded; set parallel.teacher to copied",
    ),
    Conflict(
        "fp8 student", "compiled layers",
        "train.compile: not with student.compute: fp8, which brings kernels of its own for what would be compiled",
    ),
    Conflict(
        "mixture", "plugin",
        "loss.plugin: its functions take one teacher's logits; they do not work with several teachers",
    ),
)  # fmt: skip

# what commands ask of a kind of teacher, and why a kind cannot; a kind that is not named for a command can
COMMANDS: dict[str, dict[Kind, str]] = {
    "serve": {
        "cache": "teacher.type: expected a model to serve, got cache; every trainer can read its folder",
        "server": "teacher.type: expected a model to serve, got server",
        "mixture": "teachers: expected one teacher, since a server says what one says; got several",
        "routed": "teachers: expected one teacher, since a server says what one says; got several",
        "context": "teacher.context: a server is asked about the rows as they are",
        "cross": "student.vocabulary: expected keep or extend, since a server says the teacher's tokens; got cross",
    },
    "cache": {
        "server": "teacher.type: expected a model to run over the data, got server; cache on the server's machine",
        "mixture": "teachers: expected one teacher, since a cache holds what one says; got several",
        "routed": "teachers: expected one teacher, since a cache holds what one says; got several",
        "cross": "student.vocabulary: expected keep or extend, since a cache holds the teacher's own tokens; got cross",
        "context": "teacher.context: a cache holds what a teacher says of the student's own rows",
    },
    "sample --from teacher": {
        "cache": "--from teacher: the recipe's teacher is a cache, which has answered already; give teacher.model",
        "routed": "--from teacher: each row of this recipe has its own teacher; give a recipe with teacher.model",
        "context": "--from teacher: this teacher answers after a prompt of its own (teacher.context), not the data's",
        "server": "--from teacher: a server says what follows, it does not answer; give teacher.type=model",
    },
    "inspect --shade": {
        "cache": "--shade: expected a recipe whose teacher is loaded, got teacher.type: cache",
        "server": "--shade: expected a recipe whose teacher is loaded, got teacher.type: server",
        "mixture": "--shade: compares with one teacher of the same tokenizer; this recipe has several teachers",
        "routed": "--shade: compares with one teacher of the same tokenizer; this recipe has several teachers",
        "cross": "--shade: compares with one teacher of the same tokenizer; this recipe's has another one",
        "context": "--shade: compares on the same rows; this recipe's teacher reads others (teacher.context)",
    },
    "eval": {
        "mixture": "--teacher: this run had several teachers; name the one to compare with",
        "routed": "--teacher: this run had several teachers; name the one to compare with",
        "context": "--teacher: this run's teacher read more than the student (teacher.context); name one",
    },
}
KINDS: tuple[Kind, ...] = ("model", "cache", "keep", "server", "launched", "mixture", "routed", "cross", "context")


def conflicts(recipe: Sections) -> Iterator[str]:
    """What does not go together in a recipe, a message each."""
    present = {kind_of(recipe)} | {name for name, holds in FEATURES.items() if holds(recipe)}
    if recipe.teacher.type == "server" and not recipe.teachers:  # also one that is kept
        present.add("server")
    for conflict in CONFLICTS:
        if conflict.first in present and conflict.second in present:
            yield conflict.message
    routes = [teacher.route for teacher in recipe.teachers]
    if "separate terms" in present and kind_of(recipe) == "routed" and len(set(routes)) < len(routes):
        yield _ONE
    for number, teacher in enumerate(recipe.teachers):
        field, route = f"teachers.{number}", teacher.route
        if teacher.context is not None and routes.count(route) > 1:
            yield f"{field}.route: expected one of its own, since a mixture's teachers read the same; got context"
        if teacher.is_cached and any(other.is_cached and other.route == route for other in recipe.teachers[:number]):
            yield f"{field}.route: expected one cache at most in a mixture, whose other teachers are loaded or served"
        if teacher.ema is not None and any(other.ema is not None for other in recipe.teachers[:number]):
            yield f"{field}.ema: expected one running average of the student at most"
        parts = [part for part in recipe.data.parts if teacher.context is not None and part.teacher in (None, route)]
        if any(part.data.format == "text" for part in parts):
            yield f"{field}.context: running text has no answers that could be read after another prompt"
        if teacher.is_cached and recipe.data.on_policy is not None:
            yield f"data.on_policy: teachers.{number} is a cache, which has not read what the student will say"
    own = recipe.data.on_policy
    whole = own is not None and (own.fraction, own.temperature, own.top_k, own.top_p, own.min_p) == (1, 1, 0, 1, 0)
    if recipe.loss.has("policy_gradient") and not whole:
        yield (
            "loss.terms: policy_gradient is of tokens that the student drew from what it says now: expected "
            "data.on_policy with fraction 1 and temperature 1, without top_k, top_p and min_p"
        )
    samples, rows = recipe.data.samples, recipe.train.batch_size
    if recipe.loss.rewarded is not None and whole and samples < 2:
        yield (
            "data.on_policy.samples: expected 2 or more with a reward (loss.terms), which is compared with those of "
            f"other answers to the same prompt; got {samples}"
        )
    if rows % samples:
        yield f"train.batch_size: expected a multiple of data.on_policy.samples {samples}, got {rows}"
    if samples > 1 and own is not None and own.temperature == 0:
        yield f"data.on_policy.samples: {samples} answers at data.on_policy.temperature 0 would be the same"
    if recipe.student.vocabulary == "cross" and recipe.teachers:
        yield "student.vocabulary: cross compares with one teacher, and got several teachers"
    if recipe.student.vocabulary == "cross" and not recipe.teacher.is_loaded:
        yield f"student.vocabulary: cross needs a loaded teacher; got teacher.type: {recipe.teacher.type}"
    if recipe.teacher.urls and recipe.student.is_cut and recipe.teacher.model is None:
        yield "student.from_teacher: its layers are with the server; name the model it serves by teacher.model as well"


def require_command(recipe: Sections, command: str) -> None:
    """Hold that the recipe's kind of teacher can do what a command asks.

    Raises:
        ValueError: it cannot.
    """
    kept_server = recipe.teacher.type == "server" and kind_of(recipe) == "keep"
    if message := COMMANDS[command].get("server" if kept_server else kind_of(recipe)):
        raise ValueError(message)
