"""Effect of `student.compute: fp8` on the loss and the gradients, on one real batch.

Every GEMM of the decoder is rounded, so that gradients are off by more than the 4 % of one GEMM. The error differs in
every batch: it is noise, like that of sampling batches. Its effect shows in the held-out metrics, which are not in fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from distill.models.precision.fp8_student import compute_in_fp8
from distill.objectives.targets import Batch
from distill.teachers.objective import DistillationObjective


def compute_and_measure(
    objective: DistillationObjective,
    batch: Batch,
    autocast: Callable[[], AbstractContextManager[object]],
    *,
    checkpointed: bool,
    sharded: bool,
) -> str:
    """Switch the student to fp8 compute, and return a line on the change of its loss and gradients.

    Args:
        objective: Objective of the run; its student is patched, has its adapters and is not sharded yet.
        batch: Collated batch on the device: `input_ids`, `labels` [B, S].
        autocast: Context manager of the run's forward passes.
        checkpointed: True to keep as few activations as a run with gradient checkpointing does.
        sharded: True if the student will be sharded: its gradients may not fit, and nothing is measured.

    Raises:
        ValueError: no layer of the student gains.
    """
    student: Any = objective.student
    if sharded:
        layers = compute_in_fp8(student)
        return f"{'fp8':<12}student: {layers} linear layers compute in it; in shards, so that the cost is not measured"
    inputs = objective.student_inputs(batch)
    weights = [p for p in student.parameters() if p.requires_grad]
    device = weights[0].device
    training = student.training

    def loss_and_gradients() -> tuple[float, list[torch.Tensor]]:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), autocast():
            torch.manual_seed(0)
            loss = student(**inputs)["loss"]
            return loss.item(), list(torch.autograd.grad(loss, weights, materialize_grads=True))

    student.train()
    if checkpointed:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients = loss_and_gradients()
    layers = compute_in_fp8(student)
    loss_in_fp8, in_fp8 = loss_and_gradients()
    if checkpointed:
        student.gradient_checkpointing_disable()
    student.train(training)
    for gradient_in_fp8, gradient in zip(in_fp8, gradients, strict=True):
        gradient_in_fp8.sub_(gradient)
    off = torch.stack([x.norm() for x in in_fp8]).double().norm()
    size = torch.stack([x.norm() for x in gradients]).double().norm()
    return (
        f"{'fp8':<12}student: {layers} linear layers compute in it, the head as it was; on one batch loss "
        f"{loss_in_fp8:.4f}, before {loss:.4f}, gradient off by {float(off / size):.1%}"
    )
