"""Operands as kernels take them: plain tensors whose elements lie side by side, differentiated once.

Kernels address a vector as `ptr + row` and a row as `ptr + row * stride + column`. `flatten()` and `reshape(-1)` return
a 1-D view as it is, so that a column of a table, every other element or an expanded number would be read as if its
neighbours in memory were its elements: `rows_of` is what a launcher passes every such operand through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from distill_kernels.launch import TensorDescriptor, tl, triton

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@overload
def rows_of(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def rows_of(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def rows_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor` [..., n] with the elements of its last dimension side by side; itself where they are, else a copy.

    Strides of the other dimensions stay as they are unless it is copied; a vector of one element may keep any stride.
    """
    if tensor is None or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def own_output(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as an autograd function returns it: its memory, but no view, which could not be modified in place."""
    return tensor.detach() if not torch.compiler.is_compiling() and tensor._is_view() else tensor


def has_aligned_rows(matrix: torch.Tensor) -> bool:
    """True where the copy engine (TMA) takes `matrix` as it is: adjacent elements, 16-byte base and stride."""
    apart = matrix.stride(0) >= matrix.shape[1] and matrix.stride(0) * matrix.element_size() % 16 == 0
    return matrix.stride(1) == 1 and apart and matrix.data_ptr() % 16 == 0


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors [n_i, ...] that lie after each other in one allocation as one, [sum n_i, ...]; else None."""
    first, elements = tensors[0], 0
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN
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
    """`matrix` as `load_block` takes it, for blocks of `rows` and `columns`: a descriptor for the copy engine, or
    what pointers are made of."""
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
    """[ROWS, COLUMNS] from `row` and `column` on, 0 beyond the matrix's ends; `source` is of `blocks_of`."""
    if TMA:
        return source.load([row, column])
    else:
        at, inside = _block(source, row, column, ROWS, COLUMNS)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_block(source, block, row, column, TMA: tl.constexpr):
    """`block` to `row` and `column` of the matrix, in its dtype; what lies beyond its ends is not written."""
    if TMA:
        source.store([row, column], block.to(source.dtype))
    else:
        at, inside = _block(source, row, column, block.shape[0], block.shape[1])
        tl.store(at, block.to(source[0].dtype.element_ty), mask=inside)


def check_tensor(name: str, tensor: object) -> None:
    """Refuse what has no memory of its own for a kernel to read.

    Raises:
        ValueError: if `tensor` is no dense `torch.Tensor` (a numpy array, a list, sparse), or one that `torch.vmap` or
            `torch.func.grad` stand behind.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__module__}.{type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError(
            f"{name}: expected a plain tensor, got one inside torch.vmap or torch.func.grad: kernels make their own "
            f"gradients, once; use torch.autograd.grad or backward(), and a batch dimension in place of vmap"
        )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a backward whose result autograd cannot differentiate: `create_graph=True` raises in place of a constant.

    (`once_differentiable` raises only where the upstream gradient itself needs one, which that of a scalar does not.)
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph: expected False, since this gradient comes from a kernel and has none of its own, "
                "got True (for a gradient penalty compute the loss in plain PyTorch)"
            )
        return backward(ctx, *upstream)

    return checked
