"""The training step at flagship shapes on packed chats, of which two tokens in five are learned.

Rows of 4,096 tokens hold whole chats of some 200 to 1,200 tokens, each of one to three questions and answers; answers
are learned. Random tokens and weights. The rivals are those of `packed_rivals.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from distill.commands.bench import Batch, bench_step
from distill.data.collator import Collator
from distill.recipe.loss import Loss
from scripts.bench.harness import Row
from scripts.bench.packed_rivals import PACKED_RIVALS
from scripts.bench.step import BATCH, LENGTH, STUDENT, TEACHER, pair, rows_of
from scripts.bench.step_variants import variants_of

LEARNED = 0.4
SHORTEST, LONGEST = 200, 1200


def chats(vocabulary: int, batch: int = BATCH, length: int = LENGTH, device: str = "cuda") -> Batch:
    """A batch of packed chats as the collator makes it."""
    draw, rows = random.Random(0), []
    for _ in range(batch):
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        while (room := length - len(row["input_ids"])) > 0:
            size = min(draw.randint(min(SHORTEST, length // 8), min(LONGEST, length // 3)), room)
            ids = [draw.randrange(vocabulary) for _ in range(size)]
            turn = -(-size // draw.randint(1, 3))
            row["input_ids"] += ids
            row["labels"] += [ids[i] if i % turn >= (1 - LEARNED) * turn else -100 for i in range(size)]
            row["position_ids"] += range(size)
        rows.append(row)
    return {name: tensor.to(device) for name, tensor in Collator(0)(rows).items()}


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out torch.compile; `only` names variants, separated by commas."""
    variants = (
        tuple(only.split(",")) if only else ("plain", "compile", "compile-rows", "liger", "distill", "distill-all-rows")
    )
    if quick and not only:
        variants = tuple(name for name in variants if "compile" not in name)
    results = bench_step(pair, chats, Loss(), variants=variants_of(variants, PACKED_RIVALS))
    batch = chats(1000, device="cpu")
    share = batch["valid_rows"].numel() / batch["input_ids"].numel()
    documents = int((batch["position_ids"] == 0).sum())
    shape = f"{TEACHER} to {STUDENT}, {BATCH} x {LENGTH} tokens of {documents} packed chats, {share:.0%} learned, bf16"
    yield from rows_of(results, "chat_step", shape)
