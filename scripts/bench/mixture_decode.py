"""A decoding step of a mixture of experts: ours in a graph beside transformers' `generate`.

    python -m scripts.bench mixture_decode

Qwen3-30B-A3B's shapes cut to 12 layers, with its head, random weights: milliseconds of a step of 1 and of 8 sequences,
which is what 64 more tokens cost, so that no prefill is in it. transformers runs with its cache as it comes and with a
static one, for which it compiles the model, in a process of its own. Before it, one layer's experts for few tokens: by
the kernels for these, whose gate is tests/ops/test_decode_experts.py, and by grouped GEMMs.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.decoding.experts import decode_experts
from distill_kernels.layers.experts import experts

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.models.fp8_teacher import quantise_teacher
from distill.models.patch.patching import patch
from scripts.bench.harness import Row, graphed, time_in_turn
from scripts.bench.small import candidate, tell
from scripts.bench.step import random_model

LAYERS, PROMPT = 12, 128
DECODED = (16, 80)  # tokens of the shorter and the longer response
SHAPE = f"qwen3-30b-a3b shapes, {LAYERS} layers and the head, {PROMPT} tokens of context, bf16"
STATIC = "transformers, static cache, compiled"


def generating(model: Any, batch: int, **more: Any) -> Callable[[int], object]:
    """Return transformers' `generate` as a function of the number of new tokens."""
    ids = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(2)).cuda()

    def run(new: int) -> object:
        settings = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0} | more
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return run


def decoding(model: Any, batch: int) -> Callable[[int], object]:
    """Return our decode loop as a function of the number of new tokens."""
    ids = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(2)).tolist()
    loop = DecodeLoop(model, EngineSettings(0, [], max_length=PROMPT + DECODED[1]))
    return lambda new: loop.generate(ids, max_new_tokens=new)


def step_ms(run: Callable[[int], object]) -> float:
    """Return wall-clock milliseconds of one more token."""
    few, many = DECODED
    seconds = {}
    for new in (few, many):
        run(new)
        samples = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(new)
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
        seconds[new] = min(samples)
    return (seconds[many] - seconds[few]) / (many - few) * 1e3


def layers_in_turn(function: Callable[..., object], layers: list[Any], *tokens: torch.Tensor) -> Callable[[], object]:
    """Return one call of each layer's experts in a graph, so that no layer's weights stay in L2."""
    turn = itertools.cycle(layers)

    def run() -> object:
        held = next(turn)
        return function(*tokens, held.gate_up_proj, held.down_proj)

    return graphed(run, calls=len(layers))


@torch.no_grad()
def few_tokens(model: Any) -> Iterator[Row]:
    """Yield a layer's experts for few tokens, by the kernels for these and by grouped GEMMs, and where they cross."""
    layers = [layer.mlp.experts for layer in model.model.layers]
    k = model.config.num_experts_per_tok
    width = model.config.hidden_size
    for tokens in (1, 4, 8, 16, 32):
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn(tokens, width, generator=generator, device="cuda").bfloat16()
        logits = torch.randn(tokens, layers[0].num_experts, generator=generator, device="cuda")
        weights, index = logits.softmax(-1).topk(k, -1)
        moved = index.unique().numel() * 2 * (layers[0].gate_up_proj[0].numel() + layers[0].down_proj[0].numel())
        ways = {"few-token kernels": decode_experts, "grouped GEMMs": experts}
        runs = {label: layers_in_turn(function, layers, x, index, weights) for label, function in ways.items()}
        for label, replayed in time_in_turn(runs, rounds=5).items():
            ms = replayed / len(layers)
            shape = f"one layer's experts of qwen3-30b-a3b, {tokens} tokens, bf16"
            yield Row("mixture_decode", shape, label, ms, tb_per_s=moved / ms / 1e9)


def run(quick: bool, only: str) -> Iterator[Row]:
    """Measure all; `quick` leaves out the compiled rival, `only` is of no meaning here."""
    batches = (1, 8)
    plain = dict[int, float]()

    def row(label: str, batch: int, ms: float, note: str = "") -> Row:
        note = note or f"{plain[batch] / ms:.2f} x transformers"
        return Row("mixture_decode", f"{SHAPE}, {batch} sequences", label, ms, tokens_per_s=batch / ms * 1e3, note=note)

    model = random_model("qwen3-30b-a3b", 0, num_hidden_layers=LAYERS).requires_grad_(False)
    yield from few_tokens(model)
    for batch in batches:
        plain[batch] = step_ms(generating(model, batch))
        yield row("transformers", batch, plain[batch])
    patch(model, "teacher", log_it=False)
    for batch in batches:
        yield row("ours, in a graph", batch, step_ms(decoding(model, batch)))
    quantise_teacher(model)
    torch.cuda.empty_cache()
    for batch in batches:
        yield row("ours, fp8, in a graph", batch, step_ms(decoding(model, batch)))
    del model
    torch.cuda.empty_cache()
    for batch in () if quick else batches:
        limit = float(os.environ.get("BENCH_LIMIT", 120))
        result = candidate("scripts.bench.mixture_decode", str(batch), limit=limit)
        yield row(STATIC, batch, result.get("ms", math.nan), result.get("note", ""))


def static(batch: str) -> dict[str, Any]:
    """Return milliseconds a step of `generate` with a static cache, which compiles the model's forward."""
    model = random_model("qwen3-30b-a3b", 0, num_hidden_layers=LAYERS).requires_grad_(False)
    return {"ms": step_ms(generating(model, int(batch), cache_implementation="static"))}


if __name__ == "__main__":
    tell(static(sys.argv[1]))
