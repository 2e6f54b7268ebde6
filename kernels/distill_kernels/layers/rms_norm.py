"""RMSNorm, alone or fused with the residual addition before it.

    s = x + residual                                  (only in add_rms_norm)
    r = 1 / sqrt(mean(s^2) + eps),  n = s r
    llama:  y = w * cast(n)         the cast to the input's dtype comes before the weight
    gemma:  y = cast(n * (1 + w))   the weight is applied in fp32

    dn = dy * w,  ds = r (dn - n mean(dn * n)) + d(sum output),  dw = sum over rows of dy * n

Zhang and Sennrich, 2019 (arXiv:1910.07467); the casting orders are those of transformers' LlamaRMSNorm and
Gemma3RMSNorm. y may be written in another dtype, rounded once; ds is written in two where those of x and the residual
differ. For N rows of H elements of b bytes, forward moves 2 N H b (fused with the addition: 4 N H b), backward 3 N H b
(4 N H b where the sum has a gradient of its own), plus H-sized weights, 4 N for r and the partial sums of dw.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from distill_kernels.kernel_op import KernelOp, can_skip_dispatcher, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton
from distill_kernels.layers.column_sums import column_sums
from distill_kernels.layers.rms_norm_kernels import _backward_kernel, _forward_kernel
from distill_kernels.layers.row_layout import as_rows, forward_rows, one_sum_rows, stages_that_fit
from distill_kernels.operands import contiguous_rows, differentiable_once

Form = Literal["llama", "gemma"]
MAX_HIDDEN = 16_384
_FORMS = ("llama", "gemma")


def reference_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, form: Form = "llama"
) -> torch.Tensor:
    """Return the RMS norm in plain PyTorch, in fp32 (fp64 stays fp64): the specification."""
    upcast = x.double() if x.dtype == torch.float64 else x.float()
    normed = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if form == "gemma":
        return (normed * (1.0 + weight.to(upcast.dtype))).to(x.dtype)
    return weight * normed.to(x.dtype)


def reference_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, form: Form = "llama"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum, in plain PyTorch: the specification."""
    total = x + residual
    return reference_rms_norm(total, weight, eps, form), total


def _new_outputs(x, residual, weight, eps, form, dtype=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out_dtype = sum_dtype if weight is None or form == "gemma" else torch.promote_types(sum_dtype, weight.dtype)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=sum_dtype)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype or out_dtype), total, rstd


def launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    form: str,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the forward kernel; return y, the sum (empty without a residual) and 1/rms, fp32 [rows]."""
    y, total, rstd = _new_outputs(x, residual, weight, eps, form, dtype)
    hidden = x.shape[-1]
    n_rows = rstd.shape[0]
    residual_stride = 0
    x, x_stride = as_rows(x)
    weight = contiguous_rows(weight)
    if residual is not None:
        residual, residual_stride = as_rows(residual)
    if n_rows:
        config = forward_rows(hidden, n_rows, device_facts(x.device).multiprocessors)
        launch(
            _forward_kernel,
            (cdiv(n_rows, config.rows),),
            x,
            residual,
            weight,
            y,
            total,
            rstd,
            x_stride,
            residual_stride,
            n_rows,
            eps,
            H=hidden,
            BLOCK_H=next_power_of_2(hidden),
            ROWS=config.rows,
            FORM="none" if weight is None else form,
            HAS_RESIDUAL=residual is not None,
            num_warps=config.warps,
        )
    return y, total, rstd


def _new_gradients(dy, dsum, x, weight, rstd, form, need_dweight, cast_dtype=None):
    dweight = torch.empty_like(weight) if weight is not None and need_dweight else rstd.new_empty(0)
    other = x.new_empty(0) if cast_dtype is None else x.new_empty(x.shape, dtype=cast_dtype)
    return x.new_empty(x.shape), dweight, other


def _launch_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    form: str,
    need_dweight: bool,
    cast_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # returns dx in x's dtype, dweight, and dx in another dtype (both empty where not needed)
    dx, dweight, other = _new_gradients(dy, dsum, x, weight, rstd, form, need_dweight, cast_dtype)
    hidden = x.shape[-1]
    facts = device_facts(x.device)
    low_precision = x.element_size() == dy.element_size() == 2
    config = one_sum_rows(hidden, low_precision)
    block = next_power_of_2(hidden)
    if hidden > 14_336 and not low_precision and facts.warp_size == 32:
        # 16 warps have no registers for it: 0.33 ms for 0.24
        config = config._replace(warps=32)
    n_rows = rstd.shape[0]
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    weight = contiguous_rows(weight)
    dsum_stride = 0
    if dsum is not None:
        dsum, dsum_stride = as_rows(dsum)
    need_dweight = need_dweight and weight is not None
    dependent_launch = need_dweight and facts.dependent_launch
    tile_bytes = config.rows * block * sum(t.element_size() for t in (x, dy, dsum) if t is not None)
    programs = min(cdiv(n_rows, config.rows), facts.multiprocessors * config.programs)
    partials = torch.empty((programs, hidden), dtype=torch.float32, device=x.device) if need_dweight else rstd
    if n_rows:
        launch(
            _backward_kernel,
            (programs,),
            dy,
            dsum,
            x,
            weight,
            rstd,
            dx,
            other,
            partials,
            dy_stride,
            dsum_stride,
            x_stride,
            n_rows,
            0,
            H=hidden,
            BLOCK_H=block,
            ROWS=config.rows,
            FORM="none" if weight is None else form,
            HAS_DSUM=dsum is not None,
            STORE_CAST=cast_dtype is not None,
            NEED_DWEIGHT=need_dweight,
            REREAD_FP32=config.twice and low_precision,
            DEPENDENT_LAUNCH=dependent_launch,
            STAGES=stages_that_fit(config.stages, tile_bytes, facts.shared_bytes),
            num_warps=config.warps,
        )
        if need_dweight:
            column_sums(partials, dweight, None, dependent_launch)
    else:
        dweight.zero_()
    return dx, dweight, other


_backward_op = KernelOp("rms_norm_backward", _launch_backward, _new_gradients)


def _setup_context(ctx, inputs, output) -> None:
    x, residual, weight, _, form, _ = inputs
    _, total, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, rstd)
    ctx.form = form
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dsum=None):
    x, weight, rstd = ctx.saved_tensors
    dtype, residual_dtype = ctx.dtypes
    needed = ctx.needs_input_grad
    if dy is None:
        if dsum is None:
            return None, None, None, None, None, None
        # only the sum was used
        dx = dsum
        dweight = None
        other = dsum
    else:
        # the sum has the wider dtype of x and the residual, and mostly one of them the narrower
        cast_dtype = next((d for d in (dtype, residual_dtype) if d not in (None, x.dtype)), None)
        dx, dweight, other = _backward_op(dy, dsum, x, weight, rstd, ctx.form, needed[2], cast_dtype)
    if not needed[2]:
        dweight = None
    if residual_dtype is None and dx.dtype == dtype:
        return dx if needed[0] else None, None, dweight, None, None, None

    def in_dtype(wanted: torch.dtype) -> torch.Tensor:
        # stored by the kernel beside dx where that has another dtype, and empty where all have one
        return other if other.dtype == wanted and other.shape == x.shape else dx.to(wanted)

    dresidual = in_dtype(residual_dtype) if needed[1] and residual_dtype is not None else None
    return in_dtype(dtype) if needed[0] else None, dresidual, dweight, None, None, None


def check_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    form: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Check the arguments of the norms; ValueError names the one that does not fit."""
    check_floats(x=x, residual=residual, weight=weight)
    if form not in _FORMS:
        raise ValueError(f"form: expected 'llama' or 'gemma', got {form!r}")
    if x.dim() == 0 or not 0 < x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(f"x: expected a last dimension of 1 to {MAX_HIDDEN}, got shape {tuple(x.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: expected shape ({x.shape[-1]},) like x's last dimension, got {tuple(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: expected x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")


def _norm_op(name: str, results: int) -> KernelOp:
    gradient: dict[str, Any] = {"setup_context": _setup_context, "backward": _backward}
    return KernelOp(name, launch_norm, _new_outputs, **gradient, check=check_norm, results=results)


_forward_op = _norm_op("rms_norm_forward", 1)
_add_forward_op = _norm_op("add_rms_norm_forward", 2)


class _NormAndInput(torch.autograd.Function):
    """The op with its input as a second output, which no op may return."""

    @staticmethod
    def forward(ctx, x, weight, eps, form, dtype):
        inputs = (x, None, weight, eps, form, dtype)
        outputs = _forward_op.all_outputs(*inputs)
        _setup_context(ctx, inputs, outputs)
        return outputs[0], x

    @staticmethod
    @differentiable_once
    def backward(ctx, dy, dx):
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dx, None, None, None, None
        need = ctx.needs_input_grad[1]
        dx, dweight, _ = _backward_op(dy, dx, x, weight, rstd, ctx.form, need)
        return dx, dweight if need else None, None, None, None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    form: Form = "llama",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension.

    Args:
        x: [..., H], fp32, bf16 or fp16, H up to 16,384; rows may be strided.
        weight: [H], or None for no scale.
        eps: Added to the mean square.
        form: "llama" casts the normalised x to its dtype before multiplying by `weight`; "gemma" multiplies by
            `1 + weight` in fp32 and casts last.
        dtype: Dtype of the result, rounded to it in the kernel; None for the one below.

    Returns:
        [..., H]; usually in x's dtype for "gemma", in the promoted dtype of x and weight for "llama".

    Raises:
        ValueError: On an unknown form, a shape that does not fit, or a dtype that the kernels do not compute in.
    """
    if not runs_on_triton(x):
        check_norm(x, None, weight, eps, form)
        normed = reference_rms_norm(x, weight, eps, form)
        return forbid_double_backward(normed.to(dtype or normed.dtype))
    return _forward_op(x, None, weight, eps, form, dtype)


def rms_norm_and_input(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    form: Form = "llama",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x, ...)` and x, for whatever else reads x: its gradient is added in the norm's backward kernel.

    Args:
        x, weight, eps, form, dtype: Arguments of `rms_norm`.

    Returns:
        The normalised x, and x (a view of it, or itself).

    Raises:
        ValueError: As `rms_norm`.
    """
    if not (runs_on_triton(x) and can_skip_dispatcher(x, weight) and torch.is_grad_enabled() and x.requires_grad):
        return rms_norm(x, weight, eps, form, dtype), x
    outputs: tuple[torch.Tensor, torch.Tensor] = _NormAndInput.apply(x, weight, eps, form, dtype)
    return outputs


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    form: Form = "llama",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm(x + residual)`, and the sum, in one pass: the sum is rounded to its dtype before the norm.

    Args:
        x: [..., H], fp32, bf16 or fp16, H up to 16,384.
        residual: [..., H], the same shape.
        weight: [H] or None.
        eps: Added to the mean square.
        form, dtype: See `rms_norm`.

    Returns:
        The normalised sum, and the sum `x + residual` in their promoted dtype.

    Raises:
        ValueError: As `rms_norm`; also if the shapes of x and residual differ.
    """
    if not runs_on_triton(x):
        check_norm(x, residual, weight, eps, form)
        normed, total = reference_add_rms_norm(x, residual, weight, eps, form)
        return forbid_double_backward(normed.to(dtype or normed.dtype)), forbid_double_backward(total)
    normed, total = _add_forward_op(x, residual, weight, eps, form, dtype)
    return normed, total


class RMSNorm(torch.nn.Module):
    """`rms_norm` with a weight, initialised so that it does not scale (ones for "llama", zeros for "gemma").

    Args:
        hidden_size: Hidden size H.
        eps: Added to the mean square.
        form: "llama" or "gemma".
        device: Device of the weight.
        dtype: Dtype of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        form: Form = "llama",
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.form = form
        initial = torch.zeros if form == "gemma" else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, device=device, dtype=dtype))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., H] to [..., H]; with a residual, the norm of the sum and the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.form)
        return add_rms_norm(x, residual, self.weight, self.eps, self.form)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, form={self.form!r}"
