"""Numbers that several kernels share, as Triton's constants: a kernel may read no other global."""

from __future__ import annotations

import math

from distill_kernels.launch import HAS_TRITON, tl


def _constant(value: float) -> float:
    return tl.constexpr(value) if HAS_TRITON else value


LOG2_E = _constant(math.log2(math.e))  # e^x = 2^(x log2 e): exponentials are taken to base 2, in one instruction
LN_2 = _constant(math.log(2.0))
# Where a running maximum starts. Finite, since -inf less -inf is NaN, and below every score: 2^(LOWEST - m) is 0
LOWEST = _constant(-1e30)
E4M3_MAX = _constant(448.0)  # largest number of fp8 e4m3, the form without infinities
