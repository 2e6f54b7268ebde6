"""`distill inspect`: rows as they are trained on, token by token: trained, masked, and where documents begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.core.labels import IGNORE_INDEX

LONGEST_CHARACTER = 4  # tokens


class Token(NamedTuple):
    """One position of a row.

    Attributes:
        text: decoded text, given the token before; a character of several tokens is shown at its last.
        state: `trained` or `masked` (from the loss).
        starts: True if a document begins here.
        value: teacher's entropy or student's divergence in nats, of the prediction of this token; None if not computed.
    """

    text: str
    id: int
    state: str
    starts: bool
    value: float | None = None


def tokens_of(row: dict[str, Any], tokenizer: Any, values: Sequence[float | None] | None = None) -> list[Token]:
    """Return the tokens of a packed row; `tokenizer` None for random tokens, shown by their ids."""
    ids = row["input_ids"]
    texts = [f"{token} " for token in ids] if tokenizer is None else _texts(ids, tokenizer)
    found = []
    for place, (token, label, position) in enumerate(zip(ids, row["labels"], row["position_ids"], strict=True)):
        state = "masked" if label == IGNORE_INDEX or position == 0 else "trained"
        found.append(Token(texts[place], token, state, position == 0, values[place] if values else None))
    return found


def _texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds. SentencePiece drops the space before a token that is decoded alone."""
    texts: list[str] = []
    # the character before begins at `before` and reads `known`, this one at `start`
    before = 0
    start = 0
    known = ""
    for place in range(len(ids)):
        text = tokenizer.decode(ids[before : place + 1])
        whole = not text.endswith("\ufffd")
        if not whole and place + 1 - start < LONGEST_CHARACTER and place + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before, known = (start, tokenizer.decode(ids[start : place + 1])) if whole else (place + 1, "")
        start = place + 1
    return texts


def plain_text(tokens: Sequence[Token]) -> str:
    """Return the row for a file or pipe: masked text in «», each document after a line of its own.

    A token's value, in nats, follows it as [0.52].
    """
    out: list[str] = []
    document = 0
    masked = False
    for token in tokens:
        if token.starts:
            document += 1
            out.append(("»" if masked else "") + ("\n" if out else "") + f"--- document {document}\n")
            masked = False
        if (token.state == "masked") != masked:
            out.append("«" if not masked else "»")
            masked = not masked
        out.append(token.text if token.value is None else f"{token.text}[{token.value:.2f}]")
    return "".join(out) + ("»" if masked else "")


def rich_text(tokens: Sequence[Token]) -> Any:
    """Return the row for a terminal: trained tokens in colour (brighter red with a larger value), others dim."""
    from rich.text import Text

    text = Text()
    highest = max((token.value for token in tokens if token.value is not None), default=0.0) or 1.0
    for number, token in enumerate(tokens):
        if token.starts:
            text.append(("\n" if number else "") + "─── document\n", style="bold cyan")
        if token.state == "masked":
            text.append(token.text, style="dim")
        elif token.value is None:
            text.append(token.text, style="green" if number % 2 else "bright_green")
        else:
            red = int(40 + 215 * min(1.0, token.value / highest))
            text.append(token.text, style=f"white on rgb({red},40,60)")
    return text


@torch.no_grad()
def token_metrics(
    rows: Sequence[dict[str, Any]], by: str, teacher: nn.Module, student: nn.Module | None
) -> list[list[float | None]]:
    """Return a value for each trained token: the teacher's `entropy`, or the student's `divergence` (forward KL); nats.

    A token's value is that of the distribution that predicts it, one position earlier.
    """
    shaded = []
    device = next(teacher.parameters()).device
    for row in rows:
        inputs = {name: torch.tensor([row[name]], device=device) for name in ("input_ids", "position_ids")}
        log_p = teacher(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
        if by == "entropy":
            values = -(log_p.exp() * log_p).sum(-1)
        else:
            assert student is not None
            log_q = student(**inputs, use_cache=False).logits[0].float()
            columns = min(log_p.shape[-1], log_q.shape[-1])
            log_p = log_p[:, :columns].log_softmax(-1)
            log_q = log_q[:, :columns].log_softmax(-1)
            values = (log_p.exp() * (log_p - log_q)).sum(-1)
        found = [None, *values[:-1].tolist()]
        shaded.append([v if label != IGNORE_INDEX else None for v, label in zip(found, row["labels"], strict=True)])
    return shaded
