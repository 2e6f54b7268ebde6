"""One number format of weights: the interface that training, controls and files share.

A block of weights shares a scale `d` and, in some formats, a minimum `m`: its values are `q d - m` with codes `q` of
few bits. A format says which codes there are, how scales are chosen and stored, and how a file holds them. What a file
needs are pure functions of PyTorch, so that one class serves the fake quantiser, the controls and the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

FACTORS = tuple(0.70 + 0.025 * step for step in range(17))  # of the format's own scale, tried for a block


class Codes(NamedTuple):
    """Numbers that a weight's few bits stand for.

    Attributes:
        low, high: Smallest and largest.
        mantissa: Bits of the fraction of floating-point codes; 0 for integers.
        exponent: Least exponent of floating-point codes, below which they are evenly spaced.
        even: codes are those of a quotient, halves to the even neighbour, as llama.cpp rounds its larger blocks; others
            are those of a product with the scale's reciprocal, integers with halves away from zero.
    """

    low: int
    high: int
    mantissa: int = 0
    exponent: int = 0
    even: bool = False

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the nearest code, before it is clamped."""
        if self.mantissa:
            exponent = (torch.frexp(x).exponent - 1).clamp_min(self.exponent)
            step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa)
            return (x / step).round() * step
        return x.round() if self.even else round_half_away(x)

    def clamped(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the nearest code."""
        return self.round(x).clamp(self.low, self.high)


class Scales(NamedTuple):
    """Scales of a matrix's blocks.

    Attributes:
        scale: fp32 [..., K / block].
        minimum: fp32 [..., K / block], subtracted from each value of a block; None for formats without.
    """

    scale: torch.Tensor
    minimum: torch.Tensor | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Scales:
        return Scales(function(self.scale), None if self.minimum is None else function(self.minimum))


@dataclass(frozen=True)
class NumberFormat:
    """A number format.

    Attributes:
        name: Name in recipes and files.
        bits: Bits of a code.
        block: Weights of a row that share a scale; 0 for the whole row.
        codes: The codes.
        scale_bits: Bits of a block's scale and minimum, with its share of what several blocks store together.
        scale_dtype: Dtype that scales are stored in.
        signed: The scale has the sign that makes the weight of largest magnitude the lowest code.
        rounds_by_stored: Codes are found with the stored scale rather than with the one in fp32.
    """

    name: str
    bits: int
    block: int
    codes: Codes
    scale_bits: int = 16
    scale_dtype: torch.dtype = torch.float16
    signed: bool = False
    rounds_by_stored: bool = False

    file: ClassVar[str]  # kind of file: gguf or compressed-tensors
    unit: ClassVar[int] = 1  # blocks that are stored together
    has_minimum: ClassVar[bool] = False
    in_kernel: ClassVar[bool] = True  # the fused fake quantiser computes scales itself
    fallback: ClassVar[str | None] = None  # format of rows that are not whole blocks

    @property
    def is_learned(self) -> bool:
        """Return whether scales can be trained; those of 8 bits follow from the largest weight."""
        return self.bits < 8

    def fitted(self, weights: Sequence[torch.Tensor]) -> NumberFormat:
        """Return the format with a range that holds all of these weights; most formats hold any."""
        return self

    def bytes_of(self, weight: torch.Tensor) -> int:
        """Return the bytes of a matrix in a file."""
        return (weight.numel() * self.bits + weight.numel() // self.columns(weight) * self.scale_bits) // 8

    def columns(self, weight: torch.Tensor) -> int:
        """Return the weights per block of a matrix."""
        return self.block or weight.shape[-1]

    def blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the blocks of a matrix, fp32 [..., K / block, block]."""
        return weight.float().unflatten(-1, (-1, self.columns(weight)))

    def first(self, weight: torch.Tensor) -> Scales:
        """Return the scales that a plain converter chooses, before they are stored."""
        blocks = self.blocks(weight)
        if not self.signed:
            return Scales(divide(blocks.abs().amax(-1), self.codes.high))
        largest = blocks.abs().argmax(-1, keepdim=True)  # the first of equals
        return Scales(divide(blocks.gather(-1, largest).squeeze(-1), self.codes.low))

    def search(self, weight: torch.Tensor, importance: torch.Tensor) -> Scales:
        """Choose each block's scale by the squared error that importance [K] weighs, among multiples of the first."""
        first = self.first(weight).scale
        weight = weight.float()
        best = first
        least = torch.full_like(first, torch.inf)
        signs = (1.0, -1.0) if self.codes.low != -self.codes.high else (1.0,)
        for factor in (sign * factor for factor in FACTORS for sign in signs):
            scales = self.snap(Scales(first * factor))
            error = (self.values(self.encode(weight, scales), scales) - weight).square() * importance
            error = self.blocks(error).sum(-1)
            best = torch.where(error < least, scales.scale, best)
            least = torch.minimum(error, least)
        return Scales(best)

    def store(self, scales: Scales) -> dict[str, torch.Tensor]:
        """Return scales as the file holds them, by field; `load` is the inverse."""
        return {"scale": scales.scale.to(self.scale_dtype)}

    def load(self, stored: Mapping[str, torch.Tensor]) -> Scales:
        """Return the stored scales in fp32."""
        return Scales(stored["scale"].float())

    def snap(self, scales: Scales) -> Scales:
        """Return scales rounded to those that the file can hold."""
        return self.load(self.store(scales))

    def encode(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return the nearest codes by stored scales, fp32 [..., K]."""
        blocks = self.blocks(weight)
        if scales.minimum is not None:
            blocks = blocks + scales.minimum[..., None]
        return self.codes.clamped(self.relative(blocks, scales.scale)).flatten(-2)

    def relative(self, blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return blocks [..., block] in units of their scales [...], and 0 for a scale of 0."""
        if self.codes.even:
            return torch.where(scale[..., None] == 0, 0.0, blocks / scale[..., None])
        return blocks * reciprocal(scale)[..., None]

    def values(self, codes: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return the weights that codes stand for, fp32 [..., K]."""
        blocks = codes.unflatten(-1, (scales.scale.shape[-1], -1)) * scales.scale[..., None]
        return (blocks if scales.minimum is None else blocks - scales.minimum[..., None]).flatten(-2)

    def pack(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a file that hold a matrix, by their names in its module."""
        raise NotImplementedError

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the values that the tensors of `pack` hold, fp32 [N, K]."""
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """Return what a file's configuration says of the format."""
        return {}


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, and 0 for 0."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def round_half_away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero, as C's `roundf` does."""
    whole = x.abs().floor()
    return torch.copysign(whole + (x.abs() - whole >= 0.5), x)


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide by a tensor: on a GPU PyTorch multiplies by the reciprocal of a plain number, which rounds otherwise."""
    return x / x.new_full((), number)
