"""A batch of packed chats of random tokens."""

import random

import torch

from distill.data.collator import Collator


def packed_chats(vocabulary: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return packed chats as the collator batches them: of one to three turns, two tokens in five trained."""
    draw = random.Random(0)
    packed = []
    for _ in range(rows):
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        while (room := length - len(row["input_ids"])) > 0:
            size = min(draw.randint(min(200, length // 8), min(1200, length // 3)), room)
            ids = [draw.randrange(vocabulary) for _ in range(size)]
            turn = -(-size // draw.randint(1, 3))
            row["input_ids"] += ids
            row["labels"] += [ids[i] if i % turn >= 0.6 * turn else -100 for i in range(size)]
            row["position_ids"] += range(size)
        packed.append(row)
    return dict(Collator(0)(packed))
