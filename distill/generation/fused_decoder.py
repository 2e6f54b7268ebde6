"""A decoder's layers for one new token a sequence, in five kernels a layer: for the plain form that most models have.

    reason = fused_unsupported_reason(model, None)                       # None where it is of that form
    fused = FusedDecoder(model, cache, torch.bfloat16)
    fused.embed(state), fused.layers()                        # fused.stream.x is what the last norm takes

The form: RMSNorm, projections to q, k and v (with biases: Qwen 2; with a norm of each head: Qwen 3), rotary embedding,
attention, output projection, residual, RMSNorm, gated MLP, residual: Llama, Mistral, Qwen 2 and 3, SmolLM. Structure is
read off the modules, and what it does not tell (scale of scores, window, a twist of somebody's own) off one call of
the model's own forward, whose logits the kernels must then reproduce. Parameters are read where they lie at every
call; weights in float32 under autocast are cast in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from distill_kernels.decoding.attention import AttentionSpec, LayerCache, decode_step_attention
from distill_kernels.decoding.attention import scratch_of as attention_scratch
from distill_kernels.decoding.common import Scratch, Stream
from distill_kernels.decoding.fused_linear import MAX_ROWS, Product, multiply_rows, tiles_of
from distill_kernels.decoding.fused_linear import scratch_of as product_scratch
from distill_kernels.decoding.plan import FASTER_ON, Plan, choose_plan
from distill_kernels.decoding.tokens import SequenceState, embed_tokens
from distill_kernels.launch import device_facts, runs_on_triton
from torch import nn
from transformers import PreTrainedModel

from distill.generation.ragged_cache import AttentionCall, RaggedCache, prefill
from distill.models.head import bare, decoder_of, find_head
from distill.models.layers import is_offloaded
from distill.models.names import LAYER_NORMS
from distill.models.patch.shared_input import FP8_GROUP, projection_forward
from distill.models.patch.triton_only import forward_on_triton

LINEARS = (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BIASES = {f"self_attn.{each}_proj.bias" for each in "qkv"}
HEAD_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
OPTIONAL = ("self_attn.o_proj.bias", *BIASES, *HEAD_NORMS)
ROTARY = ("default", "linear", "llama3", "yarn")  # cos and sin follow from the position alone
FORWARDS = (projection_forward, forward_on_triton)  # ours, of a plain linear layer


def fused_unsupported_reason(model: nn.Module, autocast: torch.dtype | None, forced: bool = False) -> str | None:
    """Return why no `FusedDecoder` supports `model`, from its parameters and GPU (any, if `forced`); None where one
    does.
    """
    weight = next(model.parameters())
    if not runs_on_triton(weight):
        return "it is not on a GPU that the kernels run on"
    if not forced and (family := device_facts(weight.device).family) not in FASTER_ON:
        return f"they were not measured to be faster on {family}"
    return plain_unsupported_reason(model, autocast)


def plain_unsupported_reason(model: nn.Module, autocast: torch.dtype | None) -> str | None:
    """Return why `model`, possibly on the meta device, does not have the form above; None where it does."""
    weight = next(model.parameters())
    if is_offloaded(bare(model)):
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


def epsilon(norm: nn.Module) -> float:
    """Return the epsilon of an RMSNorm; 0 where it has none."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


class _Products(NamedTuple):
    """A layer's, in their order."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product


def _products(layer: nn.Module, following: torch.Tensor) -> _Products:
    """Return the GEMMs of a layer with its present parameters; `following` is the weight of the next norm."""
    own = dict(layer.named_parameters())
    (first, of_first), (second, of_second) = (
        (own[f"{name}.weight"], epsilon(layer.get_submodule(name))) for name in LAYER_NORMS
    )
    siblings = [f"self_attn.{each}_proj" for each in "qkv"]
    weights = tuple(own[f"{each}.weight"] for each in siblings)
    return _Products(
        Product(weights, tuple(own.get(f"{each}.bias") for each in siblings), first, of_first),
        Product((own["self_attn.o_proj.weight"],), (own.get("self_attn.o_proj.bias"),), second, adds=True),
        Product((own["mlp.gate_proj.weight"],), (None,), second, of_second, own["mlp.up_proj.weight"]),
        Product((own["mlp.down_proj.weight"],), (None,), following, adds=True),
    )


class FusedDecoder:
    """The layers of `model` for the newest token of each of a cache's sequences.

    Args:
        model: Model for which `fused_unsupported_reason` is None.
        cache: Cache of at most `MAX_ROWS` sequences; its keys and values are allocated here, in `dtype`.
        dtype: Compute dtype: that of the weights, or autocast's.
        calls: Scale of scores and window of each attention module, from `RaggedCache.calls` after a forward pass.
        plan: Launch shapes, for measurements.

    Attributes:
        stream: The residual stream [B, H] after `layers`, for the norm that is the decoder's last.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: RaggedCache,
        dtype: torch.dtype,
        calls: Mapping[nn.Module, AttentionCall],
        plan: Plan | None = None,
    ) -> None:
        decoder = decoder_of(model)
        self.own = list(decoder.get_submodule("layers").children())
        self.norms = [*(layer.get_submodule(LAYER_NORMS[0]) for layer in self.own), decoder.get_submodule("norm")]
        self.embedding = decoder.get_submodule("embed_tokens")
        self.cache = cache
        self.calls = calls
        self.dtype = dtype
        weight = self.embedding.get_parameter("weight")
        rows = cache.batch
        assert rows <= MAX_ROWS

        def buffer(columns: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=weight.device)

        x = buffer(weight.shape[1], weight.dtype)
        scaled = buffer(weight.shape[1])
        positions = torch.arange(cache.slots, device=weight.device)[None]
        self.cos, self.sin = (table[0].contiguous() for table in decoder.get_submodule("rotary_emb")(x, positions))
        products = _products(self.own[0], self._norm(1))
        heads = self._heads(self.own[0])
        cache.allocate(buffer(0).view(rows, heads.kv_heads, 0, heads.size))
        self.plan = plan or choose_plan(rows, products, heads, cache.slots, weight.device)
        needs = [product_scratch(rows, *each) for each in zip(products, self.plan[:4], strict=True)]
        needs.append(attention_scratch(rows, heads, self.plan.attention))
        self.scratch = Scratch.allocate(max(n for n, _ in needs), max(n for _, n in needs), weight.device)
        self.qkv = buffer(products.qkv.outputs)
        self.middle = buffer(products.gate_up.outputs)
        self.attended = buffer(heads.heads * heads.size)

        def stream(parts: int) -> Stream:
            return Stream(x, scaled, torch.empty(parts, rows, dtype=torch.float32, device=weight.device))

        self.first_stream, self.middle_stream = stream(1), stream(tiles_of(products.out, self.plan.out))
        self.stream = stream(tiles_of(products.down, self.plan.down))

    def _norm(self, number: int) -> torch.Tensor:
        """The weight of the norm before layer `number`, or after the last."""
        return self.norms[number].get_parameter("weight")

    def _heads(self, layer: nn.Module) -> AttentionSpec:
        attention = layer.get_submodule("self_attn")
        own = dict(layer.get_submodule("self_attn").named_parameters())
        size = attention.head_dim
        call = self.calls[attention]
        assert isinstance(size, int)
        heads, kv_heads = (own[f"{each}_proj.weight"].shape[0] // size for each in "qk")
        norms = [own.get(f"{each}_norm.weight") for each in "qk"]
        eps = 0.0 if norms[0] is None else epsilon(attention.get_submodule("q_norm"))
        return AttentionSpec(heads, kv_heads, size, call.scaling, call.window, norms[0], norms[1], eps)

    def embed(self, state: SequenceState) -> None:
        embed_tokens(self.embedding.get_parameter("weight"), self._norm(0), self.first_stream, state)

    def layers(self) -> None:
        """All layers, whose newest tokens have the positions `cache.lengths` - 1."""
        stream = self.first_stream
        qkv, out, gate_up, down, pace, _ = self.plan
        for number, (layer, kept) in enumerate(zip(self.own, self.cache.kept(), strict=True), 1):
            products = _products(layer, self._norm(number))
            heads = self._heads(layer)
            cached = LayerCache(*kept, self.cache.lengths, self.cos, self.sin)
            multiply_rows(self.qkv, stream, products.qkv, self.scratch, qkv)
            decode_step_attention(self.qkv, heads, cached, self.attended, self.scratch, pace)
            multiply_rows(self.attended, self.middle_stream, products.out, self.scratch, out)
            multiply_rows(self.middle, self.middle_stream, products.gate_up, self.scratch, gate_up)
            multiply_rows(self.middle, self.stream, products.down, self.scratch, down)
            stream = self.stream


@torch.no_grad()
def check_layers(model: nn.Module, dtype: torch.dtype, rows: int) -> dict[nn.Module, AttentionCall] | str:
    """Decode three tokens of each of `rows` prompts by kernels and by the model's own forward: what its attention was
    called with, or how they differ.

    Call it where the model's attention is that of a ragged cache, in eval mode, under its autocast.
    """
    inner = bare(model)
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
        return "its layers attend in another way"
    fused = FusedDecoder(model, caches[1], dtype, calls)
    if fused.cos.shape[1] != caches[1].kept()[0][0].shape[3]:
        return "it turns a part of each head only"
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
        error = (given - expected).norm() / expected.norm()
        if not error < (1e-4 if dtype == torch.float32 else 0.05):
            return f"its logits come out different by {error:.1e}"
        for cache in caches:
            cache.lengths += 1
    return calls
