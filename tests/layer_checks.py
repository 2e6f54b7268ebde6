"""Shared checks of the layer kernels: comparison of values and every gradient, and memory full of NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from helpers import assert_as_good_as_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that an element no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers that `dtype` can hold, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def as_tuple(value: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def outputs_and_gradients(
    function: Callable, inputs: Sequence[torch.Tensor | None], differentiate: Sequence[bool], seed: int = 7
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients under random upstream gradients (rounded to the outputs' dtypes, equal in each call)."""
    tracked = [
        None if tensor is None else tensor.detach().requires_grad_(wanted)
        for tensor, wanted in zip(inputs, differentiate, strict=True)
    ]
    outputs = as_tuple(function(*tracked))
    generator = torch.Generator().manual_seed(seed)
    upstream = [
        torch.randn(tuple(out.shape), generator=generator, dtype=torch.float64).to(torch.bfloat16) for out in outputs
    ]
    wanted = [tensor for tensor in tracked if tensor is not None and tensor.requires_grad]
    gradients = []
    if wanted:
        given = [grad.to(out.device, out.dtype) for grad, out in zip(upstream, outputs, strict=True)]
        gradients = list(torch.autograd.grad(outputs, wanted, given))
    return [out.detach() for out in outputs], gradients


def check_layer(
    ours: Callable,
    reference: Callable,
    inputs: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    *,
    differentiate: Sequence[bool] | None = None,
    eager: Callable | None = None,
) -> None:
    """Hold values and gradients of `ours` against `reference` in fp64, by what `eager` achieves in `dtype`.

    `inputs` keep their strides in the call of ours. `eager` defaults to `reference`.
    """
    wanted = list(differentiate) if differentiate is not None else [tensor is not None for tensor in inputs]
    exact = [None if tensor is None else tensor.double() for tensor in inputs]
    with poisoned_memory():
        our_outputs, our_gradients = outputs_and_gradients(ours, inputs, wanted)
    eager_outputs, eager_gradients = outputs_and_gradients(eager or reference, inputs, wanted)
    exact_outputs, exact_gradients = outputs_and_gradients(reference, exact, wanted)
    assert len(our_outputs) == len(eager_outputs) and len(our_gradients) == len(eager_gradients)
    for index, (value, loose, tight) in enumerate(zip(our_outputs, eager_outputs, exact_outputs, strict=True)):
        assert value.dtype == loose.dtype, f"output {index}: dtype {value.dtype}, torch's is {loose.dtype}"
        assert_as_good_as_torch(value, loose, tight, dtype, f"output {index}")
    for index, (value, loose, tight) in enumerate(zip(our_gradients, eager_gradients, exact_gradients, strict=True)):
        assert value.dtype == loose.dtype, f"gradient {index}: dtype {value.dtype}, torch's is {loose.dtype}"
        assert_as_good_as_torch(value, loose, tight, dtype, f"gradient {index}")


def check_compiles(function: Callable, inputs: Sequence[torch.Tensor], differentiate: Sequence[bool]) -> None:
    """`torch.compile(fullgraph=True)` gives the eager call's outputs and gradients exactly."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        outputs_and_gradients(function, inputs, differentiate),
        outputs_and_gradients(compiled, inputs, differentiate),
        strict=True,
    ):
        for expected, actual in zip(one, other, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
