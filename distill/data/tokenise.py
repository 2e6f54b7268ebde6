"""Rows into token ids and labels: what is learned, decided once, token by token.

Running text is learned whole and cut into pieces of `max_length` tokens. A chat or a prompt with its completion is one
document: the prompt is not learned, and what exceeds `max_length` is cut off at the end, so that the prompt and the
beginning of the answer stay; one whose prompt alone fills `max_length` is dropped and counted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatOptions, ChatTemplate, RenderedChat, Span, TrainingChat
from distill.data.formats import Format, Sample
from distill.data.sources import Row, RowFault
from distill.data.tally import Tally
from distill.data.token_cache import tokenizer_hash

BLOCK = 1 << 16  # characters given to the tokenizer at once: some take quadratic time over one long word
CALL = 1 << 19  # characters in one call of it: what it returns takes some 200 bytes a token
TOO_LONG = "prompt longer than data.max_length"
FEW = 4  # characters a token has on average
HELD = 1 << 23  # characters of chats that wait for the tokenizer
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


class Partly(NamedTuple):
    """A text of which some is learned.

    Attributes:
        number: of its row.
        text: the whole text.
        spans: character ranges to learn.
        templated: a chat template has written it, with what begins and ends it.
        origin: hash of the text, or of the conversation that it is a part of.
    """

    number: int
    text: str
    spans: list[Span]
    templated: bool
    origin: int

    def cut(self) -> tuple[str, str]:
        """The text before the first span, and the rest."""
        start = min(start for start, _ in self.spans)
        return self.text[:start], self.text[start:]


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
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> None:
        self.tokenizer, self.format, self.template = tokenizer, format, template
        self.max_length, self.options = max_length, options
        self.end = tokenizer.eos_token_id
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.beginning = beginning_of(tokenizer)

    @property
    def end_text(self) -> str:
        """What stands in for the response to a prompt alone, until the student's takes its place."""
        if not self.tokenizer.eos_token:
            raise ValueError("data.format: prompts need a tokenizer with an end-of-text token")
        return self.tokenizer.eos_token

    def settings(self) -> list[object]:
        template = self.template.settings() if self.template else None
        return [tokenizer_hash(self.tokenizer), template, asdict(self.format), self.max_length, *self.options]

    def documents(self, batch: Batch, tally: Tally) -> Iterator[Document]:
        texts: list[tuple[int, str]] = []
        waiting, held = list[Partly](), 0
        for number, row in batch:
            with tally.row(number):
                sample = self.sample(row, tally)
                if sample.messages is None and sample.prompt is None:
                    texts.append((number, clean(sample.text or "")))
                    continue
                made = self.chat(sample)
                waiting += self.partly(number, sample, made)
                tally.see_chat(made)
                tally.see_roles(sample.messages or ())
                held += sum(len(part.text) for part in waiting[len(waiting) - len(made.examples) :])
            if held > HELD:
                yield from self._pieces(waiting, tally)
                waiting, held = [], 0
        for (number, text), blocks in groupby(self._blocks_of(texts), key=lambda block: block[0]):
            yield from self._cut(number, text, (ids for _, ids in blocks), tally)
        yield from self._pieces(waiting, tally)

    def _pieces(self, parts: Sequence[Partly], tally: Tally) -> Iterator[Piece]:
        """Chats and pairs as documents; of a row whose turns are examples some may be too long, and are counted."""
        kept, faults = set[int](), dict[int, list[RowFault]]()
        for part, ids, labels in self.encode_partly(parts, tally):
            if (labels := labels[: self.max_length]).max() == IGNORE_INDEX:
                faults.setdefault(part.number, []).append(RowFault(TOO_LONG, f"{len(ids)} tokens"))
                continue
            tally.truncated += len(ids) > self.max_length
            kept.add(part.number)
            yield Piece(ids[: self.max_length], labels, part.origin)
        self.count_faults(kept, faults, tally)

    @staticmethod
    def count_faults(kept: set[int], faults: Mapping[int, Sequence[RowFault]], tally: Tally) -> None:
        """Count rows of which no example can be used as dropped; of others the examples that cannot."""
        for number, found in faults.items():
            if number in kept:
                tally.left_out += len(found)
            else:
                tally.drop(number, found[0])

    def chat(self, sample: Sample, options: ChatOptions | None = None) -> TrainingChat:
        """The examples of a chat by the template; none of a pair without one.

        Args:
            options: in place of the encoder's own.

        Raises:
            RowFault: the template refuses it, or does not write all of it.
        """
        if sample.messages is None:
            return TrainingChat([])
        assert self.template is not None, "a chat without a template"
        if self.format.kind == "prompts":
            prompt, end = self.template.prompt(sample.messages, sample.tools), self.end_text
            example = RenderedChat(prompt + end, [(len(prompt), len(prompt) + len(end))], [len(sample.messages)])
            return TrainingChat([example])
        made = self.template.for_training(
            sample.messages, sample.tools, options or self.options,
            first_trained=sample.first_trained, fits=self._fits,
        )  # fmt: skip
        if not made.examples:
            raise RowFault(TOO_LONG, f"{len(sample.messages)} messages")
        return made

    def _fits(self, prompt: str) -> bool:
        """Whether a prompt leaves room for an answer; True also of a short text, whose tokens are counted later."""
        return (
            len(prompt) < FEW * self.max_length
            or len(self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]) < self.max_length
        )

    def partly(self, number: int, sample: Sample, made: TrainingChat) -> list[Partly]:
        """The texts of a chat or a pair, and what of them is learned."""
        if sample.messages is None:
            prompt, text = sample.prompt or "", sample.text or ""
            if self.format.kind == "prompts":
                text, templated = self.end_text, "rendered" in self.format.columns
                whole, span = clean(prompt + text), (len(prompt), len(prompt) + len(text))
                return [Partly(number, whole, [span], templated, hash_of(whole))]
            whole = clean(prompt + text)
            return [Partly(number, whole, [(len(prompt), len(prompt) + len(text))], False, hash_of(whole))]
        origin = hash_of(clean(made.examples[-1].text))
        return [Partly(number, clean(each.text), each.spans, True, origin) for each in made.examples]

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

    def encode_partly(self, parts: Sequence[Partly], tally: Tally) -> Iterator[tuple[Partly, np.ndarray, np.ndarray]]:
        """The ids and labels of each, both whole, int32; those of which nothing is learned are counted and left out."""
        if not parts:
            return
        for part, (ids, learned, merged) in zip(parts, self._tokens(parts), strict=True):
            if not part.templated:  # a template writes these itself
                before, last = self.around(ids)
                ids = np.concatenate([before, ids, last]).astype(np.int32)
                learned = np.concatenate([np.zeros(len(before)), learned, np.ones(len(last))]).astype(bool)
            labels = _labels(ids, learned)
            if not (labels != IGNORE_INDEX).any():
                tally.drop(part.number, RowFault("nothing to learn after masking", f"{len(ids)} tokens"))
                continue
            tally.merged += merged
            yield part, ids, labels

    def around(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
        """The tokens that begin and end a text, each unless the text says it itself (`<s>[INST] ... </s>`)."""
        present = len(ids) > 0 and list(ids[:1]) == self.beginning, len(ids) > 0 and ids[-1] == self.end
        return [] if present[0] else self.beginning, [] if present[1] or self.end is None else [self.end]

    def _tokens(self, parts: Sequence[Partly]) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """For each text its ids, which of them lie within its spans, and whether a token straddles a span's start."""
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(
            [part.text for part in parts], add_special_tokens=False, return_offsets_mapping=fast, verbose=False
        )
        for number, (_, text, spans, _, _) in enumerate(parts):
            ids = np.array(encoded["input_ids"][number], dtype=np.int32)
            learned = np.zeros(len(ids), dtype=bool)
            merged = False
            if fast:
                offsets = np.array(encoded["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
                starts, ends = offsets[:, 0], offsets[:, 1]
                assert (np.diff(starts) >= 0).all(), "tokens in the order of the text"
                for start, end in spans:  # of a long chat there are thousands: only tokens that begin in one are read
                    first, last = np.searchsorted(starts, [start, end])
                    here = slice(int(first), int(last))
                    learned[here] = (ends[here] <= end) & (ends[here] > starts[here])
                    # a closing token that takes the white space after it along (rstrip, as all of Phi-3's do)
                    for at in first + np.flatnonzero(ends[here] > end):
                        learned[at] = int(ids[at]) in self.special and not text[end : ends[at]].strip()
                    merged = merged or bool((ends[max(0, first - 1) : first] > start).any())
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
