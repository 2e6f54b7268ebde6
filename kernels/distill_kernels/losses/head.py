"""Losses computed inside the LM head's own call, where FSDP2 has gathered the head's weight.

FSDP2 (`fully_shard`) keeps a weight as a DTensor of `Shard(0)` and gathers it in hooks around the module's `__call__`.
A fused loss reads `lm_head.weight` without calling `lm_head`, so the hooks would never fire; here the module is called
and its `forward` is the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from distill_kernels.torch_internals import disable_dynamo

Result = TypeVar("Result")


@disable_dynamo
def call_inside(
    module: nn.Module,
    compute: Callable[[torch.Tensor], Result],
    hidden: torch.Tensor,
    *,
    owner: nn.Module | None = None,
) -> Result:
    """Call `module(hidden)` with `compute` in place of its forward, so that the hooks of every wrapper around it fire.

    Args:
        module: module that the model calls.
        compute: called with the hidden states as the hooks pass them on; parameters are whole inside.
        hidden: [..., H]; goes through the hooks (FSDP2's mixed precision may cast it).
        owner: the module whose forward is replaced, where `module` only leads to it (a LoRA layer); None: `module`.

    torch.compile breaks its graph here: traced, a forward that is put back is lost, and hooks may be left out.
    """
    owner = module if owner is None else owner
    # Only a forward of the instance itself has to come back (wrappers set one); that of the class shows again by
    # itself.
    replaced = owner.__dict__.get("forward")

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> Result:
        return compute(hidden)

    # On the instance, since `__call__` looks it up there first; hooks run around it as around any forward.
    owner.forward = forward
    try:
        return module(hidden)
    finally:
        if replaced is None:
            del owner.forward
        else:
            owner.forward = replaced


def head_loss(
    lm_head: nn.Module,
    loss_fn: Callable[..., Any],
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    *,
    teacher_head: nn.Module | None = None,
    **named: Any,
) -> Any:
    """Compute a fused loss with the student's weight and bias as `lm_head` holds them inside its own call.

    For heads that FSDP2 shards; a plain head works as well. Call it inside the forward of the root module, where all
    sharded parts are called:

        class Student(nn.Module):  # fully_shard(student.lm_head), ..., fully_shard(student)
            def forward(self, ids, teacher_hidden, teacher_weight, labels):
                return head_loss(self.lm_head, self.loss_fn, self.body(ids), teacher_hidden, teacher_weight, labels)

    Args:
        lm_head: the student's head, with `weight` [V, H] and maybe `bias` [V] (an `nn.Linear`). A unit of its own
            (`fully_shard(lm_head)`), or, as where it is tied to the embedding, part of the root's.
        loss_fn: `FusedDistillationLoss`, one of its kin, or anything that is called as
            `loss_fn(student_hidden, student_weight, **rest)`; of `rest` only what is not None is passed.
        student_hidden, teacher_hidden, labels, named: arguments of `FusedDistillationLoss.forward`.
        teacher_weight: the teacher's weight, not sharded by FSDP2.
        teacher_head: the teacher's head in place of `teacher_weight` and `teacher_bias`; it may be sharded as well.

    Returns:
        The result of `loss_fn`.

    Raises:
        ValueError: where both `teacher_head` and a weight are given, the weight is still sharded inside the call, or a
            head has an adapter (PEFT), which its weight alone leaves out, that `student_lora` does not name.
    """
    if named.get("student_lora") is None:
        _expect_no_adapter("lm_head", lm_head, "a head whose weight says all, or student_lora=(A, B, scale) beside it")
    _expect_no_adapter("teacher_head", teacher_head, "a head whose weight says all (a merged adapter)")
    if teacher_head is not None and (teacher_weight is not None or named.get("teacher_bias") is not None):
        raise ValueError("teacher_head: expected either teacher_head or teacher_weight and teacher_bias, got both")

    given = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight, "labels": labels}

    def with_student(hidden: torch.Tensor, **teacher: Any) -> Any:
        all_given = {"student_bias": getattr(lm_head, "bias", None), **given, **teacher, **named}
        # Losses without a teacher or labels have no such arguments, so that None is left out instead of passed.
        all_given = {name: value for name, value in all_given.items() if value is not None}
        return loss_fn(hidden, lm_head.weight, **all_given)

    def with_teacher(hidden: torch.Tensor) -> Any:
        if teacher_head is None:
            return with_student(hidden)
        if teacher_hidden is None:
            raise ValueError("teacher_hidden: expected the teacher's hidden states beside teacher_head, got None")

        def both(teacher_hidden: torch.Tensor) -> Any:
            # Read inside of the call: outside it would be a rank's shard.
            weight = teacher_head.weight
            bias = getattr(teacher_head, "bias", None)
            return with_student(hidden, teacher_hidden=teacher_hidden, teacher_weight=weight, teacher_bias=bias)

        # One call inside the other: both heads are whole while the loss is computed.
        return call_inside(teacher_head, both, teacher_hidden)

    return call_inside(lm_head, with_teacher, student_hidden)


def _expect_no_adapter(name: str, head: nn.Module | None, expected: str) -> None:
    """Refuse a head with an unmerged adapter: its `weight` is the inner layer's, without the adapter's part."""
    wraps = getattr(head, "base_layer", None) is not None
    if wraps and not (getattr(head, "merged", False) or getattr(head, "disable_adapters", False)):
        raise ValueError(f"{name}: expected {expected}, got {type(head).__module__}.{type(head).__name__}")
