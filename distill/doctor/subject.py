"""What is examined: a teacher, a student, rows of data and a loss. What depends on the teacher's target format is in
`distill.doctor.references`; the invariants are the same functions for all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from distill_kernels import LossTerm
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator
from distill.doctor.reference import Reference
from distill.doctor.references import reference_of
from distill.doctor.rollouts import StudentRollouts
from distill.doctor.rows import Row, Rows
from distill.models.packed import keeps_apart
from distill.recipe.loss import Loss
from distill.teachers.base import Teacher
from distill.teachers.losses import is_soft
from distill.teachers.objective import DistillationObjective, as_teacher

Gradients = dict[str, torch.Tensor]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
SLACK, MOST = 2.0, 50.0  # bounds are at most so often PyTorch's own rounding, and so often the usual bound
DIVERGENCES = (
    LossTerm("forward_kl", 1.0),
    LossTerm("reverse_kl", 1.0),
    LossTerm("jsd", 1.0, beta=0.5),
    LossTerm("skew_forward_kl", 1.0, alpha=0.1),
    LossTerm("skew_reverse_kl", 1.0, alpha=0.1),
    LossTerm("tvd", 1.0),
)


@dataclass
class Subject:
    """What is checked.

    Attributes:
        student: a causal language model, bare or inside PEFT, on one device with the teacher.
        teacher: of any kind, or a causal language model.
        rows: some rows of the training data, as its `collate` takes them, at least two.
        loss: the recipe's.
        vocab_size: columns that both heads are cut to; None for what the teacher's targets say.
        weights: of the teacher's models in the recipe.
        tokenizers: of every teacher and, last, of the student, as `Vocabulary.tokenizers` gives them; None where the
            data are random tokens.
        small: makes shrunken copies (student, teacher), for whole training runs; None copies the models.
        rollouts: how the student answers while it trains, where the recipe has it; then `rows` are its answers.
        prompts: what it answered then, in the order of the rows' documents.
        last_tokens: of the data's whole answers, the last that is learned.
        packs: whether the recipe puts several documents into a row (`data.packing`).
        packing_fault: what is wrong with the data's packed rows, in words.
        data_fault: why the teacher cannot teach these data, in words: made with another template, documents missing.
        rounding: relative difference of PyTorch's own loss and gradients in the student's dtype, on full logits, from
            those in fp64, on this machine; the first check measures it, and the bounds of all follow it.
    """

    student: nn.Module
    teacher: Any
    rows: Sequence[Row]
    loss: Loss
    vocab_size: int | None = None
    weights: Sequence[float] = (1.0,)
    tokenizers: Sequence[Any] | None = None
    small: Callable[[], tuple[nn.Module, Teacher]] | None = None
    rollouts: StudentRollouts | None = None
    prompts: list[list[int]] | None = None
    last_tokens: Sequence[int] = ()
    packs: bool = True
    packing_fault: str | None = None
    data_fault: str | None = None
    rounding: float = 0.0

    def __post_init__(self) -> None:
        self.teacher = as_teacher(self.teacher)

    # ---------------------------------------------------------------- models

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next(self.student.parameters()).device

    @property
    def tolerance(self) -> float:
        """What rounding may do in the student's dtype, relative: more where PyTorch's own loss is rounded by more."""
        usual = TOLERANCE[next(self.student.parameters()).dtype]
        return max(usual, min(SLACK * self.rounding, MOST * usual))

    @property
    def models(self) -> list[Any]:
        """Every model that is loaded, the student last."""
        return [*self.teacher.models.values(), self.student]

    @property
    def apart(self) -> bool:
        """Whether documents of one row have to stay apart: always, but for a recipe of one document a row with a model
        that lets them see each other (its attention takes no positions), which is trained rightly all the same."""
        return self.packs or all(map(keeps_apart, self.models))

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """All models in eval mode: without dropout; their own mode comes back."""
        return eval_mode(*self.models)

    def shrunk(self) -> Subject:
        """The same of models that are small or copied, for runs that train."""
        student, teacher = self.small() if self.small else (copy.deepcopy(self.student), copy.deepcopy(self.teacher))
        return replace(self, student=student, teacher=teacher, small=None)

    def warm(self) -> Subject | None:
        """The same at temperature 2 where the recipe's is 1, at which T is the same as its square; else None."""
        if self.loss.temperature != 1.0 or not is_soft(self.loss):
            return None
        loss = self.loss.model_copy(update={"temperature": 2.0})
        return replace(self, teacher=self.reference.warm(), loss=loss, small=None)

    # ---------------------------------------------------- objective and data

    @property
    def reference(self) -> Reference:
        """Of the teacher's format."""
        return reference_of(self.teacher, self.weights, self.tokenizers)

    def by_definition(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, Gradients]:
        """Return loss and gradients from the models' own full logits, in `dtype` from there, by PyTorch's autograd."""
        reference = self.reference
        reference.dtype = dtype
        with self.quiet():
            loss = reference.loss(self.student, self.rows, self.batch(), self.loss, self.vocab_size)
            loss.backward()
        return loss.detach(), take_gradients(self.student)

    def objective(self) -> Any:
        """A fresh objective on the models."""
        return DistillationObjective(self.teacher, self.student, self.loss, vocab_size=self.vocab_size)

    def batch(self, rows: Sequence[Row] | None = None, pad_token_id: int = 0, **collator: Any) -> dict[str, Any]:
        """`rows` (by default all) as one batch on the device."""
        collate = self.teacher.collate(Collator(pad_token_id, **collator))
        return {name: tensor.to(self.device) for name, tensor in collate(self.rows if rows is None else rows).items()}

    @property
    def form(self) -> type[Rows]:
        """How rows are taken apart and put together."""
        return self.reference.rows

    def documents(self) -> list[dict[str, list[int]]]:
        """The documents of all rows."""
        return [document for row in self.rows for document in self.form.documents(row)]

    def packed_rows(self) -> list[Row]:
        """The rows where one holds several documents, else two of them in one at a time, if they may be."""
        if not self.apart or any(len(self.form.documents(row)) > 1 for row in self.rows):
            return list(self.rows)
        return [self.form.joined(self.rows[at : at + 2]) for at in range(0, len(self.rows), 2)]

    def uneven_rows(self) -> list[Row]:
        """The rows, as many; the first has the second's documents after its own where all learn equally many tokens.

        Of equal rows a mean of means is the mean, so that a wrong divisor would not show.
        """
        if len({sum(label != IGNORE_INDEX for label in row["labels"]) for row in self.rows}) > 1:
            return list(self.rows)
        return [self.form.joined(self.rows[:2]), *self.rows[1:]]

    # -------------------------------------------------------------- measures

    @property
    def divergences(self) -> list[LossTerm]:
        """Those that the teacher's targets can be compared by."""
        return [term for term in DIVERGENCES if term.type in self.teacher.format.terms]

    def token_losses(
        self, rows: Sequence[Row] | None = None, terms: Sequence[LossTerm] = (), **collator: Any
    ) -> list[torch.Tensor]:
        """What every trained token (or span) loses, [N, figures], token after token, without gradients: by the loss,
        or by each of `terms`."""
        batch, objective, reference = self.batch(rows, **collator), self.objective(), self.reference
        losses = [reference.single(objective, term) for term in terms] or [objective.loss]
        objective.loss = losses[0]  # a loss of hard labels alone would not ask the teacher
        results: list[torch.Tensor] = []
        loss_of = objective.loss_of

        def each(*call: Any) -> Any:
            for loss in losses:
                objective.loss = loss
                results.append(reference.each(loss_of, objective, call))
            return results[0].sum()

        objective.loss_of = each
        with torch.no_grad(), self.quiet():
            self.student(**objective.compare(batch, statistics=False))
        objective.detach()
        return results

    def least(self) -> float:
        """The least divergence of any token, by any of the divergences."""
        results = self.token_losses(terms=self.divergences)
        return torch.stack([figures[:, 0].min() for figures in results]).min().item()


def take_gradients(model: nn.Module) -> Gradients:
    """Return a model's gradients by parameter, and leave it without."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken
