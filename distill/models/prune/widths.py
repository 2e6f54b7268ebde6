"""Widths of a decoder by its configuration: hidden channels, heads, key and value heads, columns of MLPs, experts.

A head's width never changes: `head_dim` is written into the configuration where it was derived from the others, so that
`hidden_size` need not be `heads * head_dim`.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from transformers import PreTrainedConfig

from distill.models.head import attention_sizes
from distill.models.names import INTERMEDIATE, MOE_INTERMEDIATE, SHARED_INTERMEDIATE
from distill.models.routing import check_experts, experts_field, routing_of
from distill.recipe import FromTeacher
from distill.recipe.from_teacher import COLUMN_AXES, ColumnAxis

# fields of configurations, of which a family has at most one for each axis
COLUMN_FIELDS: dict[ColumnAxis, tuple[str, ...]] = {
    "intermediate": INTERMEDIATE,
    "moe_intermediate": MOE_INTERMEDIATE,
    "shared_expert_intermediate": SHARED_INTERMEDIATE,
}

GROUPED = 8  # entries in 16 bytes of 16 bits: torch.nn.functional.grouped_mm requires rows that are a multiple of it


class Widths(NamedTuple):
    """Widths of every layer of a decoder.

    Attributes:
        hidden: hidden channels, `hidden_size`.
        heads: attention heads.
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` heads.
        intermediate: columns of each MLP, `intermediate_size`; 0 where no MLP has that size.
        experts: routed experts of each layer that has some; 0 in a dense model.
        moe_intermediate: columns of each expert, `moe_intermediate_size`; 0 where the family has no such size.
        shared_expert_intermediate: columns of shared experts, `shared_expert_intermediate_size`; 0 where none has one.
    """

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    experts: int = 0
    moe_intermediate: int = 0
    shared_expert_intermediate: int = 0

    @property
    def group(self) -> int:
        """Number of heads that share a key and value head."""
        return self.heads // self.kv_heads


def widths_of(config: PreTrainedConfig) -> Widths:
    """Return the widths that a configuration has.

    Raises:
        ValueError: a configuration without attention, or whose layers have MLPs of several widths.
    """
    text = without_layers(config.get_text_config())
    heads, kv_heads, _ = attention_sizes(text)
    columns = {axis: getattr(text, name) for axis in COLUMN_AXES if (name := column_field(text, axis)) is not None}
    plain = columns.pop("intermediate", None)
    routing = routing_of(text)
    if plain is None and routing is not None:
        plain = 0
    if not heads or not isinstance(plain, int) or heads % kv_heads:
        what = "no attention heads" if not heads else f"intermediate_size {plain!r}, heads {heads} and {kv_heads}"
        raise ValueError(
            f"student.from_teacher: expected a configuration with one width of all layers to cut widths, got "
            f"{type(text).__name__} with {what}"
        )
    counts = {axis: value for axis, value in columns.items() if isinstance(value, int)}
    return Widths(text.hidden_size, heads, kv_heads, plain, 0 if routing is None else routing.experts, **counts)


def without_layers(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a text model's configuration without what single layers set for themselves (`per_layer_config`)."""
    if getattr(text, "per_layer_attributes", None) is None:
        return text
    text = copy.deepcopy(text)
    text.per_layer_config = None
    return text


def _check_layers(cut: FromTeacher, text: PreTrainedConfig) -> None:
    """Raise ValueError for a width that single layers set for themselves."""
    of_layers = getattr(text, "per_layer_attributes", None) or set()
    heads = {"num_attention_heads", "num_key_value_heads", "head_dim"}
    fields = {"hidden": {"hidden_size"}, "heads": heads, "kv_heads": heads}
    fields |= {axis: set(names) for axis, names in COLUMN_FIELDS.items()}
    for name, needed in fields.items():
        if getattr(cut, name) is not None and (apart := sorted(needed & of_layers)):
            raise ValueError(
                f"student.from_teacher.{name}: expected one width of all layers, got {type(text).__name__}, some of "
                f"whose layers have another {apart[0]}; leave {name} out"
            )


def column_field(text: PreTrainedConfig, axis: ColumnAxis) -> str | None:
    """Return the field of a text model's configuration with the columns of an axis; None where it has none.

    A name that a family maps to that of another axis (`intermediate_size` of DeepSeek-V4) is none.
    """
    others = {name for other, names in COLUMN_FIELDS.items() if other != axis for name in names}
    mine = [name for name in COLUMN_FIELDS[axis] if text.attribute_map.get(name) not in others]
    return next((name for name in mine if getattr(text, name, None)), None)


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
    _check_layers(cut, config.get_text_config())
    full = widths_of(config)
    rows = {"hidden", "moe_intermediate" if full.moe_intermediate else "intermediate"} if full.experts else set()
    asked = {name: getattr(cut, name) for name in Widths._fields}
    for name, value in asked.items():
        most = getattr(full, name)
        if value is not None and not most:
            kind = type(config).__name__
            if name == "moe_intermediate" and full.intermediate:
                raise ValueError(
                    f"student.from_teacher.{name}: {kind} has no moe_intermediate_size; its columns are those of "
                    "intermediate"
                )
            raise ValueError(f"student.from_teacher.{name}: {kind} has none for all layers; leave {name} out")
        if value is not None and value > most:
            raise ValueError(
                f"student.from_teacher.{name}: expected 1 to {most}, as many as the teacher has, got {value}"
            )
        if value not in (None, most) and name in rows and value % GROUPED:
            raise ValueError(
                f"student.from_teacher.{name}: expected a multiple of {GROUPED}, since grouped GEMMs of experts take "
                f"rows of 16 bytes, got {value}"
            )
    heads = asked["heads"]
    kv_heads = asked["kv_heads"]
    if heads is not None and kv_heads is None:
        if heads % full.group:
            raise ValueError(
                f"student.from_teacher.heads: expected a multiple of {full.group}, the heads that share a key and "
                f"value head, got {heads}; with kv_heads each of those keeps fewer heads"
            )
        kv_heads = heads // full.group
    elif kv_heads is not None and heads is None:
        heads = kv_heads * full.group
    heads = heads or full.heads
    kv_heads = kv_heads or full.kv_heads
    if heads % kv_heads or heads // kv_heads > full.group:
        raise ValueError(
            f"student.from_teacher.heads: expected {kv_heads} (kv_heads) times 1 to {full.group}, the heads that share "
            f"a key and value head in the teacher, got {heads}"
        )
    given = {name: value for name, value in asked.items() if value is not None}
    return full._replace(**given | {"heads": heads, "kv_heads": kv_heads})


def with_widths(config: PreTrainedConfig, widths: Widths) -> PreTrainedConfig:
    """Return a copy of a configuration with other widths and a head's width as it was."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    plain = without_layers(text)
    if getattr(plain, "head_dim", None) is None:
        text.head_dim = attention_sizes(plain)[2]
    text.num_attention_heads = widths.heads
    if getattr(plain, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = widths.kv_heads
    text.hidden_size = widths.hidden
    for axis in COLUMN_AXES:
        if getattr(widths, axis) and (name := column_field(plain, axis)) is not None:
            setattr(text, name, getattr(widths, axis))
    if widths.experts and (field := experts_field(text)) is not None:
        setattr(text, field, widths.experts)
    return config
