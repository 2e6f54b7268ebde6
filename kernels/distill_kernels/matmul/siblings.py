"""Shared computation of layers that read the same activations: the first one called computes for all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

# names of a module's layers that read the same activations, wherever q, k and v or gate and up are taken together
QKV = ("q_proj", "k_proj", "v_proj")
SIBLINGS = (QKV, ("gate_proj", "up_proj"))

T = TypeVar("T")


def sibling_groups(layers: Mapping[str, T]) -> list[dict[str, T]]:
    """Return the layers of one module, by their names in it, in groups that read the same input.

    Siblings of which none is missing are a group, every other layer is one alone.
    """
    by_name = {name: names for names in SIBLINGS for name in names if layers.keys() >= set(names)}
    groups = dict.fromkeys(by_name.get(name, (name,)) for name in layers)
    return [{name: layers[name] for name in names} for names in groups]


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes in: autocast's where it casts `x`, else that of `x`."""
    kind = x.device.type
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


class SiblingOutputs(Generic[T]):
    """Outputs of all layers for one input, kept until each layer has taken its own.

    An output is returned once, for the same tensor object, dtype and autograd mode, and only while neither that tensor
    nor a weight has been modified (inference tensors have no version counter); otherwise all are recomputed. They are
    dropped with the input, which is referenced weakly. Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self.wasted = False  # True once outputs were dropped unused
        self._source: weakref.ref[torch.Tensor] | None = None
        self._state: tuple[object, ...] = ()
        self._read: list[tuple[torch.Tensor, int]] = []
        self._outputs: dict[Hashable, T] = {}

    def __reduce__(self) -> tuple[type[SiblingOutputs[T]], tuple[()]]:
        return SiblingOutputs, ()

    def take(
        self,
        layer: Hashable,
        x: torch.Tensor,
        compute: Callable[[torch.Tensor], tuple[dict[Hashable, T], Sequence[torch.Tensor]] | None],
    ) -> T | None:
        """Return the output of `layer` for `x`; None where it cannot be computed.

        Args:
            layer: A key of the outputs.
            compute: Returns the outputs of all layers for `x` and the weights that they depend on, or None where it
                cannot (outputs left of another input then stay).
        """
        state = (None if x.is_inference() else x._version, compute_dtype(x), torch.is_grad_enabled())
        same = self._source is not None and self._source() is x and self._state == state and layer in self._outputs
        if not same or any(weight._version != version for weight, version in self._read):
            made = compute(x)
            if made is None:
                return None
            self.drop()
            self._outputs, weights = made
            self._read = [(weight, weight._version) for weight in weights if not weight.is_inference()]
            self._source = weakref.ref(x, self._forget)
            self._state = state
        output = self._outputs.pop(layer)
        if not self._outputs:
            self.drop()
        return output

    def drop(self) -> None:
        self.wasted = self.wasted or bool(self._outputs)
        self._source = None
        self._outputs = {}
        self._read = []

    def _forget(self, source: weakref.ref[torch.Tensor]) -> None:
        if source is self._source:  # a sibling was never called, and now cannot be
            self.drop()
