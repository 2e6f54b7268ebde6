"""Rollouts at every turn of logged chats: our decode loop with each shared prefix computed once, beside the same loop
that computes every prefix by itself. On a GPU if there is one, else on CPUs, in float32.

Random weights in the shape of SmolLM2-135M, random tokens, every answer of full length. Candidates take turns in one
process; time is that of the wall clock, and `note` has the process's own CPU time, which other programs on the machine
leave alone. The gate: both give the same tokens.

    tool chats    4 turns of 100 tokens after 400 tokens of system prompt and tools that all chats open with
    plain chats   4 turns of 150 tokens that nothing precedes
    one turn      as many prompts that share nothing
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distill.generation import shared_prefixes
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.sampling import Sampling
from scripts.bench.harness import Row
from scripts.bench.step import ARCHITECTURES

NEEDS_CUDA = False
ROUNDS = 3
VOCABULARY = 49_152


class Chats(NamedTuple):
    """Prompts of a case: `count` chats of `turns` turns of `step` tokens, after `opening` tokens that all share."""

    count: int
    turns: int
    step: int
    opening: int
    new: int

    def prompts(self) -> list[list[int]]:
        """Token ids, a prompt a turn, each the beginning of the chat's next one."""
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> list[int]:
            return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

        opening, prompts = draw(self.opening), []
        for _ in range(self.count):
            ids = opening
            for _ in range(self.turns):
                ids = ids + draw(self.step)
                prompts.append(ids)
        return prompts


CASES = {
    "tool chats": Chats(4, 4, 100, 400, 32),
    "plain chats": Chats(4, 4, 150, 0, 32),
    "one turn": Chats(16, 1, 200, 0, 32),
}


@contextlib.contextmanager
def every_prefix_by_itself() -> Iterator[None]:
    """Inside, nothing is shared but equal prompts."""

    def alone(
        prompts: list[tuple[int, ...]], held: tuple[()] = ()
    ) -> dict[tuple[int, ...], shared_prefixes.SharedPrefix]:
        return {prompt: shared_prefixes.SharedPrefix(None, 0) for prompt in [*held, *prompts]}

    with mock.patch.object(shared_prefixes, "shared_prefixes", alone):
        yield


def run(quick: bool, only: str) -> Iterator[Row]:
    """Rows of every case whose name contains `only`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.from_pretrained(f"{ARCHITECTURES}/smollm2-135m")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)
    loop = DecodeLoop(model, EngineSettings(0, []))
    ways = {"shared prefixes": contextlib.nullcontext, "every prefix by itself": every_prefix_by_itself}
    for name, chats in CASES.items():
        if only not in name:
            continue
        prompts, answers = chats.prompts(), {}
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        loop.generate(prompts[:1], max_new_tokens=1)
        for _ in range(1 if quick else ROUNDS):
            for way, context in ways.items():
                begun = time.perf_counter(), time.process_time()
                with context():
                    made = loop.generate(
                        prompts, max_new_tokens=chats.new, sampling=Sampling(1.0), batch_size=len(prompts)
                    )
                seconds[way].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
                answers[way] = made.tokens
        shape = (
            f"{name}: {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))}, {chats.new} new"
        )
        same = sum(map(list.__eq__, *answers.values())) / len(prompts)
        for way, times in seconds.items():
            wall, own = (statistics.median(each) for each in zip(*times, strict=True))
            new = len(prompts) * chats.new
            yield Row(
                "turns",
                shape,
                way,
                1e3 * wall,
                error={"other answers": 1 - same},
                tokens_per_s=new / wall,
                note=f"{new / own:.1f} tokens a second of CPU time",
            )
