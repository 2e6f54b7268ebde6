"""Lossy rows of a teacher's outputs: how hidden states and K tokens are packed in a store and on the wire.

A row belongs to one position. Of hidden states of H numbers:

    float32, bfloat16, float16    the numbers in that dtype
    fp8                           H bytes of e4m3 (1 sign, 4 exponent and 3 mantissa bits) and a float32: the row is
                                  divided by its largest absolute value over 448, the largest number of e4m3, first

Of K tokens of a vocabulary, with numbers in float16 or float32:

    ids        uint16 [K]
    ids_high   what exceeds 16 bits: 1, 2, 4 or 8 bits an id, packed into bytes; none for at most 65,536 tokens
    logprobs   [K]
    tail, entropy, label_logprob    a number each

What the numbers mean is told in `top_k_encoding`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": FP8}
FIGURES = ("tail", "entropy", "label_logprob")  # of K tokens, one number a row each


# ------------------------------------------------------------------ hidden states


def pack_hidden(hidden: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden states [M, H] in `dtype`, and for fp8 the float32 scale [M] of each row, else None."""
    if dtype != FP8:
        return hidden.to(dtype), None
    wide = hidden.float()
    scale = wide.abs().amax(-1) / torch.finfo(FP8).max
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # of a row of zeros, which stays one
    return (wide / scale[:, None]).to(FP8), scale


def unpack_hidden(hidden: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return hidden states [M, H] in `dtype` from what `pack_hidden` returns."""
    if scale is None:
        return hidden.to(dtype)
    return (hidden.float() * scale[:, None]).to(dtype)


def hidden_bytes(width: int, dtype: str) -> int:
    """Return the bytes of one row of `width` numbers, with its scale; `dtype` is one of `DTYPES`."""
    return width * DTYPES[dtype].itemsize + (4 if dtype == "fp8" else 0)


# ------------------------------------------------------------------ K tokens


def high_bits(vocabulary: int) -> int:
    """Return the bits of an id beyond 16, rounded up to 0, 1, 2, 4 or 8."""
    needed = max((vocabulary - 1).bit_length() - 16, 0)
    if needed > 8:
        raise ValueError(f"vocabulary: expected at most {1 << 24:,} tokens, got {vocabulary:,}")
    return next(width for width in (0, 1, 2, 4, 8) if width >= needed)


def pack_ids(ids: torch.Tensor, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return `ids` uint16 [M, K] and, of vocabularies that need it, `ids_high` uint8 [M, ceil(K * bits / 8)], on the
    CPU, of ids [M, K] below `vocabulary`.
    """
    bits = high_bits(vocabulary)
    wide = ids.cpu().numpy()  # torch has no shifts of uint16
    packed = {"ids": torch.from_numpy((wide & 0xFFFF).astype(np.uint16))}
    if bits == 0:
        return packed
    each = 8 // bits  # ids whose high bits share a byte, the first in the lowest bits
    # [M, K] -> [M, bytes, ids a byte], padded by zeros; each id is shifted to its place and the places are joined
    high = (wide >> 16).astype(np.uint8)
    groups = -(-wide.shape[1] // each)
    high = np.pad(high, ((0, 0), (0, groups * each - wide.shape[1]))).reshape(len(wide), groups, each)
    shifts = (np.arange(each) * bits).astype(np.uint8)
    return packed | {"ids_high": torch.from_numpy(np.bitwise_or.reduce(high << shifts, axis=2))}


def unpack_ids(packed: Mapping[str, torch.Tensor], vocabulary: int) -> torch.Tensor:
    """Return the ids int32 [M, K] from what `pack_ids` returns."""
    ids = packed["ids"].numpy().astype(np.int32)
    if "ids_high" not in packed:
        return torch.from_numpy(ids)
    high = packed["ids_high"].numpy()
    bits = high_bits(vocabulary)
    shifts = (np.arange(8 // bits) * bits).astype(np.uint8)
    apart = (high[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
    apart = apart.reshape(len(ids), high.shape[1] * len(shifts))[:, : ids.shape[1]]  # without the padding of `pack_ids`
    return torch.from_numpy(ids | (apart.astype(np.int32) << 16))


def pack_top_k(top: Mapping[str, torch.Tensor], vocabulary: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the packed rows of K tokens of M positions, named as the fields of `EncodedTopK`, on the CPU."""
    numbers = {name: top[name].to(dtype).cpu() for name in ("logprobs", *FIGURES)}
    return pack_ids(top["ids"], vocabulary) | numbers


def unpack_top_k(packed: Mapping[str, torch.Tensor], vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the fields of `EncodedTopK` by name, ids in int32 and numbers in the dtype that they were packed in."""
    return {"ids": unpack_ids(packed, vocabulary)} | {name: packed[name] for name in ("logprobs", *FIGURES)}


def top_k_bytes(k: int, vocabulary: int, dtype: str) -> int:
    """Return the bytes of one row of K tokens; `dtype` is one of `DTYPES`."""
    width = DTYPES[dtype].itemsize
    return k * (2 + width) + -(-k * high_bits(vocabulary) // 8) + len(FIGURES) * width
