"""FLOPs and memory traffic of a model per token, from its architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from distill.models.head import attention_sizes, bare, decoder_of, find_head
from distill.models.output_rows import MARK, row_parameters
from distill.models.quantised_checkpoints import as_built

if TYPE_CHECKING:
    from distill.models.shape import Shape


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


def count_flops(model: nn.Module, *, trains: bool) -> FlopCounts | None:
    """Return the FLOPs of `model`; None for a mixture of experts, whose active share is unknown here."""
    model = as_built(model)
    config = bare(model).config.get_text_config()  # type: ignore[union-attr,operator]
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    decoder = decoder_of(model)
    linear = find_head(model).linear
    embeddings = {id(p) for m in decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    layer = decoder.__dict__.get(MARK)
    rows = [] if layer is None else row_parameters(layer)  # applied to the rows that the loss reads only
    apart = embeddings | {id(p) for p in rows}
    body = [p for p in decoder.parameters() if id(p) not in apart]
    heads, _, width = attention_sizes(config)

    def cost(parameters: list[nn.Parameter]) -> tuple[float, float]:
        """Return FLOPs (forward 2, gradient of the input 2, of a trained weight 2 more) and bytes."""
        passes = [(p, 2.0 + (2 + 2 * p.requires_grad) * trains) for p in parameters]
        return sum(p.numel() * n for p, n in passes), sum(2 * sum(p.shape) * n for p, n in passes if p.dim() > 1)

    token, token_bytes = cost(body)
    trained, trained_bytes = cost([*linear.parameters(), *rows])
    pair = 4.0 * (3 if trains else 1) * config.num_hidden_layers * heads * width
    return FlopCounts(token, trained, pair, token_bytes, trained_bytes)


def head_flops(shape: Shape) -> FlopCounts:
    """Return the FLOPs of a frozen head alone, for a teacher whose hidden states are not computed here."""
    return FlopCounts(0.0, 2.0 * shape.head, 0.0, 0.0, 4.0 * (shape.hidden + shape.vocabulary))


def sum_flops(works: Iterable[FlopCounts | None]) -> FlopCounts | None:
    known = list(works)
    return None if None in known else FlopCounts(*(sum(part) for part in zip(NO_FLOPS, *known, strict=True)))


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters (tied ones once), and of those that are trained."""
    parameters = list(as_built(model).parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def count_text(number: int) -> str:
    """Return a number of parameters as text: 1.24 B, 134.5 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}" if unit == "B" else f"{number / size:.1f} {unit}"
    return str(number)
