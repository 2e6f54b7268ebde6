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
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from distill.data.chat import ChatTemplate, Span
from distill.data.formats import KNOWN_ROLES, Format, Sample
from distill.data.packing import IGNORED
from distill.data.sources import Row, RowFault

BLOCK = 1 << 16  # characters given to the tokenizer at once: some take quadratic time over one long word
MOST_ROLES = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """One document as it will stand in a row: int32 ids and labels of one length, and the hash of its text."""

    ids: np.ndarray
    labels: np.ndarray
    origin: int


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

    def drop(self, number: int, fault: RowFault) -> None:
        """Count a row that cannot be used."""
        self.dropped[fault.reason] += 1
        shown = f"row {number}: {fault.detail}"[:300]
        self.examples.setdefault(fault.reason, "".join(c if c.isprintable() else " " for c in shown))

    def see_roles(self, messages: Iterable[Mapping[str, Any]]) -> None:
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


class Encoder:
    """Turns batches of rows into pieces; it holds all that decides the result and can be sent to another process."""

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
        alone = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and alone[:1] == [tokenizer.bos_token_id]
        self.beginning = [tokenizer.bos_token_id] if begins else []  # as the tokenizer begins a text by itself

    def __call__(self, batch: Iterable[tuple[int, Row | RowFault]]) -> tuple[list[Piece], Tally]:
        """Encode numbered rows; those that cannot be used are counted, never raised.

        Raises:
            TemplateError: the chat template is unfit for training.
        """
        tally = Tally()
        texts: list[tuple[int, str]] = []
        partly: list[tuple[int, str, list[Span], bool]] = []  # number, text, what is learned of it, from a template
        for number, row in batch:
            tally.rows_read += 1
            try:
                if isinstance(row, RowFault):
                    raise row
                sample = self.format.sample(row)
                if sample.messages is None and sample.prompt is None:
                    texts.append((number, _clean(sample.text or "")))
                else:
                    partly.append((number, *self._spans(sample)))
                    tally.see_roles(sample.messages or ())
            except RowFault as fault:
                tally.drop(number, fault)
            except RecursionError:
                tally.drop(number, RowFault("nested too deeply"))
        pieces = [*self._encode_texts(texts, tally), *self._encode_partly(partly, tally)]
        return pieces, tally

    def _spans(self, sample: Sample) -> tuple[str, list[Span], bool]:
        if sample.messages is None:
            prompt, text = sample.prompt or "", sample.text or ""
            return _clean(prompt + text), [(len(prompt), len(prompt) + len(text))], False
        assert self.template is not None, "a chat without a template"
        rendered = self.template.render_for_training(
            sample.messages, sample.tools, train_on=self.train_on, first_trained=sample.first_trained
        )
        return _clean(rendered.text), rendered.spans, True

    def _encode_texts(self, texts: Sequence[tuple[int, str]], tally: Tally) -> Iterator[Piece]:
        if not texts:
            return
        blocks = [list(_blocks(text)) for _, text in texts]
        flat = self.tokenizer([block for group in blocks for block in group], add_special_tokens=False, verbose=False)
        encoded = iter(flat["input_ids"])
        room = self.max_length - len(self.beginning)
        for (number, text), group in zip(texts, blocks, strict=True):
            ids = [token for _ in group for token in next(encoded)]
            before, last = self._around(ids)
            ids = ids[len(self.beginning) - len(before) :] + last
            if len(ids) + len(self.beginning) < 2:
                tally.drop(number, RowFault("too short", "fewer than two tokens"))
                continue
            for start in range(0, len(ids), room):
                piece = np.array(self.beginning + ids[start : start + room], dtype=np.int32)
                if len(piece) >= 2:  # a last token alone has nothing to be predicted from
                    yield Piece(piece, _labels(piece, np.ones(len(piece), dtype=bool)), _origin(text))

    def _encode_partly(self, rows: Sequence[tuple[int, str, list[Span], bool]], tally: Tally) -> Iterator[Piece]:
        if not rows:
            return
        for (number, text, _, templated), (ids, learned, merged) in zip(rows, self._tokens(rows), strict=True):
            if not templated:  # a template writes these itself
                before, last = self._around(ids)
                ids = np.concatenate([before, ids, last]).astype(np.int32)
                learned = np.concatenate([np.zeros(len(before)), learned, np.ones(len(last))]).astype(bool)
            labels = _labels(ids, learned)[: self.max_length]
            if not (labels != IGNORED).any():
                within = len(ids) > self.max_length and (_labels(ids, learned) != IGNORED).any()
                reason = "prompt longer than data.max_length" if within else "nothing to learn after masking"
                tally.drop(number, RowFault(reason, f"{len(ids)} tokens"))
                continue
            tally.truncated += len(ids) > self.max_length
            tally.merged += merged
            yield Piece(ids[: self.max_length], labels, _origin(text))

    def _around(self, ids: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
        """The tokens that begin and end a text, each unless the text says it itself (`<s>[INST] ... </s>`)."""
        said = len(ids) > 0 and list(ids[:1]) == self.beginning, len(ids) > 0 and ids[-1] == self.end
        return [] if said[0] else self.beginning, [] if said[1] or self.end is None else [self.end]

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
                    # a closing token that takes the white space behind it along (rstrip, as all of Phi-3's do)
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


def _clean(text: str) -> str:
    if _SURROGATE.search(text):
        raise RowFault("invalid Unicode", "half a surrogate pair, or a byte that is not UTF-8")
    return text


def _labels(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    labels = np.where(learned, ids, IGNORED).astype(np.int32)
    labels[:1] = IGNORED
    return labels


def _origin(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _blocks(text: str, size: int = BLOCK) -> Iterator[str]:
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
