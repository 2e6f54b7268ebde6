"""Layers that read the same activations, one after another: the first that is called computes for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # by the names they have in models

T = TypeVar("T")


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in: autocast's where it is on and casts `x`, else that of `x`."""
    kind = x.device.type
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


class SiblingOutputs(Generic[T]):
    """What the siblings made of one input, until each has taken its own.

    An output is handed out once, for the very tensor that it was made of, in the same dtype and mode of autograd, and
    only while neither that tensor nor a weight has been written to (inference tensors do not count their changes); in
    any other case all are computed again. They are dropped with the input, which is not kept alive. Copies and pickles
    start empty.
    """

    def __init__(self) -> None:
        self.wasted = False  # outputs were made that nobody took
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
        """The output of `layer` for `x`; None where it cannot be computed.

        Args:
            layer: A key of the outputs.
            compute: Makes the outputs of all layers from `x`, and names the weights that they depend on; None where it
                cannot: what is left of another input then stays.
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
            self._source, self._state = weakref.ref(x, self._forget), state
        output = self._outputs.pop(layer)
        if not self._outputs:
            self.drop()
        return output

    def drop(self) -> None:
        """Forget what is left."""
        self.wasted = self.wasted or bool(self._outputs)
        self._source, self._outputs, self._read = None, {}, []

    def _forget(self, source: weakref.ref[torch.Tensor]) -> None:
        if source is self._source:  # a sibling was never called, and now cannot be
            self.drop()
