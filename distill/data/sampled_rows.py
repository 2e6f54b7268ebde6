"""Rows that `distill sample` wrote: the token ids that a model sampled, beside their text.

    {"prompt": "Add 2 and 3.", "completion": "[TOOL_CALLS][{...}]", "prompt_ids": [...], "completion_ids": [...],
     "truncated": false, "sampled": {"by": "teacher", "tokenizer": "1f0c...", "prompt": 0, "same_text": true, ...}}

The ids are what was sampled; text is only another way to write it, and does not always lead back to the same ids. A
student whose vocabulary is that of the model that sampled is trained on exactly these ids, whatever its chat template
does with such an answer. Another student is trained on the text, of rows whose text leads back to the ids (`same_text`)
by the tokenizer and the template of the model that sampled; where that takes the answer in parts (reasoning, tool
calls), they are in the last of `messages`, or in a column `message` beside `prompt` and `completion`.

An answer that was cut off (`truncated`), or ended by a stop string, has no token that ends it: none is trained on, in
either way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from distill.data.rows import RawRow, RowFault

PROMPT_IDS = "prompt_ids"
COMPLETION_IDS = "completion_ids"
TRUNCATED = "truncated"
MESSAGE = "message"  # the answer in parts, beside a prompt and a completion
SAMPLED = "sampled"  # how the answer was made
TOKENIZER = "tokenizer"  # of `sampled`: hash of the vocabulary
# of `sampled`, what is a row's own
NUMBER = "prompt"
SAME_TEXT = "same_text"
ENDED = "ended"
COLUMNS = (PROMPT_IDS, COMPLETION_IDS, TRUNCATED, MESSAGE, SAMPLED)  # beside those of the prompt and the answer
OTHER_TOKENS = "sampled with another vocabulary, and its text does not give the sampled tokens"


class SampledIds(NamedTuple):
    """Token ids of an answer and of the prompt before it.

    Attributes:
        completion: Ids of the answer, with the token that ended it unless it was cut off.
        vocabulary: Hash of the vocabulary that they are of (`vocabulary_hash`).
        same_text: The row's text leads back to these ids.
        ended: The last id is one that ends an answer.
        message: The answer in parts, where a plain text does not hold it; None if the row's text does.
    """

    prompt: list[int]
    completion: list[int]
    vocabulary: str
    same_text: bool
    ended: bool
    message: dict[str, Any] | None = None

    def require_text(self) -> None:
        """Raise RowFault if the row's text does not lead back to the sampled ids."""
        if not self.same_text:
            raise RowFault(OTHER_TOKENS, "only a student with the vocabulary of the model that sampled it can use it")


def sampled_ids(row: RawRow) -> SampledIds | None:
    """Return the token ids of a row that `distill sample` wrote; None for any other row.

    Raises:
        RowFault: The ids are not lists of whole numbers.
    """
    made = row.get(SAMPLED)
    if COMPLETION_IDS not in row or not isinstance(made, Mapping) or not isinstance(made.get(TOKENIZER), str):
        return None
    ids: dict[str, Any] = {name: row.get(name) for name in (PROMPT_IDS, COMPLETION_IDS)}
    for name, values in ids.items():
        whole = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
        if not whole or not values:
            raise RowFault("wrong type", f"column {name!r}: expected a list of token ids, got {values!s:.60}")
    message = row.get(MESSAGE)
    if message is not None and not isinstance(message, dict):
        raise RowFault("wrong type", f"column {MESSAGE!r}: expected a message, got {type(message).__name__}")
    same_text = bool(made.get(SAME_TEXT))
    ended = bool(made.get(ENDED))
    return SampledIds(ids[PROMPT_IDS], ids[COMPLETION_IDS], made[TOKENIZER], same_text, ended, message)


def vocabulary_hash(tokenizer: Any) -> str:
    """Return a hash of what each id means: equal for tokenizers that map each id to the same token."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:32]
