"""Activations as Triton functions on fp32 values: the value, and the value with its derivative.

    silu       g(x) = x s,         g'(x) = s (1 + x (1 - s)),                    s = 1 / (1 + e^-x)
    gelu       g(x) = x Phi(x),    g'(x) = Phi(x) + x e^(-x^2/2) / sqrt(2 pi),   Phi: the normal distribution
    gelu_tanh  g(x) = x s(2u),     g'(x) = s + 2 x s (1 - s) u',                 u = sqrt(2/pi) (x + 0.044715 x^3)

(Hendrycks and Gimpel, 2016, arXiv:1606.08415; x/2 (1 + tanh u) = x s(2u) spares the subtraction that tanh brings.)

At the memory's speed a multiprocessor has about 28 instructions for one bf16 element read and written; a library erf
takes most of them. Phi is computed as Phi(-|x|) = e^(-x^2/2) t P(t), t = 1 / (1 + 0.23 |x|), with P of degree 7
fitted for relative error (1.6e-7 over the whole half-line, so the negative tail does not cancel), and its exponential
serves the derivative too. Where the result is rounded to 16 bits, P of degree 5 and t = 1 / (1 + 0.325 |x|) do
(1.8e-5, a twenty-seventh of fp16's rounding).
"""

from __future__ import annotations

from distill_kernels.constants import LOG2_E
from distill_kernels.launch import tl, triton
from distill_kernels.layers.fast_math import exp2, reciprocal


@triton.jit
def _sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2_E))


@triton.jit
def _normal_tail(x, LOW_PRECISION: tl.constexpr):
    # returns Phi(-|x|) and e^(-x^2/2)
    bell = exp2(x * x * (-LOG2_E / 2))
    if LOW_PRECISION:
        t = reciprocal(1.0 + 0.325 * tl.abs(x))
        p = 0.121385622 - 0.0631756439 * t
        p = p * t + 0.0624806713
        p = p * t + 0.120241797
        p = p * t + 0.129405817
        p = p * t + 0.129658548
    else:
        t = reciprocal(1.0 + 0.23 * tl.abs(x))
        p = 0.26646503 - 0.0733354119 * t
        p = p * t - 0.230654839
        p = p * t + 0.249360199
        p = p * t + 0.00167534229
        p = p * t + 0.105310152
        p = p * t + 0.0892820652
        p = p * t + 0.0918975431
    return p * t * bell, bell


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, LOW_PRECISION: tl.constexpr = False):
    """Return the activation ("silu", "gelu", "gelu_tanh") of fp32 `x`. LOW_PRECISION: it will be rounded to 16 bits."""
    if ACTIVATION == "silu":
        return x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        tail, _ = _normal_tail(x, LOW_PRECISION)
        return tl.maximum(x, 0.0) - tl.abs(x) * tail
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return x * _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def activate_with_derivative(x, ACTIVATION: tl.constexpr, LOW_PRECISION: tl.constexpr = False):
    """Return the activation of fp32 `x` and its derivative. LOW_PRECISION: both will be rounded to 16 bits."""
    if ACTIVATION == "silu":
        s = _sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        tail, bell = _normal_tail(x, LOW_PRECISION)
        phi = tl.where(x < 0, tail, 1.0 - tail)
        return tl.maximum(x, 0.0) - tl.abs(x) * tail, phi + 0.3989422804014327 * x * bell
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        s = _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, s + x * s * (1.0 - s) * slope
