"""A step of the decode loop, device time in a CUDA graph: fused kernels against a model's own layers.

Tokens are drawn at T = 1 with log-probabilities. "x floor" is the time over
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
from typing import Any, NamedTuple

import torch
from distill_kernels.decoding.attention import AttentionConfig
from distill_kernels.decoding.fused_linear import DecodeTile
from distill_kernels.decoding.plan import DecodePlan
from distill_kernels.launch import DeviceFacts

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.fused_step import FusedStep
from distill.generation.ragged_cache import AttentionCall
from distill.generation.sampling import Sampling
from distill.generation.sequence_slots import SequenceSlots
from scripts.bench.generate import REGRET, Tokens, ragged_prompts, regret, twin
from scripts.bench.harness import Row, copy_bandwidth, time_in_turn
from scripts.bench.step import random_model


class Shape(NamedTuple):
    """A model, its sequences, whether its weights are fp32 under autocast, tokens of each sequence in the cache."""

    name: str
    rows: int
    wide: bool = False
    cached: int = 300

    @property
    def slots(self) -> int:
        """Cache slots of each sequence: room for the cached tokens, in steps of 512."""
        return (self.cached // 512 + 1) * 512


SHAPES = (
    Shape("smollm2-135m", 32),
    Shape("llama-3.2-1b", 64),
    Shape("smollm2-135m", 32, wide=True),
    Shape("llama-3.2-1b", 1),
    Shape("smollm2-135m", 64),
    Shape("qwen2.5-0.5b", 64),
    Shape("llama-3.2-1b", 16),
    Shape("llama-3.2-1b", 8, cached=1900),
    Shape("llama-3.2-1b", 128),
    Shape("smollm2-135m", 128),
)
NEW = 32
NARROW = [
    (16, 64, 1, 4, 6),
    (16, 64, 1, 2, 6),
    (16, 64, 1, 4, 9),
    (16, 256, 1, 4, 3),
    (32, 64, 1, 4, 5),
    (32, 64, 1, 4, 8),
    (32, 64, 2, 4, 4),
    (16, 128, 1, 4, 4),
]
FEW_ROWS: dict[str, list[Any]] = {
    "qkv": NARROW,
    "out": [*NARROW, (16, 64, 2, 4, 5)],
    "gate_up": [*NARROW, (32, 128, 1, 4, 3)],
    "down": [
        (32, 128, 4, 4, 3),
        (32, 128, 4, 4, 5),
        (32, 64, 4, 4, 6),
        (32, 128, 2, 4, 5),
        (32, 128, 8, 4, 3),
        (16, 128, 1, 4, 6),
        (16, 128, 2, 4, 4),
        (32, 256, 4, 4, 3),
    ],
    "attention": [(64, 1), (64, 1, 2, 3), (128, 1, 4, 2), (64, 2), (64, 4), (128, 2, 4, 2), (64, 8)],
    "head": [(128, 64, 1, 4, 3), (64, 64, 1, 4, 4), (128, 64, 1, 8, 4), (256, 64, 1, 8, 3)],
}
MANY_ROWS: dict[str, list[Any]] = {
    "qkv": [
        (64, 64, 4, 4, 6),
        (64, 128, 4, 4, 4),
        (64, 64, 2, 4, 8),
        (32, 64, 2, 4, 8),
        (64, 128, 4, 4, 3),
        (64, 128, 4, 8, 4),
        (32, 64, 1, 4, 6),
        (16, 64, 1, 4, 6),
    ],
    "out": [
        (64, 128, 4, 4, 4),
        (64, 64, 4, 4, 8),
        (32, 128, 2, 4, 6),
        (32, 64, 2, 4, 8),
        (64, 128, 4, 8, 4),
        (32, 64, 1, 4, 6),
        (16, 64, 1, 4, 6),
    ],
    "gate_up": [
        (64, 128, 1, 8, 3),
        (64, 64, 1, 8, 6),
        (64, 128, 1, 4, 3),
        (64, 64, 1, 4, 6),
        (64, 128, 2, 8, 3),
        (32, 128, 1, 8, 4),
        (32, 64, 1, 4, 6),
        (16, 64, 1, 4, 6),
    ],
    "down": [
        (64, 128, 4, 4, 6),
        (32, 128, 4, 4, 4),
        (32, 128, 4, 4, 6),
        (64, 128, 4, 8, 6),
        (64, 256, 4, 8, 3),
        (32, 128, 2, 4, 6),
        (64, 64, 4, 4, 8),
        (32, 64, 4, 4, 6),
    ],
    "attention": [(128, 1, 4, 2), (64, 1, 2, 3), (64, 1), (64, 1, 2, 2), (64, 1, 2, 4), (128, 1, 8, 2), (32, 1, 2, 4)],
    "head": [(128, 64, 1, 8, 3), (128, 64, 1, 8, 5), (128, 64, 1, 4, 4), (128, 128, 1, 8, 3), (64, 64, 1, 4, 6)],
}

MORE_ROWS: dict[str, list[Any]] = {
    "qkv": [(64, 64, 2, 4, 5), (64, 64, 2, 8, 6), (128, 64, 4, 8, 4), (32, 128, 1, 4, 5), (32, 64, 1, 4, 8)],
    "out": [(32, 128, 2, 4, 5), (64, 64, 4, 4, 6), (128, 64, 8, 8, 4), (32, 64, 2, 4, 8), (16, 128, 1, 4, 5)],
    "gate_up": [(64, 64, 1, 8, 5), (64, 64, 1, 4, 5), (64, 128, 1, 8, 3), (64, 128, 1, 4, 3)],
    "down": [(64, 64, 4, 8, 5), (64, 64, 4, 4, 6), (64, 128, 4, 8, 4), (128, 64, 8, 8, 5), (32, 64, 2, 4, 8)],
    "attention": [(32, 1, 2, 6), (32, 1, 1, 4), (32, 1, 4, 4), (16, 1, 2, 6), (32, 1, 2, 3), (32, 1, 1, 6)],
    "head": [(64, 64, 1, 8, 5), (64, 128, 1, 8, 3), (64, 64, 1, 4, 4), (128, 64, 1, 8, 4), (64, 128, 1, 4, 3)],
}


def other_plans(plan: DecodePlan, rows: int) -> Iterator[tuple[str, DecodePlan]]:
    """Plans that differ from `plan` in one kind of kernel, and that kind."""
    for kind, tiles in (FEW_ROWS if rows <= 32 else MANY_ROWS if rows <= 64 else MORE_ROWS).items():
        made = AttentionConfig if kind == "attention" else DecodeTile
        for tile in tiles:
            yield kind, plan._replace(**{kind: made(*tile)})  # type: ignore[arg-type]


def slots_of(model: Any, shape: Shape) -> SequenceSlots:
    """Buffers of sequences that are done, so that a step leaves them as they were but for the column."""
    slots = SequenceSlots(model.config, shape.rows, shape.slots, 256, model.device)
    slots.clear(5)
    slots.cache.begin(torch.full_like(slots.cache.lengths, shape.cached))
    return slots


def _begin(slots: SequenceSlots, vocab: int) -> None:
    """Tokens, and something in the cache."""
    slots.token.copy_(torch.arange(slots.batch, device=slots.token.device) % vocab)
    for tensor in itertools.chain(*slots.cache.kept()):
        tensor.normal_()


def fused_step(
    model: Any, shape: Shape, plan: DecodePlan | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[FusedStep, SequenceSlots]:
    """A step by our kernels, of `plan` or as it is chosen, and its buffers."""
    slots, ends = slots_of(model, shape), torch.tensor([2], device=model.device)
    calls = {layer.self_attn: AttentionCall(layer.self_attn.scaling, None, None) for layer in model.model.layers}
    step = FusedStep(model, slots, dtype, calls, (ends, 0, None), plan)
    _begin(slots, model.config.vocab_size)
    return step, slots


def todays_step(model: Any, shape: Shape) -> tuple[Callable[[Sampling], None], SequenceSlots]:
    """A step by the model's own layers, and its buffers."""
    loop, slots = DecodeLoop(model, settings(False, shape.wide)), slots_of(model, shape)

    def step(sampling: Sampling) -> None:
        with loop._decoding_mode():
            loop._step(slots, sampling)

    step(Sampling(1.0))
    _begin(slots, model.config.vocab_size)
    return step, slots


def settings(fused: bool, wide: bool) -> EngineSettings:
    """Return the engine settings of a fused or plain decoding step; `wide` weights are fp32 under autocast."""
    return EngineSettings(0, [], autocast=torch.bfloat16 if wide else None, log_probs=True, fused=fused)


def _graphed(step: Callable[[Sampling], None], slots: SequenceSlots) -> Callable[[], None]:
    """Replays a graph of a step, and keeps what the graph reads and writes."""

    def run() -> None:
        slots.column.zero_()
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

    def replay(kept: object = (step, slots)) -> None:
        graph.replay()

    return replay


def _milliseconds(step: Callable[[Sampling], None], slots: SequenceSlots) -> float:
    return time_in_turn({"step": _graphed(step, slots)}, rounds=3, calls=10, settle=3)["step"]


def _compile(shape: Shape, part: slice) -> None:
    model = random_model(shape.name, 0, num_hidden_layers=1)
    plan = fused_step(model, shape)[0].decoder.plan
    for _, other in list(other_plans(plan, shape.rows))[part]:
        try:
            fused_step(model, shape, other)[0](Sampling(1.0))
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:  # said again where it is timed
            print(f"{other}: {str(error).splitlines()[0]}")


def compile_all(shapes: list[Shape], workers: int = 5) -> None:
    """Fill Triton's cache with the kernels of all tiles, by processes of their own."""
    context = multiprocessing.get_context("spawn")  # CUDA is in use here, and would not outlive a fork
    jobs = [(shape, slice(turn, None, workers)) for shape in shapes if not shape.wide for turn in range(workers)]
    processes = [context.Process(target=_compile, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def best_plan(model: Any, shape: Shape) -> DecodePlan:
    """The fastest of the tiles above, a kind of kernel after the other."""
    step, slots = fused_step(model, shape)
    plan, best = step.decoder.plan, _milliseconds(step, slots)
    print(f"{shape}: {plan}: {best:.4f} ms", flush=True)
    for kind, other in other_plans(plan, shape.rows):
        tile = getattr(other, kind)
        try:
            ms = _milliseconds(*fused_step(model, shape, plan._replace(**{kind: tile})))
        except RuntimeError as error:  # out of resources
            print(f"{kind} {tuple(tile)}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{kind} {tuple(tile)}: {ms:.4f} ms (best so far {best:.4f})", flush=True)
        if ms < best:
            plan, best = plan._replace(**{kind: tile}), ms
    return plan


def _check(model: Any, shape: Shape) -> tuple[dict[str, float], str]:
    """Errors of the fused loop's answers, and a note; one that is not the same twice has an error of inf."""
    prompts = ragged_prompts(shape.rows, 64, model.config.vocab_size)

    def answered(fused: bool) -> Any:
        loop = DecodeLoop(model, settings(fused, shape.wide))
        return loop.generate(prompts, max_new_tokens=NEW, batch_size=shape.rows)

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


def _measure(shape: Shape, quick: bool, bandwidth: float) -> list[Row]:
    model = random_model(shape.name, 0)
    if shape.wide:
        model = model.float()
    model.generation_config.eos_token_id = None
    kind = "fp32 weights, autocast" if shape.wide else "bf16"
    text = f"{shape.name}, {shape.rows} rows, {shape.cached} cached, {kind}"
    patched = twin(model, attention=None)
    error, note = _check(patched, shape)
    if not error["regret"] < REGRET:
        return [Row("decode_step", text, "fused", math.nan, error=error, note=f"wrong, not timed; {note}")]
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * shape.rows * shape.cached * config.num_key_value_heads * width * 2 * config.num_hidden_layers
    floor = (sum(p.numel() * p.element_size() for p in model.parameters()) + cached) / bandwidth / 1e9
    runs = {
        "fused": _graphed(*fused_step(model, shape)),
        "today's, our layers": _graphed(*todays_step(patched, shape)),
    }
    if not shape.wide:  # their rotary embeddings would hand attention fp32 queries
        runs["today's, layers of transformers"] = _graphed(*todays_step(model, shape))
    early = DeviceFacts.dependent_launch
    DeviceFacts.dependent_launch = property(lambda facts: False)  # type: ignore[assignment,method-assign]
    try:
        runs["fused, no early starts"] = _graphed(*fused_step(model, shape))
    finally:
        DeviceFacts.dependent_launch = early  # type: ignore[method-assign]
    notes = {"fused": note}
    if not quick and not shape.wide:
        plan = best_plan(model, shape)
        runs["fused, best tiles"] = _graphed(*fused_step(model, shape, plan))
        notes["fused, best tiles"] = ", ".join(f"{kind} {tuple(tile)}" for kind, tile in plan._asdict().items())
    return [
        Row(
            "decode_step",
            text,
            label,
            ms,
            floor_ratio=ms / floor,
            tokens_per_s=shape.rows / ms * 1e3,
            error=error if label.startswith("fused") else {},
            note=notes.get(label, ""),
        )
        for label, ms in time_in_turn(runs, rounds=5, calls=10, settle=3).items()
    ]


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick`: no other tiles, and the two main shapes where none are named. `only`: parts of "MODEL, ROWS rows",
    divided by `;`."""
    parts = [part.strip() for part in only.split(";")]
    shapes = [
        shape
        for shape in (SHAPES[:2] if quick and not only else SHAPES)
        if any(part in f"{shape.name}, {shape.rows} rows" for part in parts)
    ]
    if not quick:
        compile_all(shapes)
    bandwidth = copy_bandwidth(2.0)
    for shape in shapes:
        yield from _measure(shape, quick, bandwidth)
        torch.cuda.empty_cache()
