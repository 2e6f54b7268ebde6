"""The weight gradient's sum over groups of rows: `C += A^T B`, rounded once a group.

cuBLAS rounds `A^T B` to bf16 before it adds a bf16 `C` and rounds the sum again (seen on an H200 with torch 2.11: error
2.15e-3 where a single rounding gives 1.66e-3). These persistent kernels add in fp32.

Every group's rounding stays in the sum: with 2 groups a bf16 dW misses by 2.3e-3, with 9 by 3.7e-3 and with 15 by
4.7e-3 (8,192 rows, forward KL; 2.1e-3 of it the operands' and the result's own rounding). With more than `PLAIN_GROUPS`
groups, as a small workspace needs, the sums between the first and the last are kept in fp16 relative to each row's
maximum over `HALF` columns: as many bytes, three more bits, and no range to overflow. The last group writes `C` itself.

Reads `K (M + N)` elements and `M N` of C, writes `M N`; `2 K M N` operations.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import TensorDescriptor, cdiv, device_facts, tl, triton
from distill_kernels.losses.projection import matmul_fp32
from distill_kernels.operands import has_aligned_rows

PLAIN_GROUPS = 4  # more are summed in scaled fp16

# blocks of M, N, K; for 227 and 99 KiB of shared memory
LARGE_TILE = (128, 256, 64)
SMALL_TILE = (128, 128, 32)


@triton.jit
def _accumulate_kernel(
    a_desc, b_desc, c_desc, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    columns = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for t in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * columns, tl.num_programs(0), flatten=True):
        n = t % columns * BLOCK_N  # fastest: B, the smaller operand, stays in L2 and A is read once
        m = t // columns * BLOCK_M
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            # A is G [rows, V] as the row kernel left it: tiles are loaded as stored and transposed in shared memory.
            a = a_desc.load([step * BLOCK_K, m])
            b = b_desc.load([step * BLOCK_K, n])
            total = tl.dot(a.T, b, total)
        # by halves, whose copies fit into shared memory beside the operands
        low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        # Product and sum are added in fp32 and rounded once. No other program touches this tile of C.
        low += c_desc.load([m, n]).to(tl.float32)
        c_desc.store([m, n], low.to(c_desc.dtype))
        high += c_desc.load([m, n + BLOCK_N // 2]).to(tl.float32)
        c_desc.store([m, n + BLOCK_N // 2], high.to(c_desc.dtype))


@triton.jit
def _store_scaled(
    x,
    sum_desc,
    out_desc,
    scale_ptr,
    m,
    n,
    M,
    scale_stride,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Add what is kept of `x` [rows, HALF] from m and n on, and keep it in turn, or store the sum where LAST."""
    rows = m + tl.arange(0, x.shape[0])
    at = scale_ptr + rows.to(tl.int64) * scale_stride + n // x.shape[1]
    # the kept sum is fp16 times one fp32 scale a row and half tile
    if not FIRST:
        x += sum_desc.load([m, n]).to(tl.float32) * tl.load(at, mask=rows < M, other=0.0)[:, None]
    if LAST:
        out_desc.store([m, n], x.to(out_desc.dtype))
    else:
        # The maximum lands at 32768, half of fp16's range: adding the next group's rounding cannot overflow. 1e-30
        # keeps a row of zeros from dividing by 0.
        scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / 32768.0
        sum_desc.store([m, n], (x / scale[:, None]).to(sum_desc.dtype))
        tl.store(at, scale, mask=rows < M)


@triton.jit
def _scaled_accumulate_kernel(
    a_desc,
    b_desc,
    sum_desc,
    out_desc,
    scale_ptr,
    M,
    N,
    K,
    scale_stride,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    columns = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for t in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * columns, tl.num_programs(0), flatten=True):
        n = t % columns * BLOCK_N
        m = t // columns * BLOCK_M
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            a = a_desc.load([step * BLOCK_K, m])
            b = b_desc.load([step * BLOCK_K, n])
            total = tl.dot(a.T, b, total)
        low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        _store_scaled(low, sum_desc, out_desc, scale_ptr, m, n, M, scale_stride, FIRST, LAST)
        _store_scaled(high, sum_desc, out_desc, scale_ptr, m, n + BLOCK_N // 2, M, scale_stride, FIRST, LAST)


def _tile_and_programs(c: torch.Tensor) -> tuple[tuple[int, int, int], int]:
    """Return blocks of M, N and K for the device of `c` [M, N], and the number of programs."""
    facts = device_facts(c.device)
    tile = LARGE_TILE if facts.shared_bytes >= 216 << 10 else SMALL_TILE
    return tile, min(facts.multiprocessors, cdiv(c.shape[0], tile[0]) * cdiv(c.shape[1], tile[1]))


def add_transposed_matmul_(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a product in place, `c += a^T b`, for c [M, N], a [K, M], b [K, N] of one 16-bit dtype; returns `c`.

    Without tensor descriptors (TMA) cuBLAS does it, with its second rounding.
    """
    facts = device_facts(c.device)
    if not (facts.tma and all(map(has_aligned_rows, (a, b, c)))):
        return c.addmm_(a.t(), b)
    k, m = a.shape
    n = b.shape[1]
    (block_m, block_n, block_k), programs = _tile_and_programs(c)
    _accumulate_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_k, block_n]),
        TensorDescriptor.from_tensor(c, [block_m, block_n // 2]),
        m,
        n,
        k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        num_stages=3,
    )
    return c


def add_matmul_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> None:
    """Add a product in place, `total += alpha a b`, on tensor cores also where operands have 16 bits and `total` 32.

    Args:
        total: [M, N], changed in place.
        a: left operand, [M, K].
        b: right operand, [K, N], of the dtype of `a`.
        alpha: factor of the product.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, alpha=alpha, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=alpha)


class WeightGradient:
    """The sum over groups of rows of `G^T x`, gradient [Vp, H] of a head's weight.

    Args:
        weight: the head's, [Vp, H], Vp >= V.
        vocab: V, columns that count; the others get 0.
        groups: number of calls of `add` to expect.
        fp32: sum in fp32 whatever the weight's dtype.
    """

    def __init__(self, weight: torch.Tensor, vocab: int, groups: int, *, fp32: bool) -> None:
        self.weight = weight
        self.vocab = vocab
        self.groups = groups
        self.fp32 = fp32 or weight.dtype == torch.float32
        self.total: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None
        self.done = 0

    def add(self, gradients: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add `gradients^T hidden` of one group of n rows, [n, V] and [n, H] of one dtype."""
        first = self.total is None
        self.done = self.done + 1
        if self.total is None:
            dtype = torch.float32 if self.fp32 else self.weight.dtype
            self.total = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
            # padding rows get no product; those of the vocabulary are written whole by the first group
            self.total[self.vocab :].zero_()
            if not self.fp32 and self.groups > PLAIN_GROUPS and self._fits(gradients, hidden):
                (_, block_n, _), _ = _tile_and_programs(self.total)
                # a scale a row and half tile
                shape = self.vocab, 2 * cdiv(self.total.shape[1], block_n)
                self.scales = torch.empty(shape, dtype=torch.float32, device=self.total.device)
        total = self.total[: self.vocab]
        if self.scales is not None:
            _add_scaled(total, self.scales, gradients, hidden, first=first, last=self.done == self.groups)
        elif first and self.fp32:
            matmul_fp32(gradients.t(), hidden, total)
        elif first:
            torch.mm(gradients.t(), hidden, out=total)
        elif self.fp32:
            add_matmul_(total, gradients.t(), hidden)
        else:
            add_transposed_matmul_(total, gradients, hidden)

    def _fits(self, *operands: torch.Tensor) -> bool:
        assert self.total is not None
        return device_facts(self.total.device).tma and all(map(has_aligned_rows, (*operands, self.total)))


def _add_scaled(
    c: torch.Tensor, scales: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, first: bool, last: bool
) -> None:
    """Add a group's `a^T b` to the sum in the memory of `c` [M, N], whose own dtype the last group gives it."""
    k, m = a.shape
    n = b.shape[1]
    (block_m, block_n, block_k), programs = _tile_and_programs(c)
    # One memory, two views: kept sums are fp16, the last group reads them and stores C's dtype over them.
    halves = [block_m, block_n // 2]
    _scaled_accumulate_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [block_k, block_m]),
        TensorDescriptor.from_tensor(b, [block_k, block_n]),
        TensorDescriptor.from_tensor(c.view(torch.float16), halves),
        TensorDescriptor.from_tensor(c, halves),
        scales,
        m,
        n,
        k,
        scales.stride(0),
        FIRST=first,
        LAST=last,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        num_stages=3,
    )
