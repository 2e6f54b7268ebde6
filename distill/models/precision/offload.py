"""CPU offload of a teacher that is larger than the GPU: its layers are streamed from host memory one by one.

    teacher = offload_layers(teacher, torch.device("cuda", 0))     # loaded into host memory, frozen

Embedding, final norm and head stay on the device, whole: the fused loss reads the head's weight. Each decoder layer's
weights lie in one pinned block of host memory, and two blocks of the largest layer's size lie on the device: while a
layer computes in one, the next is copied into the other, and so round and round, the first layer again after the
last. A forward pass thus takes as long as the slower of two things, its arithmetic or its weights over the bus:

    seconds >= max(2 P tokens / FLOP/s, bytes of the layers / bytes/s of the bus)

so that tokens in a micro-batch are what makes it pay. Nothing waits on the host: the copying stream waits for the
computing one before it overwrites a block, which was read by the layer before the present one, and the computing
stream waits for the copying one before it reads.

accelerate's `AlignDevicesHook` copies every tensor when it is needed, from pageable memory, and leaves tensors on the
meta device between calls. Here parameters are ordinary ones at all times, in host memory between calls, so that
whatever walks over them (fingerprints, cutting a student out of the teacher, counting) finds what it would find in a
resident model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distill.core.units import GIB
from distill.models.layers import STREAMER, find_layers
from distill.models.patch.swaps import OTHER, Swap, apply_swap, replace_forward

log = logging.getLogger(__name__)

ALIGNED = 256  # bytes; any dtype may begin there
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


def offload_layers(model: Any, device: torch.device) -> Any:
    """Leave the decoder layers of `model` in host memory, to travel to `device` when they are called.

    Args:
        model: A frozen causal language model of transformers, in host memory, with floating-point weights; changed in
            place. `model.to(device)` does nothing from then on, and any other `to` is refused.
        device: Compute device; a CPU is of use in tests only.

    Raises:
        ValueError: quantised weights, weights that are trained, or an architecture without a list of layers.
    """
    if getattr(model, "is_quantized", False):
        raise ValueError("teacher.offload: cpu needs weights in floating point, and this model's are quantised")
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("teacher.offload: only a frozen model can be offloaded; call requires_grad_(False) first")
    try:
        _, layers = find_layers(model)
    except ValueError:
        raise ValueError(
            f"teacher.offload: {type(model).__name__} has no list of decoder layers to stream one at a time"
        ) from None
    device = _with_index(device)
    travelling = _own_parameters(model, list(layers))
    _move_rest(model, {id(parameter) for group in travelling for parameter in group}, device)
    streamer = LayerStreamer(travelling, device)
    apply_swap(model, _StreamedLayers(streamer, list(layers)))
    model.__dict__[STREAMER] = streamer
    model.to = _Resident(model, device)
    if device.type == "cpu":
        log.warning("teacher.offload: cpu saves nothing on a CPU: the layers are copied within the same memory")
    return model


class LayerStreamer:
    """Brings layers to the device, the next one while the present one computes.

    Args:
        travelling: The parameters of each layer, in the order in which layers are called; their data is moved into
            one block of host memory a layer.
        device: Device that the layers are copied to.
    """

    def __init__(self, travelling: Sequence[Sequence[nn.Parameter]], device: torch.device) -> None:
        self.parameters = travelling
        self.device = device
        self.host: list[torch.Tensor] = []
        self.waiting: list[list[torch.Tensor]] = []  # the parameters' data in host memory
        for group in travelling:  # one after another, so that host memory holds the model and one layer more
            block = torch.zeros(_places(group)[1], dtype=torch.uint8)
            views = _views(group, block)
            for parameter, view in zip(group, views, strict=True):
                parameter.data = view.copy_(parameter.detach())
            self.host.append(block)
            self.waiting.append(views)
        largest = max(len(block) for block in self.host)
        # made outside of any inference mode: tensors made within could not become a parameter's data
        with torch.inference_mode(False):
            self.blocks = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
            self.arrived = [[_views(group, block) for block in self.blocks] for group in travelling]
        self.holds: list[int | None] = [None, None]  # the layer in each block
        self.at: int | None = None  # the layer whose parameters are on the device
        self.pinned = False
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            for block in self.blocks:
                # the allocator gives the memory to nobody else while a copy into it is under way
                block.record_stream(self.stream)
            self._pin()

    def __str__(self) -> str:
        waiting = sum(map(len, self.host))
        held = sum(map(len, self.blocks))
        kind = "pinned host memory" if self.pinned else "host memory"
        return (
            f"{len(self.host)} layers of the teacher ({waiting / GIB:.2f} GiB) wait in {kind} and travel to "
            f"{self.device} for every forward pass, through {held / GIB:.2f} GiB there; embedding and head stay there"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("teacher.offload: an offloaded model cannot be copied; load it a second time")

    def bring(self, number: int) -> None:
        """Put layer `number` on the device and set the next one off; after the last comes the first."""
        if self.at is not None:  # a forward pass that an exception ended
            self.take_back(self.at)
        # the first call, or one out of turn: otherwise the layer before has begun this layer's copy
        if number not in self.holds:
            self._send(number, 0)
        block = self.holds.index(number)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        for parameter, view in zip(self.parameters[number], self.arrived[number][block], strict=True):
            parameter.data = view
        self.at = number
        # The other block held the layer before, whose kernels are all queued by now, so `_send` waits for those and not
        # for this layer's, which are not queued yet: the copy runs beside them.
        following = (number + 1) % len(self.host)
        if following not in self.holds:
            self._send(following, 1 - block)

    def take_back(self, number: int) -> None:
        """Let the parameters of layer `number` be those in host memory again."""
        for parameter, view in zip(self.parameters[number], self.waiting[number], strict=True):
            parameter.data = view
        self.at = None

    def _send(self, number: int, block: int) -> None:
        source = self.host[number]
        target = self.blocks[block][: len(source)]
        self.holds[block] = number
        if self.stream is None:
            target.copy_(source)
            return
        # all that still reads this block has been called by now
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def _pin(self) -> None:
        """Pin the blocks where they lie: `pin_memory` would round each up to a power of two."""
        runtime: Any = torch.cuda.cudart()
        spans = [(block.data_ptr(), len(block)) for block in self.host if len(block)]
        done: list[tuple[int, int]] = []
        for span in spans:
            code = int(runtime.cudaHostRegister(*span, PORTABLE))
            if code != 0:
                log.warning(
                    "teacher.offload: host memory could not be pinned (CUDA error %d, %.1f of %.1f GiB done): copies "
                    "to the GPU are slower and computing waits for them",
                    code,
                    sum(size for _, size in done) / GIB,
                    sum(size for _, size in spans) / GIB,
                )
                with contextlib.suppress(RuntimeError):  # the next launch reports the failure once more, and forgets it
                    torch.zeros(1, device=self.device)
                break
            done.append(span)
        self.pinned = len(done) == len(spans)
        weakref.finalize(self, _unpin, self.device, [pointer for pointer, _ in done]).atexit = False


def _unpin(device: torch.device, pointers: Sequence[int]) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way
    runtime: Any = torch.cuda.cudart()
    for pointer in pointers:
        runtime.cudaHostUnregister(pointer)


class _StreamedLayers(Swap):
    """Swap of decoder layers for ones that are on the device while they compute."""

    kind = "offload"
    survives_unpatch = True

    def __init__(self, streamer: LayerStreamer, layers: Sequence[nn.Module]) -> None:
        self.streamer = streamer
        self.numbers = {layer: number for number, layer in enumerate(layers)}

    def applies(self, module: nn.Module) -> str | None:
        return None if module in self.numbers else OTHER

    def swap(self, module: nn.Module) -> None:
        streamer = self.streamer
        number = self.numbers[module]
        inner = module.forward

        @functools.wraps(type(module).forward)
        def forward(layer: nn.Module, *args: object, **kwargs: object) -> object:
            streamer.bring(number)
            output = inner(*args, **kwargs)
            streamer.take_back(number)
            return output

        replace_forward(module, forward)


class _Resident:
    """Replacement of an offloaded model's `to`."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = weakref.ref(model)
        self.device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        if not all(
            isinstance(each, str | torch.device) and _with_index(torch.device(each)) == self.device
            for each in arguments
        ):
            raise ValueError(
                f"teacher.offload: expected an offloaded teacher to stay on {self.device}, got a move to "
                f"{', '.join(map(str, arguments))}; load it for the student's device"
            )
        return self.model()


def _with_index(device: torch.device) -> torch.device:
    """The device by its one name: a GPU with its number, the CPU without one."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _own_parameters(model: nn.Module, layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Each layer's parameters, but for those that are used in several places: they stay on the device."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [[parameter for parameter in layer.parameters() if uses[id(parameter)] == 1] for layer in layers]


def _move_rest(model: nn.Module, travelling: set[int], device: torch.device) -> None:
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in travelling:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _places(group: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a block, and the block's length, in bytes."""
    starts = []
    end = 0
    for tensor in group:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
    return starts, end


def _views(group: Sequence[torch.Tensor], block: torch.Tensor) -> list[torch.Tensor]:
    starts, _ = _places(group)
    return [
        block[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, group, strict=True)
    ]
