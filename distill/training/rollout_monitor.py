"""Warnings of rollouts that teach nothing: rewards without a difference, responses that are all cut off."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import TrainerCallback, TrainerState

from distill.core.ranks import is_main_process

log = logging.getLogger(__name__)

IN_A_ROW = 2  # logged entries; the first one is of a single step


class Limit(NamedTuple):
    """Logged figure that is too high from a value on, and what to do about it; `{value}` stands for the figure.

    With `is_least` it is too low up to the value.
    """

    figure: str
    value: float
    text: str
    is_least: bool = False

    def is_reached(self, value: float) -> bool:
        return value <= self.value if self.is_least else value >= self.value


LIMITS = (
    Limit(
        "reward_zero_std",
        1.0,
        "the responses to each prompt all have the same reward (reward_zero_std {value:.2f}), so that it tells none "
        "from another: check the reward function on a few responses (data.on_policy.store_every writes them), or "
        "raise data.on_policy.temperature or data.on_policy.samples",
    ),
    Limit(
        "rollout_truncated",
        0.9,
        "{value:.0%} of the rollouts are cut off at data.on_policy.max_new_tokens (rollout_truncated): raise it, or "
        "check that the student ends its turns as the chat template does (distill doctor); a base student learns it "
        "from the data's responses first (data.on_policy.fraction: 0)",
    ),
    Limit(
        "rollout_context",
        0.0,
        "no response has a teacher.context (rollout_context 0): its template writes what they lack, such as a best one "
        "where none succeeds, or is longer than teacher.context.room",
        is_least=True,
    ),
)


class RolloutMonitor(TrainerCallback):
    """Callback that warns once of each of `LIMITS` that `IN_A_ROW` logged entries reach."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def on_log(self, args: object, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
        for limit in self._reached(logs or {}):
            if is_main_process():
                log.warning("step %d: %s", state.global_step, limit.text.format(value=logs[limit.figure]))

    def _reached(self, logs: Mapping[str, Any]) -> list[Limit]:
        """Count a log entry; return the limits that this entry is the `IN_A_ROW`th to reach."""
        reached = []
        for limit in LIMITS:
            if limit.figure not in logs:  # as in an evaluation's entry
                continue
            count = self._in_a_row.get(limit.figure, 0)
            if count >= IN_A_ROW:  # warned already
                continue
            self._in_a_row[limit.figure] = count + 1 if limit.is_reached(logs[limit.figure]) else 0
            if self._in_a_row[limit.figure] == IN_A_ROW:
                reached.append(limit)
        return reached
