"""Fast fp32 functions of one or two instructions, for kernels that would otherwise be bound by arithmetic.

Library exp, log and division spend several instructions on numbers near the ends of fp32's range. These do not, and are
as exact as the hardware's approximations: 2 units in the last place (logarithm: 2^-22 absolute between 1/2 and 2).
Where there is no PTX, on AMD's GPUs and in Triton's interpreter, they are Triton's functions.
"""

from __future__ import annotations

from distill_kernels.constants import LN_2, LOG2_E
from distill_kernels.launch import HAS_TRITON, tl, triton

if HAS_TRITON:
    from distill_kernels.launch import has_ptx


@triton.jit
def exp2(x):
    """Return 2^x; results below 1e-38 become 0."""
    if has_ptx():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def exp(x):
    """Return e^x, in two instructions; results below 1e-38 become 0."""
    return exp2(x * LOG2_E)


@triton.jit
def log_of_normal(x):
    """Return the natural logarithm of numbers above 1e-38."""
    if has_ptx():
        return LN_2 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def reciprocal(x):
    """Return 1/x; 0 for |x| above 2^126."""
    if has_ptx():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def log(x):
    """Return the natural logarithm, also of subnormal numbers (which softmax produces); 0 gives -inf."""
    if has_ptx():
        return LN_2 * tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)
