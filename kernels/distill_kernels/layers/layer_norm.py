"""LayerNorm over the last dimension, affine or not.

    n = (x - mean) r,  r = 1 / sqrt(var + eps),  y = n * w + b

    dn = dy * w,  dx = r (dn - mean(dn) - n mean(dn * n)),  dw = sum over rows of dy * n,  db = sum over rows of dy

Ba, Kiros and Hinton, 2016 (arXiv:1607.06450). All arithmetic is fp32, as in torch. For N rows of H elements of b bytes,
forward moves 2 N H b, backward 3 N H b (5 N H b beyond 8,192 columns of fp32, where a program's registers do not hold
a row and the sums for dw and db together), plus 8 N for mean and r and the partial sums.
"""

from __future__ import annotations

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, device_facts, launch, next_power_of_2, runs_on_triton
from distill_kernels.layers.column_sums import column_sums, row_groups
from distill_kernels.layers.layer_norm_kernels import _backward_kernel, _column_kernel, _forward_kernel
from distill_kernels.layers.row_layout import affine_forward_rows, as_rows, stages_that_fit, two_sums_rows
from distill_kernels.operands import contiguous_rows

MAX_HIDDEN = 16_384
SEPARATE_SUMS_FROM = 8192


def reference_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Return the layer norm in plain PyTorch, in fp32 (fp64 stays fp64): the specification."""
    upcast = x.double() if x.dtype == torch.float64 else x.float()
    centred = upcast - upcast.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(upcast.dtype)
    if bias is not None:
        y = y + bias.to(upcast.dtype)
    return y.to(x.dtype)


# Weights are loaded as vectors, not as rows of one: a row's own layout is taken for the whole tile, and where it has
# fewer columns than the program has threads, every row of the tile is spread over all warps.


def _column_partials(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, dy_stride: int, x_stride: int
) -> torch.Tensor:
    """Partial sums of dw and db, fp32 [groups, 2 H], where a whole row's sums do not fit a program's registers."""
    hidden = x.shape[-1]
    n_rows = rstd.shape[0]
    rows = 8
    columns = 256
    column_blocks = cdiv(hidden, columns)
    programs = 4 * device_facts(x.device).multiprocessors
    rows_per_group, groups = row_groups(n_rows, rows, cdiv(programs, column_blocks))
    partials = torch.empty((groups, 2 * hidden), dtype=torch.float32, device=x.device)
    launch(
        _column_kernel,
        (groups * column_blocks,),
        dy,
        x,
        mean,
        rstd,
        partials,
        dy_stride,
        x_stride,
        n_rows,
        rows_per_group,
        H=hidden,
        ROWS=rows,
        COLUMNS=columns,
        STAGES=3,
        num_warps=4,
    )
    return partials


def _new_outputs(x, weight, bias, eps, stats=True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = (x.new_empty(x.numel() // x.shape[-1] if stats else 0, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _launch_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, stats: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # returns y, mean and 1/std (both empty without `stats`)
    y, mean, rstd = _new_outputs(x, weight, bias, eps, stats)
    hidden = x.shape[-1]
    n_rows = x.numel() // hidden
    facts = device_facts(x.device)
    block = next_power_of_2(hidden)
    config = affine_forward_rows(hidden, n_rows, facts.multiprocessors)
    x, x_stride = as_rows(x)
    weight = contiguous_rows(weight)
    bias = contiguous_rows(bias)
    if n_rows:
        programs = cdiv(n_rows, config.rows)
        if config.programs:
            programs = min(programs, config.programs * facts.multiprocessors)
        launch(
            _forward_kernel,
            (programs,),
            x,
            weight,
            bias,
            y,
            mean,
            rstd,
            x_stride,
            n_rows,
            eps,
            H=hidden,
            BLOCK_H=block,
            ROWS=config.rows,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            STATS=stats,
            LOOP=config.programs > 0,
            STAGES=stages_that_fit(config.stages, config.rows * block * x.element_size(), facts.shared_bytes),
            num_warps=config.warps,
        )
    return y, mean, rstd


def _new_gradients(dy, x, weight, mean, rstd, need_sums, bias_dtype):
    weight_dtype = bias_dtype if weight is None else weight.dtype
    sums = x.shape[-1] if need_sums else 0
    return x.new_empty(x.shape), x.new_empty(sums, dtype=weight_dtype), x.new_empty(sums, dtype=bias_dtype)


def _launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_sums: bool,
    bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # returns dx, and the gradients of weight and bias (empty where not needed), of a missing weight too
    dx, dweight, dbias = _new_gradients(dy, x, weight, mean, rstd, need_sums, bias_dtype)
    hidden = x.shape[-1]
    facts = device_facts(x.device)
    low_precision = x.element_size() == dy.element_size() == 2
    config = two_sums_rows(hidden, low_precision)
    block = next_power_of_2(hidden)
    tile_bytes = config.rows * block * (x.element_size() + dy.element_size())
    n_rows = rstd.shape[0]
    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    weight = contiguous_rows(weight)
    if not n_rows:
        return dx, dweight.zero_(), dbias.zero_()
    apart = need_sums and hidden > SEPARATE_SUMS_FROM and not low_precision  # sums by columns, in a pass of their own
    dependent_launch = need_sums and not apart and facts.dependent_launch
    programs = cdiv(n_rows, config.rows)
    if need_sums and not apart:
        programs = min(programs, facts.multiprocessors * config.programs)
        partials = torch.empty((programs, 2 * hidden), dtype=torch.float32, device=x.device)
    else:
        partials = _column_partials(dy, x, mean, rstd, dy_stride, x_stride) if apart else rstd
    launch(
        _backward_kernel,
        (programs,),
        dy,
        x,
        weight,
        mean,
        rstd,
        dx,
        partials,
        dy_stride,
        x_stride,
        n_rows,
        0,
        H=hidden,
        BLOCK_H=block,
        ROWS=config.rows,
        HAS_WEIGHT=weight is not None,
        NEED_SUMS=need_sums and not apart,
        SUM_ROWS=config.rows > 1 and block >= config.warps * 512 // x.element_size(),
        REREAD_FP32=config.twice and low_precision,
        DEPENDENT_LAUNCH=dependent_launch,
        STAGES=stages_that_fit(config.stages, tile_bytes, facts.shared_bytes),
        num_warps=config.warps,
    )
    if need_sums:
        column_sums(partials, dweight, dbias, dependent_launch)
    return dx, dweight, dbias


_backward_op = KernelOp("layer_norm_backward", _launch_backward, _new_gradients)


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, _, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, dy):
    if dy is None:
        return None, None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    _, need_dweight, need_dbias, *_ = ctx.needs_input_grad
    dx, dweight, dbias = _backward_op(dy, x, weight, mean, rstd, need_dweight or need_dbias, ctx.bias_dtype)
    return dx, dweight if need_dweight else None, dbias if need_dbias else None, None, None


def _check(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, stats: bool = True
) -> None:
    check_floats(x=x, weight=weight, bias=bias)
    if x.dim() == 0 or not 0 < x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(f"x: expected a last dimension of 1 to {MAX_HIDDEN}, got shape {tuple(x.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: expected shape ({x.shape[-1]},) like x's last dimension, got {tuple(tensor.shape)}"
            )


_forward_op = KernelOp(
    "layer_norm_forward",
    _launch_forward,
    _new_outputs,
    setup_context=_setup_context,
    backward=_backward,
    check=_check,
    results=1,
)


def _needs_gradient(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer normalisation of the last dimension, as `torch.nn.functional.layer_norm`.

    Args:
        x: [..., H], fp32, bf16 or fp16, H up to 16,384; rows may be strided.
        weight: [H], or None for no scale.
        bias: [H], or None for no shift.
        eps: Added to the variance.

    Returns:
        [..., H] in x's dtype.

    Raises:
        ValueError: On a shape that does not fit, or a dtype that the kernels do not compute in.
    """
    if not runs_on_triton(x):
        _check(x, weight, bias, eps)
        return forbid_double_backward(reference_layer_norm(x, weight, bias, eps))
    stats = torch.is_grad_enabled() and (_needs_gradient(x) or _needs_gradient(weight) or _needs_gradient(bias))
    return _forward_op(x, weight, bias, eps, stats)


class LayerNorm(torch.nn.Module):
    """`layer_norm` with its weight (ones) and bias (zeros); state as in `torch.nn.LayerNorm`.

    Args:
        hidden_size: Hidden size H.
        eps: Added to the variance.
        elementwise_affine: True for a weight (and bias).
        bias: True for a bias in addition to the weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        has_bias = elementwise_affine and bias
        weight = torch.ones(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.weight = None if weight is None else torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, affine={self.weight is not None}"
