"""The loss of a run's first step from its chats, in float64 and plain PyTorch: nothing of `distill` computes it.

A chat is rendered, cut into tokens and given its teachers here; each model reads it alone, and losses are taken from
full logits. Packing, padding, micro-batches, stores and servers do not occur.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dense_loss import dense_rows
from distill_kernels import LossTerm


class Member(NamedTuple):
    """A teacher: its model in float64, its mixing weight, route and context."""

    model: Any
    weight: float = 1.0
    route: str | None = None
    context: dict[str, str] | None = None

    def messages(self, row):
        """The messages of a chat, with the context before the first one of the user."""
        messages = [dict(message) for message in row["messages"]]
        if self.context is not None:
            first = next(message for message in messages if message["role"] == "user")
            first["content"] = self.context["template"].format(**row) + "\n\n" + first["content"]
        return messages


def read(messages, tokenizer):
    """Token ids of a chat in the template of tests/tiny.py, and the places of the assistant's, ends included."""
    text, answers = "", []
    for message in messages:
        text += f"<|start|>{message['role']}\n"
        start = len(text)
        text += f"{message['content']}<|end|>"
        answers += [range(start, len(text))] * (message["role"] == "assistant")
        text += "\n"
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    at = [n for n, (start, _) in enumerate(found["offset_mapping"]) if any(start in answer for answer in answers)]
    return found["input_ids"], at


def predictions(model, ids, at, columns):
    """Logits [n, columns] that predict the tokens at some places."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits[[place - 1 for place in at], :columns]


def loss_of_chats(student, rows, tokenizer, members, loss, columns):
    """The mean loss over the trained tokens of all rows."""
    found, temperature = [], loss["temperature"]
    terms = [LossTerm(**{"weight": 1.0} | term) for term in loss["terms"]]
    more = {name: loss.get(name, 0.0) for name in ("label_smoothing", "z_loss")}
    for row in rows:
        own = [member for member in members if member.route in (None, row["domain"])]
        ids, at = read(row["messages"], tokenizer)
        mixture = 0.0
        for member in own:
            other, there = read(member.messages(row), tokenizer)
            assert [other[place] for place in there] == [ids[place] for place in at]
            with torch.no_grad():
                z = predictions(member.model, other, there, columns)
            mixture = mixture + member.weight / sum(m.weight for m in own) * (z / temperature).softmax(-1)
        z, labels = predictions(student, ids, at, columns), torch.tensor([ids[place] for place in at])
        found.append(dense_rows(z, temperature * mixture.log(), terms, labels, temperature=temperature, **more))
    return torch.cat(found).mean()
