"""Our FlashAttention inside transformers models, and the choice between it and PyTorch's back ends.

`use_fused_attention(model)` gives the model the attention implementation `distill`. Neither packed nor padded batches
need a mask: the decoder's forward turns `position_ids` that restart, or a mask of padding (see `padding.py`), into
cumulative lengths on the device (transformers asks the device whether a batch is packed or padded, which stalls the
host, and then builds a dense mask). calls with another mask or
a key-value cache run on the attention that the model had before.

`keep_soft_cap(model)` sees to it that a model's own attention applies its soft cap.

`autotune_attention` times the back ends on the shapes of a run.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import types
from collections.abc import Iterator
from typing import Any

import torch
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.ranges import cu_seqlens_from_position_ids
from distill_kernels.launch import runs_on_triton
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from distill.models.head import attention_sizes, decoder_of, unwrap_peft

log = logging.getLogger(__name__)

NAME = "distill"
RAGGED = "distill_ragged"  # of distill.generation.ragged_cache, which builds on this module
BACKENDS = ("triton", "cudnn", "flash")
AUTO = "auto"
DEFAULT_LENGTH = 4096  # of the row that back ends are timed on where nobody tells the batch
MAX_HEAD_DIM = 256
_SDP = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def fused_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the interface of transformers' attention layers.

    Args:
        module: The attention module; its `distill_attention` names the back end.
        query: [B, H, T, D]; key and value [B, Hkv, T, D], not repeated.
        attention_mask: A mask transformers built (padding or a cache): PyTorch's attention takes the call.
        scaling: Factor of the scores; 1/sqrt(D) if None.
        dropout: Dropout of the probabilities; PyTorch's attention takes the call if above 0.
        sliding_window: Keys a query sees, itself included.
        softcap: Scores become cap * tanh(score / cap).
        is_causal: Overrides `module.is_causal`.
        s_aux: [H], attention sinks (gpt-oss and others): logits of the softmax's denominator without a value.
        cu_seq_lens_q: int32 [documents + 1], flat over B*T, of packed documents; None for one document a row.

    Returns:
        [B, T, H, D] and None (no attention weights).
    """
    refuse_other_scores(kwargs)
    # under autocast a rotation by fp32 angles widens them
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    packed = cu_seq_lens_q is not None
    if attention_mask is not None or dropout > 0 or query.shape[2] != key.shape[2] or query.shape[-1] > MAX_HEAD_DIM:
        if packed:
            raise ValueError(
                "attention: packed documents cannot be combined with a mask, attention dropout, a cache or a head size "
                f"above {MAX_HEAD_DIM}; set attention_dropout to 0 or data.packing to false"
            )
        for name, own in (("a soft cap", softcap), ("sinks", s_aux)):
            if own is not None:
                raise ValueError(f"attention: {name} with a mask or cache needs attn_implementation='eager'")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    backend = getattr(module, "distill_attention", "triton")
    windowed = sliding_window is not None and sliding_window < query.shape[2]
    halves = query.dtype in (torch.bfloat16, torch.float16)  # neither of PyTorch's takes fp32
    own = packed or windowed or softcap is not None or s_aux is not None
    if backend != "triton" and halves and not own:
        return _torch_attention(backend, query, key, value, causal, scaling).transpose(1, 2), None
    out = flash_attention(
        query,
        key,
        value,
        causal=causal,
        scale=scaling,
        window=sliding_window if windowed else None,
        softcap=softcap,
        sinks=s_aux,
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_k=cu_seq_lens_k,
        max_seqlen_q=max_length_q,
        max_seqlen_k=max_length_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out.transpose(1, 2), None


def refuse_other_scores(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of transformers' attention that change scores in a way that no kernel here computes.

    Sparse attention hands on which keys it keeps, others a bias or a sink for each position: to leave them out would be
    silently wrong.

    Raises:
        ValueError: One of them is given.
    """
    for name in ("position_bias", "indices", "block_indices", "sinks"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention: expected no {name}, which no kernel here computes; patch with attention=None")


def keep_soft_cap(model: nn.Module, asked: str = "auto", field: str = "attn_implementation") -> None:
    """Have `model` attend by an implementation that applies the soft cap of its attention scores.

    PyTorch's attention has none. transformers 5.17 gives it to Gemma 2 and VaultGemma all the same, and their cap is
    dropped without a word; 5.23 takes `eager`, as this does.

    Args:
        model: A model of transformers, bare or inside PEFT; left as it is where no cap would be dropped.
        asked: The implementation that somebody asked for, or "auto".

    Raises:
        ValueError: `asked` is what would drop the cap.
    """
    configs = _configs(model)
    kept = [_capping(config) for config in configs]
    if all(config._attn_implementation == name for config, name in zip(configs, kept, strict=True)):
        return
    if asked != "auto":
        raise ValueError(
            f"{field}: {asked} drops the soft cap of this model's attention scores; expected auto, or an "
            "implementation that applies it, such as eager"
        )
    log.info("%s: eager, since PyTorch's attention drops the soft cap of this model's attention scores", field)
    for config, name in zip(configs, kept, strict=True):
        config._attn_implementation = name


def with_soft_cap(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    configs = _configs(model)
    return _implementations(configs, [_capping(config) for config in configs])


def _capping(config: Any) -> Any:
    """The attention implementation that `config` names, or eager where that one would drop the soft cap."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    name = config._attn_implementation
    return "eager" if capped and name == "sdpa" else name


def _torch_attention(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    with sdpa_kernel(_SDP[backend]):
        return scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )


AttentionInterface.register(NAME, fused_attention)


def use_fused_attention(model: nn.Module, decoder: nn.Module, backend: str = "triton") -> None:
    """Switch `model` to our attention; `stop_fused_attention` undoes it.

    transformers builds no mask for an attention it has no mask function for, which is what we want when documents
    are told apart by cumulative lengths, and wrong when there is a cache or a mask of another kind: the decoder's
    forward is therefore wrapped to choose by its inputs.

    Args:
        model: A causal language model of transformers.
        decoder: Body of the model, the module that builds masks and calls the layers.
        backend: "triton", "cudnn" or "flash"; packed batches, windows, soft caps, sinks and fp32 always take "triton".
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    from distill.models.patch.padding import PaddingMasks, add_to_hidden

    configs = _configs(model)
    original = decoder.__dict__.get("forward")
    before = [config._attn_implementation for config in configs]
    decoder.__dict__["_distill_attention_undo"] = (original, before)
    # in the module, so that a deep copy of the model has its own
    decoder.__dict__["_distill_attention"] = (configs, [_capping(config) for config in configs], PaddingMasks())
    for config in configs:
        config._attn_implementation = NAME
    for module in model.modules():
        if hasattr(module, "config"):
            module.distill_attention = backend  # type: ignore[assignment]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = original or types.MethodType(type(self).forward, self)
        configs, unfused, padding = self.__dict__["_distill_attention"]
        mask = kwargs.get("attention_mask")
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cached = use_cache or kwargs.get("past_key_values") is not None
        if self.config._attn_implementation == RAGGED:
            return inner(*args, **kwargs)
        ids = next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if x is not None)
        masked = mask is not None or len(args) > 1
        documents = None
        poison = None
        if masked and not cached and self.config._attn_implementation == NAME:
            documents = padding.documents(mask, ids, _why_not_ours(self))
            masked = documents is None
        if masked or cached or self.config._attn_implementation != NAME:
            with _implementations(configs, unfused):
                return inner(*args, **kwargs)
        positions = kwargs.get("position_ids")
        longest = ids.shape[1]
        queries = keys = None
        if documents is not None:
            queries, keys, poison = documents
        elif kwargs.get("cu_seq_lens_q") is None and positions is not None and positions.dim() == 2:
            if positions.shape[0] != ids.shape[0]:
                positions = positions.expand(ids.shape[0], -1)
            queries = keys = cu_seqlens_from_position_ids(positions)
        if queries is not None:
            kwargs.update(cu_seq_lens_q=queries, cu_seq_lens_k=keys, max_length_q=longest, max_length_k=longest)
        kwargs["use_cache"] = False
        return inner(*args, **kwargs) if poison is None else add_to_hidden(inner(*args, **kwargs), poison)

    decoder.forward = types.MethodType(forward, decoder)


def attends_within_documents(model: nn.Module) -> bool:
    """Return whether attention skips the pairs between documents of a row: ours does, on a GPU."""
    return "_distill_attention" in decoder_of(model).__dict__ and runs_on_triton(next(model.parameters()))


def _why_not_ours(decoder: Any) -> str | None:
    """Return the reason why our attention cannot run a call with a mask, from the model's configuration."""
    names = ("attention_dropout", "attn_pdrop", "attention_dropout_prob", "attn_dropout")
    if decoder.training and any((getattr(decoder.config, name, 0.0) or 0.0) > 0 for name in names):
        return "it drops probabilities out; attention dropout of 0 would let ours take it"
    wide = (getattr(decoder.config, "head_dim", None) or 0) > MAX_HEAD_DIM
    return f"its heads are wider than {MAX_HEAD_DIM}" if wide else None


def leave_padded_batches(decoder: nn.Module) -> None:
    """Leave batches with a mask to the attention that the model had before."""
    decoder.__dict__["_distill_attention"][2].refused = "its layers do not hand on where a row begins and ends"


def stop_fused_attention(model: nn.Module, decoder: nn.Module) -> None:
    """Give `model` back the attention it had before `use_fused_attention`."""
    original, implementations = decoder.__dict__.pop("_distill_attention_undo")
    del decoder.__dict__["_distill_attention"]
    if original is None:
        del decoder.forward
    else:
        decoder.forward = original
    for config, implementation in zip(_configs(model), implementations, strict=True):
        config._attn_implementation = implementation
    for module in model.modules():
        module.__dict__.pop("distill_attention", None)


def _configs(model: nn.Module) -> list[Any]:
    """The configurations that the model's attention modules read, each once."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]


def implementations(model: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
    configs = _configs(model)
    return _implementations(configs, [name] * len(configs))


@contextlib.contextmanager
def _implementations(configs: list[Any], names: list[str]) -> Iterator[None]:
    current = [config._attn_implementation for config in configs]
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, name in zip(configs, current, strict=True):
            config._attn_implementation = name


def autotune_attention(
    batch: int, heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, *, backward: bool
) -> tuple[str, dict[str, float]]:
    """Time causal attention of these shapes on every back end of the current GPU, without the host's launches.

    Args:
        batch: B. heads: H. kv_heads: Hkv. length: T. head_dim: D.
        dtype: Dtype of query, key and value.
        backward: True to time the backward pass too (a student).

    Returns:
        The fastest back end's name, and milliseconds by name; a back end that refuses the shapes is left out.
    """

    def draw(count: int) -> torch.Tensor:
        tensor = torch.randn(batch, length, count, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
        return tensor.requires_grad_(backward)

    query = draw(heads)
    key = draw(kv_heads)
    value = draw(kv_heads)
    upstream = torch.randn_like(query)

    def run(backend: str) -> None:
        if backend == "triton":
            out = flash_attention(query, key, value, causal=True)
        else:
            out = _torch_attention(backend, query, key, value, True, None)
        if backward:
            torch.autograd.grad(out, (query, key, value), upstream)

    times = {}
    refusals = {}
    for backend in BACKENDS:
        try:
            for _ in range(3):
                run(backend)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(3):
                    run(backend)
        except torch.OutOfMemoryError:  # no refusal: the batch is too large for a step as well
            raise
        except RuntimeError as error:  # PyTorch: "No available kernel" for shapes a back end does not serve
            refusals[backend] = str(error).splitlines()[0]
            log.info("attention: %s does not serve these shapes (%s)", backend, refusals[backend])
            continue
        samples = []
        for _ in range(7):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / 3)
        times[backend] = statistics.median(samples)
    if not times:
        raise RuntimeError(
            f"attention: no back end could be timed on [{batch}, {heads}, {length}, {head_dim}]: {refusals}"
        )
    return min(times, key=times.__getitem__), times


def default_attention(model: nn.Module, *, backward: bool) -> str:
    """Return the back end for a model whose batches are not known: the fastest on one row of `DEFAULT_LENGTH` tokens.

    Ours on a CPU, and in deterministic runs, where timings must not decide roundings.
    """
    device = next(model.parameters()).device
    if not torch.cuda.is_available() or device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return "triton"
    with torch.cuda.device(device):
        return choose_attention(model, 1, DEFAULT_LENGTH, backward=backward)[0]


def choose_attention(model: nn.Module, batch: int, length: int, *, backward: bool) -> tuple[str, dict[str, float]]:
    """Return `autotune_attention` for a model's heads, on batches of `batch` sequences of `length` tokens.

    A model with attention sinks, which PyTorch's back ends lack, is not timed.
    """
    if any(isinstance(getattr(module, "sinks", None), torch.Tensor) for module in model.modules()):
        log.info("attention: triton, the only back end that has the attention sinks of this model")
        return "triton", {}
    config = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
    dtype = torch.float16 if next(model.parameters()).dtype == torch.float16 else torch.bfloat16
    heads, kv_heads, width = attention_sizes(config)
    if not heads:  # nothing to time
        return BACKENDS[0], {}
    name, times = autotune_attention(batch, heads, kv_heads, length, width, dtype, backward=backward)
    log.info("attention: %s (%s)", name, ", ".join(f"{key} {ms:.3f} ms" for key, ms in times.items()))
    return name, times
