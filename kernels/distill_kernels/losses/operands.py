"""Value types of the linear losses: a model's head, per-token arguments, required gradients, results.

Symbols: `N` tokens, `V` vocabulary, `H` hidden size, `r` rank of a LoRA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.losses.policy_reference import Policy
from distill_kernels.losses.terms import TokenStats
from distill_kernels.losses.topk_reference import StudentTopK, TopK
from distill_kernels.operands import contiguous_rows

# Tokens that a row compares where it is not the whole vocabulary: a teacher's K, the student's K, or the sampled one.
Chosen = TopK | StudentTopK | Policy


class TokenArguments(NamedTuple):
    """Per-token arguments of a loss module, as `FusedDistillationLoss.forward` describes them."""

    labels: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    num_items: torch.Tensor | int | None = None
    valid_rows: torch.Tensor | None = None


class Head(NamedTuple):
    """One model's hidden states and language-model head.

    Attributes:
        hidden: hidden states, [N, H]; [..., H] as a module gets them.
        weight: weight of the head, [Vp, H], Vp >= V: rows from V on are padding.
        bias: bias of the head, [Vp] or None.
        lora_a: LoRA's A, [r, H] or None: the head's weight is `weight + lora_scale * lora_b @ lora_a`.
        lora_b: LoRA's B, [Vp, r] or None.
        lora_scale: factor of the product B A.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None
    lora_scale: float = 1.0

    def cut(self, vocab: int, dtype: torch.dtype) -> Head:
        """Return the first `vocab` columns of the head, in `dtype` (views where the dtype fits already)."""
        return Head(
            self.hidden,
            self.weight[:vocab].to(dtype),
            None if self.bias is None else contiguous_rows(self.bias[:vocab].to(dtype)),
            None if self.lora_a is None else self.lora_a.to(dtype),
            None if self.lora_b is None else self.lora_b[:vocab].to(dtype),
            self.lora_scale,
        )


class RowBatch(NamedTuple):
    """Per-token arguments of a loss.

    Attributes:
        labels: int64 [N] or None; row i of the hidden states predicts labels[i].
        row_scale: [N] fp32 (fp64 for fp64 inputs); a row's loss is multiplied by it, 0 skips the row.
        rows: int64 [M], the rows worth computing, or None for all of them.
        chosen: the tokens that a row compares, with what is known of them; None: all of the vocabulary. `StudentTopK`
            goes with a teacher's head, `TopK` and `Policy` (whose sampled tokens are the labels) with none.
        no_ignored_rows: no row to compute has scale 0 (hidden states of such rows may hold anything, NaN as well).
        lse: `LossOutput.lse` of the same tokens, or None. With it only gradients are computed, no loss.
    """

    labels: torch.Tensor | None
    row_scale: torch.Tensor
    rows: torch.Tensor | None
    chosen: Chosen | None = None
    no_ignored_rows: bool = False
    lse: torch.Tensor | None = None

    def contiguous(self) -> RowBatch:
        """Return the batch with contiguous vectors, as kernels read them."""
        chosen = self.chosen
        if isinstance(chosen, TopK):
            chosen = chosen._replace(ids=contiguous_rows(chosen.ids), logprobs=contiguous_rows(chosen.logprobs))
        elif isinstance(chosen, Policy):
            chosen = chosen.contiguous()
        labels = contiguous_rows(self.labels)
        rows = contiguous_rows(self.rows)
        scale = contiguous_rows(self.row_scale)
        return self._replace(labels=labels, row_scale=scale, rows=rows, chosen=chosen)

    def mask_ignored(self, x: torch.Tensor, which: slice | torch.Tensor) -> torch.Tensor:
        """Return `x` [n, ...], values of the rows `which`, with zeros where a row has scale 0."""
        if self.no_ignored_rows:
            return x
        return torch.where((self.row_scale[which] != 0)[:, None], x, 0)


class RowCall(NamedTuple):
    """Arguments of the row kernels besides logits and objective, for the n rows of a chunk.

    Attributes:
        labels, row_scale, loss: values of all tokens, [N]: int64 labels or None, fp32 factors of the losses, fp32
            losses.
        rows: int64 [n], which tokens these rows are; None: the first n of what is passed.
        stats: fp32 [7, N] or more rows, which are left as they are, or None.
        gradient: [n, V] in the dtype to compute; may be the memory of the student's logits. None: no gradient.
        clip: fp32 [2, N], the last two statistics, as far apart as those of `stats`; None without caps or statistics.
    """

    labels: torch.Tensor | None
    row_scale: torch.Tensor
    rows: torch.Tensor | None
    loss: torch.Tensor
    stats: torch.Tensor | None
    gradient: torch.Tensor | None
    clip: torch.Tensor | None = None

    @property
    def tokens(self) -> tuple[torch.Tensor | None, ...]:
        """Labels, scales and indices of the rows, as kernels take them."""
        return self[:3]

    @property
    def outputs(self) -> tuple[torch.Tensor | None, ...]:
        """Losses and statistics, as kernels take them."""
        return self[3:5]

    @property
    def stats_stride(self) -> int:
        """Elements from one statistic to the next; 0 without them."""
        given = self.clip if self.stats is None else self.stats
        return 0 if given is None else given.stride(0)


class RequiredGrads(NamedTuple):
    """Required results: gradients for the student's tensors, and statistics."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_a: bool = False
    lora_b: bool = False
    stats: bool = False

    @property
    def gradient(self) -> bool:
        """True where any gradient is required."""
        return any(self[:5])


class LossOutput(NamedTuple):
    """Row losses [N] (scaled; 0 on skipped rows), the required statistics, and the required gradients.

    `lse` is set where no gradient was computed and the loss has hard labels only: log sum of exponentials at
    temperature 1, fp32 [M], of the rows to compute in their order. Gradients follow from it later (`RowBatch.lse`).
    None otherwise, and where kernels do not run.
    """

    loss: torch.Tensor
    stats: TokenStats | None
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    lse: torch.Tensor | None = None

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        return self[2:7]
