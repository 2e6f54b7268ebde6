"""Rewards of the student's answers, and their advantages within the answers to one prompt (GRPO, Shao et al., 2024).

    A = (r - mean) / (std + 1e-4)         over the group of the answers to one prompt; std of a sample (n - 1)

with `scale="none"` the distance from the mean alone, which gives prompts with a large spread more weight (Liu et al.,
2025, "Understanding R1-Zero-like training"). A group is whole in its micro-batch, so that neither accumulation nor the
number of processes plays a part.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from distill.generation.documents import Document
from distill.generation.reward_calls import Question

EPSILON = 1e-4
NO_REWARDS = (0.0, 0.0, 0.0, 0.0)  # sums: of the rewards, of the groups' deviations; groups, those without a spread
Judged = Sequence[tuple[Document, Sequence[int]]]


class Rewards:
    """Judges answers by a function.

    Args:
        function: a number for each question.
        question: of a document and the tokens of an answer to it.
        scale: `group` divides by the group's standard deviation, `none` does not.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Question]], list[float]],
        question: Callable[[Document, Sequence[int]], Question],
        scale: str = "group",
    ) -> None:
        self.function, self.question, self.scale = function, question, scale

    def judge(self, answers: Judged) -> tuple[list[float], tuple[float, ...]]:
        """The advantage of each answer, and the sums that `reward_figures` reads.

        Args:
            answers: documents that were answered and the answers' tokens, those to one prompt next to each other,
                the one of `sample` 0 first.
        """
        values = self.function([self.question(document, tokens) for document, tokens in answers])
        begins = [number for number, (document, _) in enumerate(answers) if document.sample == 0]
        groups = [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]
        spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups]
        flat = sum(max(group) == min(group) for group in groups)
        found = [a for group in groups for a in group_advantages(group, self.scale)]
        return found, (sum(values), sum(spreads), float(len(groups)), float(flat))


def group_advantages(rewards: Sequence[float], scale: str = "group") -> list[float]:
    """Advantages of the answers to one prompt; all 0 where the rewards are the same.

    Args:
        rewards: of each answer.
        scale: `group` or `none`.
    """
    if max(rewards) == min(rewards):  # whose mean may differ from them by rounding
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    divisor = statistics.stdev(rewards) + EPSILON if scale == "group" else 1.0
    return [(reward - mean) / divisor for reward in rewards]


def reward_figures(sums: Iterable[float], answers: float) -> dict[str, float]:
    """Means from sums over all ranks.

    Args:
        sums: as `Rewards.judge` gives them.
        answers: how many were judged.

    Returns:
        reward (mean over the answers), reward_std (mean over the groups of the standard deviation within one),
        reward_zero_std (share of the groups whose rewards are all the same).
    """
    total, spread, groups, flat = sums
    return {
        "reward": total / max(answers, 1.0),
        "reward_std": spread / max(groups, 1.0),
        "reward_zero_std": flat / max(groups, 1.0),
    }
