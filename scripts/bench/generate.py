"""Batched generation: our decode loop against transformers' `generate` with its default cache and with
its static cache compiled. Prompts of different lengths, greedy, every answer of full length.

The gate is what a wrong position, mask or stale weight would break: in fp32 all tokens equal those of `generate`, and
in bf16, where equal logits make paths part, each token's logit is within rounding of the best in one uncached forward
over the whole answer ("regret", in units of the logits' standard deviation).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.sampling import Sampling
from distill.models.patch.patching import patch
from scripts.bench.harness import Row, peak_above_inputs, time_in_turn
from scripts.bench.step import random_model

MODELS = ("smollm2-135m", "llama-3.2-1b")
BATCH, PROMPT, NEW = 32, 128, 128
NO_END = -1  # an end-of-sequence token that never comes, so that all do the same work
REGRET = 0.2

Tokens = list[list[int]]


def ragged_prompts(batch: int, longest: int, vocab: int) -> Tokens:
    """Random prompts of half to all of `longest` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 2, longest + 1, (batch,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def shared_copy(model: Any) -> Any:
    """A copy that shares the model's weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def twin(model: Any, **patches: Any) -> Any:
    """A copy that shares the model's weights, with our kernels put in once: what is captured depends on them."""
    copied = shared_copy(model)
    patch(copied, "teacher", **patches)
    return copied


def candidates(model: Any, new: int, *, compiled: bool) -> dict[str, Callable[[Tokens], Tokens]]:
    """Ways to generate `new` greedy tokens for each prompt."""

    def ours(model: Any, temperature: float = 0.0) -> Callable[[Tokens], Tokens]:
        loop = DecodeLoop(model, EngineSettings(0, []))
        return lambda prompts: (
            loop.generate(prompts, max_new_tokens=new, sampling=Sampling(temperature), batch_size=len(prompts)).tokens
        )

    def theirs(prompts: Tokens, **settings: Any) -> Tokens:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=NO_END,
            use_cache=True,
            **settings,
        )
        return out[:, width:].tolist()

    layers = model.device.type == "cuda"
    patched = twin(model, attention=None, layers=layers)
    found: dict[str, Callable[[Tokens], Tokens]] = {
        "ours": ours(patched),
        "ours, drawn at T = 1": ours(patched, 1.0),
        "ours, layers of transformers": ours(model),
        "generate, default cache": theirs,
    }
    if compiled:
        found["generate, static cache, compiled"] = lambda prompts: theirs(prompts, cache_implementation="static")
    return found


@torch.no_grad()
def regret(model: Any, prompts: Tokens, answers: Tokens) -> float:
    """The most that a chosen token's logit lies below the best, over the logits' standard deviation."""
    worst = 0.0
    for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
    return worst


def _same_in_fp32(model: Any, prompts: Tokens) -> float:
    """Share of 32 greedy tokens a prompt that our loop and `generate` have in common, in fp32."""
    ways = candidates(copy.deepcopy(model).float(), 32, compiled=False)
    pairs = zip(ways["ours"](prompts), ways["generate, default cache"](prompts), strict=True)
    same = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    return sum(same) / len(same)


def _measure(name: str, new: int, compiled: bool) -> Iterator[Row]:
    model = random_model(name, 0)
    model.generation_config.eos_token_id = None
    prompts = ragged_prompts(BATCH, PROMPT, model.config.vocab_size)
    shape = f"{name}, {BATCH} prompts of {PROMPT // 2} to {PROMPT}, {new} new, bf16"
    same = _same_in_fp32(model, prompts)
    runs, errors, first = {}, {}, {}
    for label, way in candidates(model, new, compiled=compiled).items():
        start = time.perf_counter()
        try:
            answers = way(prompts)
        except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:  # of a library's own way
            yield Row("generate", shape, label, math.nan, note=f"failed: {str(error).splitlines()[0]}")
            continue
        first[label] = time.perf_counter() - start
        greedy = "drawn" not in label
        errors[label] = {"regret": regret(model, prompts, answers)} if greedy else {}
        if greedy and not errors[label]["regret"] < REGRET:
            yield Row("generate", shape, label, math.nan, error=errors[label], note="wrong, not timed")
            continue
        runs[label] = lambda w=way: w(prompts)
    if same < 1:
        yield Row("generate", shape, "fp32", math.nan, error={"same tokens": same}, note="ours and generate part")
    times = time_in_turn(runs, rounds=3, calls=1, settle=1)
    for label, ms in times.items():
        note = f"{ms / new:.3f} ms a token, first call {first[label]:.1f} s"
        yield Row(
            "generate",
            shape,
            label,
            ms,
            tokens_per_s=BATCH * new / ms * 1e3,
            error=errors[label],
            floor_ratio=ms / times["generate, default cache"] if "generate, default cache" in times else None,
            peak_mib=peak_above_inputs(runs[label]),
            note=note + f", fp32 same {same:.3f}",
        )


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick`: the small model, half the tokens, nothing compiled. "x floor" is the time over default `generate`'s."""
    for name in MODELS[:1] if quick else MODELS:
        if only in name:
            yield from _measure(name, NEW // 2 if quick else NEW, compiled=not quick)
