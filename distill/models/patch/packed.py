"""Check that packed documents give the same outputs in one row as each gives alone.

They do where attention is told of them by positions that restart. Recurrent and convolutional layers (Mamba, LFM2,
Qwen3-Next) carry their state from one document into the next, attention biased by distance (ALiBi) asks for no
positions, attention in chunks may count them from the row's beginning, and some models of transformers do not hand
positions on to where masks are made. None of them says so.

Windows, chunks and sparse selections show only in documents that are longer than they are. For the length of a trial
these limits are lowered to a few tokens, in the configuration and in the modules that have copied them, so that short
documents exceed all of them and every layer takes part. Convolutions cannot be lowered: documents are longer than
their kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.models.names import ATTENTION_LIMITS, CONVOLUTION_WIDTHS, ORIGINAL_LENGTH
from distill.models.patch.document_rope import KIND as LONGROPE
from distill.models.quantised_checkpoints import quantised_by_transformers
from distill.models.trial import OTHER_KERNEL, OTHER_SHAPE_ROUNDINGS, SAME_SHAPE_ROUNDINGS, distances, rounding

LOWERED = 4  # tokens
ROUNDINGS = 4  # documents that see each other differ by tens of percent, far more than rounding does
CARRIES = (
    "does not keep documents of one row apart: its layers carry something from one into the next, or its attention is "
    "not told where they end"
)
SHIFTS = (
    "computes a document of a packed row otherwise than alone: windows, chunks or positions are counted from the "
    "beginning of the row"
)
NOT_FINITE = "computes NaN or infinity for packed rows, and numbers for each of their documents alone"
GRADIENT_NOT_FINITE = (
    "has NaN or infinite gradients where padding is a document of its own, as it is in packed rows: the embedding of "
    "its padding token is zero"
)


def isolates_documents(model: nn.Module) -> bool:
    """Return whether documents of a packed row come out as each does alone; see `packing_problem`."""
    return packing_problem(model) is None


@torch.no_grad()
def packing_problem(model: nn.Module, *, longest: int | None = None, row_by_row: bool = False) -> str | None:
    """Compare packed rows with rows of which one document is another one, and with each document alone.

    Costs a forward or three of about 150 tokens.

    Args:
        model: A causal language model with weights, on any device; left in the mode (train or eval) it was in.
        longest: Tokens of the longest row that there will be; limits that it does not exceed stay as they are.
        row_by_row: Call it with a row at a time.

    Returns:
        What `model` does wrongly with packed rows, for a sentence that begins with its name; None where it is right.
    """
    with eval_mode(model), lowered_limits(model, longest):
        try:
            return _Trial(model, row_by_row).problem()
        except (TypeError, ValueError):  # it takes no positions, or refuses packed rows by itself
            return CARRIES


class _Trial:
    """Forwards of a model over rows of two documents; of each kind of difference, the worst token's.

    Attributes:
        first, second: Three documents each, of two lengths that are odd, so that no block begins with the second.
    """

    def __init__(self, model: nn.Module, row_by_row: bool) -> None:
        self.decoder = decoder_of(model)
        self.row_by_row = row_by_row
        device: Any = find_head(model).linear.weight.device
        text = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
        kernel = max((getattr(text, name, None) or 0 for name in CONVOLUTION_WIDTHS), default=0)
        self.length = max(2 * LOWERED + 3, 2 * kernel + 3)
        words = (torch.arange(3 * (2 * self.length + 2), device=device) * 7 + 3) % text.vocab_size
        first = words.split(3 * self.length)[0]
        second = words[3 * self.length :]
        self.first = first.split(self.length)
        self.second = second.split(self.length + 2)
        dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
        quantised = quantised_by_transformers(model)
        self.tolerance = OTHER_KERNEL if quantised else rounding(dtype, SAME_SHAPE_ROUNDINGS)
        self.alone_tolerance = OTHER_KERNEL if quantised else rounding(dtype, OTHER_SHAPE_ROUNDINGS)

    def problem(self) -> str | None:
        """Return what is wrong, of `CARRIES`, `SHIFTS`, `NOT_FINITE` and `GRADIENT_NOT_FINITE`."""
        one, two, three = self.first
        four, five, six = self.second
        packed = self.hidden((one, four), (two, four), (three, four), (one, five), (one, six))
        alone = torch.cat([self.hidden((one,))[0], self.hidden((four,))[0]])
        if not alone.isfinite().all():  # no matter of packing, and found where the logits are probed
            return None
        if not packed.isfinite().all():
            return NOT_FINITE
        if not self.padding_is_differentiable(one):
            return GRADIENT_NOT_FINITE
        cut = self.length
        late = torch.minimum(distances(packed[0], packed[1]), distances(packed[0], packed[2]))[cut:]
        early = torch.minimum(distances(packed[0], packed[3]), distances(packed[0], packed[4]))[:cut]
        carried = torch.cat([early, late])
        shifted = distances(packed[0], alone)
        if carried.max() <= self.tolerance and shifted.max() <= self.alone_tolerance:
            return None
        # experts that get more or fewer tokens round otherwise: as a row does when other rows stand beside it
        beside = [
            self.hidden((one, four), (three, five), (two, six), (two, five), (three, six))[0],
            self.hidden((one, four), (two, five), (three, six), (three, five), (two, six))[0],
        ]
        moved = torch.minimum(*(distances(packed[0], row) for row in beside))
        if carried.max() > max(self.tolerance, ROUNDINGS * moved.max().item()):
            return CARRIES
        if shifted.max() <= self.alone_tolerance:
            return None
        # where rounding changes which experts a token gets, single tokens say nothing; most of them still do
        shifts = shifted.median() > max(self.alone_tolerance, ROUNDINGS * moved.median().item())
        return SHIFTS if shifts or moved.max() <= self.tolerance else None

    def padding_is_differentiable(self, document: torch.Tensor) -> bool:
        """Return whether a model that is trained has finite gradients for a document and padding in one row.

        Padding whose embedding is zero may stay zero in every layer, where some norms have no gradient (Gemma 3n).
        """
        embedding: Any = self.decoder.get_input_embeddings()  # type: ignore[operator]
        padding = getattr(embedding, "padding_idx", None)
        if padding is None or not embedding.weight.requires_grad:
            return True
        leaves: list[torch.Tensor] = []

        def cut_off(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        hook = embedding.register_forward_hook(cut_off)
        try:
            with torch.enable_grad():
                hidden = self.hidden((document, torch.full_like(document, padding)))
                gradients = torch.autograd.grad(hidden[:, : len(document)].square().mean(), leaves)
        finally:
            hook.remove()
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def hidden(self, *rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the last hidden states [rows, S, H] of rows of documents, all of one length."""
        ids = torch.stack([torch.cat(row) for row in rows])
        positions = torch.stack([torch.cat([torch.arange(len(d), device=ids.device) for d in row]) for row in rows])
        parts = zip(*(tensor.split(1 if self.row_by_row else len(ids)) for tensor in (ids, positions)), strict=True)
        return torch.cat(
            [self.decoder(input_ids=row, position_ids=at, use_cache=False).last_hidden_state for row, at in parts]
        )


@contextlib.contextmanager
def lowered_limits(model: nn.Module, longest: int | None = None) -> Iterator[None]:
    """Inside, windows, chunks and selections of `model` are `LOWERED` tokens wide, and LongRoPE's short set as long.

    Args:
        longest: Limits that are at least as large stay as they are.
    """
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    owners |= {id(config): config for config in (*configs, *texts)}
    before = [
        (owner, name, value)
        for owner in owners.values()
        for name in ATTENTION_LIMITS
        if type(value := vars(owner).get(name)) is int and value > LOWERED and (longest is None or value < longest)
    ]
    before += [
        (config, ORIGINAL_LENGTH, value)
        for config in (*configs, *texts)
        if _long_ropes(config)
        and type(value := vars(config).get(ORIGINAL_LENGTH)) is int
        and value > LOWERED
        and (longest is None or value < longest)
    ]
    ropes = {id(rope): rope for config in (*configs, *texts) for rope in _long_ropes(config)}
    lengths = [
        (rope, value)
        for rope in ropes.values()
        if (value := rope[ORIGINAL_LENGTH]) > LOWERED and (longest is None or value < longest)
    ]
    for owner, name, _ in before:
        setattr(owner, name, LOWERED)
    for rope, _ in lengths:
        rope[ORIGINAL_LENGTH] = LOWERED
    try:
        yield
    finally:
        for rope, value in lengths:
            rope[ORIGINAL_LENGTH] = value
        for owner, name, value in before:
            setattr(owner, name, value)


def _long_ropes(config: Any) -> list[dict[str, Any]]:
    """Return the settings of LongRoPE in a configuration, of all layers or of each kind of them.

    transformers copies the configuration's own `original_max_position_embeddings` into them when it reads them.
    """
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        return []
    kinds = [settings, *(each for each in settings.values() if isinstance(each, dict))]
    return [each for each in kinds if each.get("rope_type") == LONGROPE]
