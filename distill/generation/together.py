"""A model that several processes hold in shards answers prompts: each process takes its part of them.

Every layer is gathered from all processes when it is called, so that none may stop before the last answer of any is
finished, and one that has no prompts left answers a token of padding.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distill.generation.decode_loop import Engine, Generated, Request
from distill.generation.engines import TransformersEngine


class AnswersTogether(Engine):
    """An engine for all processes of a run; every one must call it with the same arguments and gets all answers.

    The batches are those of one process: with the same logits the answers are the same.

    Args:
        engine: of this process, made with `together`.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def answer(self, request: Request) -> Generated:
        """What is drawn follows from all seeds of a batch together."""
        prompts, limits, seeds, temperature, batch_size = request
        rank, world = dist.get_rank(), dist.get_world_size()
        result = Generated([], [])
        for start in range(0, len(prompts), batch_size * world):
            mine = slice(start + rank * batch_size, start + (rank + 1) * batch_size)
            own = Request(prompts[mine], limits[mine], seeds[mine], temperature, batch_size)
            padding = Request([[self.engine.pad]], [1], [0], temperature, batch_size)
            answers = self.engine.answer(own if own.prompts else padding)
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, (answers.tokens, answers.truncated) if own.prompts else ([], []))
            for tokens, truncated in parts:
                result.tokens.extend(tokens)
                result.truncated.extend(truncated)
        return result
