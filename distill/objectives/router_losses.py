"""Losses and figures of a student's routers, where it is a mixture of experts.

With N tokens in a micro-batch (padding left out), L routers of E experts each, logits z and k experts per token:

    p[l, n] = softmax(z[l, n])
    f[e]    = share of the (l, n) that have e among the k largest of p[l, n], of all N L
    P[e]    = mean over l and n of p[l, n, e]
    balance = E * sum over e of f[e] P[e]                        (load balancing, Fedus et al., 2021, arXiv 2101.03961)
    z       = mean over l and n of logsumexp(z[l, n])^2          (router z-loss, Zoph et al., 2022, arXiv 2202.08906)

`balance` is what the forward of transformers' mixtures adds to its loss, times `router_aux_loss_coef`, where
`output_router_logits` is set in its configuration: f and P are means over all layers together, p is a softmax also for
routers whose scores are sigmoids, and f counts the largest p also where a bias or groups decide the choice.

The training loss is a mean over the trained tokens of an optimizer step, all micro-batches and ranks. `balance` is no
mean over tokens but a product of two of them: the loss of a whole step is not a sum over its micro-batches, and an
exact one would need the step's f before its first backward. Each micro-batch's `balance` and `z` therefore count by the
micro-batch's share of the step's trained tokens. With one micro-batch and one process that is the model's own loss.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from distill.models.head import unwrap_peft
from distill.models.routers import RouterOutput
from distill.recipe.loss import RouterCoefficients

COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")  # of load balancing, in configurations


def router_coefficients(
    setting: Literal["config", "none"] | RouterCoefficients, student: nn.Module
) -> RouterCoefficients:
    """Return the coefficients of a recipe's `loss.router` for a student, bare or inside PEFT."""
    if isinstance(setting, RouterCoefficients):
        return setting
    return RouterCoefficients() if setting == "none" else configured_coefficients(unwrap_peft(student))


def configured_coefficients(model: Any) -> RouterCoefficients:
    """Return the coefficients that a model's configuration asks for.

    Both are 0 without `output_router_logits`, as in most published checkpoints. Load balancing counts where the forward
    of the model's class has it: some configurations have a coefficient that no forward reads (Llama 4).
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return RouterCoefficients()
    z = _number(config, ("router_z_loss_coef",))
    balance = 0.0
    if hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        of_dbrx = getattr(config, "ffn_config", None)
        balance = _number(config, COEFFICIENT) or _number(of_dbrx, ("moe_loss_weight",))
    return RouterCoefficients(balance=balance, z=z)


def _number(config: object, names: Sequence[str]) -> float:
    values = (getattr(config, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), 0.0)


def balance_loss(logits: Sequence[torch.Tensor], per_token: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return `balance` of routers' logits, each [N, E]; a scalar, 0 where all tokens are masked.

    Args:
        mask: bool [N], False at padding; None without padding.
    """
    experts = logits[0].shape[-1]
    counts = []
    sums = []
    rows = []
    for each in logits:
        probabilities = _wide(each).softmax(-1)
        weights = _weights(mask, probabilities)
        chosen = probabilities.detach().topk(per_token, dim=-1).indices
        counts.append(count_chosen(chosen, weights, experts))
        sums.append(weights @ probabilities)
        rows.append(weights.sum())
    total = torch.stack(rows).sum().clamp_min(1.0)
    return experts * (torch.stack(counts).sum(0) / total) @ (torch.stack(sums).sum(0) / total)


def z_loss(logits: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return `z` of routers' logits, each [N, E]; a scalar, 0 where all tokens are masked. `mask` as above."""
    sums = []
    rows = []
    for each in logits:
        squares = _wide(each).logsumexp(-1).square()
        weights = _weights(mask, squares)
        sums.append(weights @ squares)
        rows.append(weights.sum())
    return torch.stack(sums).sum() / torch.stack(rows).sum().clamp_min(1.0)


def count_chosen(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Return how many tokens chose each expert, [experts], from chosen experts int64 [N, k] and weights 0 or 1 [N].

    Counts of whole numbers are exact in any order, so that two runs are equal to the bit.
    """
    return weights.new_zeros(experts).index_add(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[1]))


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _weights(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the tokens' weights [N], 0 at padding, in the dtype of a tensor of as many rows."""
    return like.new_ones(len(like)) if mask is None else mask.to(like.dtype)


class RouterSums(NamedTuple):
    """Sums of one micro-batch, or of several, that the figures of routers are made of.

    Attributes:
        chosen: [L, E], tokens that chose each expert.
        probabilities: [L, E], sums of the routers' probabilities.
        tokens: [L], number of tokens.
        shared: [2], chosen experts that the teacher's router chose too, as a share of the k, summed over tokens and
            layers; and the number of these.
        losses: [3], `balance` and `z` times the trained tokens of their micro-batches, and the number of these.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    tokens: torch.Tensor
    shared: torch.Tensor
    losses: torch.Tensor

    def figures(self) -> dict[str, float]:
        """Return the metrics; one wait for the device.

        Returns:
            router_load (tokens of the busiest expert over the mean of all, mean over layers; 1 is balanced),
            router_entropy (entropy of the mean routing in nats, mean over layers; at most log E), router_agreement
            (share of the chosen experts that the teacher's router chooses too) where the teacher has the same experts,
            router_balance and router_z where they are trained on, without coefficients. Empty without tokens.
        """
        loads = self.chosen.amax(-1) / self.chosen.mean(-1)
        mean = self.probabilities / self.tokens[:, None]
        entropies = torch.special.entr(mean).sum(-1)
        values = torch.stack([self.tokens.amin(), loads.mean(), entropies.mean(), *self.shared, *self.losses])
        tokens, load, entropy, shared, compared, balance, z, trained = values.tolist()
        if not tokens:
            return {}
        found = {"router_load": load, "router_entropy": entropy}
        if compared:
            found["router_agreement"] = shared / compared
        if trained:
            found |= {"router_balance": balance / trained, "router_z": z / trained}
        return found


class StudentRouters:
    """What a step computes from the outputs of a student's routers.

    Args:
        layers: Numbers of the layers with routers.
        experts: Experts of a layer.
        per_token: Experts per token.
        coefficients: Coefficients of the losses.
        compared: Pairs of layers [student, teacher] whose choices are compared; empty where the teacher's experts are
            not the student's.
    """

    def __init__(
        self,
        layers: Sequence[int],
        experts: int,
        per_token: int,
        coefficients: RouterCoefficients,
        compared: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.layers = list(layers)
        self.experts = experts
        self.per_token = per_token
        self.coefficients = coefficients
        self.compared = list(compared)

    @property
    def are_trained(self) -> bool:
        """Return whether the training loss has a loss of the routers."""
        return self.coefficients.balance > 0 or self.coefficients.z > 0

    def losses(
        self, outputs: Mapping[int, Sequence[RouterOutput]], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `balance` and `z`; of a coefficient of 0 without a graph.

        Args:
            mask: bool [N], False at padding; None without padding.
        """
        logits = [router.logits for routers in outputs.values() for router in routers]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.coefficients.balance > 0):
            balance = balance_loss(logits, self.per_token, mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.coefficients.z > 0):
            z = z_loss(logits, mask)
        return balance, z

    @torch.no_grad()
    def sums(
        self,
        student: Mapping[int, Sequence[RouterOutput]],
        teacher: Mapping[int, Sequence[RouterOutput]],
        mask: torch.Tensor | None,
        losses: torch.Tensor,
    ) -> RouterSums:
        """Return the sums of a micro-batch's figures. Nothing waits for the device.

        Args:
            student, teacher: Outputs of routers by the number of their layer.
            mask: bool [N], False at padding; None without padding.
            losses: See `RouterSums`.
        """
        chosen = []
        probabilities = []
        tokens = []
        for router in (router for routers in student.values() for router in routers):
            values = router.logits.float().softmax(-1)
            weights = _weights(mask, values)
            chosen.append(count_chosen(router.chosen, weights, values.shape[-1]))
            probabilities.append(weights @ values)
            tokens.append(weights.sum())
        shared = losses.new_zeros(2)
        for own, other in self.compared if teacher else ():
            for router, theirs in zip(student[own], teacher[other], strict=True):
                shared += _shared(router, theirs, mask)
        return RouterSums(torch.stack(chosen), torch.stack(probabilities), torch.stack(tokens), shared, losses)


def _shared(student: RouterOutput, teacher: RouterOutput, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the sum over tokens of the share of chosen experts in common, and the number of tokens, [2]."""
    share = (student.chosen[:, :, None] == teacher.chosen[:, None, :]).any(-1).float().mean(-1)
    weights = _weights(mask, share)
    return torch.stack([weights @ share, weights.sum()])
