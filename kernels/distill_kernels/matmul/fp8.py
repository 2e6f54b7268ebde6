"""Inference linear layer in fp8, with a scale for each row of the activations (on the fly) and of the weight (once).

    s_x[m] = max_k |x[m, k]| / 448        x8 = e4m3(x / s_x)
    s_w[n] = max_k |w[n, k]| / 448        w8 = e4m3(w / s_w)
    y[m, n] = s_x[m] s_w[n] sum_k x8[m, k] w8[n, k] + b[n]

e4m3 keeps 3 bits of mantissa: each operand is off by about 2.6 % (root mean square), so a product of independent
values by about 3.7 % of its norm. Quantising reads 2 and writes 1 byte an element of x (100 MB, 24 microseconds, for
8,192 x 4,096 at 4.2 TB/s); the product runs on cuBLAS's or CUTLASS's row-scaled fp8 kernels (`torch._scaled_mm`),
whose tensor cores do twice the bf16 rate. Layers that read the same activations quantise them once: `share_input`. What
a gated MLP's activation or a norm makes is quantised as it is computed, with the bits of both one after the other: 5
bytes an element in place of 9 (`Fp8Linear.forward_gated`), with a residual addition 7 in place of 11 (`fp8_rms_norm`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import nn

from distill_kernels.kernel_op import KernelOp, check_no_gradients, check_tensors
from distill_kernels.launch import device_facts, launch, next_power_of_2, runs_on_triton, tl, triton
from distill_kernels.layers.activations import activate
from distill_kernels.layers.glu import Activation, check_activation, glu
from distill_kernels.layers.rms_norm import Form, check_norm, launch_norm, reference_rms_norm
from distill_kernels.matmul.siblings import SIBLINGS, SiblingOutputs
from distill_kernels.operands import contiguous_rows, has_aligned_rows
from distill_kernels.torch_internals import map_nested, scaled_mm

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-12  # smallest scale, of a row of zeros


def reference_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [M, K] and fp32 scales [M, 1] whose product is x [M, K], rounded; NaN and inf give NaN."""
    upcast = x.float()
    scale = (upcast.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=TINY)
    return (upcast / scale).to(FP8), scale


def reference_fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `fp8_linear` of x [M, K] in plain PyTorch, accumulated in fp32: the specification."""
    x8, scale = reference_quantize_rows(x)
    y = (x8.float() @ weight.float().T) * scale * weight_scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    up_ptr,
    x8_ptr,
    scale_ptr,
    K,
    stride_x,
    stride_up,
    ACTIVATION: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, read once; of x, or of ACTIVATION(x) * up, rounded as `glu` leaves it."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        up = tl.load(up_ptr + row * stride_up + k, mask=k < K, other=0.0).to(tl.float32)
        x = (activate(x, ACTIVATION) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, TINY)
    # a NaN is lost by max, kept by the division; an infinity makes its row NaN here as in the reference
    tl.store(x8_ptr + row * K + k, (x / scale).to(tl.float8e4nv), mask=k < K)
    tl.store(scale_ptr + row, scale)


def _launch(
    x: torch.Tensor, up: torch.Tensor | None = None, activation: str = "none"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [M, K], or with an activation `glu(x, up)`, both of one dtype, row by row."""
    x = contiguous_rows(x)
    up = contiguous_rows(up)
    if not (runs_on_triton(x) and device_facts(x.device).fp8):
        return reference_quantize_rows(x if up is None else glu(x, up, activation))  # type: ignore[arg-type]
    rows, inputs = x.shape
    x8 = torch.empty(rows, inputs, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_2(inputs)
        warps = min(16, max(1, block // 1024))
        other = x if up is None else up
        launch(
            quantize_rows_kernel,
            (rows,),
            x,
            other,
            x8,
            scale,
            inputs,
            x.stride(0),
            other.stride(0),
            ACTIVATION=activation,
            TINY=TINY,
            BLOCK=block,
            num_warps=warps,
        )
    return x8, scale


def _new_outputs(x, up=None, activation="none") -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _check_matrices(x: torch.Tensor, up: torch.Tensor | None = None, activation: str = "none") -> None:
    check_tensors(x=x, up=up)
    check_no_gradients(x=x, up=up)
    if x.dim() != 2:
        raise ValueError(f"x: expected a matrix [M, K], got shape {tuple(x.shape)}")


_op = KernelOp("quantize_rows", _launch, _new_outputs, check=_check_matrices)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to e4m3 by its largest magnitude.

    Args:
        x: [M, K] float32, float16 or bfloat16.

    Returns:
        e4m3 [M, K] and fp32 scales [M, 1]; their product is x, each element off by at most 1/16 of itself
        (elements below 2^-15 of the row's largest: by 2^-19 of it).

    Raises:
        ValueError: If x is not a matrix, or requires a gradient.
    """
    quantized: tuple[torch.Tensor, torch.Tensor] = _op(x)
    return quantized


def _product(x8, scale, weight, weight_scale, bias, dtype):
    """Return the product [M, N] in `dtype` of quantised activations [M, K] and weight."""
    if not x8.is_cuda:
        y = (x8.float() @ weight.float().T) * scale * weight_scale
        return (y if bias is None else y + bias.float()).to(dtype)
    if not torch.compiler.is_compiling() and not has_aligned_rows(weight):
        weight = weight.clone(memory_format=torch.contiguous_format)
    scale_b = contiguous_rows(weight_scale).view(1, -1)
    y = scaled_mm(x8, weight.t(), scale_a=scale, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y if bias is None else y + bias


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `F.linear` with both operands in e4m3; activations are quantised row by row here. Inference only.

    Args:
        x: [..., K] bfloat16 (on the CPU any floating dtype).
        weight: e4m3 [N, K], from `quantize_rows` of the weight. On a GPU, K and N divide by 16.
        weight_scale: Scales of the weight's rows, fp32 [N].
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of x, within about 4 % (norm) of the unquantised layer.

    Raises:
        ValueError: For other dtypes, or if x requires a gradient.
    """
    check_tensors(x=x, weight=weight, weight_scale=weight_scale, bias=bias)
    _check(x)
    flat = x.reshape(-1, x.shape[-1])
    x8, scale = quantize_rows(flat)
    return _product(x8, scale, weight, weight_scale, bias, x.dtype).view(*x.shape[:-1], weight.shape[0])


def _check(x: torch.Tensor) -> None:
    check_tensors(x=x)
    if x.is_cuda and not device_facts(x.device).fp8:
        raise ValueError(f"x: expected a GPU with products of e4m3, got one of {device_facts(x.device).family}")
    if x.is_cuda and x.dtype != torch.bfloat16:
        raise ValueError(f"x: expected bfloat16 on a GPU, got {x.dtype}")
    check_no_gradients(x=x)


class QuantizedActivations(torch.Tensor):
    """Activations [..., K] of which there is e4m3 [M, K] and fp32 scales [M, 1] alone. `Fp8Linear` takes them as they
    are; any other operation is given their product, in the dtype that the activations would have.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    quantized: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def __new__(cls, quantized: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor) -> QuantizedActivations:
        rows: QuantizedActivations = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        rows.quantized = quantized
        return rows

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        def whole(x):
            return (x.quantized[0].float() * x.quantized[1]).view(x.shape).to(x.dtype) if isinstance(x, cls) else x

        return func(*map_nested(whole, args), **map_nested(whole, kwargs or {}))


def fp8_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    form: Form = "llama",
    residual: torch.Tensor | None = None,
) -> tuple[QuantizedActivations, torch.Tensor]:
    """`quantize_rows(rms_norm(x))`, or of `add_rms_norm` with a residual, for `Fp8Linear`; bit for bit, in one pass.

    Args:
        x, weight, eps, form, residual: See `add_rms_norm`; all of one dtype, without gradients.

    Returns:
        The normalised rows [..., H], and the sum `x + residual`, or x.

    Raises:
        ValueError: As `add_rms_norm`, or where dtypes differ.
    """
    check_norm(x, residual, weight, eps, form)
    for name, other in (("weight", weight), ("residual", residual)):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{name}: expected {x.dtype} as x, got {other.dtype}")
    if runs_on_triton(x) and device_facts(x.device).fp8:
        x8, total, scale = launch_norm(x.detach(), residual, weight, eps, form, FP8)
        return QuantizedActivations((x8.view(-1, x.shape[-1]), scale[:, None]), x), x if residual is None else total
    total = x if residual is None else x + residual
    normed = reference_rms_norm(total, weight, eps, form)
    return QuantizedActivations(reference_quantize_rows(normed.reshape(-1, x.shape[-1])), x), total


class Fp8Linear(nn.Module):
    """`nn.Linear` for inference with an e4m3 weight, half the bytes of bf16; activations are quantised row by row.

    Args:
        weight: [N, K] of any floating dtype, quantised here.
        bias: [N] or None.

    Raises:
        ValueError: Where N or K does not divide by 16 (the GPU's fp8 products need it), and in `forward` as
            `fp8_linear`.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        check_tensors(weight=weight, bias=bias)
        if weight.dim() != 2 or weight.shape[0] % 16 or weight.shape[1] % 16:
            raise ValueError(f"weight: expected [N, K] with N and K divisible by 16, got {tuple(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        weight8, scale = quantize_rows(weight.detach())
        self.register_buffer("weight", weight8)
        self.register_buffer("weight_scale", scale.flatten())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._shared: SiblingOutputs[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._place = 0
        self._siblings = 1

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Fp8Linear:
        """Return the fp8 form of a frozen `nn.Linear`."""
        return cls(linear.weight, linear.bias)

    @staticmethod
    def share_input(layers: Iterable[Fp8Linear]) -> None:
        """Let `layers` that are called one after another with the same tensor quantise it once.

        An inference tensor must not be written to between these calls. A layer called twice starts afresh.
        """
        layers = list(layers)
        shared = SiblingOutputs[tuple[torch.Tensor, torch.Tensor]]()
        for place, layer in enumerate(layers):
            layer._shared = shared
            layer._place = place
            layer._siblings = len(layers)

    def _quantize_for_all(self, x: torch.Tensor) -> tuple[dict[Hashable, tuple[torch.Tensor, torch.Tensor]], tuple[()]]:
        return dict.fromkeys(range(self._siblings), quantize_rows(x.reshape(-1, x.shape[-1]))), ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features] in the dtype of x, which `fp8_rms_norm` may have made."""
        if isinstance(x, QuantizedActivations):
            _check(x)
            quantized: tuple[torch.Tensor, torch.Tensor] | None = x.quantized
        elif self._shared is None or torch.compiler.is_compiling():
            return fp8_linear(x, self.weight, self.weight_scale, self.bias)
        else:
            _check(x)
            quantized = self._shared.take(self._place, x, self._quantize_for_all)
        assert quantized is not None
        y = _product(*quantized, self.weight, self.weight_scale, self.bias, x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def forward_gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        """`self(glu(gate, up, activation))`, bit for bit, without what is quantised in memory; hooks are not called.

        Args:
            gate, up: [..., in_features] of one dtype, bfloat16 on a GPU.

        Raises:
            ValueError: As `forward` and `glu`.
        """
        check_tensors(gate=gate, up=up)
        check_activation(activation)
        if gate.shape != up.shape or gate.dtype != up.dtype:
            expected = f"{gate.dtype} {tuple(gate.shape)}"
            raise ValueError(f"up: expected {expected} as gate, got {up.dtype} {tuple(up.shape)}")
        if torch.compiler.is_compiling():
            y: torch.Tensor = self(glu(gate, up, activation))
            return y
        check_no_gradients(gate=gate, up=up)
        for part in (gate, up):
            _check(part)
        x8, scale = _op(gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]), activation)
        y = _product(x8, scale, self.weight, self.weight_scale, self.bias, gate.dtype)
        return y.view(*gate.shape[:-1], self.out_features)

    def _apply(self, fn, recurse=True):
        """Move to a device, but keep fp8 and fp32 where a caller requests another dtype (`model.bfloat16()`)."""
        weight = self.weight
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight.dtype != weight.dtype:
            self.weight = weight.to(self.weight.device)
        if self.weight_scale.dtype != scale.dtype:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def swap_linears_for_fp8(model: nn.Module, keep: Iterable[str] = ("lm_head",)) -> list[str]:
    """Replace the `nn.Linear` layers of a frozen model by `Fp8Linear`, in place, one after another.

    Siblings by name (q, k and v; gate and up) share their quantised input.

    Args:
        model: Model for inference; its hooks on the replaced layers are lost.
        keep: Layers left as they are: every one whose dotted name contains one of these. The head costs most
            accuracy for least time.

    Returns:
        The dotted names of the layers replaced.

    Raises:
        ValueError: If none was replaced.
    """
    keep = tuple(keep)
    replaced = []
    # no layer is named here: it would be kept, in 16 bits, until the last one is replaced
    parents = [(name, module) for name, module in model.named_modules() if next(module.children(), None) is not None]
    for parent_name, parent in parents:
        for name, child in list(parent.named_children()):
            full = f"{parent_name}.{name}" if parent_name else name
            fits = type(child) is nn.Linear and child.in_features % 16 == 0 and child.out_features % 16 == 0
            if fits and not any(part in full for part in keep):
                setattr(parent, name, Fp8Linear.from_linear(child))
                replaced.append(full)
        for names in SIBLINGS:
            layers = [
                layer for layer in (getattr(parent, name, None) for name in names) if isinstance(layer, Fp8Linear)
            ]
            if len(layers) == len(names):
                Fp8Linear.share_input(layers)
    if not replaced:
        raise ValueError(f"model: expected nn.Linear layers with sizes divisible by 16 outside keep={keep}, got none")
    return replaced
