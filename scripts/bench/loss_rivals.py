"""Rivals of the fused losses: PyTorch, `torch.compile`, Liger, TRL and unsloth_zoo, each a maker of a loss of inputs.

A divergence is named by its `beta` as of the generalised JSD: 0 is forward KL, 1 reverse KL. A maker that raises
ImportError has no library to call.

The strongest that `torch.compile` allows computes the loss in chunks of rows from both models' hidden states, as verl
and VeOmni do: GEMMs to the logits, one compiled function from these to the loss and their gradient by its formula,
and the back-projections, all in the forward pass. Its logits are bf16, as GEMMs make them, or fp32.

unsloth_zoo refuses to be imported without unsloth, so that its one file is loaded by its path: from an installed wheel,
or from a copy of `fused_losses/fused_linear.py` that UNSLOTH_FUSED_LINEAR names. Its chunk is that of its default, or
the fastest of a few numbers of rows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CHUNKS = (2048, 4096)  # rows
UNSLOTH_FILE = "unsloth_zoo/fused_losses/fused_linear.py"
UNSLOTH_ROWS = (1024, 2048)  # by default 512 of a vocabulary of 128,256


def full_logits(x: Any, w: Any, xt: Any, wt: Any, beta: float) -> torch.Tensor:
    """Return the loss in plain PyTorch: full bf16 logits, log-softmax in fp32."""
    log_s = torch.log_softmax((x @ w.t()).float(), -1)
    with torch.no_grad():
        log_t = torch.log_softmax((xt @ wt.t()).float(), -1)
    kl = functools.partial(torch.nn.functional.kl_div, log_target=True, reduction="batchmean")
    if beta == 0.0:
        return kl(log_s, log_t)
    if beta == 1.0:
        return kl(log_t, log_s)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log(1 - beta))
    return beta * kl(log_m, log_t) + (1 - beta) * kl(log_m, log_s)


def loss_and_logit_gradient(z_s: torch.Tensor, z_t: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of rows of logits [n, V], and its gradient for the student's, both in fp32."""
    log_s, log_t = torch.log_softmax(z_s.float(), -1), torch.log_softmax(z_t.float(), -1)
    p_s, p_t = log_s.exp(), log_t.exp()
    if beta == 0.0:
        return (p_t * (log_t - log_s)).sum(), p_s - p_t
    if beta == 1.0:
        rows = (p_s * (log_s - log_t)).sum(-1, keepdim=True)
        return rows.sum(), p_s * (log_s - log_t - rows)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log(1 - beta))
    rows = (p_s * (log_s - log_m)).sum(-1, keepdim=True)
    loss = beta * (p_t * (log_t - log_m)).sum() + (1 - beta) * rows.sum()
    return loss, (1 - beta) * p_s * (log_s - log_m - rows)


class CompiledChunks(torch.autograd.Function):
    """Mean loss in chunks of rows; gradients are made in the forward pass and handed out as they are."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, xt: Any, wt: Any, compute: Any, rows: int, dtype: torch.dtype) -> Any:
        n = x.shape[0]
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        wide = {} if dtype == x.dtype else {"out_dtype": dtype}
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            z_s, z_t = torch.mm(x[part], w.t(), **wide), torch.mm(xt[part], wt.t(), **wide)
            some, gradient = compute(z_s, z_t, 1.0 / n)
            loss += some
            torch.mm(gradient, w, out=dx[part])
            dw.addmm_(gradient.t(), x[part])
        ctx.gradients = dx, dw
        return loss

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        dx, dw = ctx.gradients
        del ctx.gradients
        return dx, dw, None, None, None, None, None


def compiled_chunks(beta: float, rows: int, dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
    """Return the loss by `CompiledChunks` with logits of `dtype`."""

    @torch.compile(dynamic=False)
    def compute(z_s: torch.Tensor, z_t: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        loss, gradient = loss_and_logit_gradient(z_s, z_t, beta)
        return loss * scale, (gradient * scale).to(torch.bfloat16)

    return lambda i: CompiledChunks.apply(i.x, i.w, i.x_teacher, i.w_teacher, compute, rows, dtype)


def _liger_jsd(beta: float) -> Callable[[Any], torch.Tensor]:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=beta)
    return lambda i: module(i.x, i.w, i.x_teacher, i.w_teacher, i.labels)


def _liger_chunked(beta: float) -> Callable[[Any], torch.Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(0.0, 1.0, beta=beta, compiled=True, chunk_size=CHUNKS[0])
    return lambda i: module(i.x, i.w, i.x_teacher, i.w_teacher, i.labels)


def _liger_probabilities() -> Callable[[Any], torch.Tensor]:
    """Forward KL to the teacher's probabilities [N, V], which are computed first, as the module does not."""
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    module = LigerFusedLinearKLDivLoss()

    def loss(i: Any) -> torch.Tensor:
        target = torch.empty(i.shape.rows, i.shape.vocab, dtype=i.x.dtype, device=i.x.device)
        for part in torch.arange(i.shape.rows).split(CHUNKS[0]):
            here = slice(int(part[0]), int(part[-1]) + 1)
            target[here] = torch.softmax((i.x_teacher[here] @ i.w_teacher.t()).float(), -1)
        return module(i.x, i.w, target)

    return loss


def _trl_function() -> Any:
    """TRL's chunked divergence, without what its trainers need (data frames, servers) where that is not installed."""
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    except ImportError:
        for name in [name for name in sys.modules if name.startswith("trl.trainer")]:
            del sys.modules[name]
        import trl

        package, tools = types.ModuleType("trl.trainer"), types.ModuleType("trl.trainer.utils")
        package.__path__ = [str(Path(trl.__file__).parent / "trainer")]
        tools.maybe_gather_lm_head_ctx = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[attr-defined]
        sys.modules.update({"trl.trainer": package, "trl.trainer.utils": tools})
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    return ChunkedDivergenceFunction


def _trl(beta: float) -> Callable[[Any], torch.Tensor]:
    function = _trl_function()

    def loss(i: Any) -> torch.Tensor:
        heads = i.x, i.w, None, i.x_teacher, i.w_teacher, None
        return function.apply(*heads, beta, 1.0, 1.0, None, 1.0, None)[0].sum() / i.shape.rows

    return loss


@functools.cache
def _unsloth_module() -> types.ModuleType:
    """unsloth_zoo's file of fused linear losses, which imports torch and triton alone.

    Raises:
        ImportError: It is not there.
    """
    path = os.environ.get("UNSLOTH_FUSED_LINEAR")
    if path is None:
        try:
            files = importlib.metadata.files("unsloth_zoo") or []
        except importlib.metadata.PackageNotFoundError:
            raise ImportError("unsloth_zoo is not installed, and UNSLOTH_FUSED_LINEAR names no file of it") from None
        path = str(next(file.locate() for file in files if str(file) == UNSLOTH_FILE))
    spec = importlib.util.spec_from_file_location("unsloth_fused_linear", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ImportError(f"UNSLOTH_FUSED_LINEAR: expected unsloth_zoo's fused_linear.py, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unsloth(beta: float, rows: int | None = None) -> Callable[[Any], torch.Tensor]:
    function = _unsloth_module().fused_linear_jsd
    return lambda i: function(i.x, i.w, i.x_teacher, i.w_teacher, beta=beta, rows_per_chunk=rows)


def _of_full_logits(function: Callable[..., torch.Tensor], beta: float) -> Callable[[Any], torch.Tensor]:
    return lambda i: function(i.x, i.w, i.x_teacher, i.w_teacher, beta)


def rivals(beta: float) -> dict[str, Callable[[], Callable[[Any], torch.Tensor]]]:
    """Return makers of the other candidates by name."""
    made: dict[str, Callable[[], Callable[[Any], torch.Tensor]]] = {
        "eager, full logits": lambda: _of_full_logits(full_logits, beta),
        "torch.compile, full logits": lambda: _of_full_logits(torch.compile(full_logits), beta),
        "Liger LigerFusedLinearJSD": lambda: _liger_jsd(beta),
        "Liger LigerFusedLinearJSDLoss, compiled": lambda: _liger_chunked(beta),
        "TRL ChunkedDivergenceFunction": lambda: _trl(beta),
    }
    if beta == 0.0:
        made["Liger LigerFusedLinearKLDivLoss"] = _liger_probabilities
    made["unsloth_zoo fused_linear_jsd"] = lambda: _unsloth(beta)
    for rows in UNSLOTH_ROWS:
        made[f"unsloth_zoo fused_linear_jsd, chunks of {rows:,} rows"] = functools.partial(_unsloth, beta, rows)
    for rows in CHUNKS:
        for dtype, bits in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            name = f"torch.compile, chunks of {rows:,} rows, {bits} logits"
            made[name] = functools.partial(compiled_chunks, beta, rows, dtype)
    return made
