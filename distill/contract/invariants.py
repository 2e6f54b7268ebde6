"""What must hold for any recipe, each as a function that measures it: silent faults of training, made loud.

    subject = Subject(student, teacher, rows, loss)
    for check in CHECKS:
        print(check(subject))    # pass  packing: losses of 40 tokens, packed and alone, differ by 3e-07 (at most 2e-04)

`distill doctor RECIPE` runs them on a recipe's own models and data. Each compares two ways that must come to the same:
the fused loss and plain logits, eight rows at once and one by one, documents packed and alone. Differences are
relative norms; what rounding may do in each dtype is in `TOLERANCE`, and faults of the kinds these look for (a token
counted too much, a mask off by one, a head read without its LoRA) are larger by orders of magnitude.
Those that need whole training runs are in `distill.contract.invariants_runs`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn
from transformers import TrainingArguments

from distill.contract.reference_loss import reference_loss, shifted
from distill.data.collator import Collator
from distill.models.head import bare, decoder_of, find_head, read_head
from distill.models.vocabulary import compare
from distill.recipe.loss import Loss
from distill.training.objective import IGNORE, DistillationObjective
from distill.training.trainer import DistillationTrainer

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
SMALL_WORKSPACE_MIB = 0.25

Row = Mapping[str, Sequence[int]]
Gradients = dict[str, torch.Tensor]


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        name: of the invariant.
        passed: whether it holds.
        detail: what was compared, with the figure.
        seconds: it took; None where nobody looked.
    """

    name: str
    passed: bool
    detail: str
    seconds: float | None = None

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" [{self.seconds:.0f} s]"
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}{took}"


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
    """

    student: nn.Module
    teacher: nn.Module
    rows: Sequence[Row]
    loss: Loss
    vocab_size: int | None = None
    tokenizers: tuple[Any, Any] | None = None
    small: Callable[[], tuple[nn.Module, nn.Module]] | None = None

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next(self.student.parameters()).device

    @property
    def tolerance(self) -> float:
        """What rounding may do in the student's dtype, relative."""
        return TOLERANCE[next(self.student.parameters()).dtype]

    def batch(self, rows: Sequence[Row] | None = None, **collator: Any) -> dict[str, torch.Tensor]:
        """`rows` (by default all) as one batch on the device."""
        made = Collator(0, **collator)(self.rows if rows is None else rows)
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def objective(self) -> DistillationObjective:
        """A fresh objective on the two models."""
        return DistillationObjective(self.teacher, self.student, self.loss, vocab_size=self.vocab_size)


# ------------------------------------------------------------------ the invariants


def fused_equals_reference(subject: Subject) -> Finding:
    """Loss and gradients through the fused loss equal those from the models' own full logits, in fp64 from there."""
    loss, gradients = _fused(subject, subject.batch())
    with _quiet(subject):
        batch = subject.batch()
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            teacher = subject.teacher(**inputs, use_cache=False).logits
        student = subject.student(**inputs, use_cache=False).logits
        columns = subject.vocab_size or min(student.shape[-1], teacher.shape[-1])
        expected = reference_loss(student[..., :columns], teacher[..., :columns], batch["labels"], subject.loss)
        expected.backward()
    wanted = _take_gradients(subject.student)
    return _judge("fused loss", "loss and gradients against full logits", subject,
                  [difference({"loss": loss}, {"loss": expected.detach()}), difference(gradients, wanted)])  # fmt: skip


def divergence_is_one(subject: Subject) -> Finding:
    """Every divergence is 0 between the teacher and itself, and nowhere negative between student and teacher."""
    batch = subject.batch()
    objective = subject.objective()
    with torch.no_grad(), _quiet(subject):
        hidden = objective.teacher_hidden(batch)
        body = {name: batch[name] for name in ("input_ids", "position_ids")}
        student_hidden = decoder_of(bare(subject.student))(**body, use_cache=False).last_hidden_state
        teacher_head, student_head = (read_head(find_head(m)) for m in (subject.teacher, subject.student))
        reading, labels = objective.reading, shifted(batch["labels"])
        zero, least = 0.0, 0.0
        for term in DIVERGENCES:
            same = FusedDistillationLoss(
                [term], reduction="sum", student_logit_scale=reading.teacher.scale,
                student_softcap=reading.teacher.softcap, teacher_logit_scale=reading.teacher.scale,
                teacher_softcap=reading.teacher.softcap,
            )  # fmt: skip
            both = (hidden, teacher_head.weight)
            found = same(*both, *both, labels, student_bias=teacher_head.bias, teacher_bias=teacher_head.bias)
            zero = max(zero, abs(found.item()) / max(int((labels != IGNORE).sum()), 1))
            pair = FusedDistillationLoss(
                [term], reduction="none", student_logit_scale=reading.student.scale,
                student_softcap=reading.student.softcap, teacher_logit_scale=reading.teacher.scale,
                teacher_softcap=reading.teacher.softcap,
            )  # fmt: skip
            tokens = pair(
                student_hidden, student_head.weight, hidden, teacher_head.weight, labels,
                student_bias=student_head.bias, teacher_bias=teacher_head.bias, student_lora=student_head.lora,
                vocab_size=reading.vocab_size,
            )  # fmt: skip
            least = min(least, tokens.min().item())
    objective.detach()
    allowed = subject.tolerance
    return Finding(
        "divergence", zero <= allowed and least >= -allowed,
        f"of the teacher from itself {zero:.1e}, least of any token {least:.1e} (at most {allowed:.0e} from 0)",
    )  # fmt: skip


def accumulation_changes_nothing(subject: Subject) -> Finding:
    """The trainer's gradient of one batch of all rows equals that of as many micro-batches of one row."""
    whole, single = _trainer_gradients(subject, len(subject.rows)), _trainer_gradients(subject, 1)
    return _judge(
        "accumulation", f"gradients of 1 x {len(subject.rows)} rows and {len(subject.rows)} x 1", subject,
        [difference(single, whole)],
    )  # fmt: skip


def packing_changes_nothing(subject: Subject) -> Finding:
    """A document's per-token losses are the same alone and behind another one in a packed row."""
    alone = [document for row in subject.rows for document in documents(row)]
    alone = [document for document in alone if len(document["input_ids"]) > 1]
    alone = (alone if len(alone) > 1 else alone * 2)[: 2 * len(subject.rows)]
    packed = [_joined(alone[index : index + 2]) for index in range(0, len(alone), 2)]
    apart = torch.cat([_token_losses(subject, [document]) for document in alone])
    together = torch.cat([_token_losses(subject, [row]) for row in packed])
    return _judge(
        "packing", f"losses of {apart.numel()} tokens in {len(alone)} documents, packed and alone", subject,
        [difference({"losses": together}, {"losses": apart})],
    )  # fmt: skip


def padding_changes_nothing(subject: Subject) -> Finding:
    """Padding on either side, more padding, other ids in it, and a masked last token leave every loss as it was."""
    wanted = _token_losses(subject, subject.rows)
    length = max(len(row["input_ids"]) for row in subject.rows)
    found = {
        "left": _token_losses(subject, subject.rows, padding_side="left"),
        "more": _token_losses(subject, subject.rows, pad_to_multiple_of=length + 7),
        "ids": _token_losses(subject, subject.rows, pad_to_multiple_of=length + 7, pad_token_id=5),
        **{
            f"masked {number}": _token_losses(subject, [_with_masked_end(row, number) for row in subject.rows])
            for number in (1, 7)
        },
    }
    return _judge(
        "padding", "losses under padding left, right, more, of other ids, and behind a masked token", subject,
        [difference({name: value}, {name: wanted}) for name, value in found.items()],
    )  # fmt: skip


def patching_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients with our kernels in both models equal those of the models as transformers made them."""
    from distill.models.patching import patch, unpatch

    loss, gradients = _fused(subject, subject.batch())
    attention = "triton" if subject.device.type == "cuda" else None
    reports = []
    try:
        reports += [
            patch(subject.teacher, "teacher", attention=attention),
            patch(subject.student, "student", attention=attention),
        ]
        patched_loss, patched = _fused(subject, subject.batch())
    finally:
        unpatch(subject.teacher)
        unpatch(subject.student)
    swapped = sum(sum(report.swapped.values()) for report in reports)
    return _judge(
        "patching", f"loss and gradients with {swapped} modules on our kernels", subject,
        [difference({"loss": patched_loss}, {"loss": loss}), difference(patched, gradients)],
    )  # fmt: skip


def workspace_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients do not depend on how many rows of logits are held at a time."""
    loss, gradients = _fused(subject, subject.batch())
    small_loss, small = _fused(subject, subject.batch(), workspace=int(SMALL_WORKSPACE_MIB * 2**20))
    return _judge(
        "workspace", f"loss and gradients with {SMALL_WORKSPACE_MIB} MiB of it and with as much as suits", subject,
        [difference({"loss": small_loss}, {"loss": loss}), difference(small, gradients)],
    )  # fmt: skip


def both_read_the_same(subject: Subject) -> Finding:
    """Teacher and student get the same ids at the same positions, and each id is the same token to both."""
    seen: dict[str, Any] = {}
    objective, hooks = subject.objective(), []

    def remember(role: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[role] = {
                name: kwargs[name].clone() for name in ("input_ids", "position_ids") if kwargs.get(name) is not None
            }

        return hook

    for role, model in (("teacher", subject.teacher), ("student", subject.student)):
        hooks.append(decoder_of(bare(model)).register_forward_pre_hook(remember(role), with_kwargs=True))
    batch = subject.batch()
    try:
        with torch.no_grad(), _quiet(subject):
            subject.student(**objective.compare(batch))
    finally:
        objective.detach()
        for hook in hooks:
            hook.remove()
    differing = [
        name
        for name in ("input_ids", "position_ids")
        if not all(name in seen.get(r, {}) and torch.equal(seen[r][name], batch[name]) for r in ("teacher", "student"))
    ]
    columns, largest = objective.columns, int(batch["input_ids"].max())
    if differing or largest >= columns:
        what = f"{' and '.join(differing)} differ" if differing else f"id {largest} has no column among {columns:,}"
        return Finding("same tokens", False, what)
    if subject.tokenizers is None:
        return Finding("same tokens", True, "same ids and positions; no tokenizer, the data are random tokens")
    rows = [len(find_head(model).linear.weight) for model in (subject.teacher, subject.student)]  # type: ignore[arg-type]
    verdict = compare(*subject.tokenizers, *rows)
    return Finding("same tokens", verdict.compatible, f"same ids and positions; {verdict}")


CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    fused_equals_reference,
    divergence_is_one,
    accumulation_changes_nothing,
    packing_changes_nothing,
    padding_changes_nothing,
    patching_changes_nothing,
    workspace_changes_nothing,
    both_read_the_same,
)
DIVERGENCES = (
    LossTerm("forward_kl", 1.0),
    LossTerm("reverse_kl", 1.0),
    LossTerm("jsd", 1.0, beta=0.5),
    LossTerm("skew_forward_kl", 1.0, alpha=0.1),
    LossTerm("skew_reverse_kl", 1.0, alpha=0.1),
    LossTerm("tvd", 1.0),
)


# ------------------------------------------------------------------ measuring


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The worst tensor's relative difference; a tensor that is small beside the rest is held against a hundredth of
    them all. Infinite where a tensor is missing or holds a NaN, and where there are only zeros to compare."""
    if found.keys() != wanted.keys() or any(found[name].shape != wanted[name].shape for name in wanted):
        return float("inf")
    if all(not value.any() for value in wanted.values()):
        return float("inf")  # two zeros agree about nothing
    norms = {name: torch.linalg.vector_norm(value.double()).item() for name, value in wanted.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    worst = 0.0
    for name, value in wanted.items():
        off = torch.linalg.vector_norm(found[name].double() - value.double()).item()
        relative = off / max(norms[name], 0.01 * whole, 1e-30)
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def documents(row: Row) -> list[dict[str, list[int]]]:
    """The documents of a packed row, cut where positions start again."""
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    bounds = zip(starts, [*starts[1:], len(row["position_ids"])], strict=True)
    return [{name: list(values[a:b]) for name, values in row.items()} for a, b in bounds]


def _joined(parts: Sequence[Row]) -> Row:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _with_masked_end(row: Row, token: int) -> Row:
    last = row["position_ids"][-1] + 1
    return {
        "input_ids": [*row["input_ids"], token],
        "labels": [*row["labels"], IGNORE],
        "position_ids": [*row["position_ids"], last],
    }


def _judge(name: str, what: str, subject: Subject, differences: Sequence[float]) -> Finding:
    worst = max(differences)
    return Finding(name, worst <= subject.tolerance, f"{what} differ by {worst:.1e} (at most {subject.tolerance:.0e})")


@contextlib.contextmanager
def _quiet(subject: Subject) -> Iterator[None]:
    """Both models in eval mode: without dropout; their own mode comes back."""
    modes = [(model, model.training) for model in (subject.student, subject.teacher)]
    for model, _ in modes:
        model.eval()
    try:
        yield
    finally:
        for model, training in modes:
            model.train(training)


def _take_gradients(model: nn.Module) -> Gradients:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def _fused(
    subject: Subject, batch: dict[str, torch.Tensor], *, workspace: int | None = None
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients as training makes them."""
    objective = subject.objective()
    objective.loss.workspace = workspace
    with _quiet(subject):
        loss = subject.student(**objective.compare(batch, statistics=False))["loss"]
        loss.backward()
    objective.detach()
    return loss.detach(), _take_gradients(subject.student)


def _token_losses(subject: Subject, rows: Sequence[Row], pad_token_id: int = 0, **collator: Any) -> torch.Tensor:
    """The loss of every trained token, row after row, without gradients."""
    batch = Collator(pad_token_id, **collator)(rows)
    batch = {name: tensor.to(subject.device) for name, tensor in batch.items()}
    objective = subject.objective()
    objective.loss.reduction = "none"
    with torch.no_grad(), _quiet(subject):
        losses = subject.student(**objective.compare(batch, statistics=False))["loss"]
    objective.detach()
    return losses.flatten()[batch["valid_rows"]]


def _trainer_gradients(subject: Subject, batch_size: int) -> Gradients:
    """Gradients that `DistillationTrainer` accumulates over all rows in micro-batches of `batch_size`."""
    count = -(-len(subject.rows) // batch_size)
    with tempfile.TemporaryDirectory() as folder, _quiet(subject), _without_training_mode(subject.student):
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=count,
            report_to="none", disable_tqdm=True, use_cpu=subject.device.type == "cpu", save_strategy="no",
        )  # fmt: skip
        trainer = DistillationTrainer(
            subject.student, subject.teacher, arguments, loss=subject.loss, vocab_size=subject.vocab_size
        )
        trainer.current_gradient_accumulation_steps = count
        batches = [
            subject.batch(subject.rows[start : start + batch_size]) for start in range(0, len(subject.rows), batch_size)
        ]
        items = trainer._get_num_items_in_batch(batches, subject.device)
        for batch in batches:
            trainer.training_step(subject.student, batch, items)
        trainer.objective.detach()
    return _take_gradients(subject.student)


@contextlib.contextmanager
def _without_training_mode(model: nn.Module) -> Iterator[None]:
    """`Trainer.training_step` turns training mode on, and dropout with it: keep the model in eval mode."""
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.train
