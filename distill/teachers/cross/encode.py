"""Rows into pairs of readings: one text by the student's tokenizer and by the teacher's, and the spans they share.

Running text is read by both and cut, where both have a token end, into pieces that neither exceeds. Of a chat each
model reads what its own template makes; compared is what the assistant says, found in both texts, and the token that
ends its turn. A span is learned only where something of the same document stands before it in both readings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from distill.data.chat import ChatTemplate
from distill.data.formats import Format, Sample
from distill.data.sources import Row, RowFault
from distill.data.tokenise import Tally, _blocks, _clean, _origin
from distill.teachers.cross.alignment import common_boundaries, token_bytes, token_ends

SMALLEST_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class Pair(NamedTuple):
    """One document as both models read it.

    Attributes:
        student: int32 [n], token ids; likewise `teacher` [m].
        spans: int32 [k, 4], first token and the one behind the last of the student's, then of the teacher's.
        origin: hash of the text.
    """

    student: np.ndarray
    teacher: np.ndarray
    spans: np.ndarray
    origin: int


class Part(NamedTuple):
    """What is compared of a text, as characters from `start` to `stop`, and the special token right behind it."""

    start: int
    stop: int
    closing: str | None


class Reader:
    """One model's way to read: its tokenizer, what its tokens stand for, its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        template: its chat template, or None.
        field: "student.model" or "teacher.model", for errors.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, field: str) -> None:
        self.tokenizer, self.template, self.side = tokenizer, template, field.partition(".")[0]
        self.spelled = token_bytes(tokenizer, field)
        self.end = tokenizer.eos_token_id
        alone = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and alone[:1] == [tokenizer.bos_token_id]
        self.beginning = [tokenizer.bos_token_id] if begins else []  # as the tokenizer begins a text by itself
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)"
        self._special = re.compile(alternatives)

    def read(self, text: str) -> tuple[list[int], np.ndarray]:
        """Token ids of a text and where each ends, in bytes.

        Raises:
            RowFault: the tokens do not spell the text.
        """
        ids, ends, before = [], [], 0
        for block in _blocks(text):
            here, raw = self.tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"], block.encode()
            found = token_ends(here, self.spelled, raw)
            if found is None:
                raise RowFault(
                    "tokens do not spell the text", f"the {self.side}'s tokenizer changes it: {block[:80]!r}"
                )
            ids += here
            ends.append(found + before)
            before += len(raw)
        return ids, np.concatenate(ends) if ends else np.zeros(0, dtype=np.int64)

    def parts(self, sample: Sample, train_on: Literal["all", "last"]) -> tuple[str, list[Part]]:
        """A chat as this model's template writes it, and what the assistant says of it."""
        assert self.template is not None and sample.messages is not None
        rendered = self.template.render_for_training(
            sample.messages, sample.tools, train_on=train_on, first_trained=sample.first_trained
        )
        return _clean(rendered.text), [self._part(rendered.text, *span) for span in rendered.spans]

    def _part(self, text: str, start: int, stop: int) -> Part:
        """A turn without the spaces around it and the tokens that close it."""
        for match in reversed(list(self._special.finditer(text, start, stop))):
            if text[match.end() : stop].strip():
                break
            stop = match.start()
        said = text[start:stop]
        stop = start + len(said.rstrip())
        start = min(start + len(said) - len(said.lstrip()), stop)
        closing = self._special.match(text, stop)
        return Part(start, stop, closing[0] if closing else None)

    def closes(self, part: Part, ids: list[int], at: int) -> bool:
        """Whether token `at` is the special one that closes `part`."""
        return (
            part.closing is not None and at < len(ids) and ids[at] == self.tokenizer.convert_tokens_to_ids(part.closing)
        )

    def closing(self) -> int | None:
        """The token that ends an assistant's turn, by the template; None where no special token does."""
        if self.template is None:
            return None
        text = self.template.render_for_training(SMALLEST_CHAT)
        closing = self._part(text.text, *text.spans[-1]).closing
        return None if closing is None else self.tokenizer.convert_tokens_to_ids(closing)


def end_pairs(student: Reader, teacher: Reader) -> tuple[tuple[int, int], ...]:
    """Tokens that mean the same whatever their texts: those that end a turn, and those that end a text."""
    pairs: list[tuple[int, int]] = []
    for one, other in ((student.closing(), teacher.closing()), (student.end, teacher.end)):
        if one is not None and other is not None and all(one != a and other != b for a, b in pairs):
            pairs.append((one, other))
    return tuple(pairs)


class PairEncoder:
    """Turns batches of rows into pairs; holds all that decides the result, and can be sent to another process."""

    def __init__(
        self, student: Reader, teacher: Reader, format: Format, *, max_length: int, train_on: Literal["all", "last"]
    ) -> None:
        self.student, self.teacher, self.format = student, teacher, format
        self.max_length, self.train_on = max_length, train_on
        self.ends = [[student.end], [teacher.end]] if None not in (student.end, teacher.end) else [[], []]

    def __call__(self, batch: Iterable[tuple[int, Row | RowFault]]) -> tuple[list[Pair], Tally]:
        """Encode numbered rows; those that cannot be used are counted, never raised."""
        tally, pairs = Tally(), []
        for number, row in batch:
            tally.rows_read += 1
            try:
                if isinstance(row, RowFault):
                    raise row
                sample = self.format.sample(row)
                if sample.messages is not None:
                    made = [self._chat(sample, tally)]
                elif sample.prompt is not None:
                    made = [self._completion(_clean(sample.prompt), _clean(sample.text or ""), tally)]
                else:
                    made = list(self._pieces(_clean(sample.text or "")))
                if not made:
                    raise RowFault("too short", "no span with something before it")
                pairs += made
            except RowFault as fault:
                tally.drop(number, fault)
        return pairs, tally

    def _pieces(self, text: str) -> Iterator[Pair]:
        """Running text, cut where both readings have a token end."""
        readings, boundaries, before = self._common(text)
        starts, first, last = [0, 0], 0, len(boundaries) - 1
        while first < last:
            stop = min(
                int(np.searchsorted(boundaries[:, side], starts[side] + self.max_length - len(before[side]), "right"))
                for side in (0, 1)
            )
            stop -= 1
            if stop <= first:
                raise RowFault("no common token end within data.max_length", repr(text[:80]))
            if stop == last - 1 > first + 1:
                stop -= 1  # the last span, the end of the text, would stand alone, with nothing before it to learn from
            cuts = boundaries[first : stop + 1]
            ids = [before[side] + readings[side][starts[side] : cuts[-1, side]] for side in (0, 1)]
            if spans := self._cut(ids, [cuts - starts + [len(own) for own in before]], text):
                yield spans
            first, starts = stop, cuts[-1].tolist()
            before = [self.student.beginning, self.teacher.beginning]

    def _common(self, text: str) -> tuple[list[list[int]], np.ndarray, list[list[int]]]:
        """Both readings of a text with the token that ends it, the tokens up to each common boundary, [k, 2], and what
        each is to begin with."""
        (ids_s, ends_s), (ids_t, ends_t) = self.student.read(text), self.teacher.read(text)
        _, cut_s, cut_t = common_boundaries(ends_s, ends_t)
        boundaries = np.stack([cut_s, cut_t], 1)
        before, behind = self._around(ids_s, ids_t)
        if behind[0]:
            boundaries = np.concatenate([boundaries, boundaries[-1:] + 1])
        return [ids_s + behind[0], ids_t + behind[1]], boundaries, before

    def _around(self, *readings: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens that begin both readings, each unless the text says it itself (`<s>[INST] ... </s>`), and those
        that end them, unless the text says one of them: then they could not be compared."""
        sides = (self.student, self.teacher)
        before = [
            [] if ids[:1] == side.beginning else side.beginning for side, ids in zip(sides, readings, strict=True)
        ]
        said = any(ids[-1:] == [side.end] for side, ids in zip(sides, readings, strict=True))
        return before, [[], []] if said else self.ends

    def _cut(self, ids: list[list[int]], runs: list[np.ndarray], text: str) -> Pair | None:
        """The pair within `max_length`; `runs` of boundaries, [k, 2] each, with the spans between them."""
        spans = [np.stack([run[:-1, 0], run[1:, 0], run[:-1, 1], run[1:, 1]], 1) for run in runs]
        found = np.concatenate(spans) if spans else np.zeros((0, 4), dtype=np.int64)
        learned = (found[:, 0] > 0) & (found[:, 2] > 0) & (found[:, [1, 3]] <= self.max_length).all(1)
        learned &= (found[:, 1] > found[:, 0]) & (found[:, 3] > found[:, 2])
        if not learned.any():
            return None
        student, teacher = (np.array(own[: self.max_length], dtype=np.int32) for own in ids)
        return Pair(student, teacher, found[learned].astype(np.int32), _origin(text))

    def _completion(self, prompt: str, completion: str, tally: Tally) -> Pair:
        """A prompt, not learned, and its completion."""
        text = prompt + completion
        (ids_s, ends_s), (ids_t, ends_t) = self.student.read(text), self.teacher.read(text)
        start, stop = len(prompt.encode()), len(text.encode())
        run = _run(ends_s, ends_t, start, start, stop - start)
        before, behind = self._around(ids_s, ids_t)
        if behind[0]:
            run = np.concatenate([run, run[-1:] + 1])
        ids = [before[0] + ids_s + behind[0], before[1] + ids_t + behind[1]]
        return self._partly(ids, [run + [len(own) for own in before]], text, tally)

    def _chat(self, sample: Sample, tally: Tally) -> Pair:
        """A chat by both templates."""
        (text, parts), (other_text, other_parts) = (
            side.parts(sample, self.train_on) for side in (self.student, self.teacher)
        )
        if len(parts) != len(other_parts):
            raise RowFault("the two chat templates mark different turns", f"{len(parts)} and {len(other_parts)}")
        (ids_s, ends_s), (ids_t, ends_t) = self.student.read(text), self.teacher.read(other_text)
        runs = []
        for own, other in zip(parts, other_parts, strict=True):
            said = text[own.start : own.stop]
            if said != other_text[other.start : other.stop]:
                raise RowFault("the two chat templates write what the assistant says differently", repr(said[:80]))
            starts = len(text[: own.start].encode()), len(other_text[: other.start].encode())
            run = _run(ends_s, ends_t, *starts, len(said.encode()))
            to_its_end = len(run) and ends_s[run[-1, 0] - 1] == starts[0] + len(said.encode())
            if to_its_end and all(
                side.closes(part, ids, at)
                for side, part, ids, at in zip(
                    (self.student, self.teacher), (own, other), (ids_s, ids_t), run[-1].tolist(), strict=True
                )
            ):
                run = np.concatenate([run, run[-1:] + 1])
            runs.append(run)
        return self._partly([ids_s, ids_t], runs, text, tally)

    def _partly(self, ids: list[list[int]], runs: list[np.ndarray], text: str, tally: Tally) -> Pair:
        pair = self._cut(ids, runs, text)
        if pair is None:
            raise RowFault("nothing to compare", "no aligned span of the answer lies within data.max_length")
        tally.truncated += any(len(own) > self.max_length for own in ids)
        return pair


def _run(ends_s: np.ndarray, ends_t: np.ndarray, start_s: int, start_t: int, length: int) -> np.ndarray:
    """Tokens up to each common boundary of one part of two texts, [k, 2]; the part begins at `start_s`, `start_t`."""
    places = ((ends_s, start_s), (ends_t, start_t))
    own, others = (ends[(ends >= start) & (ends <= start + length)] - start for ends, start in places)
    common = np.intersect1d(own, others)
    if start_s == start_t == 0:
        common = np.union1d(common, [0])
    return np.stack([np.searchsorted(ends, common + start, side="right") for ends, start in places], 1).astype(np.int64)
