"""Lookup of the data's row that a response belongs to, by the tokens of its prompt, for reward functions.

Rows of training data hold tokens alone. Other columns of a source's row (a reference answer, an identifier) are stored
next to the tokenised data, with hashes of all prompts of its documents, and read from disk on request. Rows with the
same prompt and other columns are distinguished by the data's response; where that is the same too, the row cannot be
identified, and the run ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatOptions, template_of
from distill.data.documents import tokenise_documents
from distill.data.formats import Format
from distill.data.load import format_of
from distill.data.packing import Documents, Ragged
from distill.data.row_counts import RowCounts
from distill.data.rows import TableRow
from distill.data.sampled_rows import sampled_ids
from distill.data.sources import open_source
from distill.data.tokenise import Batch, Encoder, RowEncoder
from distill.data.tokenise import Document as Encoded
from distill.generation.documents import Document
from distill.generation.function_calls import FunctionInput, RewardFunction
from distill.generation.rewards import Rewards
from distill.generation.stopping import response_text
from distill.recipe import Recipe


class RowRecord(NamedTuple):
    """The row of one document, with hashes to find it by.

    Attributes:
        number: number of the row.
        prompts: uint64 hashes of the tokens before each span that is trained on.
        turns: index of each span's message, int32; -1 where the row is no chat.
        whole: uint64 hash of all its tokens up to the last one that is trained on.
        row: the row as JSON, padded with spaces to a multiple of 4 bytes.
    """

    number: int
    prompts: np.ndarray
    turns: np.ndarray
    whole: np.ndarray
    row: bytes

    @property
    def origin(self) -> int:
        """The row's number; its value does not matter, since none of these are held out."""
        return self.number

    def columns(self) -> Mapping[str, np.ndarray]:
        """Return the columns of `RowRecordEncoder`."""
        return {
            "number": np.array([self.number], dtype=np.int32),
            "prompts": self.prompts.view(np.int32),
            "turns": self.turns,
            "whole": self.whole.view(np.int32),
            "row": np.frombuffer(self.row, dtype=np.int32),
        }


class RowRecordEncoder(RowEncoder):
    """Encoder of the rows' notes: one for each document that another encoder makes.

    Args:
        encoder: encoder of the student's data.
    """

    columns: Mapping[str, tuple[str, ...]] = dict.fromkeys(("number", "prompts", "turns", "whole", "row"), ())

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.format = encoder.format
        self.tokenizer = encoder.tokenizer

    def settings(self) -> list[object]:
        return ["rows for rewards, by table", *self.encoder.settings()]

    def documents(self, batch: Batch, tally: RowCounts) -> Iterator[Encoded]:
        for number, row in batch:
            found = list(self.encoder.documents([(number, row)], tally))
            text = b""
            turns = list[int]()
            for document in found:
                columns = document.columns()
                ids = columns["input_ids"].tolist()
                labels = columns["labels"]
                trained_on = labels != IGNORE_INDEX
                starts = np.flatnonzero(trained_on & ~np.concatenate([[False], trained_on[:-1]])).tolist()
                end = int(np.flatnonzero(trained_on)[-1]) + 1
                if not text:
                    text = _as_json(row)
                    turns = self._turns(row)
                prompts = np.array([token_hash(ids[:start]) for start in starts], dtype=np.uint64)
                here = turns[: len(starts)]
                turns = turns[len(starts) :] or turns[-1:]
                numbers = np.array(here + here[-1:] * (len(starts) - len(here)), dtype=np.int32)
                yield RowRecord(number, prompts, numbers, np.array([token_hash(ids[:end])], dtype=np.uint64), text)

    def _turns(self, row: Any) -> list[int]:
        """Return the numbers of a row's messages that are trained on, in order; [-1] for a row that is no chat."""
        sample = self.format.sample(row)
        if sample.messages is None:
            return [-1]
        if self.format.kind == "prompts":
            return [len(sample.messages)]
        if self.encoder.takes_ids(sample._replace(sampled=sampled_ids(row))):
            return [len(sample.messages) - 1]
        own = [n for n, turn in enumerate(sample.messages) if turn["role"] == "assistant" and n >= sample.first_trained]
        return own[-1:] if self.encoder.options.train_on == "last" else own


def token_hash(ids: Sequence[int]) -> int:
    """Return a 64-bit hash of tokens."""
    digest = hashlib.blake2b(np.asarray(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _as_json(row: object) -> bytes:
    """Return whether a row is of a table, and the row, as JSON; values that JSON lacks, such as dates, become text."""
    text = json.dumps([isinstance(row, TableRow), row], default=str).encode()
    return text + b" " * (-len(text) % 4)


def _from_json(text: bytes) -> dict[str, Any]:
    """Return the row that `_as_json` wrote."""
    is_table, row = json.loads(text)
    return TableRow(row) if is_table else row


class SourceRows(NamedTuple):
    """The rows of one source."""

    name: str
    format: Format
    notes: Documents

    def hashes(self, column: str) -> np.ndarray:
        """Return a column of hashes, uint64, of all documents."""
        return np.asarray(self.notes.columns[column].values).view(np.uint64)

    def of(self, column: str, number: int) -> np.ndarray:
        """Return a document's numbers in a column, int32."""
        values: Ragged = self.notes.columns[column]
        return np.asarray(values.values[values.offsets[number] : values.offsets[number + 1]])


class RowTable:
    """Index of the rows of all sources by their prompts.

    Args:
        sources: sources of the training data.
        tokenizer: tokenizer of the data.
        ends: tokens that end a response.
    """

    def __init__(self, sources: Sequence[SourceRows], tokenizer: Any, ends: Collection[int]) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.ends = ends
        self._order = [np.argsort(each.hashes("prompts"), kind="stable") for each in sources]
        self._sorted = [each.hashes("prompts")[order] for each, order in zip(sources, self._order, strict=True)]

    def function_input(self, document: Document, response: Sequence[int]) -> FunctionInput:
        """Return the question for a response to a document's prompt, with the row that the document was made of.

        Raises:
            ValueError: no row has this prompt, or rows that differ in other columns have it.
        """
        wanted = token_hash(document.prompt)
        found = dict[bytes, tuple[SourceRows, int, int]]()
        exact = dict[bytes, tuple[SourceRows, int, int]]()
        whole = token_hash(document.ids)
        for source, order, hashes in zip(self.sources, self._order, self._sorted, strict=True):
            begin = np.searchsorted(hashes, np.uint64(wanted), "left")
            end = np.searchsorted(hashes, wanted, "right")
            for place in order[begin:end].tolist():
                ends = source.notes.columns["prompts"].offsets // 2  # a hash is two int32 numbers
                number = int(np.searchsorted(ends, place, side="right")) - 1
                key = source.of("row", number).tobytes()
                entry = (source, number, place - int(ends[number]))
                found.setdefault(key, entry)
                if int(source.of("whole", number).view(np.uint64)[0]) == whole:
                    exact.setdefault(key, entry)
        chosen = found if len(found) == 1 else exact
        if not found:
            raise ValueError(
                "data.on_policy: expected the prompts of the training data's rows, got one of none of them"
            )
        if len(chosen) != 1:
            rows = " and ".join(self._location(*entry[:2]) for entry in [*found.values()][:2])
            raise ValueError(
                f"data.on_policy: expected one row per prompt, or different completions, got {rows} with the same "
                "prompt and other columns: a reward or an environment needs the row of a response"
            )
        ((text, (source, number, span)),) = chosen.items()
        return self._function_input(_from_json(text), source, number, span, response)

    def _function_input(
        self, row: dict[str, object], source: SourceRows, number: int, span: int, response: Sequence[int]
    ) -> FunctionInput:
        sample = source.format.sample(row)
        turn = int(source.of("turns", number)[span])
        prompt = sample.prompt or "" if sample.messages is None else sample.messages[:turn]
        answer = response_text(self.tokenizer, response, self.ends)
        return FunctionInput(self._location(source, number), prompt, answer, row, sample.tools)

    @staticmethod
    def _location(source: SourceRows, number: int) -> str:
        return f"row {int(source.of('number', number)[0])} of {source.name}"


def rewards_from_recipe(recipe: Recipe, tokenizer: Any, code: bytes, ends: Collection[int]) -> Rewards | None:
    """Return the rewards of a recipe's run, or None if its loss has none.

    Args:
        recipe: the run's recipe, whose reward file `--plugin` has allowed.
        tokenizer: tokenizer of the data.
        code: content of the file that the reward names.
        ends: tokens that end a response.
    """
    term = recipe.loss.rewarded
    if term is None:
        return None
    file, _, name = (term.reward or "").rpartition(":")
    function = RewardFunction(Path(file), code, name, term.reward_timeout)
    return Rewards(function, row_table_from_recipe(recipe, tokenizer, ends).function_input, term.reward_scale)


def row_table_from_recipe(recipe: Recipe, tokenizer: Any, ends: Collection[int]) -> RowTable:
    """Return the index of a recipe's training rows by their prompts; arguments as of `RowTable`."""
    contexts = [section.context for section in (recipe.teacher, *recipe.teachers) if section.context is not None]
    private = [column for context in contexts for column in context.columns]
    sources = []
    for part in recipe.data.parts:
        data = part.data
        source = open_source(data.source, field=part.field, subset=data.subset, split=data.split)
        template = template_of(data, tokenizer)
        format = format_of(source, data, [template]).without(private)
        encoder = Encoder(tokenizer, format, template, max_length=data.max_length, options=ChatOptions.of(data))
        notes, _, _, _ = tokenise_documents(
            source, RowRecordEncoder(encoder), max_rows=data.max_rows, workers=data.workers, cache=data.cache
        )
        sources.append(SourceRows(source.name, format, notes))
    return RowTable(sources, tokenizer, ends)
