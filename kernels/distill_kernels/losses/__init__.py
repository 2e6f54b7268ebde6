"""Losses, and the table of the divergences between two full distributions; the table loads without torch.

A new divergence is a row here, a branch in `divergence.reference_terms` and the same branch in
`row_functions.one_divergence`. What a recipe takes, modules check and `distill doctor` measures follows from the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Divergence(NamedTuple):
    """Row of the table of divergences.

    Attributes:
        definition: the formula, p_t the teacher's distribution and p_s the student's.
        parameter: name of its parameter, in [0, 1], or "".
        default: the parameter's default.
        below_1: the parameter must be below 1.
        limits: the divergence that it is defined as at a value of its parameter.
        g_sums_to_0: `sum(g)` of divergence.py is 0, so that its gradient takes one sweep.
        stable_top: the gradient cancels at p_s near 1, see `divergence.logit_gradient`.
    """

    definition: str
    parameter: str = ""
    default: float = 0.0
    below_1: bool = False
    limits: Mapping[float, str] = {}
    g_sums_to_0: bool = False
    stable_top: bool = False


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence("KL(p_t || p_s)", g_sums_to_0=True),
    "reverse_kl": Divergence("KL(p_s || p_t)"),
    "jsd": Divergence(
        "beta KL(p_t || m) + (1 - beta) KL(p_s || m), m = beta p_t + (1 - beta) p_s",
        "beta",
        0.5,
        limits={0.0: "forward_kl", 1.0: "reverse_kl"},
    ),
    "skew_forward_kl": Divergence(
        "KL(p_t || alpha p_t + (1 - alpha) p_s)",
        "alpha",
        0.1,
        below_1=True,
        limits={0.0: "forward_kl"},
        stable_top=True,
    ),
    "skew_reverse_kl": Divergence(
        "KL(p_s || alpha p_s + (1 - alpha) p_t)", "alpha", 0.1, below_1=True, limits={0.0: "reverse_kl"}
    ),
    "tvd": Divergence("half the sum of |p_t - p_s|"),
}


def with_parameter(name: str) -> tuple[str, ...]:
    """Return the divergences whose parameter has this name; "" for those without one."""
    return tuple(kind for kind, row in DIVERGENCES.items() if row.parameter == name)
