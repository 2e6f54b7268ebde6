"""Test setup of the invariants: a teacher, a student, rows of data and a loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from distill_kernels import LossTerm
from distill_kernels.losses import DIVERGENCES
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator, move_batch
from distill.doctor.reference import Reference
from distill.doctor.references import reference_of
from distill.doctor.rewards import advantages_of
from distill.doctor.rollouts import StudentRollouts
from distill.doctor.rows import DoctorRow, join_rows, split_row
from distill.generation.documents import Readers
from distill.models.patch.packed import isolates_documents
from distill.objectives.losses import is_soft
from distill.recipe.loss import Loss
from distill.teachers.base import Teacher
from distill.teachers.objective import DistillationObjective, as_teacher

Gradients = dict[str, torch.Tensor]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
# a bound is at most SLACK x PyTorch's rounding and MOST x the usual bound
SLACK = 2.0
MOST = 50.0
TERMS = tuple(
    LossTerm(
        kind,
        1.0,
        beta=row.default if row.parameter == "beta" else None,
        alpha=row.default if row.parameter == "alpha" else None,
    )
    for kind, row in DIVERGENCES.items()
)


@dataclass
class CheckSetup:
    """Models, rows and loss that the invariants are measured on.

    Attributes:
        student: Causal language model, bare or inside PEFT, on one device with the teacher.
        teacher: Teacher of any kind, or a causal language model.
        rows: At least two rows of the training data, as its `columns` accept them.
        vocab_size: Number of logits that both heads are cut to; None for that of the teacher's targets.
        weights: Weights of the teacher's models in the recipe.
        tokenizers: Tokenizers of every teacher and, last, of the student, from `Vocabulary.tokenizers`; None where the
            data are random tokens.
        small: Function that makes truncated copies (student, teacher) for training runs; None copies the models.
        rollouts: Rollout settings, where the recipe trains on-policy; then `rows` are rollouts.
        readers: Readers of rollouts by teachers' tokenizers that are others than the student's, by route.
        prompts: Prompts of these rollouts, in the order of the rows' documents.
        last_tokens: Last trained token of each complete response in the data.
        turn_end_problem: Reason why the student's rollouts would not end as the chat template's turns do.
        packs: Whether the recipe packs several documents into a row (`data.packing`).
        packing_fault: Description of wrongly packed rows in the data.
        data_fault: Reason why the teacher does not fit the data: another template, missing documents.
        rounding: Relative difference of PyTorch's loss and gradients on full logits, in the student's dtype, from those
            in fp64, on this machine; the first check measures it, and all bounds depend on it.
    """

    student: nn.Module
    teacher: Any
    rows: Sequence[DoctorRow]
    loss: Loss
    vocab_size: int | None = None
    weights: Sequence[float] = (1.0,)
    tokenizers: Sequence[Any] | None = None
    small: Callable[[], tuple[nn.Module, Teacher]] | None = None
    rollouts: StudentRollouts | None = None
    readers: Readers = field(default_factory=dict)
    prompts: list[list[int]] | None = None
    last_tokens: Sequence[int] = ()
    turn_end_problem: str | None = None
    packs: bool = True
    packing_fault: str | None = None
    data_fault: str | None = None
    rounding: float = 0.0

    def __post_init__(self) -> None:
        self.teacher = as_teacher(self.teacher)

    # ---------------------------------------------------------------- models

    @property
    def device(self) -> torch.device:
        return next(self.student.parameters()).device

    @property
    def tolerance(self) -> float:
        """Return the relative bound for the student's dtype, larger where PyTorch's own loss has more rounding."""
        usual = TOLERANCE[next(self.student.parameters()).dtype]
        return max(usual, min(SLACK * self.rounding, MOST * usual))

    @property
    def models(self) -> list[Any]:
        """Return every loaded model, the student last."""
        return [*self.teacher.models.values(), self.student]

    @property
    def separates_documents(self) -> bool:
        """Return whether documents of one row must be separated.

        Always, except for a recipe with one document per row whose model does not separate them (its attention ignores
        positions), which is trained correctly all the same.
        """
        return self.packs or all(map(isolates_documents, self.models))

    def in_eval_mode(self) -> contextlib.AbstractContextManager[None]:
        return eval_mode(*self.models)

    def truncated(self) -> CheckSetup:
        """Return the subject with truncated or copied models, for training runs."""
        student, teacher = self.small() if self.small else (copy.deepcopy(self.student), copy.deepcopy(self.teacher))
        return replace(self, student=student, teacher=teacher, loss=self.loss.with_automatic_layers(), small=None)

    def at_temperature_2(self) -> CheckSetup | None:
        """Return the subject at temperature 2 if the recipe's is 1, where T and its square are equal; else None."""
        if self.loss.tempered or not is_soft(self.loss):
            return None
        loss = self.loss.model_copy(update={"temperature": 2.0})
        return replace(self, teacher=self.reference.at_temperature_2(), loss=loss, small=None)

    # ---------------------------------------------------- objective and data

    @property
    def reference(self) -> Reference:
        return reference_of(self.teacher, self.weights, self.tokenizers)

    def reference_loss(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, Gradients]:
        """Return loss and gradients from the models' full logits, in `dtype` from there, by PyTorch's autograd."""
        reference = self.reference
        reference.dtype = dtype
        with self.in_eval_mode():
            loss = reference.loss(self.student, self.rows, self.batch(), self.loss, self.vocab_size)
            loss.backward()
        return loss.detach(), take_gradients(self.student)

    def objective(self) -> Any:
        return DistillationObjective(self.teacher, self.student, self.loss, vocab_size=self.vocab_size)

    def batch(self, rows: Sequence[DoctorRow] | None = None, pad_token_id: int = 0, **collator: Any) -> dict[str, Any]:
        """Return `rows` (default: all) as one batch on the device."""
        collate = Collator(pad_token_id, columns=self.teacher.columns, **collator)
        return self.on_device(collate(self.rows if rows is None else rows))

    def on_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a collated batch on the device, with advantages of its documents where the loss has a reward."""
        more = {} if self.loss.rewarded is None else {"advantages": advantages_of(batch)}
        return move_batch({**batch, **more}, self.device)

    def documents(self) -> list[dict[str, list[int]]]:
        return [document for row in self.rows for document in split_row(row)]

    def packed_rows(self) -> list[DoctorRow]:
        """Return the rows if one holds several documents, else pairs of them joined, if documents are separated."""
        if not self.separates_documents or any(len(split_row(row)) > 1 for row in self.rows):
            return list(self.rows)
        return [join_rows(self.rows[at : at + 2]) for at in range(0, len(self.rows), 2)]

    def uneven_rows(self) -> list[DoctorRow]:
        """Return the rows; the first is extended by the second if all have equally many trained tokens.

        With equal rows, a mean of means equals the mean, so a wrong divisor would not show.
        """
        if len({sum(label != IGNORE_INDEX for label in row["labels"]) for row in self.rows}) > 1:
            return list(self.rows)
        return [join_rows(self.rows[:2]), *self.rows[1:]]

    # -------------------------------------------------------------- measures

    @property
    def divergences(self) -> list[LossTerm]:
        """Return the divergences that the teacher's targets allow."""
        return [term for term in TERMS if term.type in self.teacher.format.properties.divergences]

    def token_losses(
        self, rows: Sequence[DoctorRow] | None = None, terms: Sequence[LossTerm] = (), **collator: Any
    ) -> list[torch.Tensor]:
        """Return the loss of every trained token (or span), [N, metrics], without gradients, for each of `terms`."""
        batch = self.batch(rows, **collator)
        objective = self.objective()
        reference = self.reference
        losses = [reference.single(objective, term) for term in terms] or [objective.loss]
        objective.loss = losses[0]  # a loss of hard labels alone would not use the teacher
        results: list[torch.Tensor] = []
        loss_of = objective.loss_of

        def each(*call: Any) -> Any:
            for loss in losses:
                objective.loss = loss
                results.append(reference.each(loss_of, objective, call))
            return results[0].sum()

        objective.loss_of = each
        with torch.no_grad(), self.in_eval_mode():
            self.student(**objective.student_inputs(batch, statistics=False))
        objective.detach()
        return results

    def least(self) -> float:
        """Return the smallest divergence of any token, over all divergences."""
        results = self.token_losses(terms=self.divergences)
        return torch.stack([figures[:, 0].min() for figures in results]).min().item()


def take_gradients(model: nn.Module) -> Gradients:
    """Return a model's gradients by parameter, and clear them."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken
