"""`distill check` of a student that answers: how many answers a step has, and what they take."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import save_models
from transformers import AutoConfig, AutoModelForCausalLM

from distill.cli import run_command
from distill.models.gpu_specs import GPU_SPECS
from distill.models.shape import model_sizes
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.planning.step_time import seconds_per_token
from distill.recipe import load
from distill.recipe.shipped import find_architecture

ROOT = Path(__file__).resolve().parents[2]


def measured():
    """The newest row of each shape and of fused and own layers."""
    rows = map(json.loads, (ROOT / "scripts/bench/results/nvidia-h200.jsonl").read_text().splitlines())
    candidates = {"fused": True, "today's, our layers": False}
    found = {}
    for row in rows:
        if row["case"] == "decode_step" and row["candidate"] in candidates:
            found[row["shape"], candidates[row["candidate"]]] = row["ms"]
    return [(*key, ms) for key, ms in found.items()]


@pytest.mark.parametrize("shape, fused, ms", measured())
def test_a_token_takes_what_was_measured(shape, fused, ms):
    name, rows, cached = re.match(r"(\S+), (\d+) rows, (\d+) cached", shape).groups()
    with torch.device("meta"):
        student = model_sizes(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(find_architecture(name))))
    itemsize = 4 if "fp32" in shape else 2
    predicted = seconds_per_token(student, GPU_SPECS["H200"], int(rows), int(cached), itemsize, fused)
    assert 1e3 * predicted == pytest.approx(ms, rel=0.2)


RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: pairs.jsonl, max_length: 64, cache: false, on_policy: {max_new_tokens: 8, batch_size: 4}}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 3, batch_size: 2, tokens_per_step: 512}
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`check_run` of the recipe above with overrides, on an H200."""
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 4})
    pairs = [{"prompt": f"Question {n}?", "completion": f"It is {n * n}."} for n in range(64)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    Path("r.yaml").write_text(RECIPE)
    return lambda *overrides: check_run(load("r.yaml", overrides), find_device("H200"))


@pytest.mark.full
def test_answers_are_counted_and_their_time_is_a_part_of_the_step(plan):
    one, none = plan("data.packing=false"), plan("data.packing=false", "data.on_policy=null")
    assert none.rollouts is None and one.rollouts is not None
    assert one.rollouts[:2] == (8, 8)  # a row of 64 tokens each, of 512
    assert one.seconds_per_step == pytest.approx(none.seconds_per_step + one.rollouts.seconds)
    half = plan("data.packing=false", "data.on_policy.fraction=0.5")
    assert half.rollouts.number == 4 and half.rollouts.seconds == pytest.approx(one.rollouts.seconds / 2)
    packed, apart = (plan("data.max_length=128", f"data.packing={packing}").rollouts for packing in ("true", "false"))
    assert packed.number > apart.number == 4
    together = plan("data.packing=false", "data.on_policy.batch_size=8").rollouts.seconds
    assert one.rollouts.seconds / 2 < together < 0.6 * one.rollouts.seconds  # waiting for kernels is the most of it
    assert plan("data.max_length=32", "data.on_policy.max_new_tokens=99").rollouts.tokens < 32


@pytest.mark.full
def test_steps_that_are_not_fused_are_slower(plan):
    def seconds(*overrides):
        return plan("data.packing=false", "train.tokens_per_step=16384", *overrides).rollouts.seconds

    fused = seconds("data.on_policy.batch_size=128")
    assert seconds("data.on_policy.batch_size=129") > 2 * fused < seconds("student.lora.r=4")  # rows at once, adapters


@pytest.mark.full
@pytest.mark.parametrize("override", ["data.on_policy.engine=transformers", "train.precision=float32"])
def test_other_engines_have_no_time_estimate(override, plan, capsys):
    found = plan(override)
    assert found.rollouts.seconds is None and found.seconds_per_step is None
    assert run_command(["check", "r.yaml", "--gpu", "H200", override]) == 0
    assert "of at most 8 tokens: time unknown" in capsys.readouterr().out


@pytest.mark.full
def test_check_estimates_the_time_of_rollouts(plan, capsys):
    assert run_command(["check", "r.yaml", "--gpu", "H200", "data.packing=false"]) == 0
    assert "rollouts    8 per step of at most 8 tokens: 0.00 s of it if all are that long" in capsys.readouterr().out
    assert run_command(["check", "r.yaml", "--gpu", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts"]["tokens"] == 8
