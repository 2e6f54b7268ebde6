"""Widths of a decoder by its configuration: hidden channels, heads, key and value heads, MLP columns, experts.

A head's width never changes: `head_dim` is written into the configuration where it was derived from the others, so that
`hidden_size` need not be `heads * head_dim`.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from transformers import PreTrainedConfig

from distill.core.errors import first_line
from distill.models.head import attention_sizes
from distill.models.prune.routing import check_experts, experts_field, routing_of
from distill.recipe import FromTeacher


class Widths(NamedTuple):
    """Widths of every layer of a decoder.

    Attributes:
        hidden: hidden channels, `hidden_size`.
        heads: attention heads.
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` heads.
        intermediate: columns of each MLP, `intermediate_size`; 0 where all are those of experts.
        experts: routed experts of each layer that has some; 0 in a dense model.
    """

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    experts: int = 0

    @property
    def group(self) -> int:
        """Number of heads that share a key and value head."""
        return self.heads // self.kv_heads


def widths_of(config: PreTrainedConfig) -> Widths:
    """Return the widths that a configuration has.

    Raises:
        ValueError: a configuration without attention, or whose layers have MLPs of several widths.
    """
    text = config.get_text_config()
    try:
        heads, kv_heads, _ = attention_sizes(text)
    except RuntimeError as error:  # transformers, of a configuration with other numbers in each layer
        raise ValueError(
            f"student.from_teacher: expected a configuration with one width of all layers to cut widths, got "
            f"{type(text).__name__}: {first_line(error)}"
        ) from error
    columns = next((value for name in ("intermediate_size", "n_inner") if (value := getattr(text, name, None))), None)
    routing = routing_of(text)
    if columns is None and routing is not None:
        columns = 0
    if not heads or not isinstance(columns, int) or heads % kv_heads:
        what = "no attention heads" if not heads else f"intermediate_size {columns!r}, heads {heads} and {kv_heads}"
        raise ValueError(
            f"student.from_teacher: expected a configuration with one width of all layers to cut widths, got "
            f"{type(text).__name__} with {what}"
        )
    return Widths(text.hidden_size, heads, kv_heads, columns, 0 if routing is None else routing.experts)


def target_widths(cut: FromTeacher | None, config: PreTrainedConfig) -> Widths | None:
    """Return the widths that `student.from_teacher` asks for of a teacher of this configuration; None where it cuts
    none.

    Raises:
        ValueError: a width that the teacher does not have, or heads that do not share their keys evenly.
    """
    if cut is None or not cut.cuts_widths:
        return None
    if cut.experts is not None:
        check_experts(cut.experts, config.get_text_config())
    full = widths_of(config)
    asked = {name: getattr(cut, name) for name in Widths._fields}
    for name, value in asked.items():
        most = getattr(full, name)
        if value is not None and not most:
            raise ValueError(
                f"student.from_teacher.{name}: {type(config).__name__} has none for all layers; leave {name} out"
            )
        if value is not None and value > most:
            raise ValueError(
                f"student.from_teacher.{name}: expected 1 to {most}, as many as the teacher has, got {value}"
            )
    heads, kv_heads = asked["heads"], asked["kv_heads"]
    if heads is not None and kv_heads is None:
        if heads % full.group:
            raise ValueError(
                f"student.from_teacher.heads: expected a multiple of {full.group}, the heads that share a key and "
                f"value head, got {heads}; with kv_heads each of those keeps fewer heads"
            )
        kv_heads = heads // full.group
    elif kv_heads is not None and heads is None:
        heads = kv_heads * full.group
    heads, kv_heads = heads or full.heads, kv_heads or full.kv_heads
    if heads % kv_heads or heads // kv_heads > full.group:
        raise ValueError(
            f"student.from_teacher.heads: expected {kv_heads} (kv_heads) times 1 to {full.group}, the heads that share "
            f"a key and value head in the teacher, got {heads}"
        )
    return Widths(
        asked["hidden"] or full.hidden,
        heads,
        kv_heads,
        asked["intermediate"] or full.intermediate,
        asked["experts"] or full.experts,
    )


def with_widths(config: PreTrainedConfig, widths: Widths) -> PreTrainedConfig:
    """Return a copy of a configuration with other widths and a head's width as it was."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    _, _, width = attention_sizes(text)
    if getattr(text, "head_dim", None) is None:
        text.head_dim = width
    text.num_attention_heads = widths.heads
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = widths.kv_heads
    text.hidden_size = widths.hidden
    if widths.intermediate:
        name = "intermediate_size" if getattr(text, "intermediate_size", None) else "n_inner"
        setattr(text, name, widths.intermediate)
    if widths.experts and (field := experts_field(text)) is not None:
        setattr(text, field, widths.experts)
    return config
