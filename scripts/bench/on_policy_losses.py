"""Losses of tokens that the student sampled, or of its own top tokens, at the flagship's shape.

    linear log_probs             `fused_log_probs` of the labels and its gradients
    linear policy gradient       `fused_policy_gradient_loss`, clipped, with and without KL penalty and entropy bonus
    linear top_k_reverse_kl      the recipe's term, from both heads to gradients, beside the full reverse KL

The floor of the first two is the student's bare products (logits, dx, dW), that of the third those of both models.
Errors are those of the gradients against fp64; peak memory is above the inputs, dW included.

Predicted on an H100 before any run: the student's three products take 15.1 ms at 8,192 x 128,256 x 2,048; the row
kernel reads and writes 2.1 GB each, 1.5 ms at 2.8 TB/s, and the statistics in the projection's epilogue cost 0.4 ms: 17
ms, 1.12 x the floor, and 1.16 with an entropy bonus, which reads 2.1 GB once more. The top k takes the products of the
reverse KL, 35 ms, but 4 V bytes read and 2 V written a row where its two sweeps read 8 V, and a selection that reads 32
KiB: 1.08 to 1.10 x the floor for K = 64, for which it stays in registers, and 1.2 for K = 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels import FusedDistillationLoss, FusedPolicyGradientLoss, LossTerm, fused_log_probs
from distill_kernels.losses.policy_reference import Policy

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.student_top_k import StudentTopKLoss
from distill.objectives.targets import HeadForward, StepInputs, VocabularyAlignment
from distill.recipe.loss import Loss
from scripts.bench.harness import Row
from scripts.bench.losses import MAIN, REVERSE, Inputs, exact_gradients_from, floor, measured, ours

STUDENT_FLOOR = "floor: the student's products"


def log_probs(quick: bool) -> Iterator[Row]:
    """`fused_log_probs` of the labels and its gradients; errors are those of their mean, the cross-entropy's but for
    the sign."""
    hard = FusedDistillationLoss([LossTerm("cross_entropy", 1.0)]).objective
    for head, case in ((True, "linear log_probs"), (False, "linear log_probs, frozen head")):
        inputs = Inputs(MAIN)
        exact = {"fused_log_probs": exact_gradients_from(inputs, None, hard, labels=inputs.labels)}
        inputs.w.requires_grad_(head)
        losses = {"fused_log_probs": lambda i: -fused_log_probs(i.x, i.w, i.labels).mean()}
        bare = STUDENT_FLOOR, floor(inputs, head=head, teacher=False)
        yield from measured(case, inputs, losses, bare, exact, "", quick)


def policy_gradient(quick: bool) -> Iterator[Row]:
    """The one-pass loss of sampled tokens, beside plain PyTorch over full bf16 logits."""
    for head, case in ((True, "linear policy gradient"), (False, "linear policy gradient, frozen head")):
        yield from measured(*policy_candidates(case, head), "", quick)


def policy_candidates(case: str, head: bool) -> tuple[Any, ...]:
    """The arguments of `measured`, with ratios about 1; `head`: whether the head learns."""
    inputs = Inputs(MAIN)
    generator = torch.Generator("cuda").manual_seed(2)
    advantages = torch.randn(MAIN.rows, device="cuda", generator=generator)
    with torch.no_grad():
        now = fused_log_probs(inputs.x, inputs.w, inputs.labels)
    old, reference = (now + 0.1 * torch.randn(MAIN.rows, device="cuda", generator=generator) for _ in range(2))
    losses: dict[str, Callable[[Inputs], torch.Tensor]] = {}
    exact = {}
    for name, settings in {
        "clipped": {},
        "clipped, k3": {"kl_weight": 0.1},
        "clipped, k3, entropy": {"kl_weight": 0.1, "entropy_weight": 0.01},
    }.items():
        module = FusedPolicyGradientLoss(clip=0.2, skip_ignored_rows=False, **settings)
        policy = Policy(advantages, old, reference, module.policy)
        exact[name] = exact_gradients_from(
            inputs, None, module.objective, labels=inputs.labels, policy=policy, rows=512
        )
        losses[name] = lambda i, module=module: module(i.x, i.w, i.labels, advantages, old, reference)

    def eager(i: Inputs) -> torch.Tensor:
        log_p = torch.log_softmax((i.x @ i.w.t()).float(), -1).gather(-1, i.labels[:, None])[:, 0]
        ratio = (log_p - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    losses["eager, clipped, full logits"] = eager
    inputs.w.requires_grad_(head)
    return case, inputs, losses, (STUDENT_FLOOR, floor(inputs, head=head, teacher=False)), exact


def student_top_k(quick: bool) -> list[Row]:
    """The recipe's `top_k_reverse_kl`, from both heads to gradients, beside the full reverse KL."""
    inputs = Inputs(MAIN)
    rows, losses = torch.arange(MAIN.rows, device="cuda"), {"full reverse KL": ours(REVERSE)}
    for k in (64,) if quick else (8, 64, 256):
        for tail in ("bucket", "renormalize"):
            section = Loss.model_validate({"terms": [{"type": "top_k_reverse_kl", "k": k, "tail": tail}]})
            alignment = VocabularyAlignment(LogitTransform(), MAIN.vocab, None)
            module = StudentTopKLoss(section.terms[0], section, alignment, LogitTransform())  # type: ignore[arg-type]

            def loss(i: Inputs, module: StudentTopKLoss = module) -> torch.Tensor:
                head, teacher = (HeadWeights(weight, None, None) for weight in (i.w, i.w_teacher))
                given = StepInputs(i.x_teacher[None], None, False)
                return module(HeadForward(i.x[None], head, given, i.labels[None], rows), teacher)

            losses[f"top_k_reverse_kl, K = {k}, {tail}"] = loss
    bare = "floor: bare products", floor(inputs)
    return measured("linear top_k_reverse_kl", inputs, losses, bare, {}, "", quick)


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """All cases; `quick`: fewer rounds, and K = 64 alone; `only`: part of a case's name."""
    if only in "linear log_probs":
        yield from log_probs(quick)
    if only in "linear policy gradient":
        yield from policy_gradient(quick)
    if only in "linear top_k_reverse_kl":
        yield from student_top_k(quick)
