"""Check, before training, that a student can be saved: all files but its weights.

    lines = [*fix_generation_config(student, "student.model"), *check_saving(student, tokenizer, "student.model")]

transformers refuses to save some generation configurations that it loads, some tokenizers cannot be read after they
were written, and a model's remote code may be missing: a run that finds this out at its end has lost its training.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.core.errors import disk_code, first_line, quote
from distill.models.head import unwrap_peft

SAMPLE = "One text, 2 numbers.\n"


def fix_generation_config(student: Any, field: str) -> list[str]:
    """Remove contradictory values, such as a temperature without sampling, from a student's generation configuration.

    Generation does not change: the removed values had no effect.

    Args:
        student: Bare or inside PEFT.
        field: Field that messages begin with.

    Returns:
        A line that names the removed values; none where nothing was removed.

    Raises:
        ValueError: it cannot be saved even without them.
    """
    model: Any = unwrap_peft(student)
    taken: dict[str, object] = {}
    mended = copy.deepcopy(getattr(model, "generation_config", None))
    if mended is None:
        return []
    while (fault := _fault_of(mended)) is not None:
        names = [name for name in re.findall(r"^- `(\w+)`", fault, re.MULTILINE) if name not in taken]
        if not names:
            raise ValueError(
                f"{field}: its generation_config.json cannot be saved with the student: {fault.splitlines()[0]}"
            )
        for name in names:
            taken[name] = getattr(mended, name)
            setattr(mended, name, None)
    if not taken:
        return []
    model.generation_config = mended
    values = ", ".join(f"{name} {value}" for name, value in taken.items())
    return [
        f"{field}: in its generation_config.json {values} have no effect (do_sample {quote(bool(mended.do_sample))}, "
        f"num_beams {mended.num_beams or 1}), and transformers refuses to save that; the student is saved without them"
    ]


def _fault_of(config: Any) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error)
    return None


def add_turn_end_tokens(student: Any, tokenizer: Any, closings: Collection[str]) -> list[str]:
    """Add the tokens that close a turn of the chat template to the student's end-of-sequence tokens.

    Args:
        student: bare or inside PEFT; its `generation_config` is changed, which is saved with it.
        tokenizer: tokenizer of the data.
        closings: the tokens, of the data's chat template.

    Returns:
        A line that names the tokens that were added; none where all of them are there already.
    """
    config = getattr(unwrap_peft(student), "generation_config", None)
    if config is None:
        return []
    given = config.eos_token_id
    ends = list(given) if isinstance(given, list) else [] if given is None else [given]
    added = {tokenizer.convert_tokens_to_ids(token): token for token in sorted(closings)}
    added = {number: token for number, token in added.items() if number not in ends}
    if not added:
        return []
    config.eos_token_id = [*ends, *added]
    return [
        f"student.model: generation stops at {', '.join(added.values())} too, which ends the turns that it is trained "
        "on; saved in its generation_config.json"
    ]


def turn_end_problem(ends: Collection[int], tokenizer: Any, closings: Collection[str]) -> str | None:
    """Return that a student's end-of-sequence tokens are none of those that close a turn of the chat template.

    None where one of them is, or where either are not known. So it is with base models: what their own configuration
    ends at is the end of a text, and they seldom generate the token that closes a turn.

    Args:
        ends: End-of-sequence tokens of the student's own configuration.
    """
    closed = {tokenizer.convert_tokens_to_ids(token) for token in closings}
    if not ends or not closed or closed & set(ends):
        return None
    own = ", ".join(tokenizer.convert_ids_to_tokens(sorted(ends)))
    return (
        f"student.model: ends at {own}, and not at {', '.join(sorted(closings))}, which ends a turn of the chat "
        "template: a base model seldom generates it, so that its rollouts would run to data.on_policy.max_new_tokens; "
        "train on the data's responses first (a stage with data.on_policy.fraction: 0), or start from a chat model"
    )


def end_ids(value: int | list[int] | None) -> set[int]:
    """Return the tokens of an `eos_token_id`, which may be one, several or none."""
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def check_saving(student: Any, tokenizer: PreTrainedTokenizerBase | None, field: str) -> list[str]:
    """Write configuration, generation configuration, adapter settings and tokenizer to a scratch folder and read back.

    Args:
        student: Bare or inside PEFT, whole on this process; not changed.
        tokenizer: Tokenizer to save; None without one.
        field: Field that errors name.

    Returns:
        A line where the tokenizer that is read back gives other tokens; none otherwise.

    Raises:
        ValueError: something cannot be written or read back.
    """
    model: Any = unwrap_peft(student)
    with tempfile.TemporaryDirectory(prefix="distill-") as scratch:
        part = "its configuration"
        try:
            model.save_pretrained(scratch, state_dict={})
            type(model.config).from_pretrained(scratch)
            if hasattr(student, "peft_config"):
                part = "its adapter's settings"
                student.peft_config[student.active_adapter].save_pretrained(scratch)
            if tokenizer is None:
                return []
            part = "its tokenizer"
            tokenizer.save_pretrained(scratch)
            again = type(tokenizer).from_pretrained(scratch)
            again.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        except Exception as error:  # libraries, and a model's own code, may raise anything
            if disk_code(error) is not None:
                raise
            raise ValueError(
                f"{field}: {part} cannot be saved, so that the student would be lost: {first_line(error)}"
            ) from error
    if again.chat_template != tokenizer.chat_template or again(SAMPLE).input_ids != tokenizer(SAMPLE).input_ids:
        return [f"{field}: its tokenizer, saved and read back, makes other tokens or has another chat template"]
    return []
