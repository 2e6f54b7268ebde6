"""Formats of compressed-tensors, which vLLM and transformers read.

| format | block | codes | scale | layout |
|---|---|---|---|---|
| `int4_g32` | 32 of a row | [-8, 7] | bf16, (weight of largest magnitude) / -8 | pack-quantized |
| `int8` | a row | [-127, 127] | bf16, largest magnitude / 127 | pack-quantized |
| `fp8` | a row | e4m3, up to 448 | bf16, largest magnitude / 448 | float-quantized |
| `nvfp4` | 16 of a row | e2m1, up to 6 | e4m3 over a global scale, largest magnitude / 6 | nvfp4-pack-quantized |

All are rounded by the stored scale. One with a sign leaves 0.78 of the squared error of magnitude / 7.

`nvfp4` has a global scale beside those of its blocks. It follows from the largest magnitude of the matrix: a quarter to
a half of 448 * 6 / magnitude, so that weights and learned scales may double in training before one is clipped, and a
power of two, so that no scale is rounded by it. Blocks down to 1/7168 of the largest keep all three bits of their
scale's fraction. Projections that a server joins need the same one: `fitted` takes their matrices together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from distill_kernels.quantisation.number_format import Codes, NumberFormat, Scales

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MOST = 448.0
GLOBAL = "global_scale"  # field of stored scales


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [N, K] of 4 or 8 bits into int32 [N, K bits / 32], the first in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[-1] % each))
    shifts = torch.arange(each, dtype=torch.int64) * bits
    words = (padded.unflatten(-1, (-1, each)) << shifts).sum(-1)  # below 2^32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_codes(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return the integers of `pack_codes`: int8 [N, columns]."""
    shifts = torch.arange(32 // bits, dtype=torch.int64) * bits
    fields = (packed.long()[..., None] >> shifts) & ((1 << bits) - 1)
    return (fields.flatten(-2)[..., :columns] - (1 << (bits - 1))).to(torch.int8)


class PackedIntegers(NumberFormat):
    """Integers in words of 32 bits (pack-quantized)."""

    file: ClassVar[str] = "compressed-tensors"
    layout: ClassVar[str] = "pack-quantized"

    def pack(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": pack_codes(codes, self.bits),
            "weight_scale": stored["scale"],
            "weight_shape": torch.tensor(codes.shape),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = unpack_codes(tensors["weight_packed"], self.bits, int(tensors["weight_shape"][-1]))
        return self.values(codes.float(), Scales(tensors["weight_scale"].float()))

    def described(self) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": "float" if self.codes.mantissa else "int",
            "symmetric": True,
            "strategy": "group" if self.block else "channel",
            "group_size": self.block or None,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }


class Float8(PackedIntegers):
    """Floating point in 8 bits with a scale a row (float-quantized)."""

    layout: ClassVar[str] = "float-quantized"

    def pack(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": stored["scale"]}

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.values(tensors["weight"].float(), Scales(tensors["weight_scale"].float()))


@dataclass(frozen=True)
class NvFp4(PackedIntegers):
    """Floating point in 4 bits with scales in e4m3 (nvfp4-pack-quantized).

    Attributes:
        global_scale: What scales of blocks are multiplied by before they are stored.
    """

    global_scale: float = 512.0

    layout: ClassVar[str] = "nvfp4-pack-quantized"
    in_kernel: ClassVar[bool] = False

    def fitted(self, weights: Sequence[torch.Tensor]) -> NvFp4:
        """Return the format with the global scale of these weights, none of whose blocks is clipped by it."""
        weights = [weight.detach() for weight in weights if weight.numel() and not weight.is_meta]
        largest = max((float(weight.abs().amax()) for weight in weights), default=0.0)
        if not 0.0 < largest < math.inf:
            return self
        power = math.floor(math.log2(E4M3_MOST * self.codes.high / largest)) - 1
        return replace(self, global_scale=2.0 ** min(power, 100))

    def store(self, scales: Scales) -> dict[str, torch.Tensor]:
        """Return the scales in e4m3, relative to the global one, and that."""
        scale = (scales.scale * self.global_scale).clamp(0, E4M3_MOST).to(torch.float8_e4m3fn)
        return {"scale": scale, GLOBAL: torch.tensor([self.global_scale])}

    def load(self, stored: Mapping[str, torch.Tensor]) -> Scales:
        """Return the scales; files of earlier versions hold no global one, which was 512."""
        return Scales(stored["scale"].float() / float(stored.get(GLOBAL, self.global_scale)))

    def pack(self, codes: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return two codes a byte, the first below, their scales and the global one."""
        numbers = torch.searchsorted(torch.tensor(E2M1), codes.abs().contiguous()).to(torch.uint8)
        pairs = (numbers | (codes.signbit().to(torch.uint8) << 3)).unflatten(-1, (-1, 2))
        return {
            "weight_packed": pairs[..., 0] | (pairs[..., 1] << 4),
            "weight_scale": stored["scale"],
            "weight_global_scale": stored.get(GLOBAL, torch.tensor([self.global_scale])),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        fields = torch.stack([tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4], -1).flatten(-2).long()
        codes = torch.tensor((*E2M1, *(-number for number in E2M1)))[fields]
        return self.values(codes, Scales(tensors["weight_scale"].float() / tensors["weight_global_scale"]))

    def described(self) -> dict[str, Any]:
        return super().described() | {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}


TENSOR_FORMATS: tuple[NumberFormat, ...] = (
    PackedIntegers("int4_g32", 4, 32, Codes(-8, 7), 16, torch.bfloat16, signed=True, rounds_by_stored=True),
    PackedIntegers("int8", 8, 0, Codes(-127, 127), 16, torch.bfloat16, rounds_by_stored=True),
    Float8("fp8", 8, 0, Codes(-448, 448, mantissa=3, exponent=-6), 16, torch.bfloat16, rounds_by_stored=True),
    NvFp4("nvfp4", 4, 16, Codes(-6, 6, mantissa=1), 8, torch.float8_e4m3fn, rounds_by_stored=True),
)
