"""CUDA graphs of a decoder's forward and backward: below about a billion parameters a step is bound by Python.

    graphs = DecoderGraphs()
    graphs.add("teacher", decoder_of(teacher), trains=False)
    graphs.add("student", decoder_of(student), trains=True)
    graphs.enabled = True               # from the second call of a shape on, calls are replays

What is captured is a call of the decoder's own forward, with whatever was put into it: our kernels, compiled layers,
LoRA, gradient checkpointing, autocast. The loss and the optimizer stay launched: how many rows are learned is a shape,
and their launches are hidden by the replay. Gradients go through autograd, so that hooks of DDP and of parameters fire.

Memory: all graphs share one pool, since a replay begins where the one before has ended. Between a student's forward and
its backward its activations lie in the pool; a call that comes in between is launched. Hidden states are handed out as
copies. Gradients are handed out as views of the pool, where any later replay may write: those that are still in use
then (accumulation; a teacher that is asked before the optimizer's step) are copied first.

States of layers that are recorded (layer_states.py) are outputs of the graph like its hidden states: they are handed
out as copies, and their gradients are inputs of the backward's graph.

A graph repeats what the host decided when it was captured. Hence a decoder is refused, with the reason in `refused`, if
it waits for the device, draws random numbers on the host, has hooks of other libraries, parameters that are sharded or
not on the GPU, or returns more than hidden states. Random numbers on the device are those of a launched step.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from distill_kernels.torch_internals import copies_of, foreach_copy_
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutputWithPast

from distill.core.errors import first_line
from distill.models.layer_states import StateRecorder, recorder_of

SHAPES = 4  # of batches that a decoder is captured for; each holds its own graphs
KNOWN_HOOKS = ("torch.", "transformers.", "peft.", "accelerate.", "distill.")


class DecoderGraphs:
    """The graphs of one training step's decoders.

    Attributes:
        enabled: whether calls may be captured and replayed; off at first, so that a few launched calls warm up.
        refused: why a decoder is not captured, by the name it was added with.
        replays: calls that were replays.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.refused: dict[str, str] = {}
        self.replays = 0
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self._decoders: list[_GraphedDecoder] = []
        self._unfinished: weakref.ref[_Forward] | None = None
        self._handed_out: _Captured | None = None  # whose gradients may be in use

    def add(self, name: str, decoder: nn.Module, *, trains: bool) -> None:
        """Put the graphs before `decoder.forward`; calls of another mode (train, eval, gradients) stay launched."""
        self._decoders.append(_GraphedDecoder(self, name, decoder, trains))

    def release(self) -> None:
        """Give every decoder its forward back, and the graphs' memory to the allocator."""
        for decoder in self._decoders:
            decoder.restore()
        self._decoders = []
        self.enabled = False
        torch.cuda.empty_cache()

    @property
    def awaits_backward(self) -> bool:
        """Return whether a student's activations are in the graph's memory pool."""
        return self._unfinished is not None and self._unfinished() is not None

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay `graph`, whose kernels may write wherever the pool's memory was free when it was captured."""
        if self._handed_out is not None:
            self._handed_out.keep_gradients_in_use()
            self._handed_out = None
        graph.replay()


class _Forward:
    """One replayed forward; lives as long as its backward may come."""


class _GraphedDecoder:
    def __init__(self, graphs: DecoderGraphs, name: str, decoder: nn.Module, trains: bool) -> None:
        self.graphs = graphs
        self.name = name
        self.decoder = decoder
        self.trains = trains
        self._own = decoder.__dict__.get("forward")
        self.launched: Callable[..., Any] = self._own or types.MethodType(type(decoder).forward, decoder)
        self._captured: dict[Any, _Captured | None] = {}  # None: seen once
        self._captures = False
        why = _unsuited(decoder)
        if why:
            graphs.refused[name] = why
            return
        graphed = self

        @functools.wraps(self.launched)
        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            return graphed(*args, **kwargs)

        decoder.forward = types.MethodType(forward, decoder)

    def restore(self) -> None:
        self._captured.clear()
        self.decoder.__dict__.pop("forward", None)
        if self._own is not None:
            self.decoder.forward = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self.graphs
        if self._captures:
            return self.launched(*args, **kwargs)
        right_mode = self.trains == torch.is_grad_enabled() and self.trains == self.decoder.training
        # while a backward is to come, a replay would overwrite its activations: all graphs share their memory
        if args or not right_mode or not graphs.enabled or graphs.awaits_backward or self.name in graphs.refused:
            return self.launched(*args, **kwargs)
        tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in kwargs.items() if value is not None and key not in tensors}
        if others != {"use_cache": False} or any(tensor.requires_grad for tensor in tensors.values()):
            return self.launched(**kwargs)
        recorder = recorder_of(self.decoder)
        key = (
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(tensors.items())),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            recorder and (recorder.outputs, recorder.attention, recorder.routers),
        )
        # the first call of a shape is launched: one that comes once only, such as an epoch's last batch, is not
        # captured
        if key not in self._captured:
            if len(self._captured) < SHAPES:
                self._captured[key] = None
            return self.launched(**kwargs)
        captured = self._captured[key]
        if captured is None or captured.addresses != [p.data_ptr() for p in captured.parameters]:  # they have moved
            captured = self._captured[key] = self._capture(tensors, recorder)
        if captured is None:
            return self.launched(**kwargs)
        graphs.replays += 1
        hidden, *states = captured(tensors)
        if recorder is not None:
            recorder.fill(states)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _capture(self, tensors: dict[str, torch.Tensor], recorder: StateRecorder | None) -> _Captured | None:
        self._captures = True
        try:
            return _Captured(self.graphs, self.decoder, tensors, recorder, self.trains)
        except torch.OutOfMemoryError:
            why = "its graph does not fit into the GPU's memory beside the launched step"
        except (RuntimeError, TypeError, ValueError) as error:
            why = first_line(error)
        finally:
            self._captures = False
        self.graphs.refused[self.name] = why
        self._captured.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return None


class _Captured:
    """The graphs of one decoder for batches of one shape, with the layers' states that are recorded."""

    def __init__(
        self,
        graphs: DecoderGraphs,
        decoder: nn.Module,
        tensors: dict[str, torch.Tensor],
        recorder: StateRecorder | None,
        trains: bool,
    ) -> None:
        self.graphs = graphs
        trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad} if trains else {}
        self.parameters = list(trained.values())
        # their hooks and, under DDP, their places in autograd's graph belong to the stream of launched steps
        stand_ins: dict[str, torch.Tensor] = {name: nn.Parameter(p.detach()) for name, p in trained.items()}
        self._leaves = list(stand_ins.values())
        self.addresses = [p.data_ptr() for p in self.parameters]
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")
        # a cast weight in autocast's cache would be one of the graph's, read outside of it
        autocast = torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)
        with torch.inference_mode(False), torch.set_grad_enabled(trains), autocast:
            self.inputs = {name: tensor.detach().clone() for name, tensor in tensors.items()}

            def call() -> list[torch.Tensor]:
                output = functional_call(decoder, stand_ins, (), {**self.inputs, "use_cache": False})
                more = {name for name, value in output.items() if value is not None} - {"last_hidden_state"}
                if more:
                    raise RuntimeError(f"its decoder returns more than hidden states: {', '.join(sorted(more))}")
                return [output.last_hidden_state, *(recorder.tensors() if recorder is not None else ())]

            with _random_numbers_kept(), _without_random_state_of_checkpoints(decoder):
                self._warm_up(call)
                self.forward = torch.cuda.CUDAGraph()
                self.backward = torch.cuda.CUDAGraph()
                with own_workspace():
                    with self._capturing(self.forward):
                        outputs = call()
                    self.has_gradient = [output.requires_grad for output in outputs]
                    if trains:
                        differentiated = [output for output in outputs if output.requires_grad]
                        # made outside of the capture: inputs of the backward's graph, filled before each replay
                        self.upstream = [torch.empty_like(output) for output in differentiated]
                        with self._capturing(self.backward):
                            gradients = torch.autograd.grad(
                                differentiated, self._leaves, self.upstream, allow_unused=True
                            )
                        self.gradients: Sequence[torch.Tensor | None] = gradients
            self.outputs = [output.detach() for output in outputs]

    def __call__(self, tensors: dict[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.inputs[name].copy_(tensor)
        if self.parameters:
            replayed: tuple[torch.Tensor, ...] = _Replay.apply(self, *self.parameters)
            return replayed
        return self.run_forward()

    def run_forward(self) -> tuple[torch.Tensor, ...]:
        self.graphs.replay(self.forward)
        hidden, *states = self.outputs
        return (hidden.clone(), *copies_of(states))

    def keep_gradients_in_use(self) -> None:
        """Copy the parameters' gradients that lie in the graph's memory."""
        pairs = zip(self.parameters, self.gradients, strict=True)
        # those whose `grad` is the very view that was handed out; an optimizer that set it to None has no use for it
        used = [
            p
            for p, own in pairs
            if own is not None and own.numel() > 0 and p.grad is not None and p.grad.data_ptr() == own.data_ptr()
        ]
        if not used:
            return
        with torch.inference_mode(False), torch.no_grad():  # a teacher is asked in inference mode
            for p, copy in zip(used, copies_of([p.grad for p in used]), strict=True):  # type: ignore[misc]
                p.grad = copy

    def _warm_up(self, call: Callable[[], list[torch.Tensor]]) -> None:
        """Two calls on the graphs' stream: what is compiled, tuned or allocated once is not captured.

        Raises:
            RuntimeError: the second one waits for the device, or returns more than hidden states.
        """
        current = torch.cuda.current_stream()
        self.graphs.stream.wait_stream(current)
        before = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self.graphs.stream):
            try:
                for number in range(2):
                    if number:
                        torch.cuda.set_sync_debug_mode("error")
                    outputs = call()
                    if self.parameters:
                        outputs = [output for output in outputs if output.requires_grad]
                        upstream = [torch.zeros_like(output) for output in outputs]
                        torch.autograd.grad(outputs, self._leaves, upstream, allow_unused=True)
                        del upstream
                    del outputs
            finally:
                torch.cuda.set_sync_debug_mode(before)
        current.wait_stream(self.graphs.stream)

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Other threads, such as the one that pins batches, may go on."""
        with torch.cuda.graph(
            graph, pool=self.graphs.pool, stream=self.graphs.stream, capture_error_mode="thread_local"
        ):
            yield


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.captured = captured
        # lives in autograd's node: gone with the backward, and also where a loss is dropped without one
        ctx.alive = _Forward()
        captured.graphs._unfinished = weakref.ref(ctx.alive)
        outputs = captured.run_forward()
        ctx.mark_non_differentiable(
            *(output for output, has in zip(outputs, captured.has_gradient, strict=True) if not has)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        captured = ctx.captured
        if ctx.alive is None:
            raise RuntimeError(
                "backward: expected one backward a forward, got a second; a graph's activations are gone"
            )
        ctx.alive = None
        given = [gradient for gradient, has in zip(upstream, captured.has_gradient, strict=True) if has]
        foreach_copy_(captured.upstream, given)
        captured.graphs.replay(captured.backward)
        # the gradients lie in the pool: the next replay, of whatever graph, copies those that are still in use
        captured.graphs._handed_out = captured
        # fresh views, which autograd makes the parameters' gradients without a copy
        return None, *(None if gradient is None else gradient.detach() for gradient in captured.gradients)


@contextlib.contextmanager
def own_workspace() -> Iterator[None]:
    """cuBLAS's workspaces that are made inside belong to the graph that is captured there, and to nothing else.

    They are kept by stream, and all captures share one: a graph would go on using what lies in an earlier graph's
    memory, which is given back with that graph, or when somebody (torch.compile's graphs) drops all workspaces.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _unsuited(decoder: nn.Module) -> str | None:
    """Return why a decoder cannot be captured, as far as that is known without running it; None otherwise."""
    for parameter in decoder.parameters():
        if isinstance(parameter, DTensor):
            return "its weights are sharded"
        if not parameter.is_cuda:
            return f"its weights lie on {parameter.device}"
    for name, module in decoder.named_modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            for hook in hooks.values():
                place = getattr(hook, "__module__", None) or type(hook).__module__
                if not f"{place}.".startswith(KNOWN_HOOKS):
                    return f"a hook of {place} on {name or 'the decoder'} would run while capturing alone"
    return None


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Warming up draws no random numbers from the run's.

    Raises:
        RuntimeError: some were drawn on the host, as for layers that are dropped at random: a graph would repeat them.
    """

    def of_the_host() -> tuple[bytes, Any, bytes]:
        state: Any = np.random.get_state()
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), state[1].tobytes() + bytes([state[2] % 256])

    host = of_the_host()
    device = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.set_rng_state(device)
    if of_the_host() != host:
        raise RuntimeError("its forward draws random numbers on the host")


@contextlib.contextmanager
def _without_random_state_of_checkpoints(decoder: nn.Module) -> Iterator[None]:
    """Layers that are computed again ask for the generator's state, which a capture refuses; without dropout it is
    not needed. With dropout the capture fails, and the decoder stays launched.
    """
    changed = []
    if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in decoder.modules()):
        for module in decoder.modules():
            checkpoint = module.__dict__.get("_gradient_checkpointing_func")
            if isinstance(checkpoint, functools.partial):
                changed.append((module, checkpoint))
                keywords = {**checkpoint.keywords, "preserve_rng_state": False}
                module._gradient_checkpointing_func = functools.partial(  # type: ignore[assignment]
                    checkpoint.func, *checkpoint.args, **keywords
                )
    try:
        yield
    finally:
        for module, checkpoint in changed:
            module._gradient_checkpointing_func = checkpoint  # type: ignore[assignment]
