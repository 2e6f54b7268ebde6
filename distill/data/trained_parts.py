"""Parts of an assistant's text that are not trained on, left out of the trained ranges of a rendered chat."""

from __future__ import annotations

from collections.abc import Sequence

from distill.data.assistant_turns import RenderedChat
from distill.data.messages import untrained_ranges
from distill.data.rendering import Message, Span
from distill.data.rows import RowFault


def without_untrained(example: RenderedChat, messages: Sequence[Message]) -> RenderedChat:
    """Return a rendered chat whose trained ranges lack what messages exclude by `train_detail`.

    Raises:
        RowFault: Such a message's text stands not exactly once in its turn, so that its parts cannot be located.
    """
    if len(example.turns) == 1:
        spans_of = {example.turns[0]: example.spans}
    elif len(example.turns) == len(example.spans):
        spans_of = {turn: [span] for turn, span in zip(example.turns, example.spans, strict=True)}
    else:
        raise RowFault("train_detail cannot be located", "the chat template writes a turn in several parts")
    spans: list[Span] = []
    for turn, own in spans_of.items():
        excluded = untrained_ranges(messages[turn])
        if excluded:
            start = _place_of(example.text, own, messages[turn]["content"])
            own = [piece for span in own for piece in _without(span, [(start + a, start + b) for a, b in excluded])]
        spans += own
    return example._replace(spans=spans)


def _place_of(text: str, spans: Sequence[Span], content: str) -> int:
    """Return where a message's text begins within the ranges of its turn."""
    kept = content.strip()  # a template may strip it
    start = spans[0][0]
    end = spans[-1][1]
    found = text.find(kept, start, end)
    if found < 0 or text.find(kept, found + 1, end) >= 0:
        raise RowFault("train_detail cannot be located", f"{kept!r:.80} stands not exactly once in its turn")
    return found - content.index(kept)


def _without(span: Span, excluded: Sequence[Span]) -> list[Span]:
    """Return the pieces of a range that none of the sorted `excluded` ranges covers."""
    pieces = []
    start, end = span
    for begin, stop in excluded:
        if begin > start:
            pieces.append((start, min(begin, end)))
        start = max(start, stop)
    pieces.append((start, end))
    return [(begin, stop) for begin, stop in pieces if begin < stop]
