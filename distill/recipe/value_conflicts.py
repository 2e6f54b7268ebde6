"""Conflicts between values of settings, each a message; those between properties are in `compatibility.py`."""

from __future__ import annotations

from collections.abc import Iterator

from distill.recipe.data import OnPolicy
from distill.recipe.quantise import GGUF_FILES
from distill.recipe.teachers import Sections


def value_conflicts(recipe: Sections) -> Iterator[str]:
    own = recipe.data.on_policy
    whole = own is not None and (own.fraction, own.temperature, own.top_k, own.top_p, own.min_p) == (1, 1, 0, 1, 0)
    if recipe.loss.has("policy_gradient") and not whole:
        yield (
            "loss.terms: policy_gradient needs tokens sampled from the student's distribution: expected data.on_policy "
            f"with fraction 1 and temperature 1, without top_k, top_p and min_p; got {_sampling_of(own)}"
        )
    if recipe.loss.tailed is not None and not whole:
        yield (
            "loss.terms: top_k_reverse_kl with tail: sampled needs tokens sampled from the student's distribution: "
            "expected data.on_policy with fraction 1 and temperature 1, without top_k, top_p and min_p; got "
            f"{_sampling_of(own)}"
        )
    samples = recipe.data.samples
    rows = recipe.train.batch_size
    if recipe.loss.rewarded is not None and whole and samples < 2:
        yield (
            "data.on_policy.samples: expected 2 or more with a reward (loss.terms), which is compared with those of "
            f"other answers to the same prompt; got {samples}"
        )
    if recipe.loss.rewarded is not None and own is not None and own.reward is not None:
        yield "data.on_policy.reward: a term of loss.terms has a reward already; expected one of both"
    if rows % samples:
        yield f"train.batch_size: expected a multiple of data.on_policy.samples {samples}, got {rows}"
    if samples > 1 and own is not None and own.temperature == 0:
        yield f"data.on_policy.samples: {samples} answers at data.on_policy.temperature 0 would be the same"
    if any(part.data.format == "prompts" for part in recipe.data.parts) and (own is None or own.fraction < 1):
        yield "data.format: prompts have no answers to train on: expected data.on_policy with fraction 1"
    held_out = recipe.data.validation
    if recipe.data.streaming and held_out.source is None and held_out.max_rows is None:
        yield (
            "data.validation.max_rows: expected a number of first rows to hold out of data.streaming, or a "
            "data.validation.source; got null"
        )
    if own is not None and own.environment is not None and own.turns == "all":
        yield (
            "data.on_policy.turns: all replays the replies of logged chats: expected last with "
            "data.on_policy.environment, got all"
        )
    if recipe.data.generates_every_turn and any(part.data.train_on == "last" for part in recipe.data.parts):
        yield "data.on_policy.turns: all answers every turn: expected data.train_on all or each, got last"
    if recipe.teacher.urls and recipe.student.is_cut and recipe.teacher.model is None:
        yield "student.from_teacher: its layers are with the server; name the model it serves by teacher.model as well"
    quantise = recipe.student.quantise
    export = recipe.export
    if export is not None and quantise is not None and not recipe.stages:
        file = GGUF_FILES.get(quantise.format)
        if export.gguf in GGUF_FILES.values() and export.gguf != file:
            yield (
                f"export.gguf: {export.gguf} would round the weights again that student.quantise trains in "
                f"{quantise.format}; expected {file or 'no export'}"
            )


def _sampling_of(own: OnPolicy | None) -> str:
    names = ("fraction", "temperature", "top_k", "top_p", "min_p")
    return "no data.on_policy" if own is None else ", ".join(f"{name} {getattr(own, name):g}" for name in names)
