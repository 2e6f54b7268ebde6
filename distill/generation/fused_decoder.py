"""A decoder's layers for one new token a sequence, in five kernels a layer: for the plain form that most models have.

    reason, calls = fused_support(model, None, 8)                         # support_check.py: None where it serves it
    fused = FusedDecoder(model, cache, torch.bfloat16, calls)
    fused.embed(state), fused.layers()                        # fused.stream.x is what the last norm takes

The form: RMSNorm, projections to q, k and v (with biases: Qwen 2; with a norm of each head: Qwen 3), rotary embedding,
attention, output projection, residual, RMSNorm, gated MLP, residual: Llama, Mistral, Qwen 2 and 3, SmolLM. Parameters
are read where they lie at every call; weights in float32 under autocast are cast in the kernels.
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
from distill_kernels.decoding.plan import DecodePlan, choose_plan
from distill_kernels.decoding.tokens import SequenceState, embed_tokens
from distill_kernels.matmul.siblings import QKV
from torch import nn

from distill.generation.ragged_cache import AttentionCall, RaggedCache
from distill.models.head import decoder_of
from distill.models.names import LAYER_NORMS


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
    siblings = [f"self_attn.{name}" for name in QKV]
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
        model: Model for which `fused_support` has no reason against it.
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
        plan: DecodePlan | None = None,
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
        # all layers have the shapes of the first: its launch shapes and buffers serve every one
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

        # One residual stream, and three sets of sums of squares: the GEMM that adds to the stream leaves them for the
        # norm that the next one takes in, one sum per tile of its columns.
        self.first_stream = stream(1)
        self.middle_stream = stream(tiles_of(products.out, self.plan.out))
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
            # each GEMM also applies the norm of what it reads, or adds to the stream what it computes
            multiply_rows(self.qkv, stream, products.qkv, self.scratch, qkv)
            decode_step_attention(self.qkv, heads, cached, self.attended, self.scratch, pace)
            multiply_rows(self.attended, self.middle_stream, products.out, self.scratch, out)
            multiply_rows(self.middle, self.middle_stream, products.gate_up, self.scratch, gate_up)
            multiply_rows(self.middle, self.stream, products.down, self.scratch, down)
            stream = self.stream
