"""Recording of chosen layers' states while a model's decoder runs: outputs of layers and routers, inputs of attention.

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
from distill.models.routers import RouterOutput, find_routers, read_router, routing_of_model

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
        routers: Outputs of the layer's routers by its number. Empty where a router did not run or has other outputs
            than a logit for each token and expert.
    """

    outputs: dict[int, torch.Tensor]
    attention: dict[int, AttentionInputs]
    routers: dict[int, list[RouterOutput]]


class StateRecorder:
    """Recorder of chosen layers' states of a causal language model, bare or inside PEFT.

    Args:
        model: The model, whose layers are found once.
        outputs: Numbers of layers whose outputs are recorded.
        attention: Numbers of layers whose attention's inputs are recorded.
        routers: Numbers of layers whose routers' outputs are recorded.
        router_gradients: Whether a loss is computed from routers' logits, which are recorded detached otherwise.

    Attributes:
        states: States of the present forward.
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Collection[int] = (),
        attention: Collection[int] = (),
        routers: Collection[int] = (),
        router_gradients: bool = False,
    ) -> None:
        self.outputs = tuple(outputs)
        self.attention = tuple(attention)
        self.routers = tuple(routers)
        self._router_gradients = router_gradients
        self.states = LayerStates({}, {}, {})
        self._decoder = decoder_of(model)
        self._name = type(unwrap_peft(model)).__name__
        _, layers = find_layers(model)
        self._layers = {number: layers[number] for number in outputs}
        self._owners = {id(module): number for number in attention for module in layers[number].modules()}
        self._routing = routing_of_model(model) if routers else None
        found = find_routers(model) if routers else {}
        self._routers = {number: found[number] for number in routers}

    @contextlib.contextmanager
    def record(self) -> Iterator[LayerStates]:
        """Record the states of a forward inside the block.

        Raises:
            ValueError: On exit, where a layer did not run, has outputs of another form than [B, S, hidden], or does not
                attend through transformers' attention interface.
        """
        self.states = states = LayerStates({}, {}, {})
        hooks = [
            layer.register_forward_hook(functools.partial(_keep, states, number))
            for number, layer in self._layers.items()
        ]
        hooks += [
            router.module.register_forward_hook(functools.partial(self._keep_router, states, number, router.output))
            for number, routers in self._routers.items()
            for router in routers
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
        if not self._has_all_routers():
            states.routers.clear()
        missing = sorted(set(self.attention) - states.attention.keys())
        if missing:
            raise ValueError(
                f"loss.terms: attention_relation: layer {missing[0]} of {self._name} does not call attention through "
                "transformers' attention interface (eager attention, or none); set attention to sdpa, or leave the "
                "term out"
            )

    def tensors(self) -> list[torch.Tensor]:
        """Return the states of the present forward: outputs of layers, queries, keys and values, outputs of routers."""
        outputs = [self.states.outputs[number] for number in self.outputs]
        outputs += [each for number in self.attention for each in self.states.attention[number]]
        if self._has_all_routers():
            outputs += [each for number in self.routers for router in self.states.routers[number] for each in router]
        return outputs

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put the states of a forward that ran no hooks in place, in the order of `tensors()`."""
        found = iter(tensors)
        for number in self.outputs:
            self.states.outputs[number] = next(found)
        for number in self.attention:
            self.states.attention[number] = AttentionInputs(next(found), next(found), next(found))
        pairs = list(zip(found, found, strict=True))  # logits and chosen experts take turns
        if pairs:
            outputs = iter(pairs)
            for number in self.routers:
                self.states.routers[number] = [RouterOutput(*next(outputs)) for _ in self._routers[number]]

    def _keep_router(
        self, states: LayerStates, number: int, index: int, module: nn.Module, inputs: object, output: object
    ) -> None:
        assert self._routing is not None
        router = read_router(output, index, self._routing)
        if router is None:
            return
        if not self._router_gradients:
            router = RouterOutput(router.logits.detach(), router.chosen)
        outputs = states.routers.setdefault(number, [])
        if len(outputs) == len(self._routers[number]):  # of an earlier call: a graph is captured after two others
            outputs.clear()
        outputs.append(router)

    def _has_all_routers(self) -> bool:
        """Return whether each router has an output: losses and figures are over all of them, or there are none."""
        found = self.states.routers
        return all(len(found.get(number, ())) == len(routers) for number, routers in self._routers.items())


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
