"""Proof that a family's widths can be cut: a small model of it is cut, and computes what it should.

The small model has the configuration's own parts, a few layers and narrow ones, and random weights. In it everything
that belongs to some channels, heads and columns is set to zero: what is left computes nothing with them, and the model
cut to the others must give the same logits. Experts are not set to zero: the routers of what is compared give them the
logit -inf. In what is compared experts compute as where they are scored (`experts.py`), in the model that was cut as
the family does. A family whose modules are made up in a way that nobody told us about is refused by that, in place of
being cut into nonsense.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from distill.core.errors import first_line
from distill.models.layers import layers_to_keep
from distill.models.patch.swaps import EPSILONS
from distill.models.prune.experts import MaskedRouters, expert_modules, expert_statistics, largest_experts
from distill.models.prune.narrow import Selection, cut_parts, exact_factor
from distill.models.prune.pruning import cut_config, trial_ids
from distill.models.prune.width_layout import Axis, Order, WidthLayout, WidthProbe
from distill.models.prune.widths import Widths, widths_of, with_widths, without_layers
from distill.models.routing import routing_of
from distill.models.trial import CUT_WEIGHTS, relative_error
from distill.recipe.from_teacher import COLUMN_AXES

LAYERS = 4
# of a small model, on each axis of columns
COLUMNS = 48
KEPT = 32
EPSILON = 1e-12  # of the small models' norms, whose own epsilons a cut does not scale
ORDERS: tuple[Order, ...] = ("blocks", "interleaved")
_proven: dict[tuple[str, str, tuple[str, ...]], WidthLayout | str] = {}


def verified_layout(config: PreTrainedConfig, axes: Collection[Axis]) -> WidthLayout:
    """Return the layout of a configuration's model for these axes, tried out on a small model.

    Args:
        config: Configuration of the teacher.
        axes: Axes to cut, without `kv_heads`, which heads include.

    Raises:
        ValueError: a model that cannot be cut, with the module or with the error of the small model.
    """
    key = (type(config).__name__, config.to_json_string(use_diff=False), tuple(sorted(axes)))
    if key not in _proven:
        if len(_proven) >= 32:
            _proven.clear()
        try:
            _proven[key] = _verify(config, axes)
        except ValueError as error:
            _proven[key] = str(error)
    found = _proven[key]
    if isinstance(found, str):
        raise ValueError(found)
    return found


def axes_of(full: Widths, widths: Widths) -> list[Axis]:
    """Return the axes along which a cut makes a model narrower; heads stand for their keys and values as well."""
    alone: tuple[Axis, ...] = ("hidden", *COLUMN_AXES, "experts")
    cut: list[Axis] = [axis for axis in alone if getattr(full, axis) != getattr(widths, axis)]
    heads = (full.heads, full.kv_heads) != (widths.heads, widths.kv_heads)
    return [*cut, "heads"] if heads else cut


def _verify(config: PreTrainedConfig, axes: Collection[Axis]) -> WidthLayout:
    tried: list[str] = []
    several = [axis for axis in ("heads", *COLUMN_AXES) if axis in axes]
    growth = WidthProbe(config, axes)
    found: list[WidthLayout] = []
    for each in itertools.product(ORDERS, repeat=len(several)):
        orders = dict(zip(several, each, strict=True))
        layout = growth.layout(orders)
        if layout in found:
            continue
        found.append(layout)
        try:
            small = small_config(config)
            error = _error_of_small(small, axes, WidthProbe(small, axes).layout(orders))
        except (RuntimeError, ArithmeticError, LookupError, AttributeError, TypeError) as fault:
            raise ValueError(
                f"student.from_teacher: a small {type(config).__name__} cannot be cut along {', '.join(axes)}: "
                f"{type(fault).__name__}: {first_line(fault)}"
            ) from fault
        if error <= CUT_WEIGHTS:
            return layout
        tried.append(f"{error:.2g}")
    compared = "no token routed there" if list(axes) == ["experts"] else "zeros there"
    raise ValueError(
        f"student.from_teacher: a small {type(config).__name__} that is cut along {', '.join(axes)} differs from the "
        f"same with {compared} by {' or '.join(tried)}, relative; its {', '.join(axes)} cannot be cut"
    )


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of the same family with a few narrow layers."""
    total = config.get_text_config().num_hidden_layers
    full = widths_of(config)
    short = cut_config(config, layers_to_keep(total, min(LAYERS, total)))
    pairs = 1 if full.kv_heads == 1 else 4
    group = min(full.group, 4)
    heads = pairs * group
    routing = routing_of(config.get_text_config())
    experts = 0 if routing is None else routing.of_small
    columns = {axis: COLUMNS for axis in COLUMN_AXES if getattr(full, axis)}
    widths = full._replace(hidden=16 * heads, heads=heads, kv_heads=pairs, experts=experts)
    small = with_widths(short, widths._replace(**columns))
    before = without_layers(config.get_text_config())
    text = small.get_text_config()
    if getattr(text, "mamba_n_heads", None) and getattr(text, "mamba_d_ssm", None) is None:
        text.mamba_n_heads = text.mamba_expand * text.hidden_size // text.mamba_d_head  # as the family requires
    if not hasattr(before, "head_dim"):
        del text.head_dim  # of a family that may have no other than hidden_size / heads
    elif before.head_dim is None:
        text.head_dim = None
    return small


def _error_of_small(small: PreTrainedConfig, axes: Collection[Axis], layout: WidthLayout) -> float:
    """Return the relative error of a small cut model's logits."""
    full = layout.full
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
        _draw(model, layout)
        # of each group one head stays, of every second group where there are several
        kv = list(range(0, full.kv_heads, 2))
        heads = [n * full.group + m for n in kv for m in range(0, full.group, 2)]
        layers = list(range(small.get_text_config().num_hidden_layers))
        parts: dict[str, dict[int, list[int]]] = {}
        widths = full
        if "heads" in axes:
            parts |= {"heads": dict.fromkeys(layers, heads), "kv_heads": dict.fromkeys(layers, kv)}
            widths = widths._replace(heads=len(heads), kv_heads=len(kv))
        columns: dict[str, list[list[int]]] = {}
        for name, (axis, total, experts) in layout.mlps.items():
            drawn = [torch.randperm(total)[: total * KEPT // COLUMNS] for _ in range(experts or 1)]
            columns[name] = [each.sort().values.tolist() for each in drawn]
            widths = widths._replace(**{axis: KEPT})
        hidden = None
        if "hidden" in axes:
            hidden = torch.randperm(full.hidden)[: full.hidden // 2].sort().values.tolist()
            widths = widths._replace(hidden=len(hidden))
        dropped: dict[int, list[int]] = {}
        if "experts" in axes:
            routing = routing_of(small.get_text_config())
            assert routing is not None
            # the first of each group goes, since zeros in place of numbers of experts name it
            scores = torch.rand(routing.experts).view(routing.groups, -1)
            scores[:, 0] = -1
            kept_experts = largest_experts(scores.flatten(), routing.least, routing.groups)
            having = expert_modules(model, layout)
            parts["experts"] = dict.fromkeys(having, kept_experts)
            dropped = dict.fromkeys(having, sorted({*range(routing.experts)} - {*kept_experts}))
            widths = widths._replace(experts=routing.least)
        selection = Selection(layers, hidden, parts, columns, {})
        _zero_the_rest(model, selection, layout)
        norms = {name: exact_factor(block.axis, full, widths) for name, _, block in layout.norms(model)}
        cut = cut_parts(model, selection._replace(norms=norms), widths, layout)
        ids = trial_ids(small, 24)
        for module in (*model.modules(), *cut.modules()):
            for name in [name for name in EPSILONS if isinstance(getattr(module, name, None), float)]:
                setattr(module, name, EPSILON)
        with torch.no_grad():
            got = cut(input_ids=ids, use_cache=False).logits.double()
            with contextlib.ExitStack() as around:
                if dropped:
                    around.enter_context(MaskedRouters(model, layout, dropped))
                around.enter_context(expert_statistics(model, layout, "l2"))
                expected = model(input_ids=ids, use_cache=False).logits.double()
    return relative_error(got, expected)


@torch.no_grad()
def _draw(model: nn.Module, layout: WidthLayout) -> None:
    """Draw weights so large that every part of the model counts, and norms of all sizes."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.shape[0] < 4096 else 1.0)
        else:
            parameter.uniform_(0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name in layout.dims and buffer.is_floating_point():
            buffer.uniform_(-0.5, 0.5)


@torch.no_grad()
def _zero_the_rest(model: nn.Module, selection: Selection, layout: WidthLayout) -> None:
    """Set what is dropped to zero, experts aside, and norms, through which zeros pass."""
    apart = {f"{name}.weight" for name, _, _ in layout.norms(model)}
    parts = {axis: kept for axis, kept in selection.parts.items() if axis != "experts"}
    narrow = selection._replace(parts=parts).narrowing(layout)
    for name, parameter in model.named_parameters():
        if name in layout.dims and name not in apart:
            kept = narrow(name, torch.arange(parameter.numel()).view(parameter.shape))
            mask = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            mask[kept.flatten()] = 1
            parameter.mul_(mask.view(parameter.shape))
