"""`C += A^T B` with one rounding: the weight gradient's sum over groups of rows.

cuBLAS rounds `A^T B` to bf16 before it adds a bf16 `C` and rounds the sum again (seen on an H200 with torch 2.11: error
2.15e-3 where a single rounding gives 1.66e-3). This persistent kernel adds in fp32.

Reads `K (M + N)` elements and `M N` of C, writes `M N`; `2 K M N` operations.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import TensorDescriptor, cdiv, device_facts, tl, triton
from distill_kernels.operands import has_aligned_rows

LARGE_TILE, SMALL_TILE = (128, 256, 64), (128, 128, 32)  # blocks of M, N, K; for 227 and 99 KiB of shared memory


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
            a = a_desc.load([step * BLOCK_K, m])
            b = b_desc.load([step * BLOCK_K, n])
            total = tl.dot(a.T, b, total)
        # by halves, whose copies fit into shared memory beside the operands
        low, high = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        low += c_desc.load([m, n]).to(tl.float32)
        c_desc.store([m, n], low.to(c_desc.dtype))
        high += c_desc.load([m, n + BLOCK_N // 2]).to(tl.float32)
        c_desc.store([m, n + BLOCK_N // 2], high.to(c_desc.dtype))


def add_transposed_matmul_(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a product in place, `c += a^T b`, for c [M, N], a [K, M], b [K, N] of one 16-bit dtype; returns `c`.

    Without tensor descriptors (TMA) cuBLAS does it, with its second rounding.
    """
    facts = device_facts(c.device)
    if not (facts.tma and all(map(has_aligned_rows, (a, b, c)))):
        return c.addmm_(a.t(), b)
    (k, m), n = a.shape, b.shape[1]
    block_m, block_n, block_k = LARGE_TILE if facts.shared_bytes >= 216 << 10 else SMALL_TILE
    programs = min(facts.multiprocessors, cdiv(m, block_m) * cdiv(n, block_n))
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
        a: [M, K].
        b: [K, N], of the dtype of `a`.
        alpha: factor of the product.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, alpha=alpha, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=alpha)
