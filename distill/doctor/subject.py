"""What is examined: two models, rows of data, a loss; and how the invariants reach into a kind of teacher.

`Subject` is one loaded teacher over the student's vocabulary. Another kind of teacher is a subclass that says what its
objective, its reference and its documents are (`subject_several`, `subject_cross`, `subject_cached`); the invariants
are the same functions for all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn

from distill.data.collator import Collator
from distill.doctor.own_words import OwnWords
from distill.doctor.reference_loss import reference_loss, shifted
from distill.models.head import bare, decoder_of, find_head, read_head
from distill.models.packed import keeps_apart
from distill.models.vocabulary import compare
from distill.recipe.loss import Loss
from distill.teachers.objective import IGNORE, DistillationObjective, build_loss, last_hidden

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
DIVERGENCES = (
    LossTerm("forward_kl", 1.0),
    LossTerm("reverse_kl", 1.0),
    LossTerm("jsd", 1.0, beta=0.5),
    LossTerm("skew_forward_kl", 1.0, alpha=0.1),
    LossTerm("skew_reverse_kl", 1.0, alpha=0.1),
    LossTerm("tvd", 1.0),
)

Row = Mapping[str, Sequence[int]]
Verdict = tuple[bool, str]


@dataclass
class Subject:
    """What is checked.

    Attributes:
        student: a causal language model, bare or inside PEFT, on one device with the teacher.
        teacher: a causal language model.
        rows: some rows of the training data (`input_ids`, `labels`, `position_ids`), at least two.
        loss: the recipe's.
        vocab_size: columns that both heads are cut to; None for the smaller head.
        tokenizers: of teacher and student; None where the data are random tokens.
        small: makes shrunken copies (student, teacher), for whole training runs; None copies the models.
        own_words: how the student answers while it trains, where the recipe has it; then `rows` are its answers.
        prompts: what it was asked then, in the order of the rows' documents.
        packs: whether the recipe puts several documents into a row (`data.packing`).
    """

    student: nn.Module
    teacher: Any
    rows: Sequence[Row]
    loss: Loss
    vocab_size: int | None = None
    tokenizers: tuple[Any, ...] | None = None
    small: Callable[[], tuple[nn.Module, Any]] | None = None
    own_words: OwnWords | None = None
    prompts: list[list[int]] | None = None
    packs: bool = True

    divergences: ClassVar[tuple[LossTerm, ...]] = DIVERGENCES

    # ---------------------------------------------------------------- models

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next(self.student.parameters()).device

    @property
    def tolerance(self) -> float:
        """What rounding may do in the student's dtype, relative."""
        return TOLERANCE[next(self.student.parameters()).dtype]

    @property
    def teachers(self) -> list[Any]:
        """Every teacher that is loaded."""
        return [self.teacher]

    @property
    def models(self) -> list[nn.Module]:
        """Every model, the student last."""
        return [*self.teachers, self.student]

    @property
    def apart(self) -> bool:
        """Whether documents of one row have to stay apart: always, but for a recipe of one document a row with a model
        that lets them see each other (its attention takes no positions), which is trained rightly all the same."""
        return self.packs or all(map(keeps_apart, self.models))

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """All models in eval mode: without dropout; their own mode comes back."""
        modes = [(model, model.training) for model in self.models]
        for model, _ in modes:
            model.eval()
        try:
            yield
        finally:
            for model, training in modes:
                model.train(training)

    def shrunk(self) -> Subject:
        """The same of models that are small or copied, for runs that train."""
        student, teacher = self.small() if self.small else (copy.deepcopy(self.student), copy.deepcopy(self.teacher))
        return replace(self, student=student, teacher=teacher, small=None)

    # ---------------------------------------------------- objective and data

    @property
    def objective_type(self) -> Callable[..., DistillationObjective]:
        """What makes the objective, as `DistillationTrainer` takes it."""
        return DistillationObjective

    def objective(self) -> Any:
        """A fresh objective on the models."""
        return self.objective_type(self.teacher, self.student, self.loss, vocab_size=self.vocab_size)

    def collator(self, pad_token_id: int = 0, **settings: Any) -> Callable[[Any], dict[str, Any]]:
        """What makes batches of rows."""
        return Collator(pad_token_id, **settings)

    def batch(self, rows: Sequence[Row] | None = None, pad_token_id: int = 0, **collator: Any) -> dict[str, Any]:
        """`rows` (by default all) as one batch on the device."""
        made = self.collator(pad_token_id, **collator)(self.rows if rows is None else rows)
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    @staticmethod
    def documents(row: Row) -> list[dict[str, list[int]]]:
        """The documents of a packed row, cut where positions start again."""
        return [{name: list(values[a:b]) for name, values in row.items()} for a, b in bounds(row["position_ids"])]

    @staticmethod
    def joined(parts: Sequence[Row]) -> dict[str, list[int]]:
        """Documents behind each other as one row."""
        return {name: [item for part in parts for item in part[name]] for name in parts[0]}

    def packed_rows(self) -> list[Row]:
        """The rows where one holds several documents, else two of them behind each other at a time, if they may be."""
        if not self.apart or any(len(self.documents(row)) > 1 for row in self.rows):
            return list(self.rows)
        return [self.joined(self.rows[at : at + 2]) for at in range(0, len(self.rows), 2)]

    def uneven_rows(self) -> list[Row]:
        """The rows, as many; the first has the second's documents behind its own where all learn equally many tokens.

        Of equal rows a mean of means is the mean, so that a wrong divisor would not show.
        """
        if len({sum(label != IGNORE for label in row["labels"]) for row in self.rows}) > 1:
            return list(self.rows)
        return [self.joined(self.rows[:2]), *self.rows[1:]]

    @staticmethod
    def shortened(document: Row, tokens: int) -> dict[str, list[int]] | None:
        """A document cut around what is learned, `tokens` long or little more; None where nothing is."""
        first = first_learned(document)
        return None if first is None else {name: list(v[: cut_at(first, tokens)]) for name, v in document.items()}

    @staticmethod
    def with_masked_end(row: Row, token: int) -> dict[str, list[int]] | None:
        """The row with one more token that is not learned; None where that makes it another row to the teacher."""
        return {
            "input_ids": [*row["input_ids"], token],
            "labels": [*row["labels"], IGNORE],
            "position_ids": [*row["position_ids"], row["position_ids"][-1] + 1],
        }

    # -------------------------------------------------------------- measures

    def reference(self) -> torch.Tensor:
        """The loss of all rows from the models' own full logits, in fp64 from there, with a graph to the student."""
        batch = self.batch()
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            teachers = [(share, model(**inputs, use_cache=False).logits) for share, model in self.shares()]
        student = self.student(**inputs, use_cache=False).logits
        columns = self.vocab_size or min(z.shape[-1] for z in (student, *(z for _, z in teachers)))
        cut = [(share, z[..., :columns]) for share, z in teachers]
        return reference_loss(student[..., :columns], cut, batch["labels"], self.loss)

    def shares(self) -> list[tuple[float, Any]]:
        """The teachers with their shares in the mixture."""
        return [(1.0, self.teacher)]

    def token_losses(
        self, rows: Sequence[Row] | None = None, terms: Sequence[LossTerm] = (), **collator: Any
    ) -> list[torch.Tensor]:
        """What every trained token loses, token after token, without gradients: by the loss, or by each of `terms`."""
        batch, objective = self.batch(rows, **collator), self.objective()
        losses = [self.single(objective, term) for term in terms] or [objective.loss]
        objective.loss = losses[0]  # a loss of hard labels alone would not ask the teacher
        found: list[torch.Tensor] = []
        whole = objective.loss_of

        def each(*given: Any) -> Any:
            for loss in losses:
                objective.loss = loss
                found.append(self.one_by_one(whole, objective, given))
            return found[0].sum()

        objective.loss_of = each
        with torch.no_grad(), self.quiet():
            self.student(**objective.compare(batch, statistics=False))
        objective.detach()
        return found

    def one_by_one(self, loss_of: Callable[..., Any], objective: Any, given: Sequence[Any]) -> torch.Tensor:
        """Each token's loss, from the arguments of `objective.loss_of`."""
        objective.loss.reduction = "none"
        return loss_of(*given).flatten()[given[-1]]

    def least(self) -> float:
        """The least divergence of any token, by any of the divergences that the kind of teacher serves."""
        return torch.stack([losses.min() for losses in self.token_losses(terms=self.divergences)]).min().item()

    def single(self, objective: Any, term: LossTerm) -> Any:
        """The loss of one term alone."""
        return build_loss([term], objective.reading)

    def from_itself(self) -> tuple[str, float]:
        """What was compared with itself, and the largest divergence of it, a token's mean."""
        batch, objective = self.batch(), self.objective()
        hidden, head = self.teacher_states(objective, batch)
        objective.detach()
        shape, labels = objective.reading.teacher, shifted(batch["labels"])
        found = []
        for term in self.divergences:
            same = FusedDistillationLoss(
                [term], student_logit_scale=shape.scale, student_softcap=shape.softcap,
                teacher_logit_scale=shape.scale, teacher_softcap=shape.softcap,
            )  # fmt: skip
            both = (hidden, head.weight)
            found.append(same(*both, *both, labels, student_bias=head.bias, teacher_bias=head.bias))
        return "the teacher", worst_of(found)

    def teacher_states(self, objective: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """The teacher's last hidden states over a batch and its head."""
        return last_hidden(self.teacher, batch), read_head(find_head(self.teacher))

    # -------------------------------------------------------- the same tokens

    def reads(self, batch: Mapping[str, Any]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
        """Every model with the ids and positions that it should get of a batch."""
        wanted = {name: batch[name] for name in ("input_ids", "position_ids")}
        return [(model, wanted) for model in self.models]

    def same_tokens(self, columns: int, batch: Mapping[str, Any]) -> Verdict:
        """Whether each id means the same to all, in words."""
        largest = int(batch["input_ids"].max())
        if largest >= columns:
            return False, f"id {largest} has no column among {columns:,}"
        if self.tokenizers is None:
            return True, "same ids and positions; no tokenizer, the data are random tokens"
        own, rows = self.tokenizers[-1], self._head_rows()
        verdicts = [
            compare(tokenizer, own, there, rows[-1])
            for tokenizer, there in zip(self.tokenizers[:-1], rows[:-1], strict=True)
        ]
        told = next((verdict for verdict in verdicts if not verdict.compatible), verdicts[0])
        return told.compatible, f"same ids and positions; {told}"

    def _head_rows(self) -> list[int]:
        return [len(find_head(model).linear.weight) for model in self.models]  # type: ignore[arg-type]

    def decoders(self, batch: Mapping[str, Any]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
        """As `reads`, with each model's decoder."""
        return [(decoder_of(bare(model)), wanted) for model, wanted in self.reads(batch)]

    # -------------------------------------------------------------- elsewhere

    def told(self) -> dict[str, Any]:
        """What another process must be told beside models, rows and loss."""
        return {}

    @classmethod
    def retold(cls, told: Mapping[str, Any], teachers: list[Any]) -> tuple[Any, dict[str, Any]]:
        """In that process: the teacher, and what else it was told, as arguments."""
        return teachers[0], {}


def worst_of(losses: Sequence[torch.Tensor]) -> float:
    """The largest size; NaN where one is."""
    return torch.stack(list(losses)).abs().max().item()


def bounds(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Where each document of a packed row begins and ends."""
    starts = [index for index, position in enumerate(positions) if position == 0]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


def first_learned(document: Row) -> int | None:
    """The first place whose label is learned."""
    return next((at for at, label in enumerate(document["labels"]) if label != IGNORE), None)


def cut_at(first: int, tokens: int) -> int:
    """Where a document ends that is cut around what is learned from `first` on."""
    return max(tokens // 2, min(first + tokens // 4, 8 * tokens))
