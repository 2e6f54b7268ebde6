"""The training step on packed rows as others would run it, with torch's variable-length attention.

    plain           transformers' layers, logits in full, KL in fp32 with the other tokens' losses masked
    plain-rows      the same, where the head gets the learned rows alone
    compile         plain with each decoder layer and the divergence under torch.compile
    compile-rows    plain-rows likewise
    compile-model   plain-rows with both decoders whole under torch.compile, max-autotune-no-cudagraphs: minutes
    liger           Liger Kernel's patches and its fused linear JSD at beta = 0 of the learned rows

Documents' bounds are made beforehand.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from distill_kernels.attention.ranges import cu_seqlens_from_position_ids
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from distill.commands.bench import Batch, Rival, Step, decoder_inputs, logits_step
from distill.models.head import decoder_of, find_head
from scripts.bench.step_variants import compile_layers, liger_step

VARLEN = "bench_varlen"
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int
) -> torch.Tensor:
    """torch's variable-length attention (torch >= 2.10), causal, of [B, H, T, D] tensors; gives [B, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 says is_causal where later ones have a window; 2.12 wants to be told that heads of keys are fewer
    known = inspect.signature(varlen_attn).parameters
    settings: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    settings |= {"enable_gqa": True} if "enable_gqa" in known else {}
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out: Any = varlen_attn(*flat, bounds, bounds, longest, longest, **settings)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def register_varlen() -> None:
    """Give transformers `varlen` under the name `VARLEN`."""

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        # scores are scaled by 1/sqrt(D), as these models have it
        return varlen(query, key, value, kwargs["cu_seq_lens_q"], kwargs["max_length_q"]), None

    AttentionInterface.register(VARLEN, attend)


def with_bounds(batch: Batch) -> dict[str, Any]:
    """A packed batch with the bounds of its documents, as transformers hands them to attention."""
    positions = batch["position_ids"]
    bounds, longest = cu_seqlens_from_position_ids(positions).unique(), int(positions.max()) + 1
    return {**batch, **dict(zip(BOUNDS, (bounds, bounds, longest, longest), strict=True))}


def _attend_by_varlen(*models: Any) -> None:
    register_varlen()
    for model in models:
        model.config._attn_implementation = VARLEN


def _logits_step(
    teacher: nn.Module,
    student: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    compiles: str = "",
    selects: bool = False,
) -> Step:
    """The step by logits.

    Args:
        compiles: "", "layers" or "model".
        selects: whether the head gets the learned rows alone.
    """
    _attend_by_varlen(teacher, student)
    inputs, rows = decoder_inputs(with_bounds(batch)), batch["valid_rows"]
    learned = torch.zeros(batch["input_ids"].numel(), device=rows.device).index_fill_(0, rows, 1.0)

    def divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        log_p, log_q = (F.log_softmax(z.flatten(0, -2).float(), -1) for z in (student_logits, teacher_logits))
        each = F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
        return (each if selects else each * learned).sum() / rows.numel()

    decoders: dict[nn.Module, Any] = {model: decoder_of(model) for model in (teacher, student)}
    if compiles == "layers":
        for model in decoders:
            compile_layers(model)
    elif compiles:
        decoders = {m: torch.compile(d, mode="max-autotune-no-cudagraphs") for m, d in decoders.items()}

    def logits(model: nn.Module) -> torch.Tensor:
        hidden = decoders[model](**inputs).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, rows) if selects else hidden
        return find_head(model).module(hidden)  # type: ignore[no-any-return]

    loss = torch.compile(divergence) if compiles else divergence
    return logits_step(functools.partial(logits, teacher), functools.partial(logits, student), loss, optimizer)


def _liger_step(teacher: nn.Module, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    _attend_by_varlen(teacher, student)
    return liger_step(teacher, student, with_bounds(batch), optimizer, batch["valid_rows"])


PACKED_RIVALS: dict[str, Rival] = {
    "plain": _logits_step,
    "plain-rows": functools.partial(_logits_step, selects=True),
    "compile": functools.partial(_logits_step, compiles="layers"),
    "compile-rows": functools.partial(_logits_step, compiles="layers", selects=True),
    "compile-model": functools.partial(_logits_step, compiles="model", selects=True),
    "liger": _liger_step,
}
