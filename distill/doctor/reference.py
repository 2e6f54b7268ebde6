"""Reference of a target format for doctor: its fp64 loss, independent of the teacher's `targets` and the format's
`loss`.

A reference that shared code with its format would share its faults. `Reference` is that of hidden states, of one
teacher or several, each with the student's prompt or another; other formats are subclasses (`reference_top_k`,
`reference_spans`, `reference_routed`), listed in `distill.doctor.references`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

import torch
from distill_kernels import FusedDistillationLoss, LossTerm, TeacherHead
from torch.nn import functional as F

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.collator import Collator, move_batch
from distill.doctor.reference_layers import layer_loss
from distill.doctor.reference_loss import Mixture, SampledTokens, mixed_log_probabilities, shift_left, token_loss
from distill.doctor.remote_outputs import column_prefix, logits_of
from distill.doctor.rewards import advantage_of
from distill.doctor.rows import DoctorRow, first_trained, split_row
from distill.models.load.vocabulary import compare
from distill.objectives.losses import LogitTransforms, TargetLoss, build_loss, single_losses
from distill.objectives.targets import Batch
from distill.recipe.loss import Loss
from distill.teachers.base import Teacher
from distill.teachers.combination.mixture import MixtureFormat
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.context.teacher import ContextTeacher

FEW = 4  # tokens; a shorter context may occur in a prompt by chance
COLUMNS = 512  # columns of the vocabulary over which a mixture is compared with itself
INPUTS = ("input_ids", "position_ids")

Verdict = tuple[bool, str]
Reads = list[tuple[Any, dict[str, torch.Tensor]]]


class Reference:
    """Reference of hidden states: of one teacher, or of the mixture of several.

    Args:
        weights: Weights of its members, from the recipe, not from the teacher.
        tokenizers: Tokenizers of every teacher and, last, of the student; None for random tokens.

    Attributes:
        dtype: Dtype of the loss: float64 for the reference, float32 to measure PyTorch's rounding.
    """

    dtype = torch.float64

    def __init__(self, teacher: Teacher, weights: Sequence[float] = (1.0,), tokenizers: Any = None) -> None:
        self.teacher: Any = teacher
        self.weights = tuple(weights)
        self.tokenizers = tokenizers

    @property
    def mixed(self) -> Sequence[Any]:
        """Return the teachers whose distributions are mixed: the teacher itself, or those of a mixture."""
        several = isinstance(self.teacher.format, MixtureFormat)
        return [part.teacher for part in self.teacher.parts()] if several else [self.teacher]

    # ------------------------------------------------------------------ loss

    def loss(
        self, student: Any, rows: Sequence[DoctorRow], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        """Return the mean loss over the trained tokens, [], in `dtype` from the logits on, with the student's graph.

        Args:
            batch: The same rows, padded, on the student's device.
            columns: Number of logits to compare; None for that of the smallest head.
        """
        labels = shift_left(batch["labels"])
        keep = labels != IGNORE_INDEX
        z_s = student(**{name: batch[name] for name in INPUTS}, use_cache=False).logits[keep]
        with torch.no_grad():
            teachers = self.teacher_logits(rows, keep.device)
        columns = columns or min(z.shape[-1] for z in (z_s, *(z for _, z in teachers)))
        cut = [(share, z[:, :columns]) for share, z in teachers]
        sampled = SampledTokens(keep.flatten().nonzero()[:, 0], self.advantages(rows) if loss.rewarded else None)
        total = token_loss(z_s[:, :columns], cut, labels[keep], loss, sampled, self.dtype)
        if loss.reads_layers:
            (teacher,) = self.teacher.models.values()
            total = total + layer_loss(student, teacher, batch, loss, self.dtype)
        return total

    def document_loss(
        self, student: torch.nn.Module, document: DoctorRow, device: torch.device, loss: Loss, columns: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum of a document's losses, and their number, for a reference of several teachers."""
        collate = Collator(0, columns=self.teacher.columns)
        batch = move_batch(collate([document]), device)
        count = len(batch["valid_rows"])
        if count == 0:
            return torch.zeros((), device=device), 0
        return count * self.loss(student, [document], batch, loss, columns), count

    def advantages(self, rows: Sequence[DoctorRow]) -> torch.Tensor:
        """Return the advantage of each trained token [N] by the reward that doctor uses, document by document."""
        documents = [document["labels"] for row in rows for document in split_row(row)]
        return torch.tensor(
            [advantage_of(labels) for labels in documents for label in labels[1:] if label != IGNORE_INDEX]
        )

    def teacher_logits(self, rows: Sequence[DoctorRow], device: torch.device) -> Mixture:
        """Return each member's weight and full logits [N, V] at the trained positions, document by document."""
        documents = [document for row in rows for document in split_row(row)]
        return [
            (share, torch.cat([logits_of(member, document, device) for document in documents]))
            for share, member in zip(self.weights, self.mixed, strict=True)
        ]

    def at_temperature_2(self) -> Teacher:
        """Return a teacher that allows a loss at temperature 2."""
        return self.teacher

    # ----------------------------------------------------- token after token

    def single(self, objective: DistillationObjective, term: LossTerm) -> TargetLoss:
        spelled = {name: value for name, value in term._asdict().items() if value is not None}
        return self.teacher.format.loss({"temperature": self.temperature, "terms": [spelled]}, objective.alignment)

    @property
    def temperature(self) -> float:
        """Return the temperature at which single terms are checked."""
        return 1.0

    def each(self, loss_of: Callable[..., Any], objective: Any, call: Sequence[Any]) -> torch.Tensor:
        """Return each token's loss [N, 1], from the arguments of `objective.loss_of`."""
        for loss in single_losses(objective.loss):
            loss.reduction = "none"
        return loss_of(*call).flatten()[call[-1]][:, None]

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Return a description of the compared outputs and the largest mean divergence of them from themselves."""
        if isinstance(self.teacher.format, MixtureFormat):
            return self._mixture_from_itself(batch, terms)
        hidden = self.teacher.targets(batch)
        transform = self.teacher.format.transform
        with self.teacher.format.head.open() as head:
            both = (hidden.to(head.weight.dtype), head.weight) * 2
            losses = [build_loss([term], LogitTransforms(transform, transform)) for term in terms]
            labels = shift_left(batch["labels"])
            values = [loss(*both, labels, student_bias=head.bias, teacher_bias=head.bias) for loss in losses]
        return "the teacher", largest_magnitude(values)

    def _mixture_from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Compare the mixture with a student that equals it, by log-probabilities as hidden states, identity as head.

        Only the first columns of the vocabulary are used, since such a head is a square matrix.
        """
        keep = (shift_left(batch["labels"]) != IGNORE_INDEX).flatten()
        heads = []
        logits = []
        for share, hidden, member in zip(
            self.weights, self.teacher.targets(batch), self.teacher.format.members, strict=True
        ):
            rows = hidden.flatten(0, -2)[keep]
            scale, cap = member.transform
            with member.head.open() as head:
                weight = head.weight[:COLUMNS]
                bias = None if head.bias is None else head.bias[:COLUMNS]
            heads.append(TeacherHead(rows, weight, share, bias, scale, cap))
            z = scale * F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
            logits.append((share, z if not cap else cap * torch.tanh(z / cap)))
        mixture = mixed_log_probabilities(logits, 1.0).to(heads[0].hidden.dtype)
        one = torch.eye(mixture.shape[-1], dtype=mixture.dtype, device=mixture.device)
        values = [FusedDistillationLoss([term])(mixture, one, teachers=heads) for term in terms]
        return f"the mixture (over {mixture.shape[-1]} columns)", largest_magnitude(values)

    # -------------------------------------------------------- the same tokens

    def reads(self, student: Any, batch: Batch) -> Reads:
        """Return every model, the student last, with the ids and positions that it should get for a batch."""
        calls: Reads = []
        for member in self.mixed:
            own = {name: batch[f"{column_prefix(member)}{name}"] for name in INPUTS}
            calls += [(model, own) for model in member.models.values()]
        return [*calls, (student, {name: batch[name] for name in INPUTS})]

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Return whether each id means the same to all models, with a description."""
        largest = int(batch["input_ids"].max())
        if largest >= columns:
            return False, f"id {largest} is outside of the {columns:,} columns"
        if self.tokenizers is None:
            return True, "same ids and positions; no tokenizer, the data are random tokens"
        *teachers, own = self.tokenizers
        own = getattr(own, "tokenizer", own)  # of a `Reader`, where teachers on routes have tokenizers of their own
        verdicts = [
            compare(tokenizer, own, rows, student_rows)
            for tokenizer, rows in zip(teachers, self.teacher.format.properties.columns, strict=True)
            if not hasattr(tokenizer, "tokenizer")
        ]
        verdict = next((verdict for verdict in verdicts if not verdict.compatible), verdicts[0])
        same = verdict.compatible
        detail = f"same ids and positions; {verdict}"
        if self.teacher.rows.reading != "context":
            return same, detail
        prompt = self.teacher.prompt if isinstance(self.teacher, ContextTeacher) else None
        expected: Literal["added", "other", "any"] = "added"
        if prompt is not None:
            own = prompt.context
            expected = "other" if own is None else "added" if own.only_adds else "any"
        fine, found = context_verdict(batch, expected)
        return (same, f"{detail}; {found}") if fine else (fine, found)


def largest_magnitude(values: Sequence[torch.Tensor]) -> float:
    """Return the largest magnitude; NaN where there is one."""
    return torch.stack(list(values)).abs().max().item()


def context_verdict(batch: Batch, expected: Literal["added", "other", "any"] = "added") -> tuple[bool, str]:
    """Compare the tokens of responses in both inputs, and find context that leaks into the student's prompt.

    Args:
        expected: The teacher's prompts: `added`, the student's and a context that the student lacks; `other` than the
            student's, of either length, where the chat template has other variables for it; `any`, the student's too,
            where a context may be missing or takes the prompt's place.
    """
    more = 0
    for row in range(len(batch["labels"])):
        own, positions, other, other_positions = (
            batch[f"{who}{name}"][row].tolist() for who in ("", "teacher_") for name in ("input_ids", "position_ids")
        )
        labels = batch["labels"][row].tolist()
        for (a, b), (c, d) in zip(document_bounds(positions), document_bounds(other_positions), strict=False):
            document = {"labels": labels[a:b]}
            first = first_trained(document)
            if first is None:
                continue
            answer = own[a + first : b]
            prompt = own[a : a + first]
            if other[d - len(answer) : d] != answer:
                return False, "a response has other tokens in the teacher's input"
            if expected != "added":
                if expected == "other" and other[c : d - len(answer)] == prompt:
                    return False, "the teacher's prompt is the student's"
                more += d - c - (b - a)
                continue
            private = _only_in(other[c : d - len(answer)], prompt)
            if not private:
                return False, "the teacher has no context that the student lacks"
            leaked = SequenceMatcher(None, prompt, private, autojunk=False).find_longest_match().size
            if leaked >= max(FEW, len(private) / 2):
                return False, f"{leaked} tokens of the teacher's context are in the student's prompt"
            more += len(private)
    if expected != "added":
        return True, f"responses have the same tokens in both inputs; the teacher's prompts are {more:+,} tokens longer"
    return True, f"responses have the same tokens in both inputs; {more} tokens before them are context"


def _only_in(longer: list[int], shorter: list[int]) -> list[int]:
    """Return a prompt without the beginning and the end that it shares with another."""
    start = next((at for at, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]), len(shorter))
    most = len(shorter) - start
    backwards = zip(longer[::-1], shorter[::-1], strict=False)
    end = next((at for at, pair in enumerate(backwards) if pair[0] != pair[1]), len(shorter))
    return longer[start : len(longer) - min(end, most)]
