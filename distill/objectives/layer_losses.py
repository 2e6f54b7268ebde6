"""Losses of the terms `hidden_state`, `attention_relation` and `router`, which compare layers of both models."""

from __future__ import annotations

import torch
from distill_kernels.layers.attention_relation import relation_divergence
from distill_kernels.layers.state_distance import state_distance

from distill.models.head import HeadWeights
from distill.objectives.layer_matching import StepStates
from distill.objectives.targets import HeadForward
from distill.objectives.term_loss import TermLoss
from distill.recipe.layer_terms import AttentionRelationTerm, HiddenStateTerm, RouterTerm


class LayerTermLoss(TermLoss):
    """A term's mean over pairs of layers, from the states that the step has recorded; arguments as of `TermLoss`."""

    term: HiddenStateTerm | AttentionRelationTerm | RouterTerm
    reads_layers = True

    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        states = call.inputs.layers
        assert states is not None, "the objective records layers for a loss that reads them"
        rows = call.trained_rows()
        matched = states.matching.find(self.term)
        values = self.sum_over_pairs(states, rows) / len(matched.pairs)
        # recorded before the reduction: the metric is a mean over the interval, whatever the loss divides by
        states.record(matched.name, values)
        return self.reduce(values, rows, call)

    def sum_over_pairs(self, states: StepStates, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum over pairs of layers of each row's loss, [M]."""
        raise NotImplementedError


class HiddenStateLoss(LayerTermLoss):
    """The term `hidden_state`."""

    term: HiddenStateTerm

    def sum_over_pairs(self, states: StepStates, rows: torch.Tensor) -> torch.Tensor:
        matched = states.matching.find(self.term)
        student = [states.student.outputs[own].flatten(0, 1) for own, _ in matched.pairs]
        teacher = [states.teacher.outputs[other].flatten(0, 1) for _, other in matched.pairs]
        picked = matched.projection is not None
        if matched.projection is not None:  # one GEMM for all layers, of the rows that count
            places = rows + len(student[0]) * torch.arange(len(student), device=rows.device)[:, None]
            states_of_rows = torch.cat(student).index_select(0, places.flatten())
            student = list(matched.projection(states_of_rows).chunk(len(student)))
        return state_distance(student, teacher, rows, self.term.metric, picked=picked)


class AttentionRelationLoss(LayerTermLoss):
    """The term `attention_relation`."""

    term: AttentionRelationTerm

    def sum_over_pairs(self, states: StepStates, rows: torch.Tensor) -> torch.Tensor:
        matched = states.matching.find(self.term)
        total = None
        for own, other in matched.pairs:
            for name in self.term.relations:
                student = split_heads(getattr(states.student.attention[own], name), matched.heads)
                teacher = split_heads(getattr(states.teacher.attention[other], name), matched.heads)
                value = relation_divergence(student, teacher, states.documents)
                total = value if total is None else total + value
        assert total is not None
        return total.flatten()[rows]


class RouterLoss(LayerTermLoss):
    """The term `router`."""

    term: RouterTerm

    def sum_over_pairs(self, states: StepStates, rows: torch.Tensor) -> torch.Tensor:
        matched = states.matching.find(self.term)
        if not states.student.routers or not states.teacher.routers:
            raise ValueError(
                "loss.terms: router: expected routers with a logit for each token and expert in both models"
            )
        total = rows.new_zeros(len(rows), dtype=torch.float32)
        for own, other in matched.pairs:
            for student, teacher in zip(states.student.routers[own], states.teacher.routers[other], strict=True):
                log_p = router_log_p(student.logits, rows)
                # of a teacher in inference mode: softmax makes a tensor that a graph may hold
                target = router_log_p(teacher.logits, rows)
                total = total + (target.exp() * (target - log_p)).sum(-1)
        return total


def router_log_p(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [M, experts] of flat rows int64 [M] of logits [N, experts], in fp32 or wider."""
    picked = logits[rows]
    return picked.to(torch.promote_types(picked.dtype, torch.float32)).log_softmax(-1)


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return an attention call's states [B, its heads, S, width] as those of relation heads, [B, heads, S, width].

    Under autocast their GEMMs take what all others do.
    """
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))
    if states.shape[1] == heads:
        return states
    # all heads side by side, cut anew: a relation head may hold several attention heads, or a part of one
    return states.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
