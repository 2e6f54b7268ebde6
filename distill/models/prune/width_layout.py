"""Layout of a decoder's parameters: the dimensions that hold hidden channels, heads, columns of MLPs or experts.

No family is known by name. A dimension holds hidden channels if it is as many entries longer where the configuration
has more of them, and likewise for heads, key and value heads, columns and experts: the model is built without memory
from configurations that differ in one of these. A dimension that holds several parts (`[gate; up]`, `[q; k; v]`) is a
sequence of blocks, in one of two orders that `width_trial.py` tells apart by running a small model.

The columns of an MLP are those of one module: of a dense or shared MLP, whose parameters are those of linear layers, or
of all experts of a layer, whose parameters are `[experts, ...]` and of which each has columns of its own. Shared
experts may have a multiple of the configuration's columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from distill.core.errors import first_line
from distill.models.head import attention_sizes
from distill.models.layers import find_layers
from distill.models.patch.swaps import epsilon_of
from distill.models.prune.widths import COLUMN_FIELDS, Widths, widths_of, with_widths, without_layers
from distill.recipe.from_teacher import COLUMN_AXES, ColumnAxis

Axis = Literal["hidden", "heads", "kv_heads", ColumnAxis, "experts"]
Order = Literal["blocks", "interleaved"]
FIELDS: dict[Axis, str] = {"hidden": "hidden_size", "heads": "num_attention_heads", "experts": "the number of experts"}
FIELDS |= {axis: names[0] for axis, names in COLUMN_FIELDS.items()}


class Block(NamedTuple):
    """Consecutive entries of a dimension: those of each channel, head or column in turn.

    Attributes:
        axis: Axis that the entries belong to.
        unit: entries of each.
        total: number of channels, heads or columns.
    """

    axis: Axis
    unit: int
    total: int


Dims = tuple[tuple[Block, ...], ...]  # by dimension; empty for one that no width changes


class Columns(NamedTuple):
    """Columns of one module.

    Attributes:
        axis: Axis that they are cut by.
        total: number of columns, of each expert where it holds experts.
        experts: number of experts of a module with parameters `[experts, ...]`; 0 for a dense or shared MLP.
    """

    axis: Axis
    total: int
    experts: int


class WidthLayout(NamedTuple):
    """Layout of a model's parameters.

    Attributes:
        dims: Dimensions of the parameters that a width changes, by name.
        prefix: Prefix of the parameter names in layers, before the layer's number.
        full: the model's widths.
        mlps: Columns that are cut, by the name of their module.
    """

    dims: Mapping[str, Dims]
    prefix: str
    full: Widths
    mlps: Mapping[str, Columns]

    def layer_of(self, name: str) -> int | None:
        found = re.match(re.escape(self.prefix) + r"(\d+)\.", name)
        return None if found is None else int(found[1])

    def on(self, axis: Axis) -> Iterator[str]:
        """Yield the names of parameters with a dimension on an axis."""
        for name, dims in self.dims.items():
            if any(block.axis == axis for blocks in dims for block in blocks):
                yield name

    def readers(self, model: nn.Module, axis: Axis) -> dict[str, str]:
        """Return the linear layers that read the heads, by the prefix of their layer, or the columns, by their module.

        Modules of experts are not among them.

        Raises:
            ValueError: a layer or module in which not exactly one linear layer reads them.
        """
        found: dict[str, list[str]] = {}
        for name in self.on(axis):
            owner, _, leaf = name.rpartition(".")
            layer = self.layer_of(name)
            if layer is None:
                raise ValueError(f"student.from_teacher: {name} outside of layers has {axis}; leave {axis} out")
            place = mlp_of(name) if axis in COLUMN_AXES else f"{self.prefix}{layer}"
            if place in self.mlps and self.mlps[place].experts:
                continue
            here = found.setdefault(place, [])
            is_linear = leaf == "weight" and isinstance(model.get_submodule(owner), nn.Linear)
            if is_linear and [block.axis for block in self.dims[name][-1]] == [axis]:
                here.append(owner)
        for place, readers in found.items():
            if len(readers) != 1:
                raise ValueError(
                    f"student.from_teacher: expected one linear layer that reads the {axis} of {place}, got "
                    f"{readers or 'none'}; {axis} of {type(model).__name__} cannot be cut"
                )
        return {place: readers[0] for place, readers in found.items()}

    def norms(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, Block]]:
        """Yield the norms over channels or heads that may be cut, by name, and what their weight is over."""
        for name, dims in self.dims.items():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            if leaf == "weight" and len(dims) == 1 and epsilon_of(module) is not None:
                yield owner, module, dims[0][0]


def mlp_of(name: str) -> str:
    """Return the module whose columns a parameter has: of a linear layer's the module around it, else its own."""
    owner, _, leaf = name.rpartition(".")
    return owner.rpartition(".")[0] if leaf in ("weight", "bias") else owner


def entries(blocks: Sequence[Block], kept: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the entries of a dimension that belong to the kept channels, heads or columns, ascending.

    Args:
        blocks: Blocks of the dimension.
        kept: Kept indices by axis; an absent axis is kept whole.
    """
    found: list[int] = []
    start = 0
    for axis, unit, total in blocks:
        for number in kept.get(axis, range(total)):
            found.extend(range(start + number * unit, start + (number + 1) * unit))
        start += total * unit
    return found


def on_meta_device(config: PreTrainedConfig) -> nn.Module:
    """Return a model of a configuration on the meta device.

    Raises:
        ValueError: a configuration that makes no model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # a configuration's own checks raise what they like
        cause = first_line(error.__cause__ or error)
        raise ValueError(f"student.from_teacher: {type(config).__name__} cannot have other widths: {cause}") from error


class WidthProbe:
    """Growth of the parameters of a configuration's model with each width, from models that differ in one of them.

    Args:
        config: Configuration of transformers.
        axes: Axes that will be cut, without `kv_heads`, which heads include.

    Raises:
        ValueError: a parameter whose size follows from a width in another way, by name.
    """

    def __init__(self, config: PreTrainedConfig, axes: Collection[Axis]) -> None:
        self.full = full = widths_of(config)
        self.head_width = attention_sizes(without_layers(config.get_text_config()))[2]
        self.axes = axes
        self.model = model = on_meta_device(config)
        self._slopes = {name: [SizePerWidth(size) for size in shape] for name, shape in _shapes(model).items()}
        # One width at a time is doubled on the meta device, and what grows depends on it. Hidden channels, heads, and
        # key and value heads are doubled on top of each other, so each model is compared with the one before it.
        before = full
        wide = full._replace(hidden=2 * full.hidden)
        changes: list[tuple[Axis, Widths]] = [("hidden", wide)] if {"hidden", "heads"} & set(axes) else []
        if "heads" in axes:
            # of twice as many hidden channels, since some configurations require a multiple of the heads
            changes.append(("heads", wide._replace(heads=2 * full.heads)))
            if getattr(config.get_text_config(), "num_key_value_heads", None) is not None:
                changes.append(("kv_heads", changes[-1][1]._replace(kv_heads=2 * full.kv_heads)))
        shapes = _shapes(model)
        for axis, widths in changes:
            after = _shapes(on_meta_device(with_widths(config, widths)))
            _note(self._slopes, axis, (shapes, after), getattr(widths, axis) - getattr(before, axis))
            before = widths
            shapes = after
        # columns and experts need nothing else to grow with them: each is doubled alone, against the full model
        apart: tuple[Axis, ...] = (*COLUMN_AXES, "experts")
        for axis in apart:
            if axis in axes:
                more = getattr(full, axis)
                after = _shapes(on_meta_device(with_widths(config, full._replace(**{axis: 2 * more}))))
                _note(self._slopes, axis, (_shapes(model), after), more)
        self.mlps = self._mlps()

    def _mlps(self) -> dict[str, Columns]:
        """Return the columns of every module that has some; a module's own are the fewest of its parameters."""
        found: dict[str, Columns] = {}
        for name, dims in self._slopes.items():
            for axis in COLUMN_AXES:
                for slope in [dim.by[axis] for dim in dims if axis in dim.by]:
                    place = mlp_of(name)
                    mine = found.get(place, Columns(axis, slope * getattr(self.full, axis), 0))
                    if mine.axis != axis:
                        raise ValueError(
                            f"student.from_teacher.{axis}: {place} has columns of {mine.axis} as well; leave {axis} out"
                        )
                    # gate and up in one matrix have twice as many rows as there are columns; the down projection has
                    # one of each
                    total = min(mine.total, slope * getattr(self.full, axis))
                    found[place] = Columns(axis, total, dims[0].size if len(dims) > 2 else mine.experts)
        return found

    def layout(self, orders: Mapping[str, Order]) -> WidthLayout:
        """Return the layout of the axes that will be cut.

        Args:
            orders: by axis: of a dimension with several parts for each head or column, one part of all after the other,
                or all parts of each.

        Raises:
            ValueError: a parameter whose size follows from a width in another way, by name.
        """
        cut = {*self.axes} | ({"kv_heads"} if "heads" in self.axes else set())
        dims: dict[str, Dims] = {}
        for name, found in self._slopes.items():
            columns = self.mlps.get(mlp_of(name))
            held = [
                slope.blocks(f"{name} of {type(self.model).__name__}", self.full, self.head_width, columns, orders)
                for slope in found
            ]
            dims[name] = tuple(tuple(block for block in blocks if block.axis in cut) for blocks in held)
        prefix = find_layers(self.model)[0] + "."
        layout = WidthLayout({name: found for name, found in dims.items() if any(found)}, prefix, self.full, self.mlps)
        _check(layout, self.model, self.axes)
        return layout


class SizePerWidth:
    """Growth of one dimension's size with each width."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.by: dict[Axis, int] = {}

    def blocks(
        self, name: str, full: Widths, head_width: int, columns: Columns | None, orders: Mapping[str, Order]
    ) -> tuple[Block, ...]:
        """Return the dimension's blocks; of columns there are `columns.total` in a block."""
        if not self.by:
            return ()
        if self.size != sum(getattr(full, axis) * slope for axis, slope in self.by.items()):
            raise ValueError(
                f"student.from_teacher: expected the size of {name} to follow from {' and '.join(self.by)} alone, got "
                f"{self.size}; leave that out"
            )
        if "hidden" in self.by:
            if self.by != {"hidden": 1}:
                raise ValueError(f"student.from_teacher.hidden: {name} has {self.by} entries for each; leave it out")
            return (Block("hidden", 1, full.hidden),)
        made: list[Block] = []
        # Entries of a head in one part. Queries, keys and values in one matrix: it grows by one part for a head, and by
        # two, keys and values, for a key and value head.
        unit = self.by.get("heads", head_width)
        for axis, slope in self.by.items():
            total = getattr(full, axis)
            part = head_width if len(self.by) == 1 else unit
            if axis in COLUMN_AXES:
                assert columns is not None
                slope = slope * total // columns.total
                total = columns.total
                part = 1
            elif axis == "experts":
                part = 1
            apart = orders.get("heads" if axis == "kv_heads" else axis) == "blocks" and slope % part == 0
            made += [Block(axis, part, total)] * (slope // part) if apart else [Block(axis, slope, total)]
        return tuple(made)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and of buffers that are saved."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def _note(
    slopes: dict[str, list[SizePerWidth]], axis: Axis, shapes: Sequence[dict[str, tuple[int, ...]]], more: int
) -> None:
    """Note by how much each dimension grew, for each unit of an axis that was added."""
    before, after = shapes
    if before.keys() != after.keys():
        (name, *_) = sorted(before.keys() ^ after.keys())
        raise ValueError(f"student.from_teacher: {name} exists for some numbers of {axis} only; leave {axis} out")
    for name, dims in slopes.items():
        for slope, small, large in zip(dims, before[name], after[name], strict=True):
            if large != small:
                if (large - small) % more:
                    raise ValueError(
                        f"student.from_teacher: the size of {name} is no multiple of {axis}; leave {axis} out"
                    )
                slope.by[axis] = (large - small) // more


def _check(layout: WidthLayout, model: nn.Module, axes: Collection[Axis]) -> None:
    """Refuse what is not channels, heads or columns of plain modules."""
    kind = type(model).__name__
    for axis in axes:
        if not any(layout.on(axis)):
            raise ValueError(
                f"student.from_teacher.{axis}: {kind} has no parameter whose size follows from {FIELDS[axis]}"
            )
    for name, dims in layout.dims.items():
        held = [{block.axis for block in blocks} for blocks in dims]
        if sum("hidden" in each for each in held) > 1:
            raise ValueError(
                f"student.from_teacher: {name} maps hidden channels to hidden channels ({kind} takes no head_dim of "
                "its own, or mixes channels); its widths cannot be cut"
            )
