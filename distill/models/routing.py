"""Routing of tokens to experts by a configuration: the number of experts, and how few of them a cut may leave."""

from __future__ import annotations

import math
from typing import NamedTuple

from transformers import PreTrainedConfig

from distill.models.names import EXPERT_GROUPS, EXPERT_GROUPS_PER_TOKEN, EXPERTS, EXPERTS_PER_TOKEN


class Routing(NamedTuple):
    """Numbers that the routers of all layers share.

    Attributes:
        experts: routed experts of a layer; shared ones are not among them.
        per_token: experts that a token is routed to.
        groups: groups of neighbouring experts among which a token's groups are chosen first; 1 where there are none.
        groups_per_token: groups that a token's experts come from.
    """

    experts: int
    per_token: int
    groups: int = 1
    groups_per_token: int = 1

    @property
    def least_per_group(self) -> int:
        """Return the experts of a group that routing needs; a group's score may be that of its best two."""
        return max(math.ceil(self.per_token / self.groups_per_token), 2 if self.groups > 1 else 1)

    @property
    def least(self) -> int:
        """Return the experts of a layer that routing needs."""
        return self.least_per_group * self.groups

    @property
    def of_small(self) -> int:
        """Return the experts of a small model: twice those that routing needs, or all where there are fewer."""
        return min(self.experts // self.groups, 2 * self.least_per_group) * self.groups


def experts_field(text: PreTrainedConfig) -> str | None:
    """Return the field of a text model's configuration with the number of experts; None for a dense model."""
    return next((name for name in EXPERTS if _number(text, (name,)) > 1), None)


def routing_of(text: PreTrainedConfig) -> Routing | None:
    """Return the routing of a text model's configuration; None for a dense model."""
    name = experts_field(text)
    if name is None:
        return None
    groups = max(1, _number(text, EXPERT_GROUPS))
    per_token = max(1, _number(text, EXPERTS_PER_TOKEN))
    return Routing(getattr(text, name), per_token, groups, max(1, _number(text, EXPERT_GROUPS_PER_TOKEN)))


def check_experts(count: int, text: PreTrainedConfig) -> None:
    routing = routing_of(text)
    if routing is None:
        raise ValueError(
            f"student.from_teacher.experts: expected a mixture of experts with one number of experts in all layers, "
            f"got {type(text).__name__}; leave experts out"
        )
    each = f"{routing.per_token} experts per token"
    if routing.groups > 1:
        each += f", {routing.groups} groups of at least 2, {routing.groups_per_token} groups per token"
    if not routing.least <= count <= routing.experts:
        raise ValueError(
            f"student.from_teacher.experts: expected {routing.least} to {routing.experts} ({each}), got {count}"
        )
    if count % routing.groups:
        raise ValueError(
            f"student.from_teacher.experts: expected a multiple of {routing.groups}, the groups that tokens are routed "
            f"by, got {count}"
        )


def _number(text: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """Return the first of these fields that is a number, 0 where none is; of a list its largest."""
    for name in names:
        value = getattr(text, name, None)
        if isinstance(value, list | tuple) and name not in EXPERTS and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
