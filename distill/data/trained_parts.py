"""Parts of an assistant's text that are not trained on, left out of the trained ranges of a rendered chat."""

from __future__ import annotations

from collections.abc import Sequence

from distill.data.assistant_turns import RenderedChat
from distill.data.messages import untrained_ranges
from distill.data.rendering import Message, TextSpan
from distill.data.rows import RowFault


def without_untrained(example: RenderedChat, messages: Sequence[Message]) -> RenderedChat:
    """Return a rendered chat whose trained ranges lack what messages exclude by `train_detail`.

    Raises:
        RowFault: Such a message's text stands not exactly once in its turn, so that its parts cannot be located.
    """
    spans: list[TextSpan] = []
    turns: list[int] = []
    for turn in dict.fromkeys(example.turns):
        kept = [span for span, its_turn in zip(example.spans, example.turns, strict=True) if its_turn == turn]
        excluded = untrained_ranges(messages[turn])
        if excluded:
            start = _place_of(example.text, kept, messages[turn]["content"])
            moved = [(start + begin, start + end) for begin, end in excluded]
            kept = [piece for span in kept for piece in _without(span, moved)]
        spans += kept
        turns += [turn] * len(kept)
    return example._replace(spans=spans, turns=turns)


def _place_of(text: str, spans: Sequence[TextSpan], content: str) -> int:
    """Return where a message's text begins within the ranges of its turn."""
    kept = content.strip()  # a template may strip it
    start = spans[0][0]
    end = spans[-1][1]
    found = text.find(kept, start, end)
    if found < 0 or text.find(kept, found + 1, end) >= 0:
        raise RowFault("train_detail cannot be located", f"{kept!r:.80} stands not exactly once in its turn")
    return found - content.index(kept)


def _without(span: TextSpan, excluded: Sequence[TextSpan]) -> list[TextSpan]:
    """Return the pieces of a range that none of the sorted `excluded` ranges covers."""
    pieces = []
    start, end = span
    for begin, stop in excluded:
        if begin > start:
            pieces.append((start, min(begin, end)))
        start = max(start, stop)
    pieces.append((start, end))
    return [(begin, stop) for begin, stop in pieces if begin < stop]
