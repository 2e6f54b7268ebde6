"""Rewards of rollouts, and their advantages within the responses to one prompt (GRPO, Shao et al., 2024).

    A = (r - mean) / (std + 1e-4)       over the group of the responses to one prompt; std of a sample (n - 1)

With `scale="none"` A is the deviation from the mean alone, which gives prompts with a large spread more weight (Liu et
al., 2025, "Understanding R1-Zero-like training"). A group is whole in its micro-batch, so that A depends neither on
gradient accumulation nor on the number of processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distill.generation.documents import RolloutDocument, RolloutScore
from distill.generation.function_calls import FunctionInput, Judgement

EPSILON = 1e-4
Responses = Sequence[tuple[RolloutDocument, Sequence[int]]]


class RewardSums(NamedTuple):
    """Sums over rewarded responses: of their rewards, and of the standard deviation within each group.

    Attributes:
        flat_groups: Number of groups whose rewards are all the same.
    """

    rewards: float = 0.0
    deviations: float = 0.0
    groups: float = 0.0
    flat_groups: float = 0.0


class Rewards:
    """Rewards and advantages of responses by a reward function.

    Args:
        function: returns a number for each response, or a number with feedback.
        function_input: makes the function's input from a document and the tokens of a response to it.
        scale: `group` divides by the group's standard deviation, `none` does not.
    """

    def __init__(
        self,
        function: Callable[[Sequence[FunctionInput]], Sequence[float | Judgement]],
        function_input: Callable[[RolloutDocument, Sequence[int]], FunctionInput],
        scale: str = "group",
    ) -> None:
        self.function = function
        self.function_input = function_input
        self.scale = scale

    def score(
        self, responses: Responses, conversations: Sequence[Sequence[dict[str, object]]] = ()
    ) -> tuple[list[RolloutScore], RewardSums]:
        """Return the reward and advantage of each response, and the sums that `reward_metrics` reads.

        Args:
            responses: documents and the tokens of their responses, those to one prompt next to each other, the one of
                `sample` 0 first; of a rollout of several turns the last response.
            conversations: Messages of rollouts of several turns, after the data's prompt and before the last
                response.
        """
        inputs = [self.function_input(document, tokens) for document, tokens in responses]
        for number, messages in enumerate(conversations):
            if messages:
                given = inputs[number].prompt
                assert isinstance(given, list), "an environment needs chats"
                inputs[number] = inputs[number]._replace(prompt=[*given, *messages])
        found = [each if isinstance(each, Judgement) else Judgement(each) for each in self.function(inputs)]
        values = [each.reward for each in found]
        begins = [number for number, (document, _) in enumerate(responses) if document.sample == 0]
        groups = [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]
        spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups]
        flat = sum(max(group) == min(group) for group in groups)
        advantages = [a for group in groups for a in group_advantages(group, self.scale)]
        sums = RewardSums(sum(values), sum(spreads), float(len(groups)), float(flat))
        scores = [RolloutScore(each.reward, a, each.feedback) for each, a in zip(found, advantages, strict=True)]
        return scores, sums


def group_advantages(rewards: Sequence[float], scale: str = "group") -> list[float]:
    """Return the advantages of the responses to one prompt; all 0 where the rewards are the same.

    Args:
        rewards: reward of each response.
        scale: `group` or `none`.
    """
    if max(rewards) == min(rewards):  # their mean may differ from them by rounding
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    divisor = statistics.stdev(rewards) + EPSILON if scale == "group" else 1.0
    return [(reward - mean) / divisor for reward in rewards]


def reward_metrics(sums: RewardSums, responses: float) -> dict[str, float]:
    """Return mean rewards from sums over all ranks.

    Args:
        sums: Sums that `Rewards.score` returns.
        responses: number of rewarded responses.

    Returns:
        reward (mean over the responses), reward_std (mean over the groups of the standard deviation within one),
            reward_zero_std (fraction of the groups whose rewards are all the same).
    """
    groups = max(sums.groups, 1.0)
    return {
        "reward": sums.rewards / max(responses, 1.0),
        "reward_std": sums.deviations / groups,
        "reward_zero_std": sums.flat_groups / groups,
    }
