"""FLOPs and memory traffic of a model per token, from its architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from distill.models.dtypes import full_shape
from distill.models.head import attention_sizes, decoder_of, find_head, unwrap_peft
from distill.models.names import EXPERTS
from distill.models.quantised_checkpoints import as_built
from distill.models.routing import routing_of

if TYPE_CHECKING:
    from distill.models.shape import ModelSizes


class FlopCounts(NamedTuple):
    """FLOPs and memory traffic of one model, trained or not.

    Attributes:
        token: FLOPs per token.
        trained: FLOPs per token that is trained on.
        pair: FLOPs per pair of query and key.
        token_bytes: bytes read and written per token, in 16 bits: inputs and outputs of GEMMs, each twice, by the GEMM
            and by the neighbouring layer.
        trained_bytes: the same per token that is trained on.
    """

    token: float
    trained: float
    pair: float
    token_bytes: float = 0.0
    trained_bytes: float = 0.0

    def total(self, tokens: float, trained: float, pairs: float) -> float:
        return self.token * tokens + self.trained * trained + self.pair * pairs


NO_FLOPS = FlopCounts(0.0, 0.0, 0.0)


def active_shares(model: nn.Module) -> dict[int, float] | None:
    """Return the share of a token's experts among all, by the id of each parameter that holds routed experts.

    A layer's experts are one parameter for all of them [experts, ...], or modules in a list; shared experts and routers
    meet every token and are not among them. None for a mixture whose configuration does not tell how many experts a
    token has.
    """
    config = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
    routing = routing_of(config)
    if routing is None:
        experts = any(getattr(config, name, None) for name in EXPERTS)
        return None if experts else {}
    share = routing.per_token / routing.experts
    shares: dict[int, float] = {}
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == routing.experts:
            shares |= {id(p): share for p in module.parameters()}
        # transformers' experts: every parameter of the module has one entry for each of them
        own = list(module.parameters(recurse=False))
        if any(p.dim() == 3 and p.shape[0] == routing.experts for p in own):
            shares |= {id(p): share for p in own if p.dim() > 1 and p.shape[0] == routing.experts}
    return shares or None


def count_flops(model: nn.Module, *, trains: bool) -> FlopCounts | None:
    """Return the FLOPs of `model`, of the experts those of a token's own; None where their share is not known."""
    model = as_built(model)
    config = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
    shares = active_shares(model)
    if shares is None:
        return None
    decoder = decoder_of(model)
    linear = find_head(model).linear
    embeddings = {id(p) for m in decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    body = [p for p in decoder.parameters() if id(p) not in embeddings]
    heads, _, width = attention_sizes(config)

    def cost(parameters: list[nn.Parameter]) -> tuple[float, float]:
        """Return FLOPs (forward 2, gradient of the input 2, of a trained weight 2 more) and bytes."""
        flops = 0.0
        moved = 0.0
        for p in parameters:
            passes = 2.0 + (2 + 2 * p.requires_grad) * trains
            shape = full_shape(p)
            flops += shape.numel() * shares.get(id(p), 1.0) * passes
            if id(p) in shares and len(shape) == 3:
                # a token is read and written once for each of its experts
                moved += 2 * shape[0] * shares[id(p)] * sum(shape[1:]) * passes
            elif len(shape) > 1:
                moved += 2 * shares.get(id(p), 1.0) * sum(shape) * passes
        return flops, moved

    token, token_bytes = cost(body)
    trained, trained_bytes = cost(list(linear.parameters()))
    pair = 4.0 * (3 if trains else 1) * config.num_hidden_layers * heads * width
    return FlopCounts(token, trained, pair, token_bytes, trained_bytes)


def head_flops(shape: ModelSizes) -> FlopCounts:
    """Return the FLOPs of a frozen head alone, for a teacher whose hidden states are not computed here."""
    return FlopCounts(0.0, 2.0 * shape.head, 0.0, 0.0, 4.0 * (shape.hidden + shape.vocabulary))


def sum_flops(works: Iterable[FlopCounts | None]) -> FlopCounts | None:
    known = list(works)
    return None if None in known else FlopCounts(*(sum(part) for part in zip(NO_FLOPS, *known, strict=True)))


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters (tied ones once), and of those that are trained."""
    parameters = list(as_built(model).parameters())
    return sum(full_shape(p).numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def count_text(number: int) -> str:
    """Return a number of parameters as text: 1.24 B, 134.5 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}" if unit == "B" else f"{number / size:.1f} {unit}"
    return str(number)
