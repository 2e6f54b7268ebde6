"""Last decoder layer for trained rows only: the loss reads no other rows of its output.

Keys and values are needed of all rows. The last layer's output projection, residual, norms and MLP run on the rows
that are read; the others come out as zeros, in their places, so that whoever reads hidden states at flat positions
finds what was there before. Attention is left whole.

    hidden = decoder(**inputs, use_cache=False, **output_rows(decoder, rows, tokens)).last_hidden_state

It is off, and all rows are computed, where a layer is too narrow to be worth it (its step waits for the host, and goes
into CUDA graphs, which know no shapes that change), nearly all rows are read, layers are compiled, or the last layer is
of no form that `residual_norms.py` knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NAME = "output_rows"
MARK = "_distill_output_layer"
WIDE = 40e6  # parameters that a row meets after attention; with fewer, a layer computes all rows
MOST = 0.9  # of a batch's rows; with more, all are computed


class OutputRows:
    """Flat positions int64 [R], each once, that are read of a layer's output [B, S, H]; all other layers ignore it.

    A plain class, as an argument of the decoder: wrappers look for tensors in arguments. As an argument it is there
    again when a layer is computed a second time, for its gradient.
    """

    def __init__(self, layer: nn.Module, rows: torch.Tensor) -> None:
        self.layer = layer
        self.rows = rows


def mark(decoder: nn.Module, layer: nn.Module, verdicts: dict[Any, Any]) -> None:
    """Have the decoder's last layer, one of `residual_norms.py`, compute some rows where it is asked to.

    Args:
        verdicts: Verdicts of a `PatchReport` on a model of the same parts; extended by those of this one.
    """
    width = sum(p.numel() for p in row_parameters(layer)) if hasattr(layer.self_attn, "o_proj") else 0
    if width < WIDE:  # so little is spent on each row that leaving some out is not worth it
        return
    if NAME not in verdicts and not any(parameter.is_meta for parameter in decoder.parameters()):
        verdicts[NAME] = computes_rows(decoder, layer)
    if verdicts.get(NAME):
        decoder.__dict__[MARK] = layer


def output_rows(decoder: nn.Module, rows: torch.Tensor | None, tokens: int) -> dict[str, OutputRows]:
    """Return the arguments with which a decoder's last layer computes only `rows`; empty where it computes all.

    Args:
        rows: int64 [R], flat positions, each once; None where not known.
        tokens: Number of tokens in the batch.
    """
    layer = decoder.__dict__.get(MARK)
    if layer is None or rows is None or not 0 < rows.numel() <= MOST * tokens:
        return {}
    return {} if layer._compiled_call_impl is not None else {NAME: OutputRows(layer, rows)}


def row_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Those that only the rows that are read meet."""
    before = ("input_layernorm.", "self_attn.")
    own = [p for name, p in layer.named_parameters() if not name.startswith(before)]
    return own + list(layer.self_attn.o_proj.parameters())  # type: ignore[union-attr]


def rows_to_compute(layer: nn.Module, kwargs: dict[str, object]) -> torch.Tensor | None:
    """The rows that this layer is to compute, taken out of its arguments; None for all."""
    selection = kwargs.pop(NAME, None)
    return selection.rows if isinstance(selection, OutputRows) and selection.layer is layer else None


@contextlib.contextmanager
def projecting(attention: nn.Module, rows: torch.Tensor | None) -> Iterator[None]:
    """Inside, an attention module's output projection gets `rows` of [B, S, ...] as [1, R, ...]."""
    if rows is None:
        yield
        return
    # a hook, since what `o_proj` is may have changed since the layer was patched: adapters, 8 bits
    projection = attention.get_submodule("o_proj")
    hook = projection.register_forward_pre_hook(lambda _, inputs: (pick(inputs[0], rows), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def pick(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Rows of [B, S, H] as [1, R, H]; `x` itself for None."""
    picked: torch.Tensor = x if rows is None else _Pick.apply(x, rows)
    return picked


def put_back(x: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """[1, R, H] at its places in `shape`, zeros elsewhere; `x` itself for None."""
    whole: torch.Tensor = x if rows is None else _PutBack.apply(x, rows, shape)
    return whole


def _picked(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2).index_select(0, rows)[None]


def _put(x: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    full = x.new_zeros(*shape[:-1], x.shape[-1])
    full.flatten(0, -2).index_copy_(0, rows, x[0])
    return full  # no view: FSDP2 puts hooks on what a layer returns


class _Pick(torch.autograd.Function):
    """Rows occur once, so that nothing is added up in the gradient, as autograd's own would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return _picked(x, rows)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _put(upstream, rows, ctx.shape), None


class _PutBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _put(x, rows, shape)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _picked(upstream, rows), None, None


@torch.no_grad()
def computes_rows(decoder: nn.Module, layer: nn.Module) -> bool:
    """Return whether a layer computes single rows as it does among all, which holds for a last layer only."""
    device = next(decoder.parameters()).device
    ids = torch.arange(6, device=device)[None]
    rows = torch.tensor([1, 4], device=device)
    try:
        whole = decoder(input_ids=ids, use_cache=False).last_hidden_state
        selected = decoder(input_ids=ids, use_cache=False, **{NAME: OutputRows(layer, rows)}).last_hidden_state
    except (TypeError, ValueError, RuntimeError, AttributeError):  # a form that we do not know
        return False
    scale = 16 * torch.finfo(whole.dtype).eps * whole.abs().max()
    near = (selected - whole).abs().amax(-1)[0] <= scale
    return near.tolist() == [False, True, False, False, True, False]
