"""Recording of chosen layers' states while a model's decoder runs: outputs of layers, and what attention gets.

    recorder = StateRecorder(model, outputs=[3], attention=[5])
    with recorder.record() as states:
        hidden = decoder(**inputs)
    states.outputs[3], states.attention[5].query

Nothing else is kept, unlike with `output_hidden_states`. Hooks are on the layers' own modules and exist inside the
block alone, within the forward of whatever wraps the model (DDP, FSDP): a layer that is computed a second time, for its
gradient, is not recorded again. Queries, keys and values are taken where transformers' layers call their attention
function, so they are the same for every form of the projections and for every attention back end. A CUDA graph of the
decoder (graphs.py) runs no hooks when it is replayed: it finds the recorder by `recorder_of` and fills it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distill.models.head import decoder_of, unwrap_peft
from distill.models.layers import find_layers

RECORDER = "_distill_recorder"  # attribute of a decoder whose states are recorded


class AttentionInputs(NamedTuple):
    """Inputs of one attention call.

    Attributes:
        query: [B, heads, S, head width].
        key, value: [B, key-value heads, S, head width].
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class LayerStates(NamedTuple):
    """States of one forward.

    Attributes:
        outputs: [B, S, hidden] by the layer's number.
        attention: Inputs of the layer's attention by its number.
    """

    outputs: dict[int, torch.Tensor]
    attention: dict[int, AttentionInputs]


class StateRecorder:
    """Recorder of chosen layers' states of a causal language model, bare or inside PEFT.

    Args:
        model: The model, whose layers are found once.
        outputs: Numbers of layers whose outputs are recorded.
        attention: Numbers of layers whose attention's inputs are recorded.

    Attributes:
        states: States of the present forward.
    """

    def __init__(self, model: nn.Module, outputs: Collection[int] = (), attention: Collection[int] = ()) -> None:
        self.outputs = tuple(outputs)
        self.attention = tuple(attention)
        self.states = LayerStates({}, {})
        self._decoder = decoder_of(model)
        self._name = type(unwrap_peft(model)).__name__
        _, layers = find_layers(model)
        self._layers = {number: layers[number] for number in outputs}
        self._owners = {id(module): number for number in attention for module in layers[number].modules()}

    @contextlib.contextmanager
    def record(self) -> Iterator[LayerStates]:
        """Record the states of a forward inside the block.

        Raises:
            ValueError: On exit, where a layer did not run, has outputs of another form than [B, S, hidden], or does not
                attend through transformers' attention interface.
        """
        self.states = states = LayerStates({}, {})
        hooks = [
            layer.register_forward_hook(functools.partial(_keep, states, number))
            for number, layer in self._layers.items()
        ]
        self._decoder.__dict__[RECORDER] = self
        try:
            with _recorded_attention(states, self._owners) if self._owners else contextlib.nullcontext():
                yield states
        finally:
            del self._decoder.__dict__[RECORDER]
            for hook in hooks:
                hook.remove()
        missing = sorted(set(self.outputs) - states.outputs.keys())
        if missing:
            raise ValueError(
                f"loss.terms: hidden_state: layer {missing[0]} of {self._name} has no output [batch, tokens, hidden] "
                "to compare"
            )
        missing = sorted(set(self.attention) - states.attention.keys())
        if missing:
            raise ValueError(
                f"loss.terms: attention_relation: layer {missing[0]} of {self._name} does not call attention through "
                "transformers' attention interface (eager attention, or none); set attention to sdpa, or leave the "
                "term out"
            )

    def tensors(self) -> list[torch.Tensor]:
        """Return the states of the present forward: outputs of layers, then queries, keys and values."""
        outputs = [self.states.outputs[number] for number in self.outputs]
        return outputs + [each for number in self.attention for each in self.states.attention[number]]

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put the states of a forward that ran no hooks in place, in the order of `tensors()`."""
        found = iter(tensors)
        for number in self.outputs:
            self.states.outputs[number] = next(found)
        for number in self.attention:
            self.states.attention[number] = AttentionInputs(next(found), next(found), next(found))


def recorder_of(decoder: nn.Module) -> StateRecorder | None:
    """Return the recorder that records a decoder's present forward; None without one."""
    return decoder.__dict__.get(RECORDER)


def _keep(states: LayerStates, number: int, module: nn.Module, inputs: object, output: object) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
        states.outputs[number] = hidden


@contextlib.contextmanager
def _recorded_attention(states: LayerStates, owners: dict[int, int]) -> Iterator[None]:
    """Put a recorder before every attention function; `owners` has the layer's number by the id of its modules."""

    def recorder(attend: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(attend)
        def record(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: object,
            **more: object,
        ) -> object:
            number = owners.get(id(module))
            if number is not None:
                states.attention[number] = AttentionInputs(query, key, value)
            return attend(module, query, key, value, *args, **more)

        return record

    functions = dict(ALL_ATTENTION_FUNCTIONS)
    ALL_ATTENTION_FUNCTIONS.update({name: recorder(attend) for name, attend in functions.items()})
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]
