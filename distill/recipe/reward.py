"""The reward function of a recipe: that of a `policy_gradient` term, or of `data.on_policy`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from distill.recipe.data import OnPolicy
from distill.recipe.loss import Loss


class RewardSettings(NamedTuple):
    """Settings of a reward function.

    Attributes:
        field: Field of the recipe that names it, as messages begin.
        function: `FILE.py:function`.
        timeout: Time limit of a call, in seconds.
        scale: Divisor of a deviation from the group's mean, as `reward_scale`.
    """

    field: str
    function: str
    timeout: float
    scale: Literal["group", "none"] = "group"

    @property
    def file(self) -> str:
        return self.function.rpartition(":")[0]

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


def reward_of(loss: Loss, on_policy: OnPolicy | None) -> RewardSettings | None:
    """Return the reward of an active term, else that of `data.on_policy`; None where there is none.

    Args:
        on_policy: The recipe's `data.on_policy`; None where it is not active.
    """
    term = loss.rewarded
    if term is not None and term.reward is not None:
        return RewardSettings("loss.terms: reward", term.reward, term.reward_timeout, term.reward_scale)
    if on_policy is not None and on_policy.reward is not None:
        return RewardSettings("data.on_policy.reward", on_policy.reward, on_policy.reward_timeout)
    return None
