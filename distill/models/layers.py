"""The decoder layers of a model: their number, the list that holds them, those that a student keeps, where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from distill.models.head import decoder_of, unwrap_peft
from distill.recipe import FromTeacher

STREAMER = "_distill_streamer"  # attribute of a model whose layers are in host memory


def layers_to_keep(total: int, count: int) -> list[int]:
    """The layers that `layers: count` keeps of `total`: all but a contiguous block in the middle.

    With `d = total - count` layers to drop, layers `s .. s + d - 1` go, `s = (count + 1) // 2`, so that the first half
    of the kept layers (and the odd one) stands before the gap and the second half after it. 30 layers, 20 kept:
    0-9 and 20-29.
    """
    if not 1 <= count <= total:
        raise ValueError(f"student.from_teacher.layers: expected 1 to {total}, as many as the teacher has, got {count}")
    start = (count + 1) // 2
    return [*range(start), *range(start + total - count, total)]


def check_kept(keep: Sequence[int], total: int) -> list[int]:
    """`keep` as a list, ascending and within the teacher's layers."""
    indices = list(keep)
    if not indices or indices != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= total:
        raise ValueError(
            f"student.from_teacher.keep: expected ascending layer numbers from 0 to {total - 1}, none twice, "
            f"got {indices}"
        )
    return indices


def layer_indices(cut: FromTeacher | None, total: int) -> list[int]:
    """The layers that `student.from_teacher` keeps of a teacher's `total`."""
    assert cut is not None
    return check_kept(cut.keep, total) if cut.keep is not None else layers_to_keep(total, cut.layers or total)


def layer_count(config: Any) -> int:
    return config.get_text_config().num_hidden_layers


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder's list of layers and its name inside `model`, such as `model.layers`.

    Raises:
        ValueError: where there is none of the length that the configuration tells.
    """
    model = unwrap_peft(model)
    total = layer_count(model.config)
    decoder = decoder_of(model)
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total and id(module) in inside:
            return name, module
    raise ValueError(f"student.from_teacher: {type(model).__name__} has no list of {total} layers; give student.model")


def is_offloaded(model: nn.Module | None) -> bool:
    return model is not None and STREAMER in model.__dict__


def offloading_of(model: nn.Module | None) -> str | None:
    """Return a line on the offloaded layers of `model`; None where it is resident."""
    return None if model is None or STREAMER not in model.__dict__ else str(model.__dict__[STREAMER])
