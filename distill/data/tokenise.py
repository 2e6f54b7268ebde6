"""Rows into token ids and labels: what is learned, decided once, token by token.

Running text is learned whole and cut into pieces of `max_length` tokens. A chat or a prompt with its completion is one
document: the prompt is not learned, and what exceeds `max_length` is cut off at the end, so that the prompt and the
beginning of the answer stay; one whose prompt alone fills `max_length` is dropped and counted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatTemplate, Message, Span
from distill.data.formats import KNOWN_ROLES, Format, Sample
from distill.data.sources import Row, RowFault
from distill.data.token_cache import tokenizer_hash

BLOCK = 1 << 16  # characters given to the tokenizer at once: some take quadratic time over one long word
CALL = 1 << 19  # characters in one call of it: what it returns takes some 200 bytes a token
MOST_ROLES = 20
_SURROGATE = re.compile("[\ud800-\udfff]")

Batch = list[tuple[int, Row | RowFault]]


class Document(Protocol):
    """What an encoder makes: `columns()` by name, int32, and the hash of the text it comes from."""

    @property
    def origin(self) -> int: ...

    def columns(self) -> Mapping[str, np.ndarray]: ...


class Piece(NamedTuple):
    """One document as it will stand in a row: int32 ids and labels of one length, and the hash of its text."""

    ids: np.ndarray
    labels: np.ndarray
    origin: int

    def columns(self) -> dict[str, np.ndarray]:
        """As `Encoder.columns`."""
        return {"input_ids": self.ids, "labels": self.labels}


@dataclass
class Tally:
    """What happened to the rows.

    Attributes:
        rows_read: rows the source gave, usable or not.
        dropped: reason to number of rows.
        examples: reason to the first row it hit.
        truncated: chats and pairs whose end exceeded `max_length`.
        merged: chats and pairs in which one token holds the last of the prompt and the first of the answer; that
            token is not learned.
        roles: a role in chats that templates do not usually know, to number of rows; the template got it as it is.
    """

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    truncated: int = 0
    merged: int = 0
    roles: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> str:
        """The three commonest reasons for which rows were dropped, each with the first row it hit."""
        return "; ".join(f"{count:,} {why} ({self.examples[why]})" for why, count in self.dropped.most_common(3))

    def drop(self, number: int, fault: RowFault) -> None:
        """Count a row that cannot be used."""
        self.dropped[fault.reason] += 1
        example = f"row {number}: {fault.detail}"[:300]
        self.examples.setdefault(fault.reason, "".join(c if c.isprintable() else " " for c in example))

    def see_roles(self, messages: Iterable[Message]) -> None:
        """Count a chat's unusual roles; of endlessly many the first ones."""
        for role in sorted({str(message.get("role")) for message in messages} - KNOWN_ROLES):
            if role in self.roles or len(self.roles) < MOST_ROLES:
                self.roles[role] += 1

    def add(self, other: Tally) -> None:
        """Add the counts of later rows."""
        self.rows_read += other.rows_read
        self.dropped.update(other.dropped)
        self.examples = other.examples | self.examples
        self.truncated += other.truncated
        self.merged += other.merged
        self.roles.update(other.roles)

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """Count what makes row `number` unusable, instead of raising it."""
        try:
            yield
        except RowFault as fault:
            self.drop(number, fault)
        except RecursionError:
            self.drop(number, RowFault("nested too deeply"))


class RowEncoder:
    """Turns batches of rows into documents; it holds all that decides the result and can be sent to another process.

    Attributes:
        format: what the rows hold.
        columns: what is made of a document, to the columns that its numbers point into, in turn; () where they are
            token ids or labels.
    """

    format: Format
    columns: Mapping[str, tuple[str, ...]]

    def __call__(self, batch: Batch) -> tuple[list[Document], Tally]:
        """The documents of numbered rows, and what happened to the rows."""
        tally = Tally()
        return list(self.documents(batch, tally)), tally

    def documents(self, batch: Batch, tally: Tally) -> Iterator[Document]:
        """Encode numbered rows as they are asked for; those that cannot be used are counted, never raised.

        Raises:
            TemplateError: the chat template is unfit for training.
        """
        raise NotImplementedError

    def settings(self) -> list[object]:
        """All that decides the result, as plain JSON."""
        raise NotImplementedError

    def sample(self, row: Row | RowFault, tally: Tally) -> Sample:
        """Read one row; RowFault where it cannot be used."""
        tally.rows_read += 1
        if isinstance(row, RowFault):
            raise row
        return self.format.sample(row)


class Encoder(RowEncoder):
    """The rows as one tokenizer reads them."""

    columns: Mapping[str, tuple[str, ...]] = {"input_ids": (), "labels": ()}

    def __init__(
        self,
        tokenizer: Any,
        format: Format,
        template: ChatTemplate | None,
        *,
        max_length: int,
        train_on: Literal["all", "last"] = "all",
    ) -> None:
        self.tokenizer, self.format, self.template = tokenizer, format, template
        self.max_length, self.train_on = max_length, train_on
        self.end = tokenizer.eos_token_id
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.beginning = beginning_of(tokenizer)

    def settings(self) -> list[object]:
        template = self.template.source if self.template else None
        return [tokenizer_hash(self.tokenizer), template, asdict(self.format), self.max_length, self.train_on]

    def documents(self, batch: Batch, tally: Tally) -> Iterator[Document]:
        texts: list[tuple[int, str]] = []
        partly: list[tuple[int, str, list[Span], bool]] = []  # number, text, what is learned of it, from a template
        for number, row in batch:
            with tally.row(number):
                sample = self.sample(row, tally)
                if sample.messages is None and sample.prompt is None:
                    texts.append((number, clean(sample.text or "")))
                else:
                    partly.append((number, *self.spans(sample)))
                    tally.see_roles(sample.messages or ())
        for (number, text), blocks in groupby(self._blocks_of(texts), key=lambda block: block[0]):
            yield from self._cut(number, text, (ids for _, ids in blocks), tally)
        for number, text, ids, labels in self.encode_partly(partly, tally):
            if (labels := labels[: self.max_length]).max() == IGNORE_INDEX:
                tally.drop(number, RowFault("prompt longer than data.max_length", f"{len(ids)} tokens"))
                continue
            tally.truncated += len(ids) > self.max_length
            yield Piece(ids[: self.max_length], labels, hash_of(text))

    def spans(self, sample: Sample) -> tuple[str, list[Span], bool]:
        """The text of a chat or a pair, what of it is learned, and whether a template has written it.

        Raises:
            RowFault: the template refuses it.
        """
        if sample.messages is None:
            prompt, text = sample.prompt or "", sample.text or ""
            return clean(prompt + text), [(len(prompt), len(prompt) + len(text))], False
        assert self.template is not None, "a chat without a template"
        rendered = self.template.render_for_training(
            sample.messages, sample.tools, train_on=self.train_on, first_trained=sample.first_trained
        )
        return clean(rendered.text), rendered.spans, True

    def _blocks_of(self, texts: Sequence[tuple[int, str]]) -> Iterator[tuple[tuple[int, str], np.ndarray]]:
        """The texts block by block, each with its text and its ids, int32; some blocks a call of the tokenizer."""
        waiting: list[tuple[tuple[int, str], str]] = []
        characters = 0

        def encode() -> Iterator[tuple[tuple[int, str], np.ndarray]]:
            parts = [block for _, block in waiting]
            for (item, _), ids in zip(waiting, self.ids_of(parts), strict=True):
                yield item, np.array(ids, dtype=np.int32)

        for item in texts:
            for block in blocks(item[1]):
                waiting.append((item, block))
                characters += len(block)
                if characters >= CALL:
                    yield from encode()
                    waiting, characters = [], 0
        if waiting:
            yield from encode()

    def ids_of(self, parts: list[str]) -> list[list[int]]:
        """The ids of some texts, without special tokens; where nobody asks for offsets, none are made."""
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        if getattr(type(self.tokenizer), "_encode_plus", None) is not TokenizersBackend._encode_plus:
            return self.tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"]
        self.tokenizer("", add_special_tokens=False, verbose=False)  # undoes what earlier calls left of padding
        made = self.tokenizer.backend_tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [encoding.ids for encoding in made]

    def _cut(self, number: int, text: str, parts: Iterable[np.ndarray], tally: Tally) -> Iterator[Piece]:
        """Pieces of one text from the ids of its blocks."""
        origin, room = hash_of(text), self.max_length - len(self.beginning)
        beginning, ids = np.array(self.beginning, dtype=np.int32), np.zeros(0, dtype=np.int32)
        begun, cut, last = False, 0, [] if self.end is None else [self.end]

        def pieces(count: int) -> Iterator[Piece]:
            for start in range(0, count, room):
                piece = np.concatenate([beginning, ids[start : start + room]])
                if len(piece) >= 2:  # a last token alone has nothing to be predicted from
                    yield Piece(piece, _labels(piece, np.ones(len(piece), dtype=bool)), origin)

        for part in parts:
            if len(part) == 0:
                continue
            before, last = self.around(part)
            ids = np.concatenate([ids, part if begun else part[len(beginning) - len(before) :]])
            begun, whole = True, len(ids) // room * room
            yield from pieces(whole)
            cut, ids = cut + whole, ids[whole:]
        ids = np.concatenate([ids, np.array(last, dtype=np.int32)])
        if cut + len(ids) + len(beginning) < 2:
            tally.drop(number, RowFault("too short", "fewer than two tokens"))
        yield from pieces(len(ids))

    def encode_partly(
        self, rows: Sequence[tuple[int, str, list[Span], bool]], tally: Tally
    ) -> Iterator[tuple[int, str, np.ndarray, np.ndarray]]:
        """Of numbered texts, as `spans` gives them: number, text, ids and labels, both whole, int32; those of which
        nothing is learned are counted and left out."""
        if not rows:
            return
        for (number, text, _, templated), (ids, learned, merged) in zip(rows, self._tokens(rows), strict=True):
            if not templated:  # a template writes these itself
                before, last = self.around(ids)
                ids = np.concatenate([before, ids, last]).astype(np.int32)
                learned = np.concatenate([np.zeros(len(before)), learned, np.ones(len(last))]).astype(bool)
            labels = _labels(ids, learned)
            if not (labels != IGNORE_INDEX).any():
                tally.drop(number, RowFault("nothing to learn after masking", f"{len(ids)} tokens"))
                continue
            tally.merged += merged
            yield number, text, ids, labels

    def around(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
        """The tokens that begin and end a text, each unless the text says it itself (`<s>[INST] ... </s>`)."""
        present = len(ids) > 0 and list(ids[:1]) == self.beginning, len(ids) > 0 and ids[-1] == self.end
        return [] if present[0] else self.beginning, [] if present[1] or self.end is None else [self.end]

    def _tokens(
        self, rows: Sequence[tuple[int, str, list[Span], bool]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """For each text its ids, which of them lie within its spans, and whether a token straddles a span's start."""
        texts = [text for _, text, _, _ in rows]
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        for number, (_, text, spans, _) in enumerate(rows):
            ids = np.array(encoded["input_ids"][number], dtype=np.int32)
            learned = np.zeros(len(ids), dtype=bool)
            merged = False
            if fast:
                offsets = np.array(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
                starts, ends = offsets[:, 0], offsets[:, 1]
                for start, end in spans:
                    learned |= (starts >= start) & (ends <= end) & (ends > starts)
                    # a closing token that takes the white space after it along (rstrip, as all of Phi-3's do)
                    for at in np.flatnonzero((starts >= start) & (starts < end) & (ends > end)):
                        learned[at] = int(ids[at]) in self.special and not text[end : ends[at]].strip()
                    merged = merged or bool(((starts < start) & (ends > start)).any())
            else:
                for start, end in spans:
                    first, straddles = self._tokens_before(text, start, ids)
                    last, _ = self._tokens_before(text, end, ids)
                    learned[first + straddles : last] = True
                    merged = merged or straddles
            yield ids, learned, merged

    def _tokens_before(self, text: str, position: int, ids: np.ndarray) -> tuple[int, bool]:
        """For a tokenizer that gives no offsets: how many tokens of `ids` the text up to `position` fixes."""
        alone = self.tokenizer(text[:position], add_special_tokens=False, verbose=False)["input_ids"]
        same = 0
        while same < min(len(alone), len(ids)) and alone[same] == ids[same]:
            same += 1
        return same, same < len(alone)


def beginning_of(tokenizer: Any) -> list[int]:
    """The token that a tokenizer begins a text with by itself, or nothing."""
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return [tokenizer.bos_token_id] if begins else []


def clean(text: str) -> str:
    """The text, if it can be encoded.

    Raises:
        RowFault: it holds half a surrogate pair.
    """
    if _SURROGATE.search(text):
        raise RowFault("invalid Unicode", "half a surrogate pair, or a byte that is not UTF-8")
    return text


def _labels(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    labels = np.where(learned, ids, IGNORE_INDEX).astype(np.int32)
    labels[:1] = IGNORE_INDEX
    return labels


def hash_of(text: str) -> int:
    """64 bits of a text's hash: where a document comes from."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(text), BLOCK):
        digest.update(text[start : start + BLOCK].encode())
    return int.from_bytes(digest.digest(), "little")


def blocks(text: str, size: int = BLOCK) -> Iterator[str]:
    """A text in parts of at most `size` characters, cut after a line end, else before a space, else anywhere."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind("\n", start, start + size) + 1
        if cut <= start:
            cut = text.rfind(" ", start + 1, start + size)
        if cut <= start:
            cut = start + size
        yield text[start:cut]
        start = cut
    yield text[start:]
