"""Fallback of the fused decoding step to the model's own layers, with one log line, if a kernel does not compile."""

import logging

import pytest
import torch
from distill_kernels.launch import LAUNCH_ERRORS
from tiny import tiny_model

from distill.generation import fused_step
from distill.generation.decode_loop import DecodeLoop, EngineSettings, Request
from distill.generation.sampling import GREEDY

PROMPTS = [[5, 6, 7, 8], [40], [100, 3, 77]]
WORDS = "own layers, which is slower: a fused kernel fails here (no such tile)"


def loop_of(model, fused=True):
    return DecodeLoop(model, EngineSettings(2, [0], log_probs=True, fused=fused))


def model_on(device):
    return tiny_model(layers=1).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def fail(*args, **kwargs):
    raise LAUNCH_ERRORS[0]("no such tile\nand more")


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="distill.generation")
    return lambda: [record.message for record in caplog.records if WORDS in record.message]


@pytest.mark.full
def test_decoding_falls_back_with_one_warning_where_layers_fail(kernel_device, fault, warnings):
    fault.setattr(fused_step, "fused_support", fail)
    model = model_on(kernel_device)
    loop = loop_of(model)
    for _ in range(2):
        assert loop.generate(PROMPTS, max_new_tokens=4) == loop_of(model, False).generate(PROMPTS, max_new_tokens=4)
    assert len(warnings()) == 1


@pytest.mark.full
def test_failures_after_the_layers_are_handled(kernel_device, fault, warnings):
    """The head's kernel, which fails at the first step: slots are as they were, and no other slots try it."""
    loop = loop_of(model_on(kernel_device))
    request = Request(PROMPTS, [2, 2, 2], [1, 2, 3], GREEDY, 3)
    fault.setattr(fused_step, "score_tokens", fail)
    with loop._decoding_mode():
        slots = loop._slots_for(request)
        if kernel_device.type == "cpu":  # no graph is captured here, which begins so
            slots.clear(loop.pad)
            loop._warm_up(slots, GREEDY)
        assert slots.fused is None and int(slots.column) == 0 and bool(slots.done.all())
        assert loop._slots_for(request).fused is None
    assert len(warnings()) == 1
    assert loop.generate(PROMPTS, max_new_tokens=4) == loop_of(loop.model, False).generate(PROMPTS, max_new_tokens=4)


def test_failures_of_unfused_layers_are_raised(kernel_device, monkeypatch):
    loop = loop_of(model_on(kernel_device), fused=False)
    monkeypatch.setattr(type(loop.model), "forward", fail)
    with loop._decoding_mode(), pytest.raises(LAUNCH_ERRORS[0]):
        slots = loop._slots_for(Request(PROMPTS, [2, 2, 2], [1, 2, 3], GREEDY, 3))
        loop._warm_up(slots, GREEDY)
