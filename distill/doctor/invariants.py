"""What must hold for any recipe, each as a function that measures it: silent faults of training, made loud.

    subject = Subject(student, teacher, rows, loss)
    for check in CHECKS:
        print(check(subject))    # pass  packing: losses of 40 tokens, packed and alone, differ by 3e-07 (at most 2e-04)

`distill doctor RECIPE` runs them on a recipe's own models and data. Each compares two ways that must come to the same:
the fused loss and plain logits, eight rows at once and one by one, documents packed and alone. Differences are
relative norms; what rounding may do in each dtype is in `TOLERANCE`, or twice what PyTorch's
own loss on full logits is rounded by on this machine where that is more; faults of the kinds these look for (a token
counted too much, a mask off by one, a head read without its LoRA) are larger by orders of magnitude.
What depends on a teacher's targets is in `distill.doctor.references`; the invariants that need whole training runs are
in `distill.doctor.invariants_runs`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import TrainingArguments

from distill.doctor.rollouts import prompts_of
from distill.doctor.subject import TOLERANCE, Gradients, Subject, take_gradients
from distill.models.head import bare, decoder_of, find_head
from distill.teachers.blame import teacher_fault
from distill.training.trainer import DistillationTrainer

SMALL_WORKSPACE = 2**18  # bytes
ROW_BYTES = 64  # a column, at least: chunks of a row or two would measure how a CPU's BLAS adds up a long vector


class Finding(NamedTuple):
    """The result of one check.

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
    """Loss and gradients through the fused loss equal those from the models' own full logits, in fp64 from there; where
    the recipe's temperature is 1, at 2 as well."""
    differences, warm = [], subject.warm()
    loss, gradients = _fused(subject)
    for each in (subject, warm):
        if each is None:
            continue
        ours = (loss, gradients) if each is subject else _fused(each)
        exact = each.by_definition()
        differences += _differences(ours, exact)
        if each is subject and subject.tolerance > TOLERANCE[torch.float64]:
            subject.rounding = max(_differences(subject.by_definition(torch.float32), exact))
    both = "" if warm is None else ", at temperatures 1 and 2"
    finding = _judged("fused loss", f"loss and gradients against full logits{both}", subject, differences)
    finding = finding._replace(detail=f"{finding.detail}; PyTorch's own loss on them is off by {subject.rounding:.1e}")
    if not loss.isfinite():
        objective = subject.objective()
        objective.detach()
        fault = teacher_fault(objective, [subject.batch()])
        reason = "the loss is not finite" if fault is None else f"the teacher is not finite ({fault})"
        return finding._replace(detail=f"{reason}; {finding.detail}")
    return finding


def divergence_is_one(subject: Subject) -> Finding:
    """Every divergence is 0 between the teacher and itself, and nowhere negative between student and teacher."""
    with torch.no_grad(), subject.quiet():
        what, zero = subject.reference.from_itself(subject.batch(), subject.divergences)
        least = subject.least()
    allowed = subject.tolerance
    return Finding(
        "divergence", zero <= allowed and least >= -allowed,
        f"of {what} from itself {zero:.1e}, least of any token {min(least, 0.0):.1e} (at most {allowed:.0e} from 0)",
    )  # fmt: skip


def accumulation_changes_nothing(subject: Subject) -> Finding:
    """The trainer's gradient of one batch of all rows equals that of as many micro-batches of one row, and that of the
    batch outside of the trainer; where the student answers, its answers do not depend on how many are made at once."""
    rows = subject.uneven_rows()
    uneven = replace(subject, rows=rows)
    whole, single = _trainer_gradients(uneven, len(rows)), _trainer_gradients(uneven, 1)
    finding = _judged(
        "accumulation", f"gradients of 1 x {len(rows)} rows and {len(rows)} x 1", subject,
        [difference(single, whole), difference(whole, _fused(uneven)[1])],
    )  # fmt: skip
    if subject.rollouts is None or not finding.passed:
        return finding
    alone = subject.documents()
    together, apart = (subject.rollouts.answered(subject.student, alone, n) for n in (len(alone), 1))
    same = sum(one == other for one, other in zip(together, apart, strict=False))
    agreeing = f"{same} of {len(alone)} answers of the student's own are the same together and one by one"
    return finding._replace(passed=same == len(together) == len(apart), detail=f"{finding.detail}; {agreeing}")


def packing_changes_nothing(subject: Subject) -> Finding:
    """Each packed row of the data holds documents of the data, one after the other with positions that restart; and a
    document's per-token losses are the same alone and after another one in a row."""
    if subject.packing_fault is not None:
        return Finding("packing", False, subject.packing_fault)
    if not subject.apart:
        return Finding("packing", None, "documents of one row would see each other, and data.packing is false")
    alone = [document for document in subject.documents() if len(document["input_ids"]) > 1]
    alone = (alone if len(alone) > 1 else alone * 2)[: 2 * len(subject.rows)]
    packed = [subject.form.joined(alone[index : index + 2]) for index in range(0, len(alone), 2)]
    apart = torch.cat([subject.token_losses([document])[0] for document in alone])
    together = torch.cat([subject.token_losses([row])[0] for row in packed])
    return _judged(
        "packing", f"losses of {len(apart)} tokens in {len(alone)} documents, packed and alone", subject,
        [difference({"losses": together}, {"losses": apart})],
    )  # fmt: skip


def padding_changes_nothing(subject: Subject) -> Finding:
    """Padding on either side, more padding, other ids in it, and a masked last token leave every loss as it was.

    Training pads on the right; on the left padding is a document before, which has to stay apart. A masked token makes
    another document of one that must stay whole: there it is left out.
    """
    (expected,) = subject.token_losses()
    length = max(len(row["input_ids"]) for row in subject.rows)
    results = [
        subject.token_losses(pad_to_multiple_of=length + 7),
        subject.token_losses(pad_to_multiple_of=length + 7, pad_token_id=5),
    ]
    if not subject.teacher.whole_documents:
        results += [
            subject.token_losses([subject.form.with_masked_end(row, token) for row in subject.rows]) for token in (1, 7)
        ]
    masked = "" if subject.teacher.whole_documents else ", and after a masked token"
    if subject.apart:
        results.append(subject.token_losses(padding_side="left"))
    sides = "left, right" if subject.apart else "right"
    return _judged(
        "padding", f"losses under padding {sides}, more, of other ids{masked}", subject,
        [difference({"losses": losses}, {"losses": expected}) for (losses,) in results],
    )  # fmt: skip


def patching_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients with our kernels in all models equal those of the models as transformers made them, on rows
    that hold several documents: our attention is told where they begin in another way than theirs."""
    from distill.models.patching import patch, unpatch

    subject = replace(subject, rows=subject.packed_rows())
    plain = _fused(subject)
    attention = "triton" if subject.device.type == "cuda" else None
    swapped: int = 0
    try:
        for model in subject.models:
            role: Literal["student", "teacher"] = "student" if model is subject.student else "teacher"
            report = patch(model, role, attention=attention)
            swapped += sum(report.swapped.values())
        patched = _fused(subject)
    finally:
        for model in subject.models:
            unpatch(model)
    what = f"loss and gradients with {swapped} modules on our kernels"
    return _judged("patching", what, subject, _differences(patched, plain))


def workspace_changes_nothing(subject: Subject) -> Finding:
    """Loss and gradients do not depend on how many rows of logits are held at a time."""
    objective = subject.objective()
    workspace = max(SMALL_WORKSPACE, ROW_BYTES * objective.columns)
    objective.detach()
    return _judged(
        "workspace", f"loss and gradients with {workspace / 2**20:.2g} MiB of it and with as much as suits", subject,
        _differences(_fused(subject, workspace=workspace), _fused(subject)),
    )  # fmt: skip


def both_read_the_same(subject: Subject) -> Finding:
    """Every model gets the ids and positions that it should, and they mean the same to all; of a student that answers,
    the prompts are the data's, and its answers alone are learned."""
    if subject.data_fault is not None:
        return Finding("same tokens", False, subject.data_fault)
    objective, batch, reference = subject.objective(), subject.batch(), subject.reference
    if not subject.teacher.format.needs_targets(objective.loss):  # hard labels alone: what it would read is looked at
        objective.loss = reference.single(objective, subject.divergences[0])
    reads = [(decoder_of(bare(model)), inputs) for model, inputs in reference.reads(subject.student, batch)]
    inputs_seen: list[dict[str, torch.Tensor]] = [{} for _ in reads]

    def remember(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs_seen[place] = {n: kwargs[n].clone() for n in reads[place][1] if kwargs.get(n) is not None}

        return hook

    decoders = enumerate(decoder for decoder, _ in reads)
    hooks = [decoder.register_forward_pre_hook(remember(place), with_kwargs=True) for place, decoder in decoders]
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
            name in seen and torch.equal(seen[name], expected[name])
            for seen, (_, expected) in zip(inputs_seen, reads, strict=True)
        )
    ]
    if differing:
        return Finding("same tokens", False, f"{' and '.join(differing)} differ")
    rows = len(find_head(subject.student).linear.weight)  # type: ignore[arg-type]
    same, detail = reference.same_tokens(batch, columns, rows)
    if same and subject.prompts is not None:
        same = prompts_of(subject.rows) == [list(prompt) for prompt in subject.prompts]
        prompts = "the data's prompts" if same else "other prompts"
        detail += f"; {len(subject.prompts)} answers of the student's own after {prompts}"
    return Finding("same tokens", same, detail)


def every_difference_moves(subject: Subject) -> Finding:
    """Wherever a learned token's loss is not 0, neither is the gradient that the student's last hidden state gets."""
    (losses,) = subject.token_losses()
    objective, batch = subject.objective(), subject.batch()
    loss_of, seen = objective.loss_of, []

    def remember(hidden: torch.Tensor, *call: Any) -> Any:
        if hidden.requires_grad:
            hidden.retain_grad()
            seen.append(hidden)
        return loss_of(hidden, *call)

    objective.loss_of = remember
    with subject.quiet():
        subject.student(**objective.compare(batch, statistics=False))["loss"].backward()
    objective.detach()
    subject.student.zero_grad(set_to_none=True)
    if not seen or seen[0].grad is None:
        frozen = not any(p.requires_grad for name, p in subject.student.named_parameters() if ".layers." in name)
        return Finding("gradients", None if frozen else False, "the last hidden states get none")
    differ = losses[:, 0].abs() > subject.tolerance
    norms = seen[0].grad.flatten(0, 1)[batch["valid_rows"]].norm(dim=-1)
    if len(norms) != len(losses):  # a loss of spans, each of several tokens
        differ, norms = differ.any()[None], norms.sum()[None]
    still = int((differ & ((norms == 0) | norms.isnan()).to(differ.device)).sum())
    return Finding(
        "gradients", still == 0 and bool(differ.any()),
        f"at {still} of {int(differ.sum())} places whose loss is not 0 the student's hidden state gets no gradient",
    )  # fmt: skip


CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    fused_equals_reference,
    divergence_is_one,
    accumulation_changes_nothing,
    packing_changes_nothing,
    padding_changes_nothing,
    patching_changes_nothing,
    workspace_changes_nothing,
    both_read_the_same,
    every_difference_moves,
)


# ------------------------------------------------------------------ measuring


def difference(result: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The worst tensor's relative difference; a tensor that is small beside the rest is held against a hundredth of
    them all. Infinite where a tensor is missing or holds a NaN, and where there are only zeros to compare."""
    if result.keys() != expected.keys() or any(result[name].shape != expected[name].shape for name in expected):
        return float("inf")
    if all(not value.any() for value in expected.values()):
        return float("inf")  # two zeros agree about nothing
    norms = {name: torch.linalg.vector_norm(value.double()).item() for name, value in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    worst = 0.0
    for name, value in expected.items():
        off = torch.linalg.vector_norm(result[name].double() - value.double()).item()
        relative = off / max(norms[name], 0.01 * whole, 1e-30)
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _differences(ours: tuple[torch.Tensor, Gradients], theirs: tuple[torch.Tensor, Gradients]) -> list[float]:
    """Of two losses, and of their gradients."""
    return [difference({"loss": ours[0]}, {"loss": theirs[0]}), difference(ours[1], theirs[1])]


def _judged(name: str, what: str, subject: Subject, differences: Sequence[float]) -> Finding:
    worst = max(differences)
    return Finding(name, worst <= subject.tolerance, f"{what} differ by {worst:.1e} (at most {subject.tolerance:.0e})")


def _fused(subject: Subject, *, workspace: int | None = None) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients as training makes them."""
    objective, batch = subject.objective(), subject.batch()
    objective.loss.workspace = workspace
    with subject.quiet():
        loss = subject.student(**objective.compare(batch, statistics=False))["loss"]
        loss.backward()
    objective.detach()
    return loss.detach(), take_gradients(subject.student)


def _trainer_gradients(subject: Subject, batch_size: int) -> Gradients:
    """Gradients that `DistillationTrainer` accumulates over all rows in micro-batches of `batch_size`."""
    count = -(-len(subject.rows) // batch_size)
    with tempfile.TemporaryDirectory() as folder, subject.quiet(), without_training_mode(subject.student):
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=count,
            report_to="none", disable_tqdm=True, use_cpu=subject.device.type == "cpu", save_strategy="no",
        )  # fmt: skip
        loss, columns = subject.loss, subject.vocab_size
        trainer = DistillationTrainer(subject.student, subject.teacher, arguments, loss=loss, vocab_size=columns)
        trainer.current_gradient_accumulation_steps = count
        collate: Any = trainer.data_collator
        batches = [
            {name: tensor.to(subject.device) for name, tensor in collate(subject.rows[start:][:batch_size]).items()}
            for start in range(0, len(subject.rows), batch_size)
        ]
        items = trainer._get_num_items_in_batch(batches, subject.device)
        for batch in batches:
            trainer.training_step(subject.student, batch, items)
        trainer.objective.detach()
    return take_gradients(subject.student)


@contextlib.contextmanager
def without_training_mode(model: nn.Module) -> Iterator[None]:
    """`Trainer` turns training mode on, and dropout with it: keep the model in eval mode."""
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.train
