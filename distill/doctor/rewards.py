"""Substitutes for a recipe's reward function and what follows from it: doctor runs no code that comes with a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.generation.documents import RolloutDocument
from distill.generation.function_calls import FunctionInput
from distill.generation.rewards import Rewards
from distill.generation.rollout_contexts import PromptTokens, RolloutContexts
from distill.generation.rollout_steps import GeneratedResponse

CONTEXT_TOKENS = 8


def advantage_of(labels: Sequence[int]) -> float:
    """Return the advantage that doctor assigns to a document: a number from -1.5 to 1.5, by its trained tokens."""
    return (sum(label for label in labels[1:] if label != IGNORE_INDEX) % 7 - 3) / 2


def advantages_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return each token's advantage in a collated batch, that of its document: float32 [B, S]."""
    advantages = torch.zeros(batch["labels"].shape)
    for row, (labels, positions) in enumerate(
        zip(batch["labels"].tolist(), batch["position_ids"].tolist(), strict=True)
    ):
        for begin, end in document_bounds(positions):
            advantages[row, begin:end] = advantage_of(labels[begin:end])
    return advantages


def substitute_rewards(scale: str) -> Rewards:
    """Return rewards of rollouts by their tokens; `scale` as in `Rewards`."""

    def function_input(document: RolloutDocument, answer: Sequence[int]) -> FunctionInput:
        return FunctionInput("", "", "", {"tokens": [0, *answer]})

    return Rewards(lambda asked: [advantage_of(each.row["tokens"]) for each in asked], function_input, scale)  # type: ignore[arg-type]


class SubstituteContexts(RolloutContexts):
    """Contexts in place of those that a template makes from rewarded responses: tokens before the student's prompt.

    Args:
        routes: Numbers of the routes with such contexts; None for the only teacher.
        max_length: Maximum number of tokens of a prompt with its response.
    """

    def __init__(self, routes: Sequence[int | None], max_length: int) -> None:
        super().__init__({}, _no_row, max_length)
        self.routes = routes

    def room(self, document: RolloutDocument) -> int:
        return CONTEXT_TOKENS if document.route in self.routes else 0

    def prompts(
        self,
        documents: Sequence[RolloutDocument],
        responses: Sequence[GeneratedResponse],
        scores: Sequence[object],
        longest: Callable[[RolloutDocument], int],
    ) -> list[PromptTokens | None]:
        """Return prompts that begin with tokens of the student's, the last one first: any other prompt would do."""
        found: list[PromptTokens | None] = []
        for document, response in zip(documents, responses, strict=True):
            if document.route not in self.routes:
                found.append(None)
                continue
            room = longest(document) - len(document.prompt) - len(response.tokens)
            context = document.prompt[::-1][: min(CONTEXT_TOKENS, room)]
            found.append(PromptTokens([*context, *document.prompt], bool(context)))
        return found


def _no_row(document: RolloutDocument, response: Sequence[int]) -> FunctionInput:
    raise AssertionError("a substitute reads no row of the data")
