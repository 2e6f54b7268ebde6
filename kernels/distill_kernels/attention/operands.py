"""Launch arguments of the attention kernels: masking, tensor descriptors, tile sizes."""

from __future__ import annotations

import functools
import logging
import math
import typing
from collections.abc import Callable
from typing import NamedTuple

import torch

from distill_kernels.constants import LOG2_E, LOWEST
from distill_kernels.launch import (
    INTERPRETER,
    MAX_CACHED_LAUNCHES,
    DeviceFacts,
    TensorDescriptor,
    device_facts,
    dot_precision,
    next_power_of_2,
    tl,
    triton,
)
from distill_kernels.operands import check_tensor
from distill_kernels.tuning import autotune

_log = logging.getLogger(__name__)


class ScoreSettings(NamedTuple):
    """Scaling and masking of attention scores, as every attention function here takes them.

    Attributes:
        causal: Query i sees keys up to its own position only (aligned at the last query and key).
        scale: Factor of q k^T.
        window: Number of most recent keys a query sees, itself included; None for all.
        softcap: `cap * tanh(score / cap)` before the softmax, or None.
        cu_seqlens_q, cu_seqlens_k: int [documents + 1], cumulative lengths of packed documents, or None.
        sinks: [H], a logit of each head that takes part in the softmax without a value, or None.
    """

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def score_factors(self) -> tuple[float, float, float]:
        """Factor to base-2 exponents, cap and rate inside the tanh, for the kernels; both are 1 without a cap."""
        log2_e = math.log2(math.e)
        if self.softcap is None:
            return self.scale * log2_e, 1.0, 1.0
        return log2_e, float(self.softcap), self.scale / self.softcap


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: ScoreSettings) -> None:
    """Check shapes, dtypes, devices and masking; ValueError names the argument that does not fit.

    Args:
        q: [B, H, T, D], floating point, D up to 256.
        k, v: [B, Hkv, Tk, D], H a multiple of Hkv.
        masking: scale, window, soft cap, sinks, cumulative lengths.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, positions, head size], got shape {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name}: expected q's {q.dtype} on {q.device}, got {tensor.dtype} on {tensor.device}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k, v: expected both [{q.shape[0]}, kv heads, keys, {q.shape[3]}], got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q: expected a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if q.shape[3] > 256:
        raise ValueError(f"q: expected a head size up to 256, got {q.shape[3]}")
    if not q.is_floating_point() or (q.is_cuda and q.dtype == torch.float64):
        raise ValueError(f"q: expected float16, bfloat16 or float32, got {q.dtype}")
    if not masking.scale > 0:
        raise ValueError(f"scale: expected a number > 0, got {masking.scale}")
    if masking.window is not None and masking.window < 1:
        raise ValueError(f"window: expected at least 1 key, got {masking.window}")
    if masking.softcap is not None and not masking.softcap > 0:
        raise ValueError(f"softcap: expected a number > 0, got {masking.softcap}")
    if masking.sinks is not None:
        _check_sinks(masking.sinks, q)
    if (masking.cu_seqlens_q is None) != (masking.cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q, cu_seqlens_k: expected both or none, got one")
    for name, lengths in (("cu_seqlens_q", masking.cu_seqlens_q), ("cu_seqlens_k", masking.cu_seqlens_k)):
        if lengths is None:
            continue
        check_tensor(name, lengths)
        if lengths.dim() != 1 or lengths.numel() < 2 or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: expected int [documents + 1], got {lengths.dtype} {tuple(lengths.shape)}")
        if lengths.device != q.device:
            raise ValueError(f"{name}: expected on {q.device}, got {lengths.device}")
    if masking.packed and masking.cu_seqlens_q.numel() != masking.cu_seqlens_k.numel():  # type: ignore[union-attr]
        raise ValueError("cu_seqlens_k: expected as many documents as cu_seqlens_q has, got another number")


def _check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    check_tensor("sinks", sinks)
    too_wide = sinks.dtype == torch.float64 and q.dtype != torch.float64
    if sinks.shape != (q.shape[1],) or sinks.device != q.device or not sinks.is_floating_point() or too_wide:
        raise ValueError(
            f"sinks: expected [{q.shape[1]}], a float16, bfloat16 or float32 number a query head, on {q.device}, got "
            f"{sinks.dtype} {tuple(sinks.shape)} on {sinks.device}"
        )


class Tiles(NamedTuple):
    """Tile of an attention program: rows of queries and of keys, warps, pipeline stages, TMA where available."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = True


# By kernel, kind of GPU and head size. Those of "warpgroups" were measured on sm_90. With operands in registers, as
# on Ampere, Ada and sm_120, they were read off compiled code: no spills, 100 KiB of shared memory.
TILES = {
    "forward": {
        "interpreter": {256: Tiles(32, 16, 4, 1)},  # small enough that tests cross tile borders
        "float32": {128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
        "warpgroups": {64: Tiles(64, 128, 4, 2), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
        "registers": {64: Tiles(128, 64, 4, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 4, 2)},
    },
    "dk and dv": {
        "interpreter": {256: Tiles(16, 32, 4, 1)},
        "float32": {128: Tiles(32, 32, 4, 1), 256: Tiles(16, 32, 4, 1)},
        "warpgroups": {64: Tiles(128, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8, 2)},
        "registers": {128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
        "sm_80": {128: Tiles(16, 64, 8, 2), 256: Tiles(16, 32, 8, 2)},
        "gfx942": {128: Tiles(16, 64, 8, 2), 256: Tiles(16, 32, 8, 2)},
        # of 256 dk and dv alone would take all of tensor memory
        "sm_100": {64: Tiles(64, 64, 8, 2), 128: Tiles(32, 64, 8, 2), 256: Tiles(32, 32, 8, 2, tma=False)},
    },
    "dq": {
        "interpreter": {256: Tiles(32, 16, 4, 1)},
        "float32": {128: Tiles(32, 32, 4, 1), 256: Tiles(32, 16, 4, 1)},
        "warpgroups": {64: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 4, 2)},
        "registers": {128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 2)},
    },
}


@functools.cache
def choose_tiles(kernel: str, block_d: int, dtype: torch.dtype, facts: DeviceFacts) -> Tiles:
    """Return the table's tile of `kernel` ("forward", "dk and dv" or "dq") for heads of `block_d` columns."""
    tables = TILES[kernel]
    table = tables["warpgroups" if facts.warpgroups else "registers"]
    if facts.family == INTERPRETER or dtype == torch.float32:
        table = tables["interpreter" if facts.family == INTERPRETER else "float32"]
    else:
        table = dict(sorted((table | tables.get(facts.family, {})).items()))
    return next(tile for size, tile in table.items() if block_d <= size)


@functools.cache
def neighbouring_tiles(tile: Tiles) -> tuple[Tiles, ...]:
    """Return the tile and its neighbours: half and twice its queries, keys and warps, a stage less and more."""
    queries, keys, warps, stages, _ = tile
    near = [
        tile._replace(queries=queries // 2),
        tile._replace(queries=queries * 2),
        tile._replace(keys=keys // 2),
        tile._replace(keys=keys * 2),
        tile._replace(warps=12 - warps),
        tile._replace(stages=stages + 1),
        tile._replace(stages=stages - 1),
        tile._replace(queries=queries * 2, warps=8),
    ]
    # PADDING of flash_backward.py bounds the queries
    fits = (each for each in near if 16 <= each.queries <= 128 and 16 <= each.keys <= 128 and each.stages > 0)
    return tuple(dict.fromkeys((tile, *fits)))


def autotune_tiles(
    kernel: str, q: torch.Tensor, k: torch.Tensor, masking: ScoreSettings, launch: Callable[[Tiles], object]
) -> Tiles:
    """Return the table's tile, or its fastest neighbour on a GPU without measured tables."""
    facts = device_facts(q.device)
    size = q.shape[3]
    first = choose_tiles(kernel, head_block(size), q.dtype, facts)
    if facts.measured:
        return first
    masked = "".join("-c"[masking.causal] + "-w"[masking.window is not None] + "-p"[masking.packed])
    shape = (size, q.dtype, masked, masking.softcap is not None, *map(next_power_of_2, (q.shape[2], k.shape[2])))
    return autotune(f"attention {kernel}", shape, neighbouring_tiles(first), launch, q.device)


def uses_tma(facts: DeviceFacts, tile: Tiles) -> bool:
    """Return whether tiles are loaded by TMA; with operands in registers it makes dk and dv spill a KiB a thread."""
    return facts.tma and facts.warpgroups and tile.tma


def head_block(head_size: int) -> int:
    """Return the columns of a tile: the head size, padded for matrix instructions."""
    return max(16, next_power_of_2(head_size))


def score_constants(q: torch.Tensor, masking: ScoreSettings) -> dict[str, typing.Any]:
    """Return the constants that attention's kernels and those of its gradient share, for queries [B, H, T, D]."""
    size = q.shape[3]
    return {
        "HEAD_DIM": size,
        "BLOCK_D": head_block(size),
        "CAUSAL": masking.causal,
        "PACKED": masking.packed,
        "SOFTCAP": masking.softcap is not None,
        "PRECISION": dot_precision(q.dtype),
    }


def aligned(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return `tensor` if TMA can load it, else a copy with rows padded to 16 bytes.

    TMA needs a base and strides that are multiples of 16 bytes, and adjacent columns.
    """
    columns = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and _legal(tensor.shape, tensor.stride(), columns):
        return tensor
    _warn_of_copy(name, tuple(tensor.shape[1:]), tensor.stride())
    padded = -(-tensor.shape[-1] // columns) * columns
    copy = tensor.new_empty(*tensor.shape[:-1], padded)[..., : tensor.shape[-1]]
    return copy.copy_(tensor)


@functools.lru_cache(MAX_CACHED_LAUNCHES)
def _legal(shape: tuple[int, ...], strides: tuple[int, ...], columns: int) -> bool:
    steps = [step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(step > 0 and step % columns == 0 for step in steps)


def empty_positions_first(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised [B, H, T, D] tensor that is [B, T, H, D] in memory, the layout of projections."""
    batch, heads, positions, size = like.shape
    strides = (positions * heads * size, size, heads * size, 1)  # no view, which could not be written to in place
    return like.new_empty_strided((batch, heads, positions, size), strides)


@functools.lru_cache(MAX_CACHED_LAUNCHES)
def _warn_of_copy(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    _log.info("attention copies %s [batch, *%s]: strides %s are not multiples of 16 bytes", name, shape, strides)


def tiles_of(tensor: torch.Tensor, rows: int, columns: int, tma: bool) -> typing.Any:
    """Return `tensor` [B, H, T, D] as an argument of `load_tile`, for tiles of `rows` positions of one head.

    A tensor descriptor with `tma`, else pointer, strides and length.
    """
    if not tma:
        return tensor, *tensor.stride()[:3], tensor.shape[2]
    batch, heads, positions, size = tensor.shape
    strides = list(tensor.stride())
    step = positions * heads * batch * 16
    for dimension in range(3):
        if tensor.shape[dimension] == 1:  # the stride of a single entry is arbitrary, but must be a legal one
            strides[dimension] = step
    return TensorDescriptor(tensor, [batch, heads, positions, size], strides, [1, 1, rows, columns])


@triton.jit
def load_tile(
    source, batch, head, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr
):
    """Load [ROWS, BLOCK_D] of one head from position `first` on, 0 beyond its end; `source` is from `tiles_of`."""
    if TMA:
        tile = source.load([batch, head, first, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptr, stride_b, stride_h, stride_m, positions = source
        row = tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK_D)
        ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + first.to(tl.int64) * stride_m
        held = (row < positions - first)[:, None]
        if HEAD_DIM < BLOCK_D:
            held = held & (column < HEAD_DIM)[None, :]
        tile = tl.load(ptr + row[:, None] * stride_m + column[None, :], mask=held, other=0.0)
    return tile


@triton.jit
def initial_softmax_state(sinks_ptr, head):
    """Return the initial running maximum and sum, to base 2, of rows of `head` whose softmax has a sink."""
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    largest = tl.maximum(sink, LOWEST)  # finite, also for a sink of -inf, which is none
    return largest, tl.exp2(sink - largest)


@triton.jit
def softcapped(scores, rate, cap):
    """Return cap * tanh(scores * rate), and the tanh: by exponentials, accurate to 1e-7 unlike the hardware's tanh."""
    tanh = 1 - 2 / (1 + tl.exp2(scores * rate * (2 * LOG2_E)))
    return cap * tanh, tanh
