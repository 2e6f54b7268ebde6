"""Rotary position embedding of queries and keys in one launch, half-rotated as transformers does it.

With R rotary dimensions (the first R of each head's D; the rest passes through) split in halves 1 and 2:

    y1 = x1 cos1 - x2 sin1,   y2 = x2 cos2 + x1 sin2

which is `x * cos + rotate_half(x) * sin`. Su et al., 2021 (arXiv:2104.09864). Backward is the transposed map, the same
form with sin1 and sin2 exchanged and negated; where both halves of cos and sin are equal, as transformers makes them,
that is the inverse rotation. Scaled frequencies (linear, YaRN, Llama 3, ...) live in the cos and sin that are given.
Moves 2 (Hq + Hk) D b bytes a token, and cos and sin once. Arithmetic is fp32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from distill_kernels.kernel_op import KernelOp, can_skip_dispatcher, check_floats, forbid_double_backward
from distill_kernels.launch import launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.matmul.shared_input import GradientSlots, gradient_slots
from distill_kernels.operands import differentiable_once


def reference_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [B, Hq, T, D] and k [B, Hk, T, D] by cos and sin [B or 1, T, R] in plain PyTorch: the specification."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        turned = x[..., :width]
        rest = x[..., width:]
        first, second = turned.chunk(2, -1)
        turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
        return torch.cat((turned.to(x.dtype), rest), -1)

    return rotate(q), rotate(k)


@triton.jit
def _rotate_heads(
    pointers,
    head_strides,
    first_head,
    angles,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    COPY_REST: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token, at whose first head `pointers` (of x and y) are.

    angles: cos1, cos2, sin1, sin2, [1, BLOCK_HALF] each.
    """
    x_ptr, y_ptr = pointers
    x_head_stride, y_head_stride = head_strides
    cos1, cos2, sin1, sin2 = angles
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    dims = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    mask = (heads < HEADS) & (dims < HALF)
    x_ptr += heads.to(tl.int64) * x_head_stride
    y_ptr += heads.to(tl.int64) * y_head_stride
    # Both halves are read before either is written: in place, y is x.
    x1 = tl.load(x_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + HALF + dims, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + dims, (x1 * cos1 - x2 * sin1).to(dtype), mask=mask)
    tl.store(y_ptr + HALF + dims, (x2 * cos2 + x1 * sin2).to(dtype), mask=mask)
    # dimensions from R on pass through; in place they are there
    if COPY_REST:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (heads < HEADS) & (rest < DIM)
        tl.store(y_ptr + rest, tl.load(x_ptr + rest, mask=mask), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_strides,
    k_strides,
    q_out_strides,
    k_out_strides,
    cos_strides,
    sin_strides,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    COPY_REST: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate all heads of one token, which share its cos and sin.

    Strides are of sequences, heads, tokens; those of cos and sin of sequences (0 where all share one), tokens.
    """
    # int64: a position times its stride passes 2^31 elements in long batches
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    cos_ptr += batch * cos_strides[0] + token * cos_strides[1]
    sin_ptr += batch * sin_strides[0] + token * sin_strides[1]
    cos1 = tl.load(cos_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    # The transposed map: y1's share of dx2 is that of y2 in x1 with its sign turned.
    if BACKWARD:
        sin1, sin2 = -sin2, -sin1
    q_ptr += batch * q_strides[0] + token * q_strides[2]
    k_ptr += batch * k_strides[0] + token * k_strides[2]
    q_out_ptr += batch * q_out_strides[0] + token * q_out_strides[2]
    k_out_ptr += batch * k_out_strides[0] + token * k_out_strides[2]
    angles = cos1, cos2, sin1, sin2
    for head in tl.static_range(0, Q_HEADS, BLOCK_Q):
        _rotate_heads(
            (q_ptr, q_out_ptr),
            (q_strides[1], q_out_strides[1]),
            head,
            angles,
            HEADS=Q_HEADS,
            DIM=DIM,
            HALF=HALF,
            BLOCK_HEADS=BLOCK_Q,
            BLOCK_HALF=BLOCK_HALF,
            BLOCK_REST=BLOCK_REST,
            COPY_REST=COPY_REST,
        )
    for head in tl.static_range(0, K_HEADS, BLOCK_K):
        _rotate_heads(
            (k_ptr, k_out_ptr),
            (k_strides[1], k_out_strides[1]),
            head,
            angles,
            HEADS=K_HEADS,
            DIM=DIM,
            HALF=HALF,
            BLOCK_HEADS=BLOCK_K,
            BLOCK_HALF=BLOCK_HALF,
            BLOCK_REST=BLOCK_REST,
            COPY_REST=COPY_REST,
        )


class RopeConfig(NamedTuple):
    """Heads of q and of k that a program rotates at once, and its warps."""

    q_heads: int
    k_heads: int
    warps: int


@functools.cache
def rope_config(q_heads: int, k_heads: int, half: int) -> RopeConfig:
    """Return heads a program and warps: at most 4,096 pairs at once, 16 pairs a thread."""
    most = max(4096 // next_power_of_2(half), 1)
    block_q = min(next_power_of_2(q_heads), most)
    block_k = min(next_power_of_2(k_heads), most)
    return RopeConfig(block_q, block_k, warps=min(max(block_q * next_power_of_2(half) // 512, 1), 8))


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    backward: bool,
) -> None:
    batch, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1]
    half = cos.shape[-1] // 2
    if batch * tokens == 0:
        return
    config = rope_config(q_heads, k_heads, half)
    shared = cos.shape[0] == 1  # the same positions in every sequence
    cos_batch, cos_token, _ = cos.stride()
    sin_batch, sin_token, _ = sin.stride()
    in_place = q_out is q
    launch(
        _rope_kernel,
        (tokens, batch),
        q,
        k,
        cos,
        sin,
        q_out,
        k_out,
        q.stride()[:3],
        k.stride()[:3],
        q_out.stride()[:3],
        k_out.stride()[:3],
        (0 if shared else cos_batch, cos_token),
        (0 if shared else sin_batch, sin_token),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        DIM=dim,
        HALF=half,
        BLOCK_Q=config.q_heads,
        BLOCK_K=config.k_heads,
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(dim - 2 * half),
        COPY_REST=dim > 2 * half and not in_place,
        BACKWARD=backward,
        num_warps=config.warps,
    )


def _last_contiguous(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _new_outputs(q, k, cos, sin, backward) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = _last_contiguous(q, k)
    return torch.empty_like(q), torch.empty_like(k)  # keeps the layout of a transposed projection


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = _new_outputs(q, k, cos, sin, backward)
    q, k, cos, sin = _last_contiguous(q, k, cos, sin)
    _rotate(q, k, cos, sin, q_out, k_out, backward)
    return q_out, k_out


def _launch_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    cos, sin = _last_contiguous(cos, sin)
    _rotate(q, k, cos, sin, q, k, False)


def _setup_context(ctx, inputs, output) -> None:
    _, _, cos, sin, backward = inputs
    ctx.save_for_backward(cos, sin)
    ctx.transposed = not backward


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    return *_op(dq, dk, cos, sin, ctx.transposed), None, None, None


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> None:
    check_floats(q=q, k=k, cos=cos, sin=sin)
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(
            f"q, k: expected [B, Hq, T, D] and [B, Hk, T, D], got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    batch, _, tokens, dim = q.shape
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        raise ValueError(
            f"cos, sin: expected [{batch} or 1, {tokens}, R], got shapes {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[-1] % 2 or not 0 < cos.shape[-1] <= dim:
        raise ValueError(f"cos: expected an even last dimension of 2 to {dim} (the head's), got {cos.shape[-1]}")


def _check_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    _check(q, k, cos, sin)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("in_place: expected False where q or k needs a gradient, got True")
    if runs_on_triton(q) and (q.stride(-1) != 1 or k.stride(-1) != 1):
        raise ValueError("in_place: expected q and k with a contiguous last dimension")


_op = KernelOp("rope", _launch, _new_outputs, setup_context=_setup_context, backward=_backward, check=_check)
_rotate_op = KernelOp("rope_into", _rotate, lambda *_: None, mutates=("q_out", "k_out"))
_in_place_op = KernelOp("rope_in_place", _launch_in_place, lambda *_: None, mutates=("q", "k"), check=_check_in_place)


class _RotateProjections(torch.autograd.Function):
    """Rotation of projections, columns of one matrix, in place; a copy would keep that matrix alive as well.

    Not the op's own function: an op returns none of its inputs and makes its gradients. These are written into slots of
    one matrix, which the projections' backward reads as a whole.
    """

    @staticmethod
    def forward(ctx, q, k, cos, sin, places):
        ctx.save_for_backward(cos, sin)
        ctx.places = places
        _in_place_op(q, k, cos, sin)
        return q, k

    @staticmethod
    @differentiable_once
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq, dk = _last_contiguous(dq, dk)
        batch, _, tokens, dim = dq.shape
        q_out, k_out = (part.view(batch, tokens, -1, dim).transpose(1, 2) for part in ctx.places.make(dq))
        cos, sin = _last_contiguous(cos, sin)
        _rotate_op(dq, dk, cos, sin, q_out, k_out, True)
        return q_out, k_out, None, None, None


def _are_projections(q: torch.Tensor, k: torch.Tensor, places: GradientSlots) -> bool:
    """Return whether q and k are transposed views of [B, T, H, D], the layout of their gradients' slots."""
    return all(
        x.shape[1] * x.shape[3] == size and x.stride() == (x.shape[2] * places.width, x.shape[3], places.width, 1)
        for x, size in zip((q, k), places.sizes, strict=True)
    )


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, as transformers' `apply_rotary_pos_emb` (Llama's form).

    Args:
        q: [B, Hq, T, D], fp32, bf16 or fp16; any strides, such as those of a transposed projection. For
            [B, T, H, D] pass `q.transpose(1, 2)`.
        k: [B, Hk, T, D].
        cos: [B or 1, T, R], R <= D even; dimensions from R on pass through. No gradient.
        sin: Sines, of the same shape as `cos`.
        in_place: Write over q and k. Only where no gradient is recorded; where one is, outputs of one `shared_linear`
            with joined weights are written over in any case.

    Returns:
        The rotated q and k, with the strides (where dense) and dtypes of q and k; q and k themselves if `in_place`.

    Raises:
        ValueError: On shapes that do not fit, an unsupported dtype, or in place where a gradient is needed.
    """
    if not runs_on_triton(q):
        check = _check_in_place if in_place else _check
        check(q, k, cos, sin)
        q_out, k_out = reference_rope(q, k, cos.detach(), sin.detach())
        if in_place:
            return q.copy_(q_out), k.copy_(k_out)
        return forbid_double_backward(q_out), forbid_double_backward(k_out)
    if in_place:
        _in_place_op(q, k, cos, sin)
        return q, k
    if torch.is_grad_enabled() and can_skip_dispatcher(q, k, cos, sin):
        places = gradient_slots(q, k)
        if places is not None:
            _check(q, k, cos, sin)
            if _are_projections(q, k, places):
                rotated: tuple[torch.Tensor, torch.Tensor] = _RotateProjections.apply(q, k, cos, sin, places)
                return rotated
    return _op(q, k, cos, sin, False)
