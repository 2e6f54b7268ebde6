"""Validation of a loss's arguments: kinds, shapes, dtypes, devices and values.

Values (a label beyond the vocabulary, a row named twice) are checked where that needs no host sync: on CPU tensors,
kernels in the interpreter included. On a GPU a label or top-k id out of range makes its row's loss NaN,
`num_items=0` makes all losses infinite, and `valid_rows` are not checked. With DISTILL_CHECK_VALUES=1 in the
environment values are checked there too, with host syncs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from distill_kernels.losses.mixture import TeacherHead
from distill_kernels.losses.operands import Head, RowBatch, TokenArguments
from distill_kernels.losses.policy_reference import Policy
from distill_kernels.losses.terms import plain_number
from distill_kernels.losses.topk_reference import TopK
from distill_kernels.operands import check_tensor

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
MAX_TOP_K = 511  # and the tail: 512 lanes of a program, as for 256; refused where no kernel runs as well
WHOLE_TENSOR = (
    "a whole tensor (a head sharded by FSDP2 is gathered by its own module: call distill_kernels.head_loss; gather one "
    "that is cut over the vocabulary for tensor parallelism)"
)
CHECK_VALUES = os.environ.get("DISTILL_CHECK_VALUES") == "1"


def expect(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise a ValueError that names the argument unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def checked_direction(direction: str) -> str:
    expect(direction in ("forward", "reverse"), "direction", "forward or reverse", repr(direction))
    return direction


def workspace_bytes(mib: float | None) -> int | None:
    """Return `max_workspace_mib` in bytes; ValueError unless it is None or above 0."""
    expect(mib is None or mib > 0, "max_workspace_mib", "None or a number above 0", repr(mib))
    return None if mib is None else int(mib * 2**20)


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _check_weight(name: str, weight: torch.Tensor, hidden: torch.Tensor, hidden_name: str) -> None:
    """Check that a head weight is a plain floating-point [V, H] matrix that fits the hidden states."""
    expect(
        weight.dtype in FLOATS and type(weight).__name__ not in ("Params4bit", "Int8Params"),
        name,
        "a floating-point head (a quantised head must be dequantised or left out of quantisation)",
        f"{type(weight).__name__} of {weight.dtype}",
    )
    width = hidden.shape[-1]
    expect(weight.dim() == 2 and weight.shape[1] == width, name, f"[V, {width}] as {hidden_name}", list(weight.shape))
    expect(weight.device == hidden.device, name, f"device {hidden.device} as {hidden_name}", weight.device)


def check_tokens(
    labels: torch.Tensor | None,
    token_weights: torch.Tensor | None,
    num_items: torch.Tensor | int | None,
    valid_rows: torch.Tensor | None,
    *,
    leading: torch.Size,
    device: torch.device,
) -> None:
    """Check the per-token arguments: labels and weights of shape `leading`, row indices, all on `device`.

    Raises:
        ValueError: naming the argument that does not fit; for values, see the file's head.
    """
    for name, tensor in (("labels", labels), ("token_weights", token_weights), ("valid_rows", valid_rows)):
        if tensor is not None:
            check_tensor(name, tensor)
            expect(tensor.device == device, name, f"device {device} as the student's", tensor.device)
    if labels is not None:
        fits = labels.shape == leading and labels.dtype in INTEGERS
        expect(fits, "labels", f"integers of shape {list(leading)}", _described(labels))
    if token_weights is not None:
        expect(token_weights.shape == leading, "token_weights", f"shape {list(leading)}", list(token_weights.shape))
    if isinstance(num_items, torch.Tensor):
        check_tensor("num_items", num_items)
        expect(num_items.numel() == 1, "num_items", "one number", f"a tensor of shape {list(num_items.shape)}")
    elif num_items is not None:
        expect(num_items >= 0, "num_items", "at least 0", num_items)
    if valid_rows is not None:
        fits = valid_rows.dim() == 1 and valid_rows.dtype == torch.int64
        expect(fits, "valid_rows", "int64 [M]", _described(valid_rows))
        if can_check_values(valid_rows) and not torch.compiler.is_compiling():
            n = leading.numel()
            outside = valid_rows.masked_select((valid_rows < 0) | (valid_rows >= n))
            expect(not outside.numel(), "valid_rows", f"indices of 0 to {n - 1}", outside.tolist())
            once = torch.bincount(valid_rows, minlength=1).max().item() <= 1
            expect(once, "valid_rows", "each row once", f"some of {valid_rows.numel()} rows twice")


def check_arguments(
    student: Head,
    teachers: Sequence[TeacherHead],
    tokens: TokenArguments,
    vocab_size: int | None,
    *,
    needs_labels: bool,
) -> tuple[int, torch.dtype]:
    """Check a fused loss's arguments; return the number of vocabulary columns used and the compute dtype.

    Args:
        student: hidden states [..., H] and the head.
        teachers: teachers that are read.
        tokens: per-token arguments.
        vocab_size: columns that both vocabularies share; None: all of the student's, and as many of a teacher's.
        needs_labels: the loss has a term of hard labels.

    Raises:
        ValueError: naming the argument that does not fit; one of several teachers by its number too.
    """
    hidden = student.hidden
    weight = student.weight
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", student.bias)):
        _check_plain(f"student_{name}", tensor)
    fits = hidden.dim() >= 2 and hidden.dtype in FLOATS
    expect(fits, "student_hidden", "floating [..., H] of at least 2 dimensions", _described(hidden))
    _check_weight("student_weight", weight, hidden, "student_hidden")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    if not autocast:
        expect(weight.dtype == dtype, "student_weight", f"{dtype} as student_hidden", weight.dtype)
    vocab = weight.shape[0] if vocab_size is None else int(vocab_size)
    _check_columns("student", weight, student.bias, vocab)
    for number, teacher in enumerate(teachers):
        try:
            _check_teacher(teacher, hidden, vocab, vocab_size)
        except ValueError as error:
            if len(teachers) == 1:
                raise
            raise ValueError(f"teachers[{number}]: {error}") from None
    leading = hidden.shape[:-1]
    check_tokens(*tokens, leading=leading, device=hidden.device)
    hard = tokens.labels is not None or not needs_labels
    expect(hard, "labels", "token indices, since the loss has a cross-entropy term", None)
    if student.lora_a is not None and student.lora_b is not None:
        a = student.lora_a
        b = student.lora_b
        fits = a.dim() == 2 and a.shape[1] == hidden.shape[-1] and b.shape == (weight.shape[0], a.shape[0])
        expected = f"A [r, {hidden.shape[-1]}] and B [{weight.shape[0]}, r]"
        expect(fits, "student_lora", expected, f"A {list(a.shape)} and B {list(b.shape)}")
    return vocab, dtype


def _check_plain(name: str, tensor: torch.Tensor | None) -> None:
    """Check that a tensor is one, and whole; None is skipped."""
    if tensor is not None:
        check_tensor(name, tensor)
        expect(type(tensor).__name__ != "DTensor", name, WHOLE_TENSOR, "a DTensor")


def _check_columns(model: str, weight: torch.Tensor, bias: torch.Tensor | None, vocab: int) -> None:
    """Check that a head has the `vocab` columns that count, and a bias for each of its own."""
    width = weight.shape[0]
    expect(0 < vocab <= width, "vocab_size", f"1 to {width}, the rows of {model}_weight", vocab)
    if bias is not None:
        expect(bias.shape == (width,), f"{model}_bias", f"shape [{width}]", list(bias.shape))


def _check_teacher(teacher: TeacherHead, student_hidden: torch.Tensor, vocab: int, vocab_size: int | None) -> None:
    """Check a teacher's tensors beside the student's hidden states, and its columns."""
    hidden = teacher.hidden
    for name, tensor in (("hidden", hidden), ("weight", teacher.weight), ("bias", teacher.bias)):
        _check_plain(f"teacher_{name}", tensor)
    expected = f"leading dimensions {list(student_hidden.shape[:-1])} as student_hidden"
    expect(hidden.shape[:-1] == student_hidden.shape[:-1], "teacher_hidden", expected, list(hidden.shape))
    _check_weight("teacher_weight", teacher.weight, hidden, "teacher_hidden")
    same = hidden.device == student_hidden.device
    expect(same, "teacher_hidden", f"device {student_hidden.device} as student_hidden", hidden.device)
    width = teacher.weight.shape[0]
    if vocab_size is None:
        expected = f"{vocab} rows as student_weight (or pass vocab_size, the shared columns)"
        expect(width == vocab, "teacher_weight", expected, width)
    _check_columns("teacher", teacher.weight, teacher.bias, vocab)


Lora = tuple[torch.Tensor, torch.Tensor, float]


def unpack_lora(lora: Lora | None) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """Return A, B and the scale of a LoRA; None, None and 1 without one.

    Raises:
        ValueError: if there are not three, or A or B is no plain tensor.
    """
    if lora is None:
        return None, None, 1.0
    three = isinstance(lora, (tuple, list)) and len(lora) == 3
    expect(three, "student_lora", "(A, B, scale)", f"{type(lora).__name__} of {len(lora)}")
    for tensor in lora[:2]:
        _check_plain("student_lora", tensor)
    return lora[0], lora[1], float(plain_number(lora[2], "student_lora"))


def check_top_k(ids: torch.Tensor, logprobs: torch.Tensor, leading: torch.Size) -> None:
    """Check a teacher's top-K tokens and log-probabilities, [*leading, K].

    Raises:
        ValueError: naming the one that does not fit.
    """
    for name, tensor in (("teacher_ids", ids), ("teacher_logprobs", logprobs)):
        check_tensor(name, tensor)
        plain_tensor = type(tensor).__name__ != "DTensor"
        expect(plain_tensor, name, "a plain tensor, the same on every rank", "a DTensor")
    fits = ids.shape[:-1] == leading and ids.dim() == len(leading) + 1 and ids.dtype in INTEGERS
    expect(fits, "teacher_ids", f"integers of shape {[*leading, 'K']}", _described(ids))
    fits = logprobs.shape == ids.shape and logprobs.is_floating_point()
    expect(fits, "teacher_logprobs", f"floating {list(ids.shape)} as teacher_ids", _described(logprobs))


def check_policy(policy: Policy, leading: torch.Size, device: torch.device) -> None:
    """Check the per-token arguments of a policy-gradient loss: floating, of shape `leading`, on `device`.

    Raises:
        ValueError: naming the one that does not fit.
    """
    for name, tensor in zip(Policy._fields, policy[:3], strict=False):
        if tensor is not None:
            check_tensor(name, tensor)
            fits = tensor.shape == leading and tensor.is_floating_point()
            expect(fits, name, f"floating {list(leading)} as labels", _described(tensor))
            expect(tensor.device == device, name, f"device {device} as the student's", tensor.device)


def can_check_values(tensor: torch.Tensor) -> bool:
    """Return whether values of `tensor` may be checked: without a host sync, or because DISTILL_CHECK_VALUES=1."""
    return CHECK_VALUES or tensor.device.type == "cpu"


def check_values(batch: RowBatch, vocab: int, *, labels_count: bool) -> None:
    """Check that labels (if `labels_count`) and top-k ids of the rows that count lie within `vocab`.

    Raises:
        ValueError: naming the first that does not.
    """
    if not can_check_values(batch.row_scale):
        return
    rows = slice(None) if batch.rows is None else batch.rows
    counted = batch.row_scale[rows] != 0
    values = []
    if labels_count and batch.labels is not None:
        values.append(("labels", batch.labels[rows], counted))
    if isinstance(batch.chosen, TopK):
        used = batch.chosen.logprobs[rows] > -torch.inf
        values.append(("teacher_ids", batch.chosen.ids[rows], used & counted[:, None]))
    for name, given, matters in values:
        wrong = given.long()[((given < 0) | (given.long() >= vocab)) & matters]
        if wrong.numel():
            raise ValueError(f"{name}: expected 0 to {vocab - 1}, got {wrong[0].item()}")
