"""The users' mistakes, caught before any work: shapes, dtypes and devices of a fused loss's arguments."""

from __future__ import annotations

import torch

from distill_kernels.losses.terms import Objective

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (
    "a whole tensor (a head sharded by FSDP2 is gathered by its own module: call distill_kernels.head_loss; a head cut "
    "over the vocabulary for tensor parallelism needs tp_group)"
)


def _expect(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _check_weight(name: str, weight: torch.Tensor, hidden: torch.Tensor, hidden_name: str) -> None:
    """A head weight is a plain floating [V, H] matrix that fits the hidden states."""
    _expect(
        weight.dtype in FLOATS and type(weight).__name__ not in ("Params4bit", "Int8Params"),
        name,
        "a floating-point head (a quantised head must be dequantised or left out of quantisation)",
        f"{type(weight).__name__} of {weight.dtype}",
    )
    _expect(type(weight).__name__ != "DTensor", name, WHOLE, "a DTensor")
    width = hidden.shape[-1]
    _expect(weight.dim() == 2 and weight.shape[1] == width, name, f"[V, {width}] as {hidden_name}", list(weight.shape))
    _expect(weight.device == hidden.device, name, f"device {hidden.device} as {hidden_name}", weight.device)


def check_arguments(
    objective: Objective,
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    student_bias: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    token_weights: torch.Tensor | None,
    valid_rows: torch.Tensor | None,
    vocab_size: int | None,
    sharded: bool = False,
) -> tuple[int, torch.dtype]:
    """The number of columns that count, and the dtype of the products; a ValueError names what does not fit.

    With `sharded`, heads are one rank's rows of them, and `vocab_size`, maybe 0, fits them.
    """
    _expect(
        student_hidden.dim() >= 2 and student_hidden.dtype in FLOATS,
        "student_hidden",
        "floating [..., H] of at least 2 dimensions",
        f"{list(student_hidden.shape)} of {student_hidden.dtype}",
    )
    leading = student_hidden.shape[:-1]
    _check_weight("student_weight", student_weight, student_hidden, "student_hidden")
    device_type = student_hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else student_hidden.dtype
    if not autocast:
        _expect(student_weight.dtype == dtype, "student_weight", f"{dtype} as student_hidden", student_weight.dtype)
    heads = [("student_weight", student_weight.shape[0])]
    if objective.needs_teacher:
        _expect(teacher_hidden is not None, "teacher_hidden", "the teacher's hidden states", None)
        _expect(teacher_weight is not None, "teacher_weight", "the teacher's head", None)
    if teacher_hidden is not None and teacher_weight is not None:
        _expect(
            teacher_hidden.shape[:-1] == leading,
            "teacher_hidden",
            f"leading dimensions {list(leading)} as student_hidden",
            list(teacher_hidden.shape),
        )
        _check_weight("teacher_weight", teacher_weight, teacher_hidden, "teacher_hidden")
        _expect(
            teacher_hidden.device == student_hidden.device,
            "teacher_hidden",
            f"device {student_hidden.device} as student_hidden",
            teacher_hidden.device,
        )
        heads.append(("teacher_weight", teacher_weight.shape[0]))
    vocab = student_weight.shape[0] if vocab_size is None else int(vocab_size)
    for name, width in heads:
        if vocab_size is None:
            _expect(
                width == vocab, name, f"{vocab} rows as student_weight (or pass vocab_size, the shared columns)", width
            )
        _expect(sharded or 0 < vocab <= width, "vocab_size", f"1 to {width}, the rows of {name}", vocab)
    if labels is not None:
        _expect(
            labels.shape == leading and not labels.is_floating_point(),
            "labels",
            f"integers of shape {list(leading)} as student_hidden",
            f"{list(labels.shape)} of {labels.dtype}",
        )
    _expect(
        labels is not None or objective.hard_weight == 0.0,
        "labels",
        "token indices, since the loss has a cross-entropy term",
        None,
    )
    if token_weights is not None:
        _expect(token_weights.shape == leading, "token_weights", f"shape {list(leading)}", list(token_weights.shape))
    if valid_rows is not None:
        _expect(
            valid_rows.dim() == 1 and valid_rows.dtype == torch.int64,
            "valid_rows",
            "int64 [M]",
            f"{list(valid_rows.shape)} of {valid_rows.dtype}",
        )
    for name, bias, width in (
        ("student_bias", student_bias, heads[0][1]),
        ("teacher_bias", teacher_bias, heads[-1][1]),
    ):
        if bias is not None:
            _expect(bias.shape == (width,), name, f"shape [{width}]", list(bias.shape))
    _expect((lora_a is None) == (lora_b is None), "student_lora", "(A, B, scale)", "only one of A and B")
    if lora_a is not None and lora_b is not None:
        rank, width = lora_a.shape[0], student_hidden.shape[-1]
        _expect(
            lora_a.shape == (rank, width) and lora_b.shape == (student_weight.shape[0], rank),
            "student_lora",
            f"A [r, {width}] and B [{student_weight.shape[0]}, r]",
            f"A {list(lora_a.shape)} and B {list(lora_b.shape)}",
        )
    return vocab, dtype
