"""Weights of tokens in the loss (`loss.token_weights`), from cheap arrays about each trained token.

With w the weights of a micro-batch's trained tokens and l their losses, what it adds to the loss of its step is

    normalise: none    sum of w l / (trained tokens of all micro-batches and ranks)
    normalise: mean    sum of w l / (sum of w over all micro-batches and ranks)

Weights are constants (no gradient) and factors of each token's loss inside the fused kernels, whatever the terms are. A
token of weight 0 is left out of the statistics of a training step as one that is masked from the loss.

Arrays of a function, named by its parameters; only those that are named are made. One entry per trained token:

    position, length    int64, place in the answer (from 0) and the answer's trained tokens
    answer              int64, number of the answer in the micro-batch: what belongs together
    route               int64, number of the teacher's route in the recipe's order; 0 without routes
    reward, advantage   float32, of the rollout; NaN and 0 for the data's answers
    sampled_log_p       float32, log-probability when the token was sampled; NaN for the data's answers
    student_log_p, student_entropy    float32, at temperature 1: one more GEMM of the student's head
    teacher_log_p, teacher_entropy    float32, at temperature 1: one more GEMM of both heads
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from distill.core.labels import IGNORE_INDEX, mask_document_starts
from distill.data.collator import trained_rows
from distill.objectives.targets import Batch
from distill.recipe.loss import TokenWeights

OF_BATCH = ("position", "length", "answer", "route", "reward", "advantage", "sampled_log_p")
OF_STUDENT = ("student_log_p", "student_entropy")
OF_TEACHER = ("teacher_log_p", "teacher_entropy")
ARRAYS = (*OF_BATCH, *OF_STUDENT, *OF_TEACHER)

WeightFunction = Callable[..., torch.Tensor]


class WeightedTokens(NamedTuple):
    """Weights of a micro-batch.

    Attributes:
        weights: [B, S] as the shifted labels, 0 where no token is trained.
        sums: float32 [4]: trained tokens, their weights before normalisation, tokens of weight 0, faulty weights.
    """

    weights: torch.Tensor
    sums: torch.Tensor


class TokenWeighting:
    """Weights of tokens by a section of a recipe, by a function, or by both.

    Args:
        section: Built-in forms and normalisation; None for neither.
        function: Function of `ARRAYS`; None for the built-in forms alone.

    Raises:
        ValueError: A function with other parameters, none where the section names one, or a normalisation that is not
            known before the step.
    """

    def __init__(self, section: TokenWeights | None, function: WeightFunction | None = None) -> None:
        self.section = section or TokenWeights(gamma=1.0)
        self.function = function
        if self.section.function is not None and function is None:
            raise ValueError(
                f"loss.token_weights.function: expected the function {self.section.function} itself by token_weights=, "
                "since a recipe alone runs no code; got none"
            )
        self.names = () if function is None else array_names(function)
        if self.normalises and self.reads_models:
            outputs = ", ".join(name for name in self.names if name not in OF_BATCH)
            raise ValueError(
                f"loss.token_weights.normalise: expected none with a function that reads {outputs}: the sum of its "
                "weights over a step is known only after all its micro-batches; got mean"
            )

    @property
    def normalises(self) -> bool:
        """Return whether the divisor is the sum of the step's weights."""
        return self.section.normalise == "mean"

    @property
    def reads_models(self) -> bool:
        """Return whether the function reads outputs of the models, which are computed before the loss."""
        return not set(self.names) <= set(OF_BATCH)

    @property
    def reads_teacher(self) -> bool:
        return not set(self.names).isdisjoint(OF_TEACHER)

    def weights(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return weights [n] without normalisation and graph.

        Args:
            arrays: Those of `names`, and `position` and `length`, [n] each.

        Raises:
            ValueError: The function fails, returns another shape, or on the CPU a negative or infinite weight or NaN.
        """
        position = arrays["position"]
        weights = torch.ones_like(position, dtype=torch.float32)
        if self.section.gamma is not None:
            weights = weights * self.section.gamma ** position.to(weights.dtype)
        if self.section.window is not None:
            begin, end = self.section.window
            inside = position >= _from_the_end(begin or 0, arrays["length"])
            if end is not None:
                inside &= position < _from_the_end(end, arrays["length"])
            weights = weights * inside
        # a rank without rows has a batch of padding, whose empty arrays have no largest for the function to take
        if self.function is None or not len(position):
            return weights
        return weights * self._given(arrays, len(position))

    def _given(self, arrays: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """Return what the function gives, [n] in float32 or float64."""
        assert self.function is not None
        with torch.no_grad(), torch.autocast(arrays["position"].device.type, enabled=False):
            # copies, so that a function which works in place changes no array of the batch
            given: object = self.function(**{name: arrays[name].clone() for name in self.names})
        named = self.section.function or getattr(self.function, "__name__", "the function")
        where = f"loss.token_weights: {named} with {count} tokens"
        if not isinstance(given, torch.Tensor) or given.shape != (count,):
            got = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{where}: expected a weight a token, a tensor of [{count}], got {got}")
        if given.is_complex() or given.device != arrays["position"].device:
            got = f"{given.dtype} on {given.device}"
            raise ValueError(f"{where}: expected real numbers on {arrays['position'].device}, got {got}")
        weights = given if given.dtype == torch.float64 else given.float()
        if weights.device.type == "cpu":  # on a GPU this would wait for it; there the next log line tells
            (faulty,) = (~(weights >= 0) | weights.isinf()).nonzero(as_tuple=True)
            if len(faulty):
                at = int(faulty[0])
                raise ValueError(f"{where}: expected finite weights of at least 0, got {weights[at]:g} for token {at}")
        return weights

    def sum_of(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the weights of a collated batch, float64 [], without outputs of the models."""
        assert not self.reads_models
        rows = trained_rows(batch)
        return self.weights(batch_arrays(batch, rows, self.names)).sum(dtype=torch.float64)

    def of(
        self,
        arrays: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        shape: torch.Size,
        num_items: torch.Tensor | int | None,
        weight_sum: torch.Tensor | float | None,
    ) -> WeightedTokens:
        """Return the weights of a micro-batch.

        Args:
            arrays: See `weights`.
            rows: int64 [n], the flat rows of the tokens.
            shape: Shape of the labels, [B, S].
            num_items: Trained tokens of the step; None for this micro-batch's.
            weight_sum: Sum of the step's weights; None for this micro-batch's. Used with `normalise: mean`.
        """
        weights = self.weights(arrays)
        faulty = ~(weights >= 0) | weights.isinf()
        sums = torch.stack([torch.ones_like(weights), weights, (weights == 0).to(weights.dtype), faulty.float()])
        sums = sums.sum(1, dtype=torch.float64).to(torch.float32)
        if self.normalises:
            items = len(rows) if num_items is None else num_items
            total = weights.sum() if weight_sum is None else weight_sum
            total = torch.as_tensor(total, device=weights.device, dtype=torch.float64)
            # Weights of mean 1 over the step, with the count of tokens as the divisor of all losses: the sum of w l
            # over the sum of w. A step whose weights are all 0 stays one of loss 0.
            weights = weights * (items / total.clamp_min(torch.finfo(torch.float64).tiny)).to(weights.dtype)
        full = weights.new_zeros(shape.numel()).index_copy(0, rows, weights)
        return WeightedTokens(full.view(shape), sums)


def _from_the_end(bound: int, length: torch.Tensor) -> torch.Tensor | int:
    """Return a bound of a slice as a position: a negative one counts from the end."""
    return bound if bound >= 0 else length + bound


def array_names(function: WeightFunction) -> tuple[str, ...]:
    """Return the arrays that a function's parameters name.

    Raises:
        ValueError: Another parameter, which has no default.
    """
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and name in ARRAYS:
            names.append(name)
        elif parameter.default is parameter.empty or not by_name:
            raise ValueError(f"expected parameters named {', '.join(ARRAYS)}, got {parameter}")
    return tuple(names)


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens are trained, bool [B, S], not shifted; all tokens of a span that two tokenizers share."""
    labels = mask_document_starts(batch["labels"], batch.get("position_ids"))
    trained = labels != IGNORE_INDEX
    trained[..., 0] = False  # no token before it predicts it, whatever its label
    if "spans" in batch and len(batch["spans"]):  # labels stand at the first token of each span alone
        begin = batch["spans"][:, 0]
        end = batch["spans"][:, 1]
        edges = torch.zeros(labels.numel() + 1, dtype=torch.int64, device=labels.device)
        ones = torch.ones_like(begin)
        edges.index_add_(0, begin, ones)
        edges.index_add_(0, end, -ones)
        trained |= (edges.cumsum(0)[:-1] > 0).view(labels.shape)
    return trained


def answer_positions(trained: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each trained token in its stretch and the stretch's length, int64 [B, S]."""
    position = _running_count(trained) - 1
    after = _running_count(trained.flip(-1)).flip(-1)
    return position, position + after


def _running_count(trained: torch.Tensor) -> torch.Tensor:
    """Return how many trained tokens of its stretch there are up to each token, itself included."""
    count = trained.cumsum(-1)
    before = count.masked_fill(trained, 0).cummax(-1).values  # trained tokens before the stretch
    return count - before


def batch_arrays(batch: Batch, rows: torch.Tensor, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return position and length, and those of `names` that are known without the models, [n] each.

    Args:
        batch: Collated batch.
        rows: int64 [n], flat rows that predict the trained tokens.
    """
    tokens = rows + 1  # of the same line: the last token of a line predicts none
    trained = trained_tokens(batch)
    position, length = answer_positions(trained)
    found = {"position": position.flatten()[tokens], "length": length.flatten()[tokens]}
    if "answer" in names:
        begins = trained & (position == 0)
        found["answer"] = begins.flatten().cumsum(0)[tokens] - 1
    if "route" in names:
        routes = batch.get("routes")
        found["route"] = torch.zeros_like(tokens) if routes is None else routes.flatten()[tokens]
    for name, column, default in (("reward", "rewards", torch.nan), ("advantage", "advantages", 0.0)):
        if name in names:
            found[name] = _at(batch.get(column), tokens, default)
    if "sampled_log_p" in names:
        found["sampled_log_p"] = _at(_sampled_log_p(batch), tokens, torch.nan)
    return found


def _at(column: torch.Tensor | None, tokens: torch.Tensor, default: float) -> torch.Tensor:
    if column is None:
        return torch.full(tokens.shape, default, device=tokens.device)
    return column.flatten()[tokens].float()


def _sampled_log_p(batch: Batch) -> torch.Tensor | None:
    """Return the log-probabilities of sampled tokens; at the first token of a span that of all its tokens."""
    sampled = batch.get("sampled_log_p")
    if sampled is None or "spans" not in batch or not len(batch["spans"]):
        return sampled
    begin = batch["spans"][:, 0]
    end = batch["spans"][:, 1]
    flat = sampled.flatten().double()
    unknown = flat.isnan()
    sums = torch.nn.functional.pad(flat.masked_fill(unknown, 0.0).cumsum(0), (1, 0))
    gaps = torch.nn.functional.pad(unknown.cumsum(0), (1, 0))
    whole = (sums[end] - sums[begin]).masked_fill(gaps[end] > gaps[begin], torch.nan)
    return flat.index_copy(0, begin, whole)
