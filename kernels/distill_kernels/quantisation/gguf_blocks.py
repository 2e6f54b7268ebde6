"""Blocks of GGUF files, as llama.cpp rounds and lays them out.

| format | block | codes | scale, minimum |
|---|---|---|---|
| `q4_0` | 32 | [-8, 7] | fp16, (weight of largest magnitude) / -8 |
| `q5_0` | 32 | [-16, 15] | fp16, (weight of largest magnitude) / -16 |
| `q8_0` | 32 | [-127, 127] | fp16, largest magnitude / 127 |
| `q4_k` | 32 of 256 | [0, 15] | 6 bits each times fp16 scales of the 256 |
| `q6_k` | 16 of 256 | [-32, 31] | 8 bits times an fp16 scale of the 256 |

Scales of the last two are searched: `make_qkx2_quants` and `make_qx_quants` of llama.cpp's `ggml-quants.c`, whose order
of additions is kept, so that the same bits come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from distill_kernels.quantisation.number_format import Codes, NumberFormat, Scales, divide, reciprocal

EPS = 1e-15  # magnitude below which a block is zero
CHUNK = 1 << 16  # blocks that are searched at once


def _bytes(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a tensor's bytes, uint8 [..., blocks, bytes of a block]; its last axis is one field a block or more."""
    return tensor.contiguous().view(torch.uint8).unflatten(-1, (blocks, -1))


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Add along the first axis, one after another in fp32."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


class _Gguf(NumberFormat):
    file = "gguf"

    def pack(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the bytes of the rows, uint8 [N, bytes of a row]."""
        columns = (self.block or 1) * self.unit
        parts = self.fields(codes.to(torch.int16).unflatten(-1, (-1, columns)), stored)
        return {"weight": torch.cat(parts, -1).flatten(-2)}

    def fields(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of a block in their order, each uint8 [N, blocks, bytes]."""
        raise NotImplementedError


class SimpleBlocks(_Gguf):
    """Blocks of 32 weights and a scale in fp16: 4, 5 or 8 bits a weight."""

    def fields(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the scale, the fifth bits where there are any, and the codes, the first half of the block below."""
        scale = _bytes(stored["scale"], codes.shape[-2])
        if self.bits == 8:
            return [scale, codes.to(torch.int8).view(torch.uint8)]
        codes = codes - self.codes.low
        halves = ((codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4)).to(torch.uint8)
        if self.bits == 4:
            return [scale, halves]
        fifth = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.int16)
        return [scale, fifth.sum(-1).to(torch.uint8), halves]


class _KBlocks(_Gguf):
    in_kernel: ClassVar[bool] = False

    def first(self, weight: torch.Tensor) -> Scales:
        """Return the scales that llama.cpp's search chooses."""
        return self._searched(weight, None)

    def search(self, weight: torch.Tensor, importance: torch.Tensor) -> Scales:
        """Return the scales that the search chooses for errors weighed by importance [K]."""
        return self._searched(weight, importance.expand_as(weight))

    def _searched(self, weight: torch.Tensor, importance: torch.Tensor | None) -> Scales:
        blocks = self.blocks(weight)
        flat = blocks.reshape(-1, self.block)
        size = blocks.shape[:-1]
        weighed = None if importance is None else self.blocks(importance).reshape(-1, self.block)
        found = [
            self._search(flat[at : at + CHUNK].t(), None if weighed is None else weighed[at : at + CHUNK].t())
            for at in range(0, len(flat), CHUNK)
        ]
        parts = [torch.cat(part).view(size) for part in zip(*found, strict=True)] or [flat.new_empty(size)] * 2
        return self.snap(Scales(parts[0], parts[1] if self.has_minimum else None))

    def encode(self, weight: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Return the nearest codes, and the lowest where a scale is 0."""
        codes = self.blocks(super().encode(weight, scales))
        return torch.where(scales.scale[..., None] == 0, float(self.codes.low), codes).flatten(-2)

    def _search(self, x: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return scales (and minima) [B] of blocks, whose weights lie along the first axis of `x` [block, B]."""
        raise NotImplementedError


class Q4K(_KBlocks):
    """Eight blocks of 32 weights, whose scales and minima of 6 bits are multiples of two scales in fp16."""

    unit: ClassVar[int] = 8
    fallback: ClassVar[str | None] = "q5_0"
    has_minimum: ClassVar[bool] = True

    def _search(self, x: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        mean = _sum(x * x)
        if importance is None:
            w = divide(mean, 32).double().sqrt().float() + x.abs()  # that of CPUs in fp32 may be off by a bit
        else:
            w = importance * (2 * divide(mean, 32) + x * x).sqrt()
        low = x.amin(0).clamp_max(0)
        high = x.amax(0)
        flat = high == low
        sum_w = _sum(w)
        sum_x = _sum(w * x)
        inverse = x.new_full((), 15.0) / torch.where(flat, 1.0, high - low)
        scale = 1.0 / inverse
        minimum = low
        codes = (inverse * (x - low)).round().clamp(0, 15)
        best = _sum(w * (scale * codes + low - x).square())
        for step in range(21):
            # from the best minimum so far, as there
            inverse = (x.new_full((), -1.0) + x.new_full((), 0.1) * step + 15) / torch.where(flat, 1.0, high - minimum)
            codes = (inverse * (x - minimum)).round().clamp(0, 15)
            wl = w * codes
            sum_l, sum_l2, sum_xl = _sum(torch.stack([wl, wl * codes, wl * x], 1))
            determinant = sum_w * sum_l2 - sum_l * sum_l
            tried = (sum_w * sum_xl - sum_x * sum_l) / determinant
            lowest = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            above = lowest > 0
            tried = torch.where(above, sum_xl / sum_l2, tried)
            lowest = torch.where(above, 0.0, lowest)
            error = _sum(w * (tried * codes + lowest - x).square())
            better = (determinant > 0) & (error < best)
            best = torch.where(better, error, best)
            scale = torch.where(better, tried, scale)
            minimum = torch.where(better, lowest, minimum)
        return torch.where(flat, 0.0, scale), -torch.where(flat, low, minimum)

    def store(self, scales: Scales) -> dict[str, torch.Tensor]:
        """Return multiples (6 bits) and fp16 scales of the 256 weights, for scales and for minima."""
        stored = {}
        assert scales.minimum is not None
        for name, part in (("scale", scales.scale), ("minimum", scales.minimum)):
            eights = (part.clamp_min(0) + 0.0).unflatten(-1, (-1, 8))  # no negative zero
            most = eights.amax(-1)
            inverse = torch.where(most > 0, most.new_full((), 63.0) / most, 0.0)
            stored[f"{name}_multiple"] = (inverse[..., None] * eights).round().clamp_max(63).to(torch.uint8).flatten(-2)
            stored[name] = divide(most, 63).to(torch.float16)
        return stored

    def load(self, stored: Mapping[str, torch.Tensor]) -> Scales:
        """Return the products of multiples and scales."""
        parts = (
            (stored[name].float()[..., None] * stored[f"{name}_multiple"].unflatten(-1, (-1, 8)).float()).flatten(-2)
            for name in ("scale", "minimum")
        )
        return Scales(*parts)

    def fields(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return both scales, the multiples (12 bytes), and the codes, 32 below and 32 above in a byte."""
        blocks = codes.shape[-2]
        s, m = (stored[f"{name}_multiple"].unflatten(-1, (blocks, 8)) for name in ("scale", "minimum"))
        multiples = [part[..., :4] | ((part[..., 4:] >> 4) << 6) for part in (s, m)]
        multiples.append((s[..., 4:] & 15) | ((m[..., 4:] & 15) << 4))
        pairs = codes.to(torch.uint8).unflatten(-1, (4, 2, 32))
        halves = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2)
        return [_bytes(stored["scale"], blocks), _bytes(stored["minimum"], blocks), *multiples, halves]


class Q6K(_KBlocks):
    """Sixteen blocks of 16 weights, whose scales of 8 bits are multiples of one in fp16."""

    unit: ClassVar[int] = 16
    fallback: ClassVar[str | None] = "q8_0"

    def _search(self, x: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        w = x * x if importance is None else importance
        largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
        zero = largest.abs() < EPS
        safe = torch.where(zero, 1.0, largest)
        scale = best = torch.zeros_like(largest)
        for step in (0, *range(-9, 0), *range(1, 10)):
            inverse = -(32 + x.new_full((), 0.1) * step) / safe
            codes = (inverse * x).round().clamp(-32, 31)
            sum_lx, sum_l2 = _sum(torch.stack([w * x * codes, w * codes * codes], 1))
            better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2) if step else sum_l2 != 0
            scale = torch.where(better, sum_lx / sum_l2, scale)
            best = torch.where(better, scale * sum_lx, best)
        return (torch.where(zero, 0.0, scale),)

    def store(self, scales: Scales) -> dict[str, torch.Tensor]:
        """Return multiples (8 bits) and the fp16 scale of 256 weights."""
        parts = scales.scale.unflatten(-1, (-1, 16))
        most = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
        inverse = torch.where(most.abs() < EPS, 0.0, most.new_full((), -128.0) / most)
        multiples = (inverse * parts).round().clamp(-128, 127).to(torch.int8)
        return {"scale": reciprocal(inverse)[..., 0].to(torch.float16), "scale_multiple": multiples.flatten(-2)}

    def load(self, stored: Mapping[str, torch.Tensor]) -> Scales:
        """Return the products of multiples and scale."""
        multiples = stored["scale_multiple"].unflatten(-1, (-1, 16)).float()
        return Scales((stored["scale"].float()[..., None] * multiples).flatten(-2))

    def fields(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the low four bits of codes, their high two, the multiples and the scale."""
        quarters = (codes + 32).to(torch.uint8).unflatten(-1, (2, 4, 32))
        low = quarters[..., :2, :] & 15 | ((quarters[..., 2:, :] & 15) << 4)
        shifts = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
        high = ((quarters >> 4) << shifts).sum(-2, dtype=torch.uint8)
        blocks = codes.shape[-2]
        multiples = stored["scale_multiple"].unflatten(-1, (blocks, 16)).view(torch.uint8)
        return [low.flatten(-3), high.flatten(-2), multiples, _bytes(stored["scale"], blocks)]


GGUF_FORMATS: tuple[NumberFormat, ...] = (
    SimpleBlocks("q4_0", 4, 32, Codes(-8, 7), signed=True),
    SimpleBlocks("q5_0", 5, 32, Codes(-16, 15), signed=True),
    SimpleBlocks("q8_0", 8, 32, Codes(-127, 127)),
    Q4K("q4_k", 4, 32, Codes(0, 15, even=True)),
    Q6K("q6_k", 6, 16, Codes(-32, 31, even=True), scale_bits=9),
)
