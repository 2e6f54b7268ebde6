"""Sizes of a model, counted on a copy without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from distill.models.flops import active_shares
from distill.models.head import attention_sizes, decoder_of, find_head, unwrap_peft
from distill.models.layers import find_layers
from distill.models.names import GATED_MLPS, INTERMEDIATE
from distill.models.quantised_checkpoints import quantisation_of, stored_bits


class ModelSizes(NamedTuple):
    """Sizes of one model, counted on a copy without memory.

    Attributes:
        parameters: all of them, tied ones once.
        active: parameters that one token meets: of a mixture's experts those of a token; None where that is not known.
        trained: number of parameters with gradients.
        linear: parameters in the decoder's linear layers.
        head: vocabulary x hidden size; `tied` where the embedding is the same tensor.
        vocabulary, hidden, layers, heads: Sizes in the configuration.
        query, key_value: heads x head width, of queries and of keys.
        intermediate: width of the MLP; `gated` where it has two projections up.
        adapted: sum over LoRA layers of their input widths, `rank` their rank; 0 without LoRA.
        layered: parameters in the decoder's layers, `largest_layer` those of the largest; 0 where there is no list.
        stored_bits: Bits of a weight in the decoder's linear layers, where a quantised checkpoint states them.
    """

    parameters: int
    trained: int
    linear: int
    head: int
    tied: bool
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    query: int
    key_value: int
    intermediate: int
    gated: bool
    adapted: int = 0
    rank: int = 0
    layered: int = 0
    largest_layer: int = 0
    stored_bits: float | None = None
    active: int | None = None


def model_sizes(model: nn.Module) -> ModelSizes:
    config = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
    decoder = decoder_of(model)
    head = find_head(model).linear
    weight: Any = head.weight
    linears: list[Any] = [m for m in decoder.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    adapters: list[Any] = [
        m for m in unwrap_peft(model).modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")
    ]
    adapter_layers = {id(part) for m in adapters for part in m.modules() if part is not m.get_base_layer()}
    linears = [m for m in linears if id(m) not in adapter_layers]
    heads, pairs, width = attention_sizes(config)
    names = {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    parameters = list(model.parameters())
    embedding = unwrap_peft(model).get_input_embeddings()  # type: ignore[operator]
    intermediate = next((value for name in INTERMEDIATE if (value := getattr(config, name, None))), None)
    embedding = embedding.get_base_layer() if hasattr(embedding, "get_base_layer") else embedding
    layers = layer_sizes(model)
    stored = quantisation_of(unwrap_peft(model).config)
    shares = active_shares(model)
    active = None if shares is None else round(sum(p.numel() * shares.get(id(p), 1.0) for p in parameters))
    return ModelSizes(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        linear=sum(p.numel() for m in linears for p in m.parameters(recurse=False)),
        head=weight.numel(),
        tied=embedding.weight is weight,
        vocabulary=weight.shape[0],
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        query=heads * width,
        key_value=pairs * width,
        intermediate=intermediate or 4 * config.hidden_size,
        gated=not names.isdisjoint(gate for gate, _, _ in GATED_MLPS),
        adapted=sum(m.get_base_layer().weight.shape[1] for m in adapters),
        rank=max((next(iter(m.r.values())) for m in adapters), default=0),
        layered=sum(layers),
        largest_layer=max(layers, default=0),
        stored_bits=None if stored is None else stored_bits(stored),
        active=active,
    )


def parameters_text(shapes: Sequence[ModelSizes]) -> str:
    """Return the number of parameters of models together, and of those that a token meets where they are fewer."""
    text = f"{sum(shape.parameters for shape in shapes) / 1e6:,.2f} M parameters"
    active = [shape.parameters if shape.active is None else shape.active for shape in shapes]
    if sum(active) < sum(shape.parameters for shape in shapes):
        text += f", {sum(active) / 1e6:,.2f} M of them active per token"
    return text


def layer_sizes(model: nn.Module) -> list[int]:
    """Return the number of parameters of each decoder layer; none where the model has no list of them."""
    try:
        _, layers = find_layers(model)
    except ValueError:
        return []
    return [sum(p.numel() for p in layer.parameters()) for layer in layers]


USABLE = 0.95  # of the memory; the rest goes to the CUDA context and to fragmentation
