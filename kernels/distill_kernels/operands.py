"""Preparation of kernel operands: contiguous rows, tensor descriptors, checks, and refusal of double backward.

Kernels address a vector as `ptr + row` and a row as `ptr + row * stride + column`. `flatten()` and `reshape(-1)` return
a 1-D view as it is, so that a column of a table, every other element or an expanded number would be read as if its
neighbours in memory were its elements: launchers pass every such operand through `contiguous_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from distill_kernels.launch import TensorDescriptor, tl, triton
from distill_kernels.torch_internals import is_functorch_wrapped_tensor

PLAIN = (torch.Tensor, torch.nn.Parameter)


@overload
def contiguous_rows(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def contiguous_rows(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def contiguous_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return `tensor` [..., n] with its last dimension contiguous: itself, or else a copy.

    Strides of the other dimensions stay as they are unless it is copied; a vector of one element may keep any stride.
    """
    if tensor is None or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def non_view_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, without its view relation, as a custom function's output that may be modified in place."""
    return tensor.detach() if not torch.compiler.is_compiling() and tensor._is_view() else tensor


def has_aligned_rows(matrix: torch.Tensor) -> bool:
    """Return whether TMA can load `matrix` as it is: adjacent elements, base and row stride multiples of 16 bytes."""
    aligned_stride = matrix.stride(0) >= matrix.shape[1] and matrix.stride(0) * matrix.element_size() % 16 == 0
    return matrix.stride(1) == 1 and aligned_stride and matrix.data_ptr() % 16 == 0


def adjacent_as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors [n_i, ...] that are adjacent in one allocation as one, [sum n_i, ...]; None if they are not."""
    first = tensors[0]
    elements = 0
    for tensor in tensors:
        if (
            type(tensor) not in PLAIN
            or tensor.dtype != first.dtype
            or tensor.shape[1:] != first.shape[1:]
            or not tensor.is_contiguous()
            or tensor.storage_offset() != first.storage_offset() + elements
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        elements += tensor.numel()
    return first.detach().as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())


def blocks_of(matrix: torch.Tensor, rows: int, columns: int, tma: bool) -> Any:
    """Return `matrix` as an argument of `load_block`, for blocks of `rows` and `columns`.

    A tensor descriptor with `tma`, else pointer, stride and shape.
    """
    if not tma:
        return matrix, matrix.stride(0), *matrix.shape
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def _block(source, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    ptr, stride, rows, columns = source
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, COLUMNS)
    at = ptr + r[:, None].to(tl.int64) * stride + c[None, :]
    return at, (r < rows)[:, None] & (c < columns)[None, :]


@triton.jit
def load_block(source, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Load [ROWS, COLUMNS] from `row` and `column` on, 0 beyond the matrix's ends; `source` is from `blocks_of`."""
    if TMA:
        return source.load([row, column])
    else:
        at, inside = _block(source, row, column, ROWS, COLUMNS)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_block(source, block, row, column, TMA: tl.constexpr):
    """Store `block` at `row` and `column` of the matrix, in its dtype, masked at the matrix's ends."""
    if TMA:
        source.store([row, column], block.to(source.dtype))
    else:
        at, inside = _block(source, row, column, block.shape[0], block.shape[1])
        tl.store(at, block.to(source[0].dtype.element_ty), mask=inside)


def check_tensor(name: str, tensor: object) -> None:
    """Check that `tensor` is a dense tensor with memory of its own.

    Raises:
        ValueError: if `tensor` is no dense `torch.Tensor` (a numpy array, a list, sparse), or wrapped by `torch.vmap`
            or `torch.func.grad`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__module__}.{type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f"{name}: expected a plain tensor, got one inside torch.vmap or torch.func.grad: kernels make their own "
            f"gradients, once; use torch.autograd.grad or backward(), and a batch dimension in place of vmap"
        )


def refuse_double_backward() -> None:
    """Raise the ValueError of a backward that cannot be differentiated itself."""
    raise ValueError(
        "create_graph: expected False, since this gradient comes from a kernel and has none of its own, "
        "got True (for a gradient penalty compute the loss in plain PyTorch)"
    )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward that cannot be differentiated itself, so that `create_graph=True` raises.

    (`once_differentiable` raises only where the upstream gradient itself needs one, which that of a scalar does not.)
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_double_backward()
        return backward(ctx, *upstream)

    return checked
