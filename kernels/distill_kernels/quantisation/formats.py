"""All number formats by name, and quantisation as pure functions: the specification of files and kernels.

A block of weights is stored as codes `q` and a scale `d` (and a minimum `m` in some formats); its values are
`q d - m`. Which codes and scales there are stands in `gguf_blocks.py` and `packed_tensors.py`. All arithmetic is in
fp32. Scales that were chosen by other means than the format's own are given: codes are then the nearest, `w + m` over
`d`; with the format's own, llama.cpp's `quantize_row_q4_0_ref` and its siblings say what is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from distill_kernels.quantisation.gguf_blocks import GGUF_FORMATS
from distill_kernels.quantisation.number_format import NumberFormat, Scales, reciprocal
from distill_kernels.quantisation.packed_tensors import TENSOR_FORMATS

FORMATS: dict[str, NumberFormat] = {form.name: form for form in (*GGUF_FORMATS, *TENSOR_FORMATS)}


class Blocks(NamedTuple):
    """A quantised matrix.

    Attributes:
        form: Its format.
        codes: fp32 [..., K].
        stored: Scales as the file holds them, by field.
    """

    form: NumberFormat
    codes: torch.Tensor
    stored: Mapping[str, torch.Tensor]

    def values(self) -> torch.Tensor:
        """Return the weights that the blocks stand for, fp32 [..., K]."""
        return self.form.values(self.codes, self.form.load(self.stored))


def check_fits(weight: torch.Tensor, name: str | NumberFormat, scales: Scales | None) -> NumberFormat:
    """Return a format that holds matrices of the shape of `weight`.

    Args:
        weight: Matrix, [..., K].
        name: A format, or its name for the one whose range fits `weight` where the scales are the format's own.
        scales: Scales of the blocks; None for the format's own.

    Raises:
        ValueError: For an unknown format, or rows that are not whole blocks.
    """
    if isinstance(name, NumberFormat):
        form = name
    elif name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    else:
        form = FORMATS[name] if scales is not None else FORMATS[name].fitted((weight,))
    block = (form.block or 1) * form.unit
    if weight.dim() == 0 or weight.shape[-1] == 0 or weight.shape[-1] % block:
        raise ValueError(
            f"weight: expected [..., K] with K divisible by {block} for {form.name}, got {tuple(weight.shape)}"
        )
    return form


def fitting_format(name: str, columns: int) -> str | None:
    """Return the format that holds rows of so many columns: `name`, or what llama.cpp takes instead; None for none."""
    while name and columns % ((FORMATS[name].block or 1) * FORMATS[name].unit):
        name = FORMATS[name].fallback or ""
    return name or None


def reference_quantise(weight: torch.Tensor, name: str | NumberFormat, scales: Scales | None = None) -> Blocks:
    """Quantise a matrix.

    Args:
        weight: [..., K] floating, K divisible by the format's block.
        name: A key of `FORMATS`, or a format.
        scales: Scales of the blocks, rounded to those that the file holds before use; None for the format's own.

    Raises:
        ValueError: For a shape that the format cannot hold, and numbers that no file holds: NaN and infinity.
    """
    if not weight.isfinite().all():
        raise ValueError(f"weight: expected finite numbers for a file, got {_not_finite(weight)}")
    return _quantised(weight, name, scales)


def _not_finite(weight: torch.Tensor) -> str:
    return f"{int((~weight.isfinite()).sum())} of {weight.numel()} that are NaN or infinite"


def _quantised(weight: torch.Tensor, name: str | NumberFormat, scales: Scales | None) -> Blocks:
    form = check_fits(weight, name, scales)
    chosen = form.first(weight) if scales is None else scales
    stored = form.store(chosen)
    if scales is not None or not form.in_kernel:
        return Blocks(form, form.encode(weight, form.load(stored)), stored)
    rounding = form.load(stored).scale if form.rounds_by_stored else chosen.scale
    x = form.blocks(weight) * reciprocal(rounding)[..., None]
    # the weight of largest magnitude is the lowest code where scales have a sign
    codes = (x + (0.5 - form.codes.low)).trunc() + form.codes.low if form.signed else form.codes.round(x)
    return Blocks(form, codes.clamp(form.codes.low, form.codes.high).flatten(-2), stored)


def reference_fake_quantise(
    weight: torch.Tensor, name: str | NumberFormat, scales: Scales | None = None
) -> torch.Tensor:
    """Return the values that `weight` has after quantisation, in its own dtype: the specification of the kernel.

    NaN and infinity stay what they are: as codes, which are clamped, they would become finite.
    """
    values = _quantised(weight, name, scales).values().to(weight.dtype)
    return torch.where(weight.isfinite(), values, weight)


def reference_learned_gradients(
    weight: torch.Tensor, scales: Scales, upstream: torch.Tensor, name: str | NumberFormat
) -> tuple[torch.Tensor, Scales]:
    """Return gradients of weights and scales through rounding (Esser et al., 2020, arXiv 1902.08153).

    With `x = (w + m) / d` and `q = round(x)`: inside the range of codes the value's derivative is 1 by w, `q - x` by d
    and 0 by m; where q was clamped it is 0 by w, the bound by d and -1 by m.

    Returns:
        The gradient of `weight` in the dtype of `upstream`, and those of the scales.
    """
    form = check_fits(weight, name, scales)
    stored = form.snap(scales)
    blocks = form.blocks(weight)
    gradient = form.blocks(upstream)
    if stored.minimum is not None:
        blocks = blocks + stored.minimum[..., None]
    x = form.relative(blocks, stored.scale)
    rounded = form.codes.round(x)
    codes = rounded.clamp(form.codes.low, form.codes.high)
    inside = rounded == codes
    of_scale = (gradient * (codes - torch.where(inside, x, 0.0))).sum(-1)
    of_minimum = None if stored.minimum is None else -(gradient * ~inside).sum(-1)
    return (gradient * inside).flatten(-2).to(upstream.dtype), Scales(of_scale, of_minimum)
