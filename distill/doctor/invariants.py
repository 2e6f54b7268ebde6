"""What must hold for any recipe, each as a function that measures it: silent faults of training, made loud.

    subject = Subject(student, teacher, rows, loss)
    for check in CHECKS:
        print(check(subject))    # pass  packing: losses of 40 tokens, packed and alone, differ by 3e-07 (at most 2e-04)

`distill doctor RECIPE` runs them on a recipe's own models and data. Each compares two ways that must come to the same:
the fused loss and plain logits, eight rows at once and one by one, documents packed and alone. Differences are
relative norms; what rounding may do in each dtype is in `TOLERANCE`, and faults of the kinds these look for (a token
counted too much, a mask off by one, a head read without its LoRA) are larger by orders of magnitude.
What differs between kinds of teachers is in `distill.doctor.subject`; the invariants that need whole training runs
are in `distill.doctor.invariants_runs`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TrainingArguments

from distill.doctor.own_words import prompts_of
from distill.doctor.subject import Subject
from distill.teachers.blame import teacher_fault
from distill.training.trainer import DistillationTrainer

SMALL_WORKSPACE = 2**18  # bytes
ROW_BYTES = 64  # a column, at least: chunks of a row or two would measure how a CPU's BLAS adds up a long vector

Gradients = dict[str, torch.Tensor]


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        name: of the invariant.
        passed: whether it holds; None where it has no meaning for what was examined.
        detail: what was compared, with the figure; why it was not, where it has no meaning.
        seconds: it took; None where nobody looked.
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float | None = None

    def __str__(self) -> str:
        if self.passed is None:
            return f"skip  {self.name}: skipped: {self.detail}"
        took = "" if self.seconds is None else f" [{self.seconds:.0f} s]"
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}{took}"


# ------------------------------------------------------------------ the invariants


def fused_equals_reference(subject: Subject) -> Finding:
    """Loss and gradients through the fused loss equal those from the models' own full logits, in fp64 from there."""
    loss, gradients = _fused(subject)
    with subject.quiet():
        expected = subject.reference()
        expected.backward()
    wanted = _take_gradients(subject.student)
    finding = _judge(
        "fused loss", "loss and gradients against full logits", subject,
        [difference({"loss": loss}, {"loss": expected.detach()}), difference(gradients, wanted)],
    )  # fmt: skip
    if not loss.isfinite():
        objective = subject.objective()
        objective.detach()
        fault = teacher_fault(objective, [subject.batch()])
        told = "the loss is not finite" if fault is None else f"the teacher is not finite ({fault})"
        return finding._replace(detail=f"{told}; {finding.detail}")
    return finding


def divergence_is_one(subject: Subject) -> Finding:
    """Every divergence is 0 between the teacher and itself, and nowhere negative between student and teacher."""
    with torch.no_grad(), subject.quiet():
        what, zero = subject.from_itself()
        least = subject.least()
    allowed = subject.tolerance
    return Finding(
        "divergence", zero <= allowed and least >= -allowed,
        f"of {what} from itself {zero:.1e}, least of any token {min(least, 0.0):.1e} (at most {allowed:.0e} from 0)",
    )  # fmt: skip


def accumulation_changes_nothing(subject: Subject) -> Finding:
    """The trainer's gradient of one batch of all rows equals that of as many micro-batches of one row; where the
    student answers, its answers do not depend on how many are asked at once."""
    rows = subject.uneven_rows()
    taken = replace(subject, rows=rows)
    whole, single = _trainer_gradients(taken, len(rows)), _trainer_gradients(taken, 1)
    finding = _judge(
        "accumulation", f"gradients of 1 x {len(rows)} rows and {len(rows)} x 1", subject, [difference(single, whole)]
    )
    if subject.own_words is None or not finding.passed:
        return finding
    alone = [document for row in subject.rows for document in subject.documents(row)]
    together, apart = (subject.own_words.answered(subject.student, alone, n) for n in (len(alone), 1))
    same = sum(one == other for one, other in zip(together, apart, strict=False))
    told = f"; {same} of {len(alone)} answers of the student's own are the same asked together and one by one"
    return finding._replace(passed=same == len(together) == len(apart), detail=finding.detail + told)


def packing_changes_nothing(subject: Subject) -> Finding:
    """A document's per-token losses are the same alone and behind another one in a packed row."""
    if not subject.apart:
        return Finding("packing", None, "documents of one row would see each other, and data.packing is false")
    alone = [document for row in subject.rows for document in subject.documents(row)]
    alone = [document for document in alone if len(document["input_ids"]) > 1]
    alone = (alone if len(alone) > 1 else alone * 2)[: 2 * len(subject.rows)]
    packed = [subject.joined(alone[index : index + 2]) for index in range(0, len(alone), 2)]
    apart = torch.cat([subject.token_losses([document])[0] for document in alone])
    together = torch.cat([subject.token_losses([row])[0] for row in packed])
    return _judge(
        "packing", f"losses of {len(apart)} tokens in {len(alone)} documents, packed and alone", subject,
        [difference({"losses": together}, {"losses": apart})],
    )  # fmt: skip


def padding_changes_nothing(subject: Subject) -> Finding:
    """Padding on either side, more padding, other ids in it, and a masked last token leave every loss as it was.

    Training pads on the right; on the left padding is a document before, which has to stay apart.
    """
    (wanted,) = subject.token_losses()
    length = max(len(row["input_ids"]) for row in subject.rows)
    found = {
        "more": subject.token_losses(pad_to_multiple_of=length + 7),
        "ids": subject.token_losses(pad_to_multiple_of=length + 7, pad_token_id=5),
    }
    for number in (1, 7):
        longer = [subject.with_masked_end(row, number) for row in subject.rows]
        if None not in longer:
            found[f"masked {number}"] = subject.token_losses(longer)  # type: ignore[arg-type]
    if subject.apart:
        found["left"] = subject.token_losses(padding_side="left")
    sides = "left, right" if subject.apart else "right"
    masked = ", and behind a masked token" if "masked 1" in found else ""
    return _judge(
        "padding", f"losses under padding {sides}, more, of other ids{masked}", subject,
        [difference({name: value}, {name: wanted}) for name, (value,) in found.items()],
    )  # fmt: skip


def patching_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients with our kernels in all models equal those of the models as transformers made them, on rows
    that hold several documents: our attention is told where they begin in another way than theirs."""
    from distill.models.patching import patch, unpatch

    subject = replace(subject, rows=subject.packed_rows())
    loss, gradients = _fused(subject)
    attention = "triton" if subject.device.type == "cuda" else None
    reports = []
    try:
        reports += [patch(model, "teacher", attention=attention) for model in subject.teachers]
        reports += [patch(subject.student, "student", attention=attention)]
        patched_loss, patched = _fused(subject)
    finally:
        for model in subject.models:
            unpatch(model)
    swapped = sum(sum(report.swapped.values()) for report in reports)
    return _judge(
        "patching", f"loss and gradients with {swapped} modules on our kernels", subject,
        [difference({"loss": patched_loss}, {"loss": loss}), difference(patched, gradients)],
    )  # fmt: skip


def workspace_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients do not depend on how many rows of logits are held at a time."""
    loss, gradients = _fused(subject)
    objective = subject.objective()
    workspace = max(SMALL_WORKSPACE, ROW_BYTES * objective.columns)
    objective.detach()
    small_loss, small = _fused(subject, workspace=workspace)
    return _judge(
        "workspace", f"loss and gradients with {workspace / 2**20:.2g} MiB of it and with as much as suits", subject,
        [difference({"loss": small_loss}, {"loss": loss}), difference(small, gradients)],
    )  # fmt: skip


def both_read_the_same(subject: Subject) -> Finding:
    """Every model gets the ids and positions that it should, and they mean the same to all; of a student that answers,
    the prompts are the data's, and its answers alone are learned."""
    objective, batch, hooks = subject.objective(), subject.batch(), []
    if not objective.loss.objective.needs_teacher:  # hard labels alone: what the teacher would read is looked at
        objective.loss = subject.single(objective, subject.divergences[0])
    reads = subject.decoders(batch)
    seen: list[dict[str, torch.Tensor]] = [{} for _ in reads]

    def remember(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[place] = {name: kwargs[name].clone() for name in reads[place][1] if kwargs.get(name) is not None}

        return hook

    for place, (decoder, _) in enumerate(reads):
        hooks.append(decoder.register_forward_pre_hook(remember(place), with_kwargs=True))
    try:
        with torch.no_grad(), subject.quiet():
            subject.student(**objective.compare(batch))
    finally:
        columns = objective.columns
        objective.detach()
        for hook in hooks:
            hook.remove()
    differing = [
        name
        for name in ("input_ids", "position_ids")
        if not all(
            name in found and torch.equal(found[name], wanted[name])
            for found, (_, wanted) in zip(seen, reads, strict=True)
        )
    ]
    if differing:
        return Finding("same tokens", False, f"{' and '.join(differing)} differ")
    same, told = subject.same_tokens(columns, batch)
    if same and subject.prompts is not None:
        same = prompts_of(subject.rows) == [list(prompt) for prompt in subject.prompts]
        count = len(subject.prompts)
        told += f"; {count} answers of the student's own behind " + ("the data's prompts" if same else "other prompts")
    return Finding("same tokens", same, told)


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


def _judge(name: str, what: str, subject: Subject, differences: Sequence[float]) -> Finding:
    worst = max(differences)
    return Finding(name, worst <= subject.tolerance, f"{what} differ by {worst:.1e} (at most {subject.tolerance:.0e})")


def _take_gradients(model: nn.Module) -> Gradients:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def _fused(subject: Subject, *, workspace: int | None = None) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients as training makes them."""
    objective, batch = subject.objective(), subject.batch()
    objective.loss.workspace = workspace
    with subject.quiet():
        loss = subject.student(**objective.compare(batch, statistics=False))["loss"]
        loss.backward()
    objective.detach()
    return loss.detach(), _take_gradients(subject.student)


def _trainer_gradients(subject: Subject, batch_size: int) -> Gradients:
    """Gradients that `DistillationTrainer` accumulates over all rows in micro-batches of `batch_size`."""
    count = -(-len(subject.rows) // batch_size)
    with tempfile.TemporaryDirectory() as folder, subject.quiet(), without_training_mode(subject.student):
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=count,
            report_to="none", disable_tqdm=True, use_cpu=subject.device.type == "cpu", save_strategy="no",
        )  # fmt: skip
        trainer = DistillationTrainer(
            subject.student, subject.teacher, arguments, loss=subject.loss, vocab_size=subject.vocab_size,
            objective=subject.objective_type,
        )  # fmt: skip
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
def without_training_mode(model: nn.Module) -> Iterator[None]:
    """`Trainer` turns training mode on, and dropout with it: keep the model in eval mode."""
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.train
