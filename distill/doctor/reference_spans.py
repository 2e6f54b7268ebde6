"""Reference divergence between two tokenizers, from its definition, span by span on full logits.

The outcomes are defined in `distill.objectives.spans`. Here each span's outcomes are computed one after the other,
without chunks, precomputed indices or a manual gradient; autograd differentiates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from distill_kernels import LossTerm, TokenStats
from torch import nn

from distill.data.collator import valid_rows
from distill.doctor.reference import INPUTS, Reference, Verdict, largest_magnitude
from distill.doctor.reference_loss import OF_KLS, as_specified, capped, divergence_from_kl
from distill.doctor.remote_outputs import logits_of
from distill.doctor.rows import DoctorRow, split_row
from distill.objectives.losses import LogitTransforms, build_loss, loss_terms
from distill.objectives.span_loss import CrossTokenizerLoss, Spans, SpanTargets
from distill.objectives.targets import Batch, StepInputs
from distill.recipe.loss import Loss
from distill.teachers.rows.retokenised.alignment import Shared
from distill.teachers.rows.retokenised.data import CrossColumns
from distill.teachers.rows.retokenised.encode import TokenisedReader, end_pairs
from distill.teachers.rows.retokenised.vocabularies import compare_by_bytes


class SpansReference(Reference):
    """Reference of aligned spans. `tokenizers` are `TokenisedReader`s, or None in a process that only trains."""

    @functools.cached_property
    def shared(self) -> Shared:
        """Return the ids of shared tokens, from the tokenizers themselves."""
        if self.tokenizers is None:
            return Shared(*(ids.numpy() for ids in self.teacher.format.shared))
        teacher, student = self.tokenizers
        return compare_by_bytes(student, teacher).shared

    def loss(
        self, student: nn.Module, rows: Sequence[DoctorRow], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        """Return the loss row by row without padding, from both models' full logits and the rows' spans."""
        losses = []
        device = batch["input_ids"].device
        for row in rows:
            inputs = {name: torch.tensor(row[name], device=device)[None] for name in INPUTS}
            z_s = student(**inputs, use_cache=False).logits[0].to(self.dtype)
            with torch.no_grad():
                z_t = self._teacher_logits(row, device).to(self.dtype)
            spans = torch.tensor(row["spans"]).view(-1, 4)
            both = ReferenceLogits(z_s, row["input_ids"]), ReferenceLogits(z_t.detach(), row["teacher_input_ids"])
            losses.append(dense_spans(*both, Spans(spans[:, :2], spans[:, 2:]), self.shared, loss))
        return torch.cat(losses).mean()

    def _teacher_logits(self, row: DoctorRow, device: torch.device) -> torch.Tensor:
        """Full logits [S', V] over the teacher's reading, each document by itself; 0 where nothing is compared."""
        found: list[torch.Tensor] = []
        for document in split_row(row):
            own = CrossColumns.teacher_row(document)
            places = valid_rows(torch.as_tensor(own["labels"], device=device)[None])
            logits = logits_of(self.teacher, document, device)
            whole = logits.new_zeros(len(own["input_ids"]), logits.shape[-1])
            found.append(whole.index_copy(0, places, logits))
        return torch.cat(found)

    def each(self, loss_of: Callable[..., Any], objective: Any, call: Sequence[Any]) -> torch.Tensor:
        """Return each span's divergence and the log-probabilities of its text, [M, 3]."""
        return figures_of(loss_of, call)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Compare the teacher with itself over its own spans, with all and with half of its tokens shared."""
        targets = self.teacher.targets(batch)
        own = self.teacher.hidden
        values = []
        ids = targets.teacher_ids
        itself = SpanTargets(targets.hidden, Spans(targets.spans.teacher, targets.spans.teacher), ids, ids)
        with own.head.open() as head:
            for share in (1.0, 0.5):
                shared = torch.arange(int(share * len(head.weight)), device=ids.device)
                for term in terms:
                    plain = build_loss([term], LogitTransforms(own.transform, own.transform))
                    values.append(CrossTokenizerLoss(plain, (shared, shared))(targets.hidden, head, head, itself))
        return "the teacher over its own spans", largest_magnitude(values)

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Return whether spans and shared tokens have the same bytes in both inputs, and labels begin spans."""
        teacher, student = self.tokenizers
        ends = set(end_pairs(student, teacher))
        for one, other in zip(*(ids.tolist() for ids in self.shared), strict=True):
            if student.spelled[one] != teacher.spelled[other] and (one, other) not in ends:
                texts = f"{student.spelled[one]!r} and {teacher.spelled[other]!r}"
                return False, f"shared ids {one} and {other} are {texts}"
        spans = batch["spans"].tolist()
        if batch["valid_rows"].tolist() != [a - 1 for a, *_ in spans]:
            return False, "trained tokens are not the first tokens of spans"
        own = batch["input_ids"].flatten().tolist()
        others = batch["teacher_input_ids"].flatten().tolist()
        count = 0
        for a, b, c, d in spans:
            tokens = own[a:b], others[c:d]
            text, other_text = (
                b"".join(reader.spelled[token] or b"" for token in ids)
                for reader, ids in zip((student, teacher), tokens, strict=True)
            )
            firsts = (tokens[0][0], tokens[1][0])
            if firsts not in ends and not same_bytes(
                text, other_text, prepends_space(student), prepends_space(teacher)
            ):
                return False, f"a span is {text!r} in the student's input and {other_text!r} in the teacher's"
            count += len(text)
        if any(a < stop or c < other_stop for (_, stop, _, other_stop), (a, _, c, _) in pairwise(spans)):
            return False, "spans overlap or are not in order"
        return True, f"own ids and positions each; {len(spans)} spans cover the same {count} bytes in both inputs"


def figures_of(loss_of: Callable[..., tuple[object, Sequence[torch.Tensor]]], call: Sequence[object]) -> torch.Tensor:
    """Return the divergence and both models' log-probability of the label from a loss's statistics, [N, 3]."""
    hidden, head, inputs, *rest = call
    assert isinstance(inputs, StepInputs)
    _, statistics = loss_of(hidden, head, replace(inputs, statistics=True), *rest)
    found = TokenStats(*statistics[: len(TokenStats._fields)])
    return torch.stack([found.divergence, found.student_label_logprob, found.teacher_label_logprob], 1)


def same_bytes(student: bytes, teacher: bytes, student_puts: bool, teacher_puts: bool) -> bool:
    """Return whether two tokenisations of a span decode alike, apart from a space that a tokenizer prepends to
    texts.
    """
    if student == teacher:
        return True
    return (student_puts and student == b" " + teacher) or (teacher_puts and teacher == b" " + student)


@functools.lru_cache(maxsize=8)
def prepends_space(reader: TokenisedReader) -> bool:
    ids = reader.tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and (reader.spelled[ids[0]] or b"").startswith(b" ")


class ReferenceLogits(NamedTuple):
    """Tokenisation of a text and a model's outputs: logits [S, V] and its S token ids."""

    logits: torch.Tensor
    ids: Sequence[int]


def dense_spans(
    student: ReferenceLogits, teacher: ReferenceLogits, spans: Spans, shared: Sequence[Any], loss: Loss
) -> torch.Tensor:
    """Return the losses of aligned spans, [M], in the logits' dtype.

    Args:
        student, teacher: Both tokenisations of one text.
        spans: int64 [M, 2] each: first token and end.
        shared: Ids of shared tokens, [C] of the student and [C] of the teacher.
    """
    z_s, ids_s = student
    z_t, ids_t = teacher
    terms = loss_terms(loss)
    log_s = (z_s / loss.temperatures.student).log_softmax(-1).unbind()
    log_t = (z_t / loss.temperatures.teacher).log_softmax(-1).unbind()
    hard = z_s.log_softmax(-1).unbind()
    soft = [term for term in terms if term.type != "cross_entropy"]
    ce = sum(term.weight for term in terms if term.type == "cross_entropy")
    mine, theirs = (torch.as_tensor(ids, device=z_s.device) for ids in shared)
    known = (mine < z_s.shape[-1]) & (theirs < z_t.shape[-1])
    mine = mine[known]
    theirs = theirs[known]
    losses = []
    for (a, b), (c, d) in zip(spans.student.tolist(), spans.teacher.tolist(), strict=True):
        text_s = _text(log_s, ids_s, a, b)
        text_t = _text(log_t, ids_t, c, d)
        p = log_s[a - 1].exp()
        q = log_t[c - 1].exp()
        u = ids_s[a]
        w = ids_t[c]
        ones = mine
        others = theirs
        pairs_p = []
        pairs_q = []
        if (b - a, d - c) != (1, 1) or not bool(((mine == u) & (theirs == w)).any()):
            # the text is an outcome of its own, so its mass is taken from the tokens that it begins with
            pairs_p = [text_s.exp()[None]]
            pairs_q = [text_t.exp()[None]]
            p = _less(p, u, text_s.exp())
            q = _less(q, w, text_t.exp())
            apart = (mine == u) | (theirs == w)
            ones = mine[~apart]
            others = theirs[~apart]
        both = torch.cat([*pairs_p, p[ones]]), torch.cat([*pairs_q, q[others]])
        rest_s = _without(p, ones)
        rest_t = _without(q, others)
        rest = _by_size(rest_s, rest_t)
        values = [term.weight * capped(torch.cat([_part(term, *both), rest]), term.clip) for term in soft]
        total = sum(values, start=z_s.new_zeros(()))
        losses.append(loss.scale * total - ce * _text(hard, ids_s, a, b))
    return torch.stack(losses) if losses else z_s.new_zeros(0)


def _text(log_p: Sequence[torch.Tensor], ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Return the log-probability of some tokens, each given those before it."""
    return torch.stack([log_p[at - 1][ids[at]] for at in range(start, stop)]).sum()


def _less(p: torch.Tensor, token: int, mass: torch.Tensor) -> torch.Tensor:
    return p.index_add(0, torch.tensor([token], device=p.device), -mass[None])


def _without(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    keep = torch.ones(len(p), dtype=torch.bool, device=p.device)
    keep[ids] = False
    return p[keep]


def _by_size(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences of both distributions, each sorted by probability."""
    width = max(len(p), len(q))
    p = torch.nn.functional.pad(p, (0, width - len(p))).sort(descending=True).values
    q = torch.nn.functional.pad(q, (0, width - len(q))).sort(descending=True).values
    return (p - q).abs()


def _part(term: LossTerm, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the terms of a divergence from unnormalised probabilities of student `p` and teacher `q`.

    Each term is 0 where both are equal, and never negative.
    """

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (a / b).log() - a + b

    if term.type == "tvd":
        return 0.5 * (p - q).abs()
    if term.type not in OF_KLS:
        return as_specified(term, p.log(), q.log())
    return divergence_from_kl(term, kl, p, q, lambda share: share * q + (1 - share) * p)
