"""Names of torch that are not public, each with what is done where a release of torch lacks it.

Any torch from 2.9 on is allowed, and such names move without notice. A file that needs one takes it from here, or by
`internal`, never by an import of its own: what is missing is one line of the log, and slower code with equal results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)


def internal(owner: Any, name: str, fallback: Any, consequence: str) -> Any:
    """Return the attribute `name` of a module or class of torch; where it has none, `fallback`, and say so.

    Args:
        owner: Module or class.
        name: Name of the attribute.
        fallback: Value in its place.
        consequence: What follows from that, for the log.
    """
    found = getattr(owner, name, None)
    if found is None:
        place = getattr(owner, "__name__", str(owner))
        _log.warning("torch %s has no %s.%s; %s", torch.__version__, place, name, consequence)
        return fallback
    return found


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _empty_on_current_device(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# what torch.compile's generated code calls: an allocation takes 1.0 microseconds, for 2.4 of `torch.empty_strided`
current_device: Callable[[], int] = torch.cuda.current_device
current_stream: Callable[[int], int] = _stream_of
empty_on_current_device: Callable[..., torch.Tensor] = _empty_on_current_device
if torch.backends.cuda.is_built():  # a build for CPUs alone has none of them
    _slowly = "a launch takes microseconds more"
    _guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    current_device = internal(torch._C, "_cuda_getDevice", current_device, _slowly)
    current_stream = internal(torch._C, "_cuda_getCurrentRawStream", current_stream, _slowly)
    empty_on_current_device = internal(_guards, "_empty_strided_cuda", empty_on_current_device, _slowly)


def _no_mode() -> bool:
    return True


_dispatch: Any = getattr(torch.utils, "_python_dispatch", None)
_is_in_torch_dispatch_mode: Callable[[], bool] = internal(
    _dispatch, "is_in_torch_dispatch_mode", _no_mode, "kernels are launched through the dispatcher, slowly"
)


def _is_wrapped_in_no_release(tensor: torch.Tensor) -> bool:
    return False


_functorch: Any = getattr(torch._C, "_functorch", None)
is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = internal(
    _functorch,
    "is_functorch_wrapped_tensor",
    _is_wrapped_in_no_release,
    "torch.vmap and torch.func.grad around a kernel are not recognised and fail inside it",
)
_functorch_level: Callable[[], int | None] = internal(
    _functorch, "maybe_current_level", lambda: 0, "kernels are launched through the dispatcher, slowly"
)


def in_mode_or_transform() -> bool:
    """Return whether a dispatch mode or a function transform is on, which must see an op go through the dispatcher."""
    return bool(_is_in_torch_dispatch_mode()) or _functorch_level() is not None


# torch.compiler.disable, which imports torch._dynamo, seconds, when a function is decorated
disable_dynamo: Any = internal(torch, "_disable_dynamo", torch.compiler.disable, "torch._dynamo is imported at once")


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each leaf of its tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return {key: map_nested(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(function, each) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_nested(function, each) for each in value)
    return function(value)


def _copy_one_by_one_(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _lerp_one_by_one_(tensors: Iterable[torch.Tensor], ends: Iterable[torch.Tensor], weight: float) -> None:
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


def _multiply_one_by_one(tensors: Iterable[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [tensor * factor for tensor in tensors]


_ONE_BY_ONE = "tensors are handled one by one"
# over lists of tensors, in one launch
foreach_copy_: Any = internal(torch, "_foreach_copy_", _copy_one_by_one_, _ONE_BY_ONE)
foreach_lerp_: Any = internal(torch, "_foreach_lerp_", _lerp_one_by_one_, _ONE_BY_ONE)
_foreach_mul: Any = internal(torch, "_foreach_mul", _multiply_one_by_one, _ONE_BY_ONE)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of each tensor, all made in one launch."""
    return list(_foreach_mul(tensors, 1)) if tensors else []


def _dequantised_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


# [M, K] e4m3 times [K, N] e4m3, with scales of rows and of columns
scaled_mm: Any = internal(torch, "_scaled_mm", _dequantised_product, "fp8 products are computed in float32, slowly")

# [S, K] times [E, K, N] by groups of rows; None: a product a group, and the host waits for the groups' ends
grouped_gemm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # from PyTorch 2.10 on
if grouped_gemm is None:
    grouped_gemm = internal(torch, "_grouped_mm", None, "a mixture's experts are multiplied one by one, slowly")

# [S, K] e4m3 times [E, K, N] e4m3 by groups of rows, with scales of rows and of columns; None: as bf16, scaled after
scaled_grouped_gemm: Any = internal(torch, "_scaled_grouped_mm", None, "fp8 experts are multiplied in bf16, slowly")
