"""Which of our decoders supports a model: why not the decode loop, and why not its fused steps.

Both are tried on a few tokens, whose logits must be those of the model's own forward. What can be told without running
a model, and therefore of one on the meta device, comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels.decoding.fused_linear import MAX_ROWS
from distill_kernels.decoding.plan import FASTER_ON
from distill_kernels.decoding.tokens import SequenceState
from distill_kernels.launch import device_facts, runs_on_triton
from torch import nn
from transformers import PreTrainedModel

from distill.core.errors import first_line
from distill.core.eval_mode import eval_mode
from distill.generation.fused_decoder import FusedDecoder, epsilon
from distill.generation.ragged_cache import (
    AttentionCall,
    RaggedCache,
    attention_for_ragged_cache,
    prefill,
    prefill_sequences,
)
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.models.layers import is_offloaded
from distill.models.names import LAYER_NORMS
from distill.models.patch.attention import with_soft_cap
from distill.models.patch.document_rope import rope_by_document, short_length
from distill.models.patch.packed import LOWERED, lowered_limits
from distill.models.patch.shared_input import FP8_GROUP, projection_forward
from distill.models.patch.triton_only import linear_on_triton
from distill.models.trial import (
    DECODED_ROUNDINGS,
    FUSED_STEP_16_BITS,
    FUSED_STEP_FLOAT32,
    OTHER_KERNEL,
    distances,
    relative_error,
)

STEPS = 5
# tokens of three prompts: beyond every lowered limit; one that passes them while it is decoded; one that shares most
# of its tokens with the first, whose keys it gets
PROMPTS = (2 * LOWERED + 3, LOWERED - 1, 2 * LOWERED + 1)
OWN = (PROMPTS[0], LOWERED - 1, 2 * LOWERED)  # of these tokens, those that are the first prompt's

# the form of models whose steps are fused
LINEARS = (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BIASES = {f"self_attn.{each}_proj.bias" for each in "qkv"}
HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
OPTIONAL = ("self_attn.o_proj.bias", *BIASES, *HEAD_NORMS)
ROTARY = ("default", "linear", "llama3", "yarn")  # cos and sin follow from the position alone
FORWARDS = (projection_forward, linear_on_triton)  # ours, of a plain linear layer


@torch.no_grad()
def unsupported_reason(model: nn.Module) -> str | None:
    """Return the reason why `DecodeLoop` does not support `model`, found on a few tokens; None if it does.

    Prompts of different lengths and the next tokens of each must give the logits of the model's own forward of the same
    tokens without a cache (soft cap of the attention scores included), up to the rounding of its dtype. Windows and
    the length at which LongRoPE changes are lowered to a few tokens, so that there are tokens on both sides of each.
    """
    inner: Any = unwrap_peft(model)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it takes no other attention implementation"
    rope_by_document(model)
    try:
        with eval_mode(model), lowered_limits(model):
            return _differing_logits(model, inner)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # another kind of forward
        return first_line(error)


def _differing_logits(model: nn.Module, inner: Any) -> str | None:
    """Return how the logits of decoding differ from those of the model's own forward; None where they do not."""
    weight = next(model.parameters())
    device = weight.device
    dtype = weight.dtype if weight.dtype.itemsize < 4 else torch.float32
    tolerance = min(OTHER_KERNEL, DECODED_ROUNDINGS * torch.finfo(dtype).eps)
    forward = type(inner).forward
    short = short_length(model)
    words = torch.arange(len(PROMPTS) * (PROMPTS[0] + STEPS)) * 7 + 3
    rows = (words % inner.config.get_text_config().vocab_size).view(len(PROMPTS), -1).tolist()
    for row, shared in zip(rows, OWN, strict=True):
        row[:shared] = rows[0][:shared]
    ids = torch.tensor(rows, device=device)

    def own_logits(part: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(part.shape[1], device=device).expand_as(part)
        logits: torch.Tensor = forward(inner, input_ids=part, position_ids=positions, use_cache=False).logits
        return logits.float()

    with with_soft_cap(model):
        together = own_logits(ids)
        alone = torch.cat([own_logits(row[None]) for row in ids])
        # experts that get more tokens may round otherwise, which says nothing about decoding
        tells = distances(alone, together) < tolerance / 2
        expected = alone
        if short is not None:  # where a token's logits depend on how long the sequence was when they were computed
            expected = alone.clone()
            for number, row in enumerate(ids):
                for end in range(PROMPTS[number], PROMPTS[number] + STEPS):
                    expected[number, end - 1] = own_logits(row[None, :end])[0, -1]
    with attention_for_ragged_cache(model):
        cache = RaggedCache(inner.config, len(rows), ids.shape[1], device)
        held = dict[int, Any]()
        starting = {number: row[:length] for number, (row, length) in enumerate(zip(rows, PROMPTS, strict=True))}
        prefill_sequences(decoder_of(model), starting, cache, held, short)
        cache.begin(torch.tensor(PROMPTS, device=device))
        for step in range(STEPS):
            lengths = [length + step for length in PROMPTS]
            outgrown = {n: rows[n][:length] for n, length in enumerate(lengths) if step and length - 1 == short}
            prefill_sequences(decoder_of(model), outgrown, cache, held, short)
            at = cache.lengths[:, None] - 1
            outputs = forward(
                inner,
                input_ids=ids.gather(1, at),
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                ragged_cache=cache,
            )
            chosen = torch.arange(len(rows), device=device), at[:, 0]
            errors = distances(expected[chosen], outputs.logits[:, -1].float())[tells[chosen]]
            if len(errors) and not errors.max() < tolerance:
                return f"its logits come out different by {errors.max():.1e}"
            cache.lengths += 1
    return None if tells.any() else "its logits depend on the rows beside a sequence, by rounding alone"


class FusedSupport(NamedTuple):
    """Whether `FusedDecoder` serves a model.

    Attributes:
        reason: Why it does not; None where it does.
        calls: What its attention modules are called with; empty where it does not.
    """

    reason: str | None
    calls: Mapping[nn.Module, AttentionCall]


def fused_support(
    model: nn.Module, autocast: torch.dtype | None, sequences: int, *, forced: bool = False
) -> FusedSupport:
    """Return whether the steps of a model are fused.

    Call it where the model's attention is that of a ragged cache, in eval mode, under its autocast.

    Args:
        autocast: Compute dtype where that is not its weights'.
        sequences: Sequences that are decoded together.
        forced: On families of GPUs too that fused steps were never measured on.
    """
    weight = next(model.parameters())
    if not runs_on_triton(weight):
        return FusedSupport("it is not on a GPU that the kernels run on", {})
    family = device_facts(weight.device).family
    reason = fused_unsupported_reason(model, autocast, family, sequences, forced=forced)
    if reason is not None:
        return FusedSupport(reason, {})
    return try_fused_layers(model, autocast or weight.dtype, sequences)


def fused_unsupported_reason(
    model: nn.Module, autocast: torch.dtype | None, family: str | None, sequences: float, *, forced: bool = False
) -> str | None:
    """Return why no fused step decodes `model`, which may be on the meta device, as far as that is told without running
    it; None where nothing speaks against it. Arguments as of `fused_support`; `family` is that of the GPU.
    """
    if not forced and family not in FASTER_ON:
        return f"they were not measured to be faster on {family}"
    if sequences > MAX_ROWS:
        return f"{sequences:g} sequences at once are more than {MAX_ROWS}"
    return _why_not_form(model, autocast)


def _why_not_form(model: nn.Module, autocast: torch.dtype | None) -> str | None:
    """Return why the modules of a model are not of the form in fused_decoder.py; None where they are."""
    weight = next(model.parameters())
    if is_offloaded(unwrap_peft(model)):
        return "its layers wait in host memory"
    decoder = decoder_of(model)
    head = find_head(model)
    ends = {name for name, _ in decoder.named_parameters() if not name.startswith("layers.")}
    plain = ends == {"embed_tokens.weight", "norm.weight"}
    if not plain or type(decoder.get_submodule("embed_tokens")) is not nn.Embedding:
        return "its body has other parameters than those of an embedding, layers and a norm"
    kind = getattr(getattr(decoder, "rotary_emb", None), "rope_type", None)
    if kind not in ROTARY:
        return f"its rotary embedding is of the kind {kind}"
    if head.module is not head.linear or _why_not_linear(head.linear) or head.linear.bias is not None:
        return "its head is no plain linear layer without a bias"
    layers = list(decoder.get_submodule("layers").children())
    for layer in layers:
        reason = _why_not_layer(layer)
        if reason:
            return reason
    if len({tuple(parameter.shape for parameter in layer.parameters()) for layer in layers}) > 1:
        return "its layers differ in shape"
    parameters = [*decoder.parameters(), head.linear.get_parameter("weight")]
    if len({(each.dtype, each.device) for each in parameters}) > 1 or not all(p.is_contiguous() for p in parameters):
        return "its weights differ in dtype or device, or have gaps"
    halves = (torch.float16, torch.bfloat16)
    if (autocast or weight.dtype) not in halves and (weight.is_cuda or weight.dtype != torch.float32):
        return f"it computes in {autocast or weight.dtype}"
    if any(map(_has_hooks, (*decoder.modules(), head.linear))):
        return "its modules have hooks"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks other than those of gradient checkpointing on embeddings."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__name__", "").startswith("make_inputs_require_grad") for hook in hooks)


def _why_not_linear(layer: nn.Module) -> str | None:
    forward = getattr(layer.__dict__.get("forward"), "__func__", None)
    ours = "forward" not in layer.__dict__ or forward in FORWARDS
    if type(layer) is not nn.Linear or not ours or FP8_GROUP in layer.__dict__:
        return f"a {type(layer).__name__} of its layers does more than a linear layer"
    return None if type(layer.weight) is nn.Parameter else "its weights are sharded or quantised"


def _why_not_layer(layer: nn.Module) -> str | None:
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    needed = {f"{name}.weight" for name in (*LINEARS, *LAYER_NORMS)}
    halved = any(0 < len(shapes.keys() & both) < len(both) for both in (BIASES, HEAD_NORMS))
    if not needed <= shapes.keys() <= needed.union(OPTIONAL) or halved:
        return f"a {type(layer).__name__} has other parameters, or lacks some"
    reason = next(filter(None, (_why_not_linear(layer.get_submodule(name)) for name in LINEARS)), None)
    if reason:
        return reason
    width = getattr(layer.get_submodule("self_attn"), "head_dim", None)
    if not isinstance(width, int) or width % 2 or width > 256 or shapes.get(min(HEAD_NORMS), (width,)) != (width,):
        return f"its heads are {width} wide, or are not normed one by one"
    return None if all(epsilon(layer.get_submodule(name)) for name in LAYER_NORMS) else "its norms have no epsilon"


@torch.no_grad()
def try_fused_layers(model: nn.Module, dtype: torch.dtype, rows: int) -> FusedSupport:
    """Decode three tokens of each of `rows` prompts by kernels and by the model's own forward, and compare the logits.

    What the structure does not tell (scale of scores, window, a twist of somebody's own) is read off the calls of
    attention in the model's own forward.
    """
    inner = unwrap_peft(model)
    assert isinstance(inner, PreTrainedModel)
    decoder = decoder_of(model)
    head = find_head(model).linear
    device = next(model.parameters()).device
    ids = torch.arange(7 * rows, device=device).reshape(rows, 7) % inner.config.get_text_config().vocab_size
    lengths = 4 - 2 * (torch.arange(rows, device=device) % 2)
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    caches = [RaggedCache(inner.config, rows, 16, device) for _ in range(2)]
    calls: dict[nn.Module, AttentionCall] = {}
    caches[0].calls = calls
    for cache in caches:
        prefill(decoder, prompts, range(rows), cache)
        cache.begin(lengths)
    if len(calls) != len(caches[0].layers) or any(call.softcap is not None or call.sinks for call in calls.values()):
        return FusedSupport("its layers attend in another way", {})
    fused = FusedDecoder(model, caches[1], dtype, calls)
    if fused.cos.shape[1] != caches[1].kept()[0][0].shape[3]:
        return FusedSupport("it turns a part of each head only", {})
    for _ in range(3):
        at = caches[0].lengths[:, None] - 1
        token = ids.gather(1, at)
        expected = (
            type(inner)
            .forward(
                inner,
                input_ids=token,
                position_ids=at,
                past_key_values=caches[0],
                use_cache=True,
                ragged_cache=caches[0],
            )
            .logits[:, -1]
            .float()
        )
        nobody = torch.zeros(rows, dtype=torch.bool, device=device)
        fused.embed(
            SequenceState(
                token[:, 0].contiguous(),
                lengths,
                lengths,
                nobody,
                nobody,
                lengths,
                ids,
                fused.stream.squares,
                lengths[:1] * 0,
                lengths[:0],
                0,
            )
        )
        fused.layers()
        given = head(decoder.get_submodule("norm")(fused.stream.x)).float()
        error = relative_error(given, expected)
        if not error < (FUSED_STEP_FLOAT32 if dtype == torch.float32 else FUSED_STEP_16_BITS):
            return FusedSupport(f"its logits come out different by {error:.1e}", {})
        for cache in caches:
            cache.lengths += 1
    return FusedSupport(None, calls)
