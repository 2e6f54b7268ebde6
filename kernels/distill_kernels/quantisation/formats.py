"""Formats in which blocks of weights share a scale, as pure functions: the specification of files and kernels.

A block of weights `w` is stored as integers `q` in [low, high] and one scale `d` in 16 bits; its values are `q d`.

| format | block | q | d | scale of a block | q before it is clamped |
|---|---|---|---|---|---|
| `q4_0` | 32 of a row | [-8, 7] | fp16 | (number of largest magnitude) / -8 | floor(w / d + 8.5) - 8 |
| `q8_0` | 32 of a row | [-127, 127] | fp16 | largest magnitude / 127 | w / d, halves away from zero |
| `int4_g32` | 32 of a row | [-8, 7] | bf16 | (number of largest magnitude) / -8 | floor(w / d + 8.5) - 8 |
| `int8` | a row | [-127, 127] | bf16 | largest magnitude / 127 | w / d, halves away from zero |

The first two are GGUF's blocks, rounded as llama.cpp's `quantize_row_q4_0_ref` and `quantize_row_q8_0_ref` round: by
the scale in fp32, stored in fp16. The others are groups and channels of compressed-tensors (pack-quantized), rounded by
the stored scale; one with a sign leaves 0.78 of the squared error of magnitude / 7. All arithmetic is in fp32.

Quantising the values of a block again gives the same block: that is how a trained student keeps its file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """One number format.

    Attributes:
        bits: Bits of a weight, without its share of the scale.
        block: Weights of a row that share a scale; 0 for the whole row.
        low, high: Smallest and largest integer.
        scale_dtype: Dtype that scales are stored in.
        signed: The scale has the sign that makes the number of largest magnitude `low` times it.
        rounds_by_stored: Integers are found with the stored scale rather than with the one in fp32.
    """

    bits: int
    block: int
    low: int
    high: int
    scale_dtype: torch.dtype
    signed: bool = False
    rounds_by_stored: bool = False

    def columns(self, weight: torch.Tensor) -> int:
        """Return the weights per block of a matrix."""
        return self.block or weight.shape[-1]


FORMATS: dict[str, Format] = {
    "q4_0": Format(4, 32, -8, 7, torch.float16, signed=True),
    "q8_0": Format(8, 32, -127, 127, torch.float16),
    "int4_g32": Format(4, 32, -8, 7, torch.bfloat16, signed=True, rounds_by_stored=True),
    "int8": Format(8, 0, -127, 127, torch.bfloat16, rounds_by_stored=True),
}


class Blocks(NamedTuple):
    """A quantised matrix.

    Attributes:
        codes: Integers, int8 [..., K].
        scale: Scale of each block, [..., K / block], in the format's scale dtype.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return the weights that the blocks stand for, fp32 [..., K]: exact products."""
        columns = self.codes.shape[-1] // self.scale.shape[-1]
        blocks = self.codes.unflatten(-1, (-1, columns)).float() * self.scale.float()[..., None]
        return blocks.flatten(-2)


def check_fits(weight: torch.Tensor, name: str) -> Format:
    """Return the format called `name`, if it holds matrices of the shape of `weight`.

    Raises:
        ValueError: For an unknown format, or rows that are not whole blocks.
    """
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    block = FORMATS[name].block or 1
    if weight.dim() == 0 or weight.shape[-1] == 0 or weight.shape[-1] % block:
        raise ValueError(f"weight: expected [..., K] with K divisible by {block} for {name}, got {tuple(weight.shape)}")
    return FORMATS[name]


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, and 0 for 0."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero, as C's `roundf` does."""
    whole = x.abs().floor()
    return torch.copysign(whole + (x.abs() - whole >= 0.5), x)


def reference_scale(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the scale of each block in fp32, before it is stored: fp32 [..., K / block]."""
    form = check_fits(weight, name)
    blocks = weight.float().unflatten(-1, (-1, form.columns(weight)))
    if not form.signed:
        return divide(blocks.abs().amax(-1), form.high)
    largest = blocks.abs().argmax(-1, keepdim=True)  # the first of equals
    return divide(blocks.gather(-1, largest).squeeze(-1), form.low)


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a tensor: on a GPU PyTorch multiplies by the reciprocal of a plain number, which rounds otherwise."""
    return x / x.new_full((), number)


def reference_quantise(weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> Blocks:
    """Quantise a matrix.

    Args:
        weight: [..., K] floating, K divisible by the format's block.
        name: A key of `FORMATS`.
        scale: [..., K / block], rounded to the format's scale dtype before use; None for that of the table above.

    Raises:
        ValueError: For a shape that the format cannot hold.
    """
    form = check_fits(weight, name)
    rounding = reference_scale(weight, name) if scale is None else scale
    stored = rounding.to(form.scale_dtype)
    if form.rounds_by_stored or scale is not None:
        rounding = stored.float()
    x = weight.float().unflatten(-1, (-1, form.columns(weight))) * reciprocal(rounding)[..., None]
    if form.signed and scale is None:
        codes = (x + 8.5).trunc() - 8  # never below -8: the number of largest magnitude is -8
    else:
        codes = round_half_away(x)
    return Blocks(codes.clamp(form.low, form.high).to(torch.int8).flatten(-2), stored)


def reference_fake_quantise(weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values that `weight` has after quantisation, in its own dtype: the specification of the kernel."""
    return reference_quantise(weight, name, scale).values().to(weight.dtype)


def reference_learned_gradients(
    weight: torch.Tensor, scale: torch.Tensor, upstream: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of weights and scales through rounding (Esser et al., 2020, arXiv 1902.08153).

    With `x = w / d` and `q = round(x)`: inside [low, high] the value's derivative is 1 by w and `q - x` by d; where q
    was clamped it is 0 by w and the bound by d.

    Returns:
        The gradient of `weight` in the dtype of `upstream`, and that of `scale`, fp32 [..., K / block].
    """
    form = check_fits(weight, name)
    columns = form.columns(weight)
    stored = scale.to(form.scale_dtype).float()
    x = weight.float().unflatten(-1, (-1, columns)) * reciprocal(stored)[..., None]
    rounded = round_half_away(x)
    codes = rounded.clamp(form.low, form.high)
    inside = rounded == codes
    gradient = upstream.float().unflatten(-1, (-1, columns))
    of_scale = (gradient * (codes - torch.where(inside, x, 0.0))).sum(-1)
    return (gradient * inside).flatten(-2).to(upstream.dtype), of_scale
