"""A step of the decode loop, device time in a CUDA graph: fused kernels against a model's own layers.

Every sequence has 300 tokens in the cache, tokens are drawn at T = 1 with log-probabilities. "x floor" is the time over
what the weights and cached keys of a step take at the bandwidth of a copy. Without `--quick` tiles are tried first, a
kind of kernel after the other in the whole step, and kept where the step is faster: rows "fused, best tiles" name
them. Kernels of all tiles are compiled by processes side by side.

The gate: answers come out with the same bits twice, and tokens are as good as transformers' own (`regret`). The note
gives the mean gap of the loop's log-probabilities to those of one uncached forward, beside that of today's loop.

Where "fused" is faster than both of today's on a family, its name belongs into `FASTER_ON` of
kernels/distill_kernels/decoding/plan.py, and the best tiles into `choose_tile` there.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.decoding.attention import Pace
from distill_kernels.decoding.plan import Plan
from distill_kernels.decoding.product import Tile
from distill_kernels.launch import DeviceFacts

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.fused_step import FusedStep
from distill.generation.sampling import Sampling
from distill.generation.seats import Seats
from distill.models.ragged_cache import AttentionCall
from scripts.bench.generate import REGRET, Tokens, ragged_prompts, regret, twin
from scripts.bench.harness import Row, copy_bandwidth, time_in_turn
from scripts.bench.step import random_model

SHAPES = (  # model, rows, whether its weights are fp32 under autocast
    ("smollm2-135m", 32, False),
    ("llama-3.2-1b", 64, False),
    ("smollm2-135m", 32, True),
    ("llama-3.2-1b", 1, False),
)
SLOTS, LENGTH, NEW = 512, 300, 32
NARROW = [(16, 128, 1, 4, 4), (16, 64, 1, 4, 6), (16, 64, 1, 2, 6), (16, 256, 1, 4, 3), (32, 64, 1, 4, 5)]
WIDE = [(64, 128, 4, 4, 4), (64, 64, 4, 4, 6), (64, 128, 2, 4, 4), (32, 128, 2, 4, 4), (32, 128, 1, 4, 4)]
FEW_ROWS = {
    "qkv": [*NARROW, (8, 128, 1, 4, 4), (32, 64, 2, 4, 4)],
    "out": [*NARROW, (8, 128, 1, 4, 4), (16, 64, 2, 4, 5), (16, 64, 3, 4, 3)],
    "gate_up": [*NARROW, (8, 128, 1, 4, 4), (32, 128, 1, 4, 3)],
    "down": [(16, 128, 2, 4, 4), (16, 128, 1, 4, 6), (16, 256, 1, 4, 3), (32, 128, 4, 4, 3), (16, 256, 4, 4, 4)],
    "attention": [(64, 1), (64, 2), (64, 4), (128, 1), (64, 2, 2, 3), (32, 8, 2, 4)],
    "head": [(128, 64, 1, 4, 3), (64, 64, 1, 4, 4), (128, 64, 1, 8, 4), (64, 128, 1, 4, 3), (256, 64, 1, 8, 3)],
}
MANY_ROWS = {
    "qkv": [*WIDE, (128, 64, 4, 8, 4)],
    "out": [*WIDE, (64, 128, 8, 4, 2)],
    "gate_up": [(64, 64, 2, 4, 4), (64, 64, 1, 4, 4), (64, 64, 1, 8, 6), (32, 128, 1, 4, 3), (64, 128, 1, 8, 3)],
    "down": [(64, 128, 8, 4, 4), (64, 128, 4, 4, 6), (64, 64, 8, 4, 4), (64, 128, 16, 4, 3), (32, 128, 4, 4, 4)],
    "attention": [(64, 1), (128, 1), (64, 1, 2, 3), (64, 2), (128, 1, 4, 2)],
    "head": [(128, 64, 1, 8, 3), (64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (128, 64, 1, 8, 5), (256, 64, 1, 8, 3)],
}


def other_plans(plan: Plan, rows: int) -> Iterator[tuple[str, Plan]]:
    """Plans that differ from `plan` in one kind of kernel, and that kind."""
    for kind, tiles in (FEW_ROWS if rows <= 32 else MANY_ROWS).items():
        for tile in tiles:
            yield kind, plan._replace(**{kind: (Pace if kind == "attention" else Tile)(*tile)})


def seats_of(model: Any, rows: int) -> Seats:
    """Buffers of sequences that are done, so that a step leaves them as they were but for the column."""
    seats = Seats(model.config, rows, SLOTS, 256, model.device)
    seats.seat([[5]] * rows, [0] * rows, list(range(rows)), 0)
    seats.cache.begin(torch.full_like(seats.cache.lengths, LENGTH))
    return seats


def _begin(seats: Seats, vocab: int) -> None:
    """Tokens, and something in the cache."""
    seats.token.copy_(torch.arange(seats.batch, device=seats.token.device) % vocab)
    for tensor in itertools.chain(*seats.cache.kept()):
        tensor.normal_()


def fused_step(model: Any, rows: int, dtype: torch.dtype, plan: Plan | None = None) -> tuple[FusedStep, Seats]:
    """A step by our kernels, of `plan` or as it is chosen, and its buffers."""
    seats, ends = seats_of(model, rows), torch.tensor([2], device=model.device)
    calls = {layer.self_attn: AttentionCall(layer.self_attn.scaling, None, None) for layer in model.model.layers}
    step = FusedStep(model, seats, dtype, calls, (ends, 0, None), plan)
    _begin(seats, model.config.vocab_size)
    return step, seats


def todays_step(model: Any, rows: int, autocast: torch.dtype | None) -> tuple[Callable[[Sampling], None], Seats]:
    """A step by the model's own layers, and its buffers."""
    loop, seats = DecodeLoop(model, settings(False, autocast)), seats_of(model, rows)

    def step(sampling: Sampling) -> None:
        with loop._ready():
            loop._step(seats, sampling)

    step(Sampling(1.0))
    _begin(seats, model.config.vocab_size)
    return step, seats


def settings(fused: bool, autocast: torch.dtype | None) -> EngineSettings:
    return EngineSettings(0, [], autocast=autocast, log_probs=True, fused=fused)


def _graphed(step: Callable[[Sampling], None], seats: Seats) -> Callable[[], None]:
    """Replays a graph of a step, and keeps what the graph reads and writes."""

    def run() -> None:
        seats.column.zero_()
        step(Sampling(1.0))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay(kept: object = (step, seats)) -> None:
        graph.replay()

    return replay


def _milliseconds(step: Callable[[Sampling], None], seats: Seats) -> float:
    return time_in_turn({"step": _graphed(step, seats)}, rounds=3, calls=10, settle=3)["step"]


def _compile(name: str, rows: int, part: slice) -> None:
    model = random_model(name, 0, num_hidden_layers=1)
    plan = fused_step(model, rows, torch.bfloat16)[0].decoder.plan
    for _, other in list(other_plans(plan, rows))[part]:
        try:
            fused_step(model, rows, torch.bfloat16, other)[0](Sampling(1.0))
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:  # said again where it is timed
            print(f"{other}: {str(error).splitlines()[0]}")


def compile_all(shapes: list[tuple[str, int, bool]], workers: int = 5) -> None:
    """Fill Triton's cache with the kernels of all tiles, by processes that begin before this one uses the GPU."""
    context = multiprocessing.get_context("fork")
    jobs = [
        (name, rows, slice(turn, None, workers)) for name, rows, wide in shapes if not wide for turn in range(workers)
    ]
    processes = [context.Process(target=_compile, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def best_plan(model: Any, rows: int) -> tuple[Plan, float]:
    """The fastest of the tiles above, a kind of kernel after the other, and the step's time with them."""
    step, seats = fused_step(model, rows, torch.bfloat16)
    plan, best = step.decoder.plan, _milliseconds(step, seats)
    for kind, other in other_plans(plan, rows):
        tile = getattr(other, kind)
        try:
            ms = _milliseconds(*fused_step(model, rows, torch.bfloat16, plan._replace(**{kind: tile})))
        except RuntimeError as error:  # out of resources
            print(f"{kind} {tuple(tile)}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{kind} {tuple(tile)}: {ms:.4f} ms (best so far {best:.4f})", flush=True)
        if ms < best:
            plan, best = plan._replace(**{kind: tile}), ms
    return plan, best


def _check(model: Any, rows: int, autocast: torch.dtype | None) -> tuple[dict[str, float], str]:
    """Errors of the fused loop's answers, and a note; one that is not the same twice has an error of inf."""
    prompts = ragged_prompts(rows, 64, model.config.vocab_size)

    def answered(fused: bool) -> Any:
        return DecodeLoop(model, settings(fused, autocast)).generate(prompts, max_new_tokens=NEW, batch_size=rows)

    ours, own = answered(True), answered(False)
    same = [a == b for x, y in zip(ours.tokens, own.tokens, strict=True) for a, b in zip(x, y, strict=True)]
    gaps = [log_prob_gap(model, prompts, found.tokens, found.log_probs) for found in (ours, own)]
    worst = regret(model, prompts, ours.tokens) if ours == answered(True) else math.inf
    gap = f"log-probability gap {gaps[0]:.4f}, today's {gaps[1]:.4f}"
    return {"regret": worst}, f"{100 * sum(same) / len(same):.1f} % of tokens as today's; {gap}"


@torch.no_grad()
def log_prob_gap(model: Any, prompts: Tokens, answers: Tokens, log_probs: list[list[float]]) -> float:
    """Mean distance of log-probabilities of answers from those of one uncached forward."""
    gaps = []
    for prompt, answer, given in list(zip(prompts, answers, log_probs, strict=True))[:8]:
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        right = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        gaps.append((right - torch.tensor(given)).abs().mean().item())
    return sum(gaps) / len(gaps)


def _measure(name: str, rows: int, wide: bool, quick: bool, bandwidth: float) -> list[Row]:
    model = random_model(name, 0)
    autocast = torch.bfloat16 if wide else None
    if wide:
        model = model.float()
    model.generation_config.eos_token_id = None
    shape = f"{name}, {rows} rows, {LENGTH} cached, {'fp32 weights, autocast' if wide else 'bf16'}"
    patched = twin(model, attention=None)
    error, note = _check(patched, rows, autocast)
    if not error["regret"] < REGRET:
        return [Row("decode_step", shape, "fused", math.nan, error=error, note=f"wrong, not timed; {note}")]
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * rows * LENGTH * config.num_key_value_heads * width * 2 * config.num_hidden_layers
    floor = (sum(p.numel() * p.element_size() for p in model.parameters()) + cached) / bandwidth / 1e9
    runs = {
        "fused": _graphed(*fused_step(model, rows, torch.bfloat16)),
        "today's, our layers": _graphed(*todays_step(patched, rows, autocast)),
    }
    if not wide:  # their rotary embeddings would hand attention fp32 queries
        runs["today's, layers of transformers"] = _graphed(*todays_step(model, rows, None))
    early = DeviceFacts.starts_early
    DeviceFacts.starts_early = property(lambda facts: False)  # type: ignore[assignment,method-assign]
    try:
        runs["fused, no early starts"] = _graphed(*fused_step(model, rows, torch.bfloat16))
    finally:
        DeviceFacts.starts_early = early  # type: ignore[method-assign]
    notes = {"fused": note}
    if not quick and not wide:
        plan, _ = best_plan(model, rows)
        runs["fused, best tiles"] = _graphed(*fused_step(model, rows, torch.bfloat16, plan))
        notes["fused, best tiles"] = ", ".join(f"{kind} {tuple(tile)}" for kind, tile in plan._asdict().items())
    return [
        Row("decode_step", shape, label, ms, floor_ratio=ms / floor, tokens_per_s=rows / ms * 1e3,
            error=error if label.startswith("fused") else {}, note=notes.get(label, ""))
        for label, ms in time_in_turn(runs, rounds=5, calls=10, settle=3).items()
    ]  # fmt: skip


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick`: the two main shapes, no other tiles."""
    shapes = [shape for shape in (SHAPES[:2] if quick else SHAPES) if only in shape[0]]
    if not quick:
        compile_all(shapes)
    bandwidth = copy_bandwidth(2.0)
    for shape in shapes:
        yield from _measure(*shape, quick, bandwidth)
        torch.cuda.empty_cache()
