"""A whole model without CUDA-library kernels: prompts read and answers decoded on Triton kernels only, against cuBLAS
and cuDNN, eager and in CUDA graphs. Random weights, two prompts of 512 tokens, 64 and 256 new ones, greedy.

"Triton only" has linear layers on split-K (on tiles where a prompt is read), attention, norms, gated MLPs, rotary
embeddings and sampling on our kernels; what is left to PyTorch are element-wise operations and the embedding's
lookup. Milliseconds are of a whole call over its new tokens; the note gives the share of GPU time per kernel of ours
or the library's, and the ratio "x floor" is to the fastest way on CUDA libraries (published elsewhere for such a
set-up on an H100: 10.61 ms against 8.59 ms a token, a speed ratio of 0.81; wanted here: 0.92).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from distill_kernels.primitives import split_k

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.models.patch.triton_only import use_triton_only
from scripts.bench.generate import NO_END, REGRET, Tokens, regret, shared_copy, twin
from scripts.bench.harness import Row, peak_above_inputs, time_in_turn
from scripts.bench.step import random_model

MODELS = ("llama-3.1-8b", "granite-3.3-8b")
BATCH, PROMPT, NEW = 2, 512, (64, 256)
EAGER = "generate, eager"
UNTUNED = "Triton only, one tile for all products"
ONE_TILE = split_k.SplitKConfig(64, 128, 1, 4, 4)


def on_triton_only(model: Any) -> Any:
    """A copy that shares the weights, as `distill generate --kernels triton` runs it."""
    copied = shared_copy(model)
    use_triton_only(copied)
    return copied


def ways(model: Any, new: int, *, compiled: bool) -> dict[str, Callable[[Tokens], Tokens]]:
    """Ways to answer prompts of one length; the first is the one in question."""

    def loop(model: Any) -> Callable[[Tokens], Tokens]:
        made = DecodeLoop(model, EngineSettings(0, []))
        return lambda prompts: made.generate(prompts, max_new_tokens=new, batch_size=len(prompts)).tokens

    def generate(prompts: Tokens, **settings: Any) -> Tokens:
        ids = torch.tensor(prompts, device=model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=NO_END,
            use_cache=True,
            **settings,
        )
        return out[:, ids.shape[1] :].tolist()

    untuned = loop(on_triton_only(model))

    def with_one_tile(prompts: Tokens) -> Tokens:
        with mock.patch.object(split_k, "choose_config", lambda *sizes: ONE_TILE):
            return untuned(prompts)

    found: dict[str, Callable[[Tokens], Tokens]] = {
        "Triton only": loop(on_triton_only(model)),
        UNTUNED: with_one_tile,
        "ours on cuBLAS, CUDA graph": loop(twin(model, attention=None)),
        "transformers' layers on cuBLAS, CUDA graph": loop(model),
        EAGER: generate,
    }
    if compiled:
        found["generate, static cache, compiled"] = lambda prompts: generate(prompts, cache_implementation="static")
    return found


def shares(run: Callable[[], object], most: int = 6) -> str:
    """The kernels that take the most GPU time, with their share of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profile.key_averages():
        times[event.key.split("<")[0].split("(")[0].removeprefix("void ")[:40]] += event.self_device_time_total
    total = sum(times.values()) or 1.0
    return ", ".join(f"{name} {100 * time / total:.0f} %" for name, time in times.most_common(most))


def _measure(name: str, new: int, compiled: bool) -> Iterator[Row]:
    model = random_model(name, 0)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (BATCH, PROMPT), generator=generator).tolist()
    shape = f"{name}, {BATCH} x {PROMPT} in, {new} out, bf16"
    runs, errors = {}, {}
    found = ways(model, new, compiled=compiled)
    for label, way in found.items():
        try:
            errors[label] = {"regret": regret(model, prompts, way(prompts))}
        except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:  # of a library's own way
            yield Row("cuda_free", shape, label, math.nan, note=f"failed: {str(error).splitlines()[0]}")
    # the greatest of all choices grows with their number: transformers' own forward says what bf16 leaves open
    most = max(REGRET, 1.5 * errors.get(EAGER, {}).get("regret", 0.0))
    for label, error in errors.items():
        if error["regret"] < most:
            runs[label] = lambda w=found[label]: w(prompts)
        else:
            yield Row("cuda_free", shape, label, math.nan, error=error, note="wrong, not timed")
    times = time_in_turn(runs, rounds=3, calls=1, settle=0)  # a call is seconds: clocks are its own
    fastest = min((ms for label, ms in times.items() if not label.startswith("Triton only")), default=math.nan)
    for label, ms in times.items():
        note = f"{ms / new:.3f} ms a token; {shares(runs[label])}"
        yield Row(
            "cuda_free",
            shape,
            label,
            ms,
            floor_ratio=ms / fastest,
            tokens_per_s=BATCH * new / ms * 1e3,
            error=errors[label],
            peak_mib=peak_above_inputs(runs[label]),
            note=note,
        )


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick`: one model, 64 tokens, nothing compiled."""
    for name in MODELS[:1] if quick else MODELS:
        for new in NEW[:1] if quick else NEW:
            if only in name:
                yield from _measure(name, new, compiled=not quick)
                torch.cuda.empty_cache()
