"""Asynchronous copies of tensors from a GPU to host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}  # by GPU: copies do not wait for what is computed after them


class HostCopy(dict[str, torch.Tensor]):
    """Contiguous CPU tensors by name, pinned where they come from a GPU: to be read after `wait`.

    Args:
        tensors: tensors of one device; those of the CPU are copied at once, where they are not contiguous.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__({name: t.contiguous() for name, t in tensors.items()})
        self._event: torch.cuda.Event | None = None
        device = next((t.device for t in self.values() if t.is_cuda), None)
        if device is None:
            return
        stream = _streams[device] = _streams.get(device) or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for name, tensor in self.items():
                self[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            self._event = stream.record_event()

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return (event := self._event) is None or event.query()

    def wait(self) -> HostCopy:
        """Itself, once all is here."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = None
        return self


def for_transfer(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """CPU tensors where `to_device` need not copy them once more; for threads that have the time."""
    return {name: t.pin_memory() if device.type == "cuda" else t for name, t in tensors.items()}


def to_device(array: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, without waiting for what the GPU has yet to compute."""
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array.to(device)
