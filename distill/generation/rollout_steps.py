"""Plans and results of the steps whose documents `OnPolicyRollouts` replaces."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distill.data.packing import best_fit
from distill.generation.documents import RolloutDocument
from distill.generation.rewards import RewardSums

Collated = dict[str, Any]
Batches = Sequence[Collated]


def row_length(row: Sequence[RolloutDocument]) -> int:
    return sum(document.length for document in row)


def is_repetitive(tokens: Sequence[int], length: int = 4) -> bool:
    """Return whether more than half of a response's n-grams (n = `length`) occurred in it before."""
    runs = list(zip(*(tokens[at:] for at in range(length)), strict=False))
    return 2 * len(set(runs)) < len(runs)


class MicroBatchPlan(NamedTuple):
    """A micro-batch's documents, those to generate, the number of rows to pack into, and how many did not fit."""

    documents: list[RolloutDocument]
    replaced: list[bool]
    limit: int | None
    left_out: int = 0

    @property
    def to_generate(self) -> list[RolloutDocument]:
        return [document for document, replaced in zip(self.documents, self.replaced, strict=True) if replaced]

    @property
    def has_changes(self) -> bool:
        return any(self.replaced) or self.left_out > 0

    def rows(self, responses: Any, max_length: int, one_row: bool) -> list[list[RolloutDocument]]:
        """Return the documents, with `responses` for those to generate: in one row, or packed if they were before.

        A response that is left out is None.
        """
        found = [
            next(responses) if replaced else own for own, replaced in zip(self.documents, self.replaced, strict=True)
        ]
        documents = [document for document in found if document is not None]
        if one_row:
            return [documents] if documents else []
        if self.limit is None:
            return [[document] for document in documents]
        groups = best_fit(np.array([document.length for document in documents]), max_length)
        if len(groups) > self.limit:  # the responses of one row and sample fit into one row
            order = sorted(documents, key=lambda own: (own.row, own.sample))
            return [list(group) for _, group in itertools.groupby(order, key=lambda own: (own.row, own.sample))]
        return [[documents[number] for number in group] for group in groups]


class LookAheadBatches(Iterator[Collated]):
    """An epoch's micro-batches, with look-ahead."""

    def __init__(self, batches: Iterator[Collated]) -> None:
        self.batches = batches
        self._buffered = deque[Collated]()

    def __next__(self) -> Collated:
        return self._buffered.popleft() if self._buffered else next(self.batches)

    def peek(self, count: int) -> list[Collated]:
        """Return the next `count` micro-batches without consuming them, or as many as there are."""
        self._buffered.extend(itertools.islice(self.batches, max(0, count - len(self._buffered))))
        return list(self._buffered)[:count]


class RolloutSums(NamedTuple):
    """Sums over rollouts, of which their metrics are made.

    Attributes:
        tokens: Tokens that the student generated.
        truncated, repeated: Numbers of rollouts that were cut off, and that repeat themselves.
        left_out: Documents that no longer fit.
        seconds: Time spent generating.
        lag: Optimizer steps between the weights that generated and those that are trained.
        responses: Responses in all rollouts, several in one with an environment.
        context_rollouts: Rollouts whose teacher's context is made from the run.
        contexts: Those of them for which there is one.
        context_tokens: Tokens of the teacher's prompts with it.
        rewards: See `RewardSums`.
    """

    rollouts: float = 0.0
    tokens: float = 0.0
    truncated: float = 0.0
    repeated: float = 0.0
    left_out: float = 0.0
    seconds: float = 0.0
    lag: float = 0.0
    responses: float = 0.0
    context_rollouts: float = 0.0
    contexts: float = 0.0
    context_tokens: float = 0.0
    rewards: RewardSums = RewardSums()

    def flat(self) -> list[float]:
        return [*self[:-1], *self.rewards]

    @classmethod
    def from_flat(cls, values: Sequence[float]) -> RolloutSums:
        own = len(cls._fields) - 1
        return cls._make([*values[:own], RewardSums(*values[own:])])

    def plus(self, other: RolloutSums) -> RolloutSums:
        return self.from_flat([mine + added for mine, added in zip(self.flat(), other.flat(), strict=True)])


class StepBatches(NamedTuple):
    """A step's micro-batches with generated responses, and what they add to the sums of metrics."""

    batches: list[Collated]
    sums: RolloutSums


class RolloutStep(NamedTuple):
    """The micro-batches of a step, the plan of each, and the result once it is made."""

    batches: Batches
    plans: list[MicroBatchPlan]
    result: StepBatches | None = None


class GeneratedResponse(NamedTuple):
    """A generated response, or several with an environment's replies between them.

    Attributes:
        tokens, truncated, log_probs, replies, messages, last: See `Rollout`.
        step: Optimizer steps done when it was generated.
        seconds: Share of the generation's time, in seconds.
    """

    tokens: list[int]
    truncated: bool
    log_probs: list[float]
    step: int
    seconds: float
    replies: Sequence[Sequence[int]] = ()
    messages: Sequence[dict[str, object]] = ()
    last: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - sum(stop - start for start, stop in self.replies)
