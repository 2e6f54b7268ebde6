"""The attention back end is timed once a run, written down, and used again when the run goes on."""

import contextlib
import json

import pytest
import torch
from helpers import ops_called, relative_error
from tiny import tiny_model

from distill.models.patch import attention
from distill.models.patch.attention_choice import ATTENTION_FILE, AttentionChoices, read_attention_choices
from distill.recipe import parse

RECIPE = "{teacher: {model: t}, student: {model: s}, data: {source: x, max_length: 64}, train: {steps: 1}}"


@pytest.fixture
def timed(hardware):
    calls = []

    def choose(model, batch, length, *, backward):
        calls.append((batch, length, backward))
        return ("triton" if backward else "cudnn"), {"triton": 1.23456789, "cudnn": 1.0}

    hardware.setattr(attention, "choose_attention", choose)
    return calls


def test_each_model_is_timed_once_on_the_shapes_of_the_run(timed, tmp_path):
    choices = AttentionChoices(parse(RECIPE, ["train.batch_size=3"]))
    model = tiny_model()
    assert choices.of(model, "teacher") == choices.of(model, "teacher") == "cudnn"
    assert choices.of(model, "student") == "triton"
    assert timed == [(3, 64, False), (3, 64, True)]
    choices.write(tmp_path)
    assert json.loads((tmp_path / ATTENTION_FILE).read_text())["student"] == {
        "backend": "triton",
        "milliseconds": {"triton": 1.2346, "cudnn": 1.0},
    }


def test_a_resumed_run_does_not_choose_again(timed, tmp_path):
    first = AttentionChoices(parse(RECIPE))
    first.of(tiny_model(), "student")
    first.write(tmp_path)
    timed.clear()
    again = AttentionChoices(parse(RECIPE), read_attention_choices(tmp_path))
    assert again.of(tiny_model(), "student") == "triton" and timed == []
    assert again.of(tiny_model(), "teacher") == "cudnn" and len(timed) == 1  # was not recorded


def test_a_deterministic_run_does_not_depend_on_timing(timed):
    choices = AttentionChoices(parse(RECIPE, ["train.deterministic=true"]))
    assert choices.of(tiny_model(), "teacher") == choices.of(tiny_model(), "student") == "triton" and timed == []


def test_an_implementation_that_is_named_is_not_timed(timed, tmp_path):
    choices = AttentionChoices(parse(RECIPE, ["teacher.attention=eager"]))
    assert choices.of(tiny_model(), "teacher") is None and timed == []
    choices.write(tmp_path)
    assert not (tmp_path / ATTENTION_FILE).exists() and read_attention_choices(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"teacher": 3}', '{"teacher": {"backend": "magic"}}'])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / ATTENTION_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"attention\.json: expected the attention back ends.*delete it"):
        read_attention_choices(tmp_path)


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_fp32_is_not_given_to_a_back_end_that_refuses_it(kernel_device, backend):
    """A model in fp32 outside of autocast: the choice was timed in bf16."""
    model = tiny_model().to(kernel_device).eval()
    ids = torch.arange(3, 23, device=kernel_device)[None]
    expected = model(input_ids=ids, use_cache=False).logits

    attention.use_fused_attention(model, model.model, backend)
    with ops_called("distill::flash_attention") as ours:
        assert relative_error(model(input_ids=ids, use_cache=False).logits, expected) < 1e-5
        assert len(ours) == model.config.num_hidden_layers
        with contextlib.suppress(RuntimeError):  # a CPU has no such back end
            model.bfloat16()(input_ids=ids, use_cache=False)
    assert len(ours) == model.config.num_hidden_layers
