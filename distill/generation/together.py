"""A model that several processes hold in shards answers prompts: each process takes its part of them.

Every layer is gathered from all processes when it is called, so that none may stop before the last answer of any is
finished, and one that has no prompts left answers a token of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distill.generation.decode_loop import Generated, one_for_each
from distill.generation.engines import TransformersEngine


class AnswersTogether:
    """An engine for all processes of a run; every one must call it with the same arguments and gets all answers.

    The batches are those of one process: with the same logits the answers are the same.

    Args:
        engine: of this process, made with `together`.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        batch_size: int = 64,
    ) -> Generated:
        """Answer every prompt; what is drawn follows from all seeds of a batch together."""
        limits, seeds = one_for_each(len(prompts), max_new_tokens, seeds)
        rank, world = dist.get_rank(), dist.get_world_size()
        found = Generated([], [])
        for start in range(0, len(prompts), batch_size * world):
            mine = slice(start + rank * batch_size, start + (rank + 1) * batch_size)
            asked = prompts[mine]
            answers = self.engine.generate(
                asked or [[self.engine.pad]], max_new_tokens=limits[mine] or 1, temperature=temperature,
                seeds=seeds[mine] or None, batch_size=batch_size,
            )  # fmt: skip
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, (answers.tokens, answers.truncated) if asked else ([], []))
            for tokens, truncated in parts:
                found.tokens.extend(tokens)
                found.truncated.extend(truncated)
        return found
