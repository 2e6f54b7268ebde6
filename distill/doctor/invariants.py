"""Invariants that must hold for any recipe, each a function that measures it: silent training faults made visible.

    subject = CheckSetup(student, teacher, rows, loss)
    for check in CHECKS:
        print(check(subject))    # pass  packing: losses of 40 tokens, packed and alone, differ by 3e-07 (at most 2e-04)

`distill doctor RECIPE` runs them on a recipe's models and data. Each compares two computations that must agree: the
fused loss and full logits, eight rows at once and one by one, documents packed and alone. Differences are relative
norms. The bound is `TOLERANCE` for the dtype, or twice the rounding of PyTorch's loss on full logits on this machine if
that is more; the faults looked for (a token counted twice, a mask off by one, a head without its LoRA) are larger by
orders of magnitude. Code that depends on the teacher's target format is in `distill.doctor.references`; invariants that
need whole training runs are in `distill.doctor.invariants_runs`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainingArguments

from distill.doctor.check_result import CheckResult
from distill.doctor.check_setup import TOLERANCE, CheckSetup, Gradients, take_gradients
from distill.doctor.rollouts import prompts_of
from distill.doctor.rows import join_rows, with_masked_end
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.objectives.losses import single_losses
from distill.teachers.diagnose import diagnose_teacher
from distill.training.trainer import DistillationTrainer

SMALL_WORKSPACE = 2**18  # bytes
ROW_BYTES = 64  # minimum per column: chunks of one or two rows would measure the summation order of a CPU's BLAS


# ------------------------------------------------------------------ the invariants


def fused_equals_reference(subject: CheckSetup) -> CheckResult:
    """Check that the fused loss and its gradients equal those from the models' full logits, in fp64.

    Where the recipe's temperature is 1, also at temperature 2.
    """
    differences = []
    warm = subject.at_temperature_2()
    loss, gradients = _fused(subject)
    for each in (subject, warm):
        if each is None:
            continue
        ours = (loss, gradients) if each is subject else _fused(each)
        exact = each.reference_loss()
        differences += _differences(ours, exact)
        if each is subject and subject.tolerance > TOLERANCE[torch.float64]:
            subject.rounding = max(_differences(subject.reference_loss(torch.float32), exact))
    both = "" if warm is None else ", at temperatures 1 and 2"
    finding = _within_tolerance("fused loss", f"loss and gradients against full logits{both}", subject, differences)
    finding = finding._replace(
        detail=f"{finding.detail}; the error of PyTorch's loss on them is {subject.rounding:.1e}"
    )
    if not loss.isfinite():
        objective = subject.objective()
        objective.detach()
        fault = diagnose_teacher(objective, [subject.batch()])
        reason = "the loss is not finite" if fault is None else f"the teacher is not finite ({fault})"
        return finding._replace(detail=f"{reason}; {finding.detail}")
    return finding


def divergence_of_equal_models_is_zero(subject: CheckSetup) -> CheckResult:
    """Check that every divergence is 0 between the teacher and itself, and nowhere negative."""
    with torch.no_grad(), subject.in_eval_mode():
        what, zero = subject.reference.from_itself(subject.batch(), subject.divergences)
        least = subject.least()
    allowed = subject.tolerance
    return CheckResult(
        "divergence",
        zero <= allowed and least >= -allowed,
        f"of {what} from itself {zero:.1e}, smallest of any token {min(least, 0.0):.1e} (bound {allowed:.0e})",
    )


def accumulation_changes_nothing(subject: CheckSetup) -> CheckResult:
    """Check that gradients do not depend on the micro-batch size, in the trainer and outside of it.

    With on-policy data, rollouts must not depend on the batch size of generation either.
    """
    rows = subject.uneven_rows()
    uneven = replace(subject, rows=rows)
    whole = _trainer_gradients(uneven, len(rows))
    single = _trainer_gradients(uneven, 1)
    finding = _within_tolerance(
        "accumulation",
        f"gradients of 1 x {len(rows)} rows and {len(rows)} x 1",
        subject,
        [difference(single, whole), difference(whole, _fused(uneven)[1])],
    )
    if subject.rollouts is None or not finding.passed:
        return finding
    alone = subject.documents()
    together, apart = (
        subject.rollouts.with_responses(subject.student, batches, subject.readers)
        for batches in ([subject.batch(alone)], [subject.batch([document]) for document in alone])
    )
    same = sum(one == other for one, other in zip(together, apart, strict=False))
    agreeing = f"{same} of {len(alone)} rollouts are the same together and one by one"
    return finding._replace(passed=same == len(together) == len(apart), detail=f"{finding.detail}; {agreeing}")


def packing_changes_nothing(subject: CheckSetup) -> CheckResult:
    """Check that packed rows consist of the data's documents, and that packing changes no per-token loss.

    Documents follow one another with positions that restart; a document's losses are compared alone and after another
    one.
    """
    if subject.packing_fault is not None:
        return CheckResult("packing", False, subject.packing_fault)
    if not subject.separates_documents:
        return CheckResult("packing", None, "the models do not separate documents of a row, and data.packing is false")
    alone = [document for document in subject.documents() if len(document["input_ids"]) > 1]
    alone = (alone if len(alone) > 1 else alone * 2)[: 2 * len(subject.rows)]
    packed = [join_rows(alone[index : index + 2]) for index in range(0, len(alone), 2)]
    apart = torch.cat([subject.token_losses([document])[0] for document in alone])
    together = torch.cat([subject.token_losses([row])[0] for row in packed])
    return _within_tolerance(
        "packing",
        f"losses of {len(apart)} tokens in {len(alone)} documents, packed and alone",
        subject,
        [difference({"losses": together}, {"losses": apart})],
    )


def padding_changes_nothing(subject: CheckSetup) -> CheckResult:
    """Check that padding (either side, more, other ids) and a masked last token change no loss.

    Training pads on the right; on the left padding is a preceding document, which must be separated. The masked token
    is omitted for teachers whose documents must stay whole.
    """
    (expected,) = subject.token_losses()
    length = max(len(row["input_ids"]) for row in subject.rows)
    results = [
        subject.token_losses(pad_to_multiple_of=length + 7),
        subject.token_losses(pad_to_multiple_of=length + 7, pad_token_id=5),
    ]
    if not subject.teacher.rows.whole_documents:
        results += [subject.token_losses([with_masked_end(row, token) for row in subject.rows]) for token in (1, 7)]
    masked = "" if subject.teacher.rows.whole_documents else ", and after a masked token"
    if subject.separates_documents:
        results.append(subject.token_losses(padding_side="left"))
    sides = "left, right" if subject.separates_documents else "right"
    return _within_tolerance(
        "padding",
        f"losses under padding {sides}, more, of other ids{masked}",
        subject,
        [difference({"losses": losses}, {"losses": expected}) for (losses,) in results],
    )


def patching_changes_nothing(subject: CheckSetup) -> CheckResult:
    """Check that our kernels in all models change neither loss nor gradients.

    Rows hold several documents, since our attention gets their bounds in another way than the models' own.
    """
    from distill.models.patch.patching import patch, unpatch

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
    return _within_tolerance("patching", what, subject, _differences(patched, plain))


def workspace_changes_nothing(subject: CheckSetup) -> CheckResult:
    """Check that loss and gradients do not depend on the loss's chunk size."""
    objective = subject.objective()
    workspace = max(SMALL_WORKSPACE, ROW_BYTES * objective.columns)
    objective.detach()
    return _within_tolerance(
        "workspace",
        f"loss and gradients with {workspace / 2**20:.2g} MiB of it and with the default",
        subject,
        _differences(_fused(subject, workspace=workspace), _fused(subject)),
    )


def models_read_the_same_tokens(subject: CheckSetup) -> CheckResult:
    """Check that every model gets the right ids and positions, and that ids mean the same to all.

    With on-policy data, prompts must be the data's and only the rollouts' responses may be trained on.
    """
    if subject.data_fault is not None:
        return CheckResult("same tokens", False, subject.data_fault)
    objective = subject.objective()
    batch = subject.batch()
    reference = subject.reference
    if not objective.needs_targets:  # hard labels alone: check the teacher's inputs too
        objective.loss = reference.single(objective, subject.divergences[0])
    reads = [(decoder_of(unwrap_peft(model)), inputs) for model, inputs in reference.reads(subject.student, batch)]
    inputs_seen: list[dict[str, torch.Tensor]] = [{} for _ in reads]

    def remember(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs_seen[place] = {n: kwargs[n].clone() for n in reads[place][1] if kwargs.get(n) is not None}

        return hook

    decoders = enumerate(decoder for decoder, _ in reads)
    hooks = [decoder.register_forward_pre_hook(remember(place), with_kwargs=True) for place, decoder in decoders]
    try:
        with torch.no_grad(), subject.in_eval_mode():
            subject.student(**objective.student_inputs(batch))
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
        return CheckResult("same tokens", False, f"{' and '.join(differing)} differ")
    rows = len(find_head(subject.student).linear.weight)  # type: ignore[arg-type]
    same, detail = reference.same_tokens(batch, columns, rows)
    if same and subject.prompts is not None:
        same = prompts_of(batch) == [list(prompt) for prompt in subject.prompts]
        prompts = "the data's prompts" if same else "other prompts"
        detail += f"; {len(subject.prompts)} rollouts after {prompts}"
    return CheckResult("same tokens", same, detail)


def every_loss_has_a_gradient(subject: CheckSetup) -> CheckResult:
    """Check that each trained token with a loss has a gradient at the student's last hidden state."""
    (losses,) = subject.token_losses()
    objective = subject.objective()
    batch = subject.batch()
    loss_of = objective.loss_of
    seen = []

    def remember(hidden: torch.Tensor, *call: Any) -> Any:
        if hidden.requires_grad:
            hidden.retain_grad()
            seen.append(hidden)
        return loss_of(hidden, *call)

    objective.loss_of = remember
    with subject.in_eval_mode():
        subject.student(**objective.student_inputs(batch, statistics=False))["loss"].backward()
    objective.detach()
    subject.student.zero_grad(set_to_none=True)
    if not seen or seen[0].grad is None:
        frozen = not any(p.requires_grad for name, p in subject.student.named_parameters() if ".layers." in name)
        return CheckResult("gradients", None if frozen else False, "the last hidden states get no gradient")
    differ = losses[:, 0].abs() > subject.tolerance
    norms = seen[0].grad.flatten(0, 1)[batch["valid_rows"]].norm(dim=-1)
    if len(norms) != len(losses):  # a loss of spans, each of several tokens
        differ = differ.any()[None]
        norms = norms.sum()[None]
    still = int((differ & ((norms == 0) | norms.isnan()).to(differ.device)).sum())
    return CheckResult(
        "gradients",
        still == 0 and bool(differ.any()),
        f"{still} of {int(differ.sum())} positions whose loss is not 0 have no gradient at the student's hidden state",
    )


CHECKS: tuple[Callable[[CheckSetup], CheckResult], ...] = (
    fused_equals_reference,
    divergence_of_equal_models_is_zero,
    accumulation_changes_nothing,
    packing_changes_nothing,
    padding_changes_nothing,
    patching_changes_nothing,
    workspace_changes_nothing,
    models_read_the_same_tokens,
    every_loss_has_a_gradient,
)


# ------------------------------------------------------------------ measuring


def difference(result: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative difference of any tensor.

    A tensor that is small compared with the others is measured relative to a hundredth of them all. Infinite where a
    tensor
    is missing or has a NaN, and where all are zero.
    """
    if result.keys() != expected.keys() or any(result[name].shape != expected[name].shape for name in expected):
        return float("inf")
    if all(not value.any() for value in expected.values()):
        return float("inf")  # equal zeros prove nothing
    norms = {name: torch.linalg.vector_norm(value.double()).item() for name, value in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    worst = 0.0
    for name, value in expected.items():
        off = torch.linalg.vector_norm(result[name].double() - value.double()).item()
        relative = off / max(norms[name], 0.01 * whole, 1e-30)
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def _differences(ours: tuple[torch.Tensor, Gradients], theirs: tuple[torch.Tensor, Gradients]) -> list[float]:
    return [difference({"loss": ours[0]}, {"loss": theirs[0]}), difference(ours[1], theirs[1])]


def _within_tolerance(name: str, what: str, subject: CheckSetup, differences: Sequence[float]) -> CheckResult:
    worst = max(differences)
    return CheckResult(
        name, worst <= subject.tolerance, f"{what} differ by {worst:.1e} (bound {subject.tolerance:.0e})"
    )


def _fused(subject: CheckSetup, *, workspace: int | None = None) -> tuple[torch.Tensor, Gradients]:
    objective = subject.objective()
    batch = subject.batch()
    for loss in single_losses(objective.loss):
        loss.workspace = workspace
    with subject.in_eval_mode():
        loss = subject.student(**objective.student_inputs(batch, statistics=False))["loss"]
        loss.backward()
    objective.detach()
    return loss.detach(), take_gradients(subject.student)


def _trainer_gradients(subject: CheckSetup, batch_size: int) -> Gradients:
    """Return the gradients that `DistillationTrainer` accumulates over all rows in micro-batches of `batch_size`."""
    count = -(-len(subject.rows) // batch_size)
    with tempfile.TemporaryDirectory() as folder, subject.in_eval_mode(), without_training_mode(subject.student):
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=count,
            report_to="none",
            disable_tqdm=True,
            use_cpu=subject.device.type == "cpu",
            save_strategy="no",
        )
        loss = subject.loss
        columns = subject.vocab_size
        trainer = DistillationTrainer(subject.student, subject.teacher, arguments, loss=loss, vocab_size=columns)
        collate: Any = trainer.data_collator
        batches = [
            subject.on_device(collate(subject.rows[start:][:batch_size]))
            for start in range(0, len(subject.rows), batch_size)
        ]
        items = trainer._get_num_items_in_batch(batches, subject.device)
        for batch in batches:
            trainer.training_step(subject.student, batch, items)
        trainer.objective.detach()
    return take_gradients(subject.student)


@contextlib.contextmanager
def without_training_mode(model: nn.Module) -> Iterator[None]:
    """Keep the model in eval mode: `Trainer` would turn on training mode, and dropout with it."""
    model.train = lambda mode=True: model  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.train
