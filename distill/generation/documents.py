"""Splitting of a collated batch into its documents, and reassembly.

A document of a chat or of a prompt with its completion begins with tokens masked from the loss: its labels tell where
the response starts. Packed rows separate their documents by positions that restart.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.packing import ROW
from distill.data.source_rows import PER_DOCUMENT, SourceRow, source_row_at

RolloutRow = dict[str, list[int]]
RolloutSpan = tuple[int, int, int, int]


class RetokenizedResponse(NamedTuple):
    """A generated response as a teacher with another tokenizer reads it.

    Attributes:
        teacher: token ids of the teacher's prompt and of the response, up to the last span.
        spans: first token and the one after the last, of the student's document and of `teacher`; empty where nothing
            is aligned.
    """

    teacher: list[int]
    spans: list[RolloutSpan]


class RolloutScore(NamedTuple):
    """Reward of a generated response, its advantage within the responses to the same prompt, and feedback on it."""

    reward: float
    advantage: float
    feedback: str | None = None


class ResponseRetokenizer(Protocol):
    """Reader of generated responses by a teacher's own tokenizer."""

    def retokenize(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        teacher_prompt: Sequence[int],
        *,
        reference: Sequence[int] = (),
        teacher_reference: Sequence[int] = (),
        max_teacher_tokens: int,
    ) -> RetokenizedResponse:
        """Return the teacher's reading of a response.

        Args:
            prompt: the student's tokens before the response.
            response: the student's tokens of the response, with the one that ends it unless it was cut off.
            teacher_prompt: the teacher's tokens before the response.
            reference: the student's tokens of the data's response; likewise `teacher_reference`.
            max_teacher_tokens: bound on the number of the teacher's tokens, its prompt included.
        """
        ...


Readers = Mapping[int | None, ResponseRetokenizer]  # by the number of the teacher's route; None for one teacher


@dataclass
class RolloutDocument:
    """One document of a batch.

    Attributes:
        ids: token ids up to the last one that is trained on; nothing depends on the tokens after it.
        labels: Labels as in the batch, not shifted.
        row: index of the document's row in the batch.
        teacher_ids: the teacher's input in their place, which ends with the same response; None for the same input.
        route: index of its teacher's route; None where there is one teacher.
        sample: index of its response, where several are generated for a document.
        sampled_log_p: log-probabilities of a rollout's tokens when they were sampled; None for responses of the data.
        score: reward and advantage of a rollout; None without a reward function.
        spans: Aligned spans where `teacher_ids` are of another tokenizer: first token and the one after the last,
            of `ids` and of `teacher_ids`; none where they are the student's beside documents of other routes.
        starts: Index of the first token of the last response in `ids` and in `teacher_ids`.
        source_row: Row of the data that it comes from; None where the batch has no such column (`SourceRowColumn`).
    """

    ids: list[int]
    labels: list[int]
    row: int
    teacher_ids: list[int] | None = None
    route: int | None = None
    sample: int = 0
    sampled_log_p: Sequence[float] | None = None
    score: RolloutScore | None = None
    spans: Sequence[RolloutSpan] | None = None
    starts: tuple[int, int] | None = None
    source_row: SourceRow | None = None

    @property
    def length(self) -> int:
        """Number of tokens, of the longer of the student's and the teacher's input."""
        return max(len(self.ids), len(self.teacher_ids or ()))

    @property
    def prompt_length(self) -> int:
        """Tokens before the last span that is trained on, in the longer of the student's and the teacher's input."""
        if self.starts is not None:
            return max(self.starts)
        return self.length - (len(self.ids) - len(self.prompt))

    @functools.cached_property
    def prompt(self) -> list[int]:
        """Tokens before the last span that is trained on: of a chat's several responses the last is generated anew."""
        if self.starts is not None:
            return self.ids[: self.starts[0]]
        learned = self.labels[::-1].index(IGNORE_INDEX) if IGNORE_INDEX in self.labels else len(self.labels)
        return self.ids[: len(self.labels) - learned]

    @property
    def rollout_start(self) -> int:
        """Index of the first token that is trained on: where a generated response begins."""
        if self.starts is not None:
            return self.starts[0]
        return next((at for at, label in enumerate(self.labels) if label != IGNORE_INDEX), len(self.labels))

    @functools.cached_property
    def _text(self) -> str:
        return ",".join(map(str, self.ids))

    def hash(self, *more: int) -> bytes:
        """Return a 16-byte hash of the document, its sample and the integers `more`."""
        numbers = [*more, self.sample, -1] if self.sample > 0 else [*more, -1]
        parts = [str(number) for number in numbers]
        if self.ids:
            parts.append(self._text)
        text = ",".join(parts)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def with_response(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        sampled_log_p: Sequence[float] | None = None,
        score: RolloutScore | None = None,
        replies: Sequence[Sequence[int]] = (),
        teacher_prompt: Sequence[int] | None = None,
    ) -> RolloutDocument:
        """Return the document with another response, which alone is trained on.

        Args:
            sampled_log_p: log-probability of each token of `response` when it was sampled.
            score: reward and advantage of the response.
            replies: (start, stop) of the tokens in `response` that are not the student's.
            teacher_prompt: the teacher's tokens before it, in place of those of the data.
        """
        other = self.teacher_ids
        if other is not None:
            assert not self.spans, "its response is read by another tokenizer: reread"
            if teacher_prompt is None:
                teacher_prompt = other[: len(other) - (len(self.ids) - len(prompt))]
            other = [*teacher_prompt, *response]
        labels = [IGNORE_INDEX] * len(prompt) + list(response)
        for start, stop in replies:
            labels[len(prompt) + start : len(prompt) + stop] = [IGNORE_INDEX] * (stop - start)
        ids = [*prompt, *response]
        return replace(self, ids=ids, labels=labels, teacher_ids=other, sampled_log_p=sampled_log_p, score=score)

    def with_retokenized_response(
        self,
        reader: ResponseRetokenizer,
        response: Sequence[int],
        max_teacher_tokens: int,
        sampled_log_p: Sequence[float] | None = None,
    ) -> RolloutDocument:
        """Return the document with another response, which the teacher reads by another tokenizer.

        Args:
            reader: reads the response by the teacher's tokenizer.
            response: the student's tokens.
            max_teacher_tokens: bound on the number of the teacher's tokens, those of its prompt included.
            sampled_log_p: log-probability of each token of `response` when it was sampled.
        """
        assert self.starts is not None and self.teacher_ids is not None
        own, other = self.starts
        pair = reader.retokenize(
            self.prompt,
            response,
            self.teacher_ids[:other],
            reference=self.ids[own:],
            teacher_reference=self.teacher_ids[other:],
            max_teacher_tokens=max_teacher_tokens,
        )
        ids = [*self.prompt, *response]
        labels = _labels_at(ids, pair.spans)
        return replace(
            self, ids=ids, labels=labels, teacher_ids=pair.teacher, sampled_log_p=sampled_log_p, spans=pair.spans
        )


def _labels_at(ids: Sequence[int], spans: Sequence[RolloutSpan]) -> list[int]:
    """Return labels that are set at the first token of each span."""
    labels = [IGNORE_INDEX] * len(ids)
    for first, *_ in spans:
        labels[first] = ids[first]
    return labels


def documents_of(batch: Mapping[str, torch.Tensor]) -> list[RolloutDocument]:
    """Return the documents of a collated batch that have tokens to train on, row by row.

    Args:
        batch: `input_ids` and `labels` [B, S]; `position_ids` [B, S] if rows hold several documents; padded on the
            right. With `teacher_input_ids`, the teacher's input too, which `teacher_rows` aligns with `valid_rows`, or
            `spans` where it is of another tokenizer.
    """
    if "spans" in batch:
        return _pairs_of(batch)
    ids = batch["input_ids"].tolist()
    labels = batch["labels"].tolist()
    own = _bounds(batch, "")
    others = _bounds(batch, "teacher_")
    found = []
    if others:
        teacher = batch["teacher_input_ids"].tolist()
        teacher_row_of = dict(zip(batch["valid_rows"].tolist(), batch["teacher_rows"].tolist(), strict=True))
    for row, bounds in enumerate(own):
        for number, (start, end) in enumerate(bounds):
            # padding, or what follows a response in a template
            while end > start and labels[row][end - 1] == IGNORE_INDEX:
                end -= 1
            if end > start:
                other = None
                if others:
                    # `teacher_rows` says where the teacher predicts the document's last trained token, the student at
                    # `end - 2`: its input ends one position later
                    predicts_last = teacher_row_of[row * len(ids[row]) + end - 2] % len(teacher[row])
                    other = teacher[row][others[row][number][0] : predicts_last + 2]
                route = int(batch["routes"][row, start]) if "routes" in batch else None
                source_row = source_row_at(batch, row, number)
                found.append(
                    RolloutDocument(
                        ids[row][start:end], labels[row][start:end], row, other, route, source_row=source_row
                    )
                )
    return found


def _pairs_of(batch: Mapping[str, torch.Tensor]) -> list[RolloutDocument]:
    """Return the documents of a batch of two tokenizers that have spans, row by row."""
    ids = batch["input_ids"].tolist()
    others = batch["teacher_input_ids"].tolist()
    labels = batch["labels"].tolist()
    width = len(ids[0])
    other_width = len(others[0])
    spans = batch["spans"].tolist()
    starts = batch["answer_starts"].tolist()
    found = []
    for row, bounds in enumerate(zip(_bounds(batch, ""), _bounds(batch, "teacher_"), strict=True)):
        both = zip(*bounds, strict=False)  # each may have padding at the end
        for number, ((begin, end), (other_begin, _)) in enumerate(both):
            first = row * width + begin
            shift = row * other_width + other_begin
            mine = [
                (a - first, b - first, c - shift, d - shift) for a, b, c, d in spans if first <= a < row * width + end
            ]
            route = int(batch["routes"][row, begin]) if "routes" in batch else None
            if not mine:
                plain = _plain_of(ids[row][begin:end], labels[row][begin:end], row, route)
                found += [replace(document, source_row=source_row_at(batch, row, number)) for document in plain]
                continue
            own = ids[row][begin : begin + mine[-1][1]]
            other = others[row][other_begin : other_begin + mine[-1][3]]
            response = [(a - first, c - shift) for a, c in starts if first <= a < row * width + end]
            if not response:
                raise ValueError("batch: expected answer_starts of each document, which rows of prompts and chats have")
            found.append(
                RolloutDocument(
                    own,
                    _labels_at(own, mine),
                    row,
                    other,
                    route,
                    spans=mine,
                    starts=response[-1],
                    source_row=source_row_at(batch, row, number),
                )
            )
    return found


def _plain_of(ids: list[int], labels: list[int], row: int, route: int | None) -> list[RolloutDocument]:
    """Return a document of a route whose teacher reads the student's tokens; none where nothing is trained on."""
    learned = [at for at, label in enumerate(labels) if label != IGNORE_INDEX]
    if route is None or not learned:
        return []
    made = RolloutDocument(ids[: learned[-1] + 1], labels[: learned[-1] + 1], row, route=route)
    start = len(made.prompt)
    return [replace(made, teacher_ids=list(made.ids), spans=(), starts=(start, start))]


def _bounds(batch: Mapping[str, torch.Tensor], prefix: str) -> list[list[tuple[int, int]]]:
    """Return each row's (start, end) of its documents, and of the padding after them; nothing without such input."""
    ids = batch.get(f"{prefix}input_ids")
    positions = batch.get(f"{prefix}position_ids")
    if ids is None:
        return []
    return [[(0, ids.shape[1])]] * len(ids) if positions is None else list(map(document_bounds, positions.tolist()))


def sampled_log_probs(rows: Sequence[Sequence[RolloutDocument]], shape: torch.Size) -> torch.Tensor:
    """Return each label's log-probability when it was sampled, [B, S] as `input_ids`; NaN for labels of the data.

    Of aligned spans, a span's label has the sum over the span's tokens.
    """
    precision = torch.float32 if torch.backends.mps.is_available() else torch.float64
    tokens = torch.full(shape, torch.nan, dtype=precision)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            begin = end
            end = end + len(document.ids)
            if not document.sampled_log_p:
                continue
            drawn = torch.tensor(document.sampled_log_p, dtype=precision)
            response = len(document.ids) - len(drawn)
            if not document.spans:
                tokens[row, begin + response : end] = drawn
                continue
            for first, after, *_ in document.spans:
                tokens[row, begin + first] = drawn[first - response : after - response].sum()
    return tokens


def score_columns(rows: Sequence[Sequence[RolloutDocument]], shape: torch.Size) -> dict[str, torch.Tensor]:
    """Return `rewards` and `advantages` of the response that each token belongs to.

    Both are float32 [B, S] as `input_ids`; elsewhere rewards are NaN and advantages 0.
    """
    rewards = torch.full(shape, torch.nan)
    advantages = torch.zeros(shape)
    for row, documents in enumerate(rows):
        end = 0
        for document in documents:
            end += len(document.ids)
            if document.score is not None:
                own = slice(end - (len(document.ids) - document.rollout_start), end)
                rewards[row, own] = document.score.reward
                advantages[row, own] = document.score.advantage
    return {"rewards": rewards, "advantages": advantages}


def _placed(documents: Sequence[RolloutDocument], each: int) -> list[int]:
    """Return spans (`each` 2) or starts of responses (1) as places in the row that the documents make."""
    placed: list[int] = []
    begin = other_begin = 0
    for document in documents:
        assert document.spans is not None and document.starts is not None and document.teacher_ids is not None
        for numbers in document.spans if each == 2 else [document.starts]:
            placed += [number + begin for number in numbers[:each]] + [
                number + other_begin for number in numbers[each:]
            ]
        begin = begin + len(document.ids)
        other_begin = other_begin + len(document.teacher_ids)
    return placed


def as_row(documents: Sequence[RolloutDocument]) -> RolloutRow:
    """Concatenate documents into one row, in the form that `distill.data` makes."""
    row = {
        "input_ids": [token for document in documents for token in document.ids],
        "labels": [label for document in documents for label in document.labels],
        "position_ids": [position for document in documents for position in range(len(document.ids))],
    }
    readings = [document.teacher_ids for document in documents if document.teacher_ids is not None]
    if readings:
        row["teacher_input_ids"] = [token for ids in readings for token in ids]
        row["teacher_position_ids"] = [position for ids in readings for position in range(len(ids))]
    if all(document.spans is not None for document in documents):
        row |= {"spans": _placed(documents, 2), "answer_starts": _placed(documents, 1)}
    routes = [document.route for document in documents if document.route is not None]
    if routes:
        row["route"] = routes
    if any(document.source_row is not None for document in documents):
        # padding comes from no row
        row[ROW] = [number for document in documents for number in document.source_row or (-1,) * PER_DOCUMENT]
    return row
