"""`C += A^T B` with one rounding: the weight gradient's sum over groups of rows.

cuBLAS rounds `A^T B` to bf16 before it adds a bf16 `C` and rounds the sum again (seen on an H200 with torch 2.11: error
2.15e-3 where a single rounding gives 1.66e-3). This persistent kernel adds in fp32.

Reads `K (M + N)` elements and `M N` of C, writes `M N`; `2 K M N` operations.
"""

from __future__ import annotations

import torch

from distill_kernels.launch import cdiv, device_facts, tl, triton

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64


@triton.jit
def _accumulate_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
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


def _aligned(matrix: torch.Tensor) -> bool:
    one_by_one = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return one_by_one and matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def add_product_(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`c += a^T b` for c [M, N], a [K, M], b [K, N] of one 16-bit dtype; returns `c`.

    Where tensor descriptors (TMA) do not serve, cuBLAS does it, with its second rounding.
    """
    capable = not c.is_cuda or device_facts(c.device).capability >= (9, 0)
    if not (capable and all(map(_aligned, (a, b, c)))):
        return c.addmm_(a.t(), b)
    from triton.tools.tensor_descriptor import TensorDescriptor

    (k, m), n = a.shape, b.shape[1]
    programs = min(device_facts(c.device).multiprocessors, cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N))
    _accumulate_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [BLOCK_K, BLOCK_M]),
        TensorDescriptor.from_tensor(b, [BLOCK_K, BLOCK_N]),
        TensorDescriptor.from_tensor(c, [BLOCK_M, BLOCK_N // 2]),
        m, n, k, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
    )  # fmt: skip
    return c
