"""A teacher of K tokens (`FusedTopKKLLoss`) against the full fused KL and plain PyTorch at the flagship's shape.

The floor is the bare products that are left without a teacher's head: logits, dx and dW of the student. Errors are
those of the gradients against fp64, of the same top-k loss; peak memory is above the inputs, dW included.

Predicted on an H200 before any run, from the full loss's 34.9 ms: the student's three products take 12.9 of its 21.5
TFLOP, 19.0 ms; the row kernel reads and writes 2.1 GB each, 1.0 ms, and the bucket sweeps the row once more, 0.3 to
0.5 ms with what L2 keeps: 20.3 ms for renormalize and sampled, 20.7 for the bucket, 1.07 and 1.09 x the floor, 0.59 of
the full KL's time; K from 16 to 256 and hard labels in the same pass make no difference that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels import FusedKLLoss, FusedTopKKLLoss
from distill_kernels.losses.topk_reference import TopK

from scripts.bench.harness import Row
from scripts.bench.losses import MAIN, Inputs, exact_gradients_from, floor, measured

FLOOR = "floor: the student's bare products"


def teacher_tokens(inputs: Inputs, k: int, rows: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's top-k ids (int32) and log-probabilities (fp32), [N, K]."""
    ids, logprobs = [], []
    for part in inputs.x_teacher.split(rows):
        values, which = torch.log_softmax((part @ inputs.w_teacher.t()).float(), -1).topk(k, -1)
        ids.append(which.int())
        logprobs.append(values)
    return torch.cat(ids), torch.cat(logprobs)


def exact_gradients(inputs: Inputs, loss: FusedTopKKLLoss, ids: torch.Tensor, logprobs: torch.Tensor) -> Any:
    """dx and dW of the mean loss in fp64."""
    top_k = TopK(ids, logprobs.double(), loss.tail)
    return exact_gradients_from(inputs, None, loss.objective, labels=inputs.labels, top_k=top_k, rows=512)


def eager(ids: torch.Tensor, logprobs: torch.Tensor) -> Callable[[Inputs], torch.Tensor]:
    """Return the loss in plain PyTorch: the bucket's forward KL over full bf16 logits."""

    def loss(i: Inputs) -> torch.Tensor:
        log_p = torch.log_softmax((i.x @ i.w.t()).float(), -1).gather(-1, ids.long())
        p_t, p_s = logprobs.exp(), log_p.exp()
        rest_t = (1 - p_t.sum(-1)).clamp_min(1e-8)
        rest_s = (1 - p_s.sum(-1)).clamp_min(1e-8)
        return ((p_t * (logprobs - log_p)).sum(-1) + rest_t * (rest_t.log() - rest_s.log())).mean()

    return loss


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """The flagship's shape; `quick`: K = 64 alone; `only`: part of a candidate's name."""
    inputs = Inputs(MAIN)
    full = FusedKLLoss(skip_ignored_rows=False)
    losses: dict[str, Callable[[Inputs], torch.Tensor]] = {
        "full fused KL": lambda i: full(i.x, i.w, i.x_teacher, i.w_teacher),
    }
    exact: dict[str, Any] = {}
    for k in (64,) if quick else (16, 64, 256):
        ids, given = teacher_tokens(inputs, k)
        for label, settings in {
            "bucket": {},
            "renormalize": {"tail": "renormalize"},
            "sampled": {"tail": "sampled"},
            "bucket, reverse": {"direction": "reverse"},
            "bucket + cross-entropy": {"ce_weight": 0.5},
        }.items():
            module = FusedTopKKLLoss(**settings, skip_ignored_rows=False)  # type: ignore[arg-type]
            name = f"ours, K = {k}, {label}"
            losses[name] = lambda i, m=module, t=ids, g=given: m(i.x, i.w, t, g, i.labels)
            if k == 64 and label != "bucket, reverse" and only in name:
                exact[name] = exact_gradients(inputs, module, ids, given)
                if label == "bucket":
                    exact["eager, K = 64"] = exact[name]
        if k == 64:
            losses["eager, K = 64"] = eager(ids, given)
    yield from measured("linear top-k", inputs, losses, (FLOOR, floor(inputs, teacher=False)), exact, only, quick)
