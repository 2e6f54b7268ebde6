"""Reference of the terms that compare layers: from all hidden states, and relations as whole matrices, in fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference_loss import shift_left
from distill.models.head import attention_sizes, decoder_of, unwrap_peft
from distill.models.layer_states import LayerStates, StateRecorder
from distill.models.routers import find_routers
from distill.recipe.layer_terms import AttentionRelationTerm, HiddenStateTerm, RouterTerm, pairs_of
from distill.recipe.loss import Loss

INPUTS = ("input_ids", "position_ids")


def layer_loss(
    student: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss: Loss,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the sum of the terms that compare layers, the mean over trained tokens, differentiable by the student.

    Args:
        student: Causal language model, which may have a projection (`layer_projections`).
        batch: `input_ids`, `labels`, `position_ids` [B, S].
    """
    keep = shift_left(batch["labels"]) != IGNORE_INDEX
    own = _states(student, batch)
    other = _states(teacher, batch)
    configs = [unwrap_peft(model).config.get_text_config() for model in (student, teacher)]  # type: ignore[union-attr,operator]
    total = torch.zeros((), dtype=dtype, device=keep.device)
    for term in loss.terms:
        if not isinstance(term, HiddenStateTerm | AttentionRelationTerm | RouterTerm) or term.weight == 0:
            continue
        if isinstance(term, RouterTerm):
            total = total + term.weight * _routing(term, student, teacher, batch, keep, dtype)
            continue
        pairs = pairs_of(term.layers, *(config.num_hidden_layers for config in configs))
        if isinstance(term, HiddenStateTerm):
            each = [_distance(term, own.outputs[a], other.outputs[b].detach(), keep, dtype) for a, b in pairs]
        else:
            pairs = pairs[-1:] if term.layers == "auto" else pairs
            heads = term.heads or math.gcd(*(attention_sizes(config)[1] for config in configs))
            inputs = [
                tuple(getattr(side.attention[n], name).to(dtype) for side, n in ((own, a), (other, b)))
                for a, b in pairs
                for name in term.relations
            ]
            each = [_relations(s, t.detach(), heads, batch["position_ids"])[keep] for s, t in inputs]
        total = total + term.weight * sum(values.sum() for values in each) / len(pairs) / max(int(keep.sum()), 1)
    return total


def _states(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> LayerStates:
    """Return the outputs of all layers, from `output_hidden_states` but for the last, and what attention gets."""
    count = unwrap_peft(model).config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
    with StateRecorder(model, [count - 1], range(count)).record() as states:
        inputs = {name: batch[name] for name in INPUTS}
        hidden: Sequence[torch.Tensor] = model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
    return LayerStates({**dict(enumerate(hidden[1:-1])), **states.outputs}, states.attention, {})


def _routing(
    term: RouterTerm,
    student: nn.Module,
    teacher: nn.Module,
    batch: Mapping[str, torch.Tensor],
    keep: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mean KL of routers, from transformers' own `output_router_logits`."""
    inputs = {name: batch[name] for name in INPUTS}
    routers: list[dict[int, torch.Tensor]] = []
    for model in (student, teacher):
        logits = decoder_of(model)(**inputs, use_cache=False, output_router_logits=True).router_logits
        routers.append(dict(zip(find_routers(model), (each[keep.flatten()].to(dtype) for each in logits), strict=True)))
    configs = [unwrap_peft(model).config.get_text_config() for model in (student, teacher)]  # type: ignore[union-attr,operator]
    pairs = pairs_of(term.layers, *(config.num_hidden_layers for config in configs))
    own, other = routers
    values = [
        F.kl_div(own[a].log_softmax(-1), other[b].detach().log_softmax(-1), reduction="sum", log_target=True)
        for a, b in pairs
        if a in own and b in other
    ]
    return torch.stack(values).mean() / max(int(keep.sum()), 1)


def _distance(
    term: HiddenStateTerm, student: torch.Tensor, teacher: torch.Tensor, keep: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    s = student[keep].to(dtype)
    t = teacher[keep].to(dtype)
    if term.projection == "learned":  # as it begins
        width = s.shape[-1]
        wanted = t.shape[-1]
        drawn = torch.randn(wanted, width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
        s = s @ (drawn if width != wanted else torch.eye(width)).to(s).T
    return ((s - t) ** 2).mean(-1) if term.metric == "mse" else 1 - F.cosine_similarity(s, t, dim=-1)


def _relations(student: torch.Tensor, teacher: torch.Tensor, heads: int, positions: torch.Tensor) -> torch.Tensor:
    """Return the KL of whole relation matrices [B, heads, S, S], the mean over heads, [B, S]."""
    documents = (positions == 0).cumsum(-1)
    length = positions.shape[1]
    sees = (documents[:, None] == documents[..., None]) & torch.ones(
        length, length, device=positions.device
    ).tril().bool()
    logs = []
    for states in (student, teacher):
        joined = states.transpose(1, 2).flatten(2)  # [B, S, all heads' width]
        each = torch.stack(joined.chunk(heads, dim=-1), dim=1)
        z = torch.einsum("bhid,bhjd->bhij", each, each) / each.shape[-1] ** 0.5
        logs.append(z.masked_fill(~sees[:, None], -1e9).log_softmax(-1))
    log_s, log_t = logs
    return (log_t.exp() * (log_t - log_s)).sum(-1).mean(1)
