"""Decoding of mixtures of experts: greedy responses beside transformers' `generate`, on the kernels of a few tokens."""

import pytest
import torch
from distill_kernels.launch import interpreted

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.support_check import unsupported_reason
from distill.models.fp8_teacher import quantise_teacher
from distill.models.patch import experts as patched_experts
from distill.models.patch.patching import patch
from scripts.families import checks

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40], [100, 3, 77]]
NEW = 4


def mixture(name, device, scale=1):
    return checks.random_model(name, scale=scale).requires_grad_(False).to(device)


def own_responses(model):
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        more = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 2}
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # which families are patched: tests/models/test_families.py
def test_greedy_responses_are_those_of_transformers(name, watch):
    model = mixture(name, "cpu")
    expected = own_responses(model)
    steps = []
    decode = patched_experts.decode_experts
    watch.setattr(
        patched_experts, "decode_experts", lambda x, *args, **more: steps.append(len(x)) or decode(x, *args, **more)
    )
    with interpreted():
        assert patch(model, "student", attention=None, log_it=False).swapped["experts"]
        assert unsupported_reason(model) is None
        loop = DecodeLoop(model, EngineSettings(2, []))
        assert loop.generate(PROMPTS, max_new_tokens=NEW).tokens == expected
    assert steps.count(len(PROMPTS)) >= (NEW - 1) * 4  # a step has a token of each prompt, and the model four mixtures


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_mixtures_step_is_captured(dtype):
    """Routing, experts in 16 bits or in fp8, and everything between them wait for nothing."""
    model = mixture("qwen3_moe", "cuda", scale=2).bfloat16()
    patch(model, "teacher", log_it=False)
    if dtype == "fp8":
        quantise_teacher(model)
    loop = DecodeLoop(model, EngineSettings(2, []))
    first = loop.generate(PROMPTS, max_new_tokens=32).tokens
    assert loop.replays and loop.buffers[-1].graph is not None
    assert loop.generate(PROMPTS, max_new_tokens=32).tokens == first
