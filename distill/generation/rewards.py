"""Rewards of rollouts, and their advantages within the responses to one prompt (GRPO, Shao et al., 2024).

    A = (r - mean) / (std + 1e-4)       over the group of the responses to one prompt; std of a sample (n - 1)

With `scale="none"` A is the deviation from the mean alone, which gives prompts with a large spread more weight (Liu et
al., 2025, "Understanding R1-Zero-like training"). A group is whole in its micro-batch, so that A depends neither on
gradient accumulation nor on the number of processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from distill.generation.documents import Document, Score
from distill.generation.function_calls import FunctionInput

EPSILON = 1e-4
NO_REWARDS = (0.0, 0.0, 0.0, 0.0)  # sums of rewards and of the groups' std; number of groups, and of those with std 0
Responses = Sequence[tuple[Document, Sequence[int]]]


class Rewards:
    """Rewards and advantages of responses by a reward function.

    Args:
        function: returns a number for each response.
        function_input: makes the function's input from a document and the tokens of a response to it.
        scale: `group` divides by the group's standard deviation, `none` does not.
    """

    def __init__(
        self,
        function: Callable[[Sequence[FunctionInput]], list[float]],
        function_input: Callable[[Document, Sequence[int]], FunctionInput],
        scale: str = "group",
    ) -> None:
        self.function = function
        self.function_input = function_input
        self.scale = scale

    def score(
        self, responses: Responses, conversations: Sequence[Sequence[dict[str, object]]] = ()
    ) -> tuple[list[Score], tuple[float, ...]]:
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
        values = self.function(inputs)
        begins = [number for number, (document, _) in enumerate(responses) if document.sample == 0]
        groups = [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]
        spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups]
        flat = sum(max(group) == min(group) for group in groups)
        advantages = [a for group in groups for a in group_advantages(group, self.scale)]
        return list(map(Score, values, advantages)), (sum(values), sum(spreads), float(len(groups)), float(flat))


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


def reward_metrics(sums: Iterable[float], responses: float) -> dict[str, float]:
    """Return mean rewards from sums over all ranks.

    Args:
        sums: Sums that `Rewards.score` returns.
        responses: number of rewarded responses.

    Returns:
        reward (mean over the responses), reward_std (mean over the groups of the standard deviation within one),
            reward_zero_std (fraction of the groups whose rewards are all the same).
    """
    total, spread, groups, flat = sums
    return {
        "reward": total / max(responses, 1.0),
        "reward_std": spread / max(groups, 1.0),
        "reward_zero_std": flat / max(groups, 1.0),
    }
