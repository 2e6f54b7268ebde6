"""A model's arithmetic: FLOPs a token by its architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from distill.models.head import attention_sizes, bare, decoder_of, find_head
from distill.models.output_rows import MARK, row_parameters
from distill.models.quantised import as_built
from distill.models.shape import Shape


class Work(NamedTuple):
    """FLOPs of one model, trained or not, by token, learned token, and pair of query and key; and bytes through memory,
    in 16 bits: inputs and outputs of products, each twice, by the product and by the layer on its other side."""

    token: float
    trained: float
    pair: float
    token_bytes: float = 0.0
    trained_bytes: float = 0.0

    def of(self, tokens: float, trained: float, pairs: float) -> float:
        """FLOPs of that many tokens, trained tokens and pairs."""
        return self.token * tokens + self.trained * trained + self.pair * pairs


NO_WORK = Work(0.0, 0.0, 0.0)


def work_of(model: nn.Module, *, trains: bool) -> Work | None:
    """The FLOPs of `model` by the formulas above; None for a mixture of experts, whose active share is unknown here."""
    model = as_built(model)
    config = bare(model).config.get_text_config()  # type: ignore[union-attr,operator]
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    decoder, linear = decoder_of(model), find_head(model).linear
    embeddings = {id(p) for m in decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    layer = decoder.__dict__.get(MARK)
    rows = [] if layer is None else row_parameters(layer)  # which only rows that are read meet
    apart = embeddings | {id(p) for p in rows}
    body = [p for p in decoder.parameters() if id(p) not in apart]
    heads, _, width = attention_sizes(config)

    def cost(parameters: list[nn.Parameter]) -> tuple[float, float]:
        """FLOPs: forward 2, backward to the input 2, to the weight 2 more where it is trained; and bytes."""
        passes = [(p, 2.0 + (2 + 2 * p.requires_grad) * trains) for p in parameters]
        return sum(p.numel() * n for p, n in passes), sum(2 * sum(p.shape) * n for p, n in passes if p.dim() > 1)

    (token, token_bytes), (trained, trained_bytes) = cost(body), cost([*linear.parameters(), *rows])
    pair = 4.0 * (3 if trains else 1) * config.num_hidden_layers * heads * width
    return Work(token, trained, pair, token_bytes, trained_bytes)


def head_work(shape: Shape) -> Work:
    """Return the FLOPs of a frozen head alone, for a teacher whose hidden states are not computed here."""
    return Work(0.0, 2.0 * shape.head, 0.0, 0.0, 4.0 * (shape.hidden + shape.vocabulary))


def total_work(works: Iterable[Work | None]) -> Work | None:
    """The sum; None where one is not known."""
    known = list(works)
    return None if None in known else Work(*(sum(part) for part in zip(NO_WORK, *known, strict=True)))


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """All parameters (tied ones once) and those that are trained."""
    parameters = list(as_built(model).parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def count_text(number: int) -> str:
    """A number of parameters for people: 1.24 B, 134.5 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}" if unit == "B" else f"{number / size:.1f} {unit}"
    return str(number)
