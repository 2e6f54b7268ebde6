"""`load_best_model_at_end` loads all that a checkpoint has: weights, masters, scales, merged weights, projections."""

import json

import pytest
import torch
from safetensors.torch import load_file

from distill.cli import run_command
from distill.recipe import parse
from distill.run import run

RECIPE = """
teacher: {model: teacher}
student: {model: student, quantise: {format: q4_0}}
data: {source: synthetic, max_length: 32, max_rows: 200, cache: false, validation: {fraction: 0.1}}
train: {steps: 6, batch_size: 4, tokens_per_step: 256, learning_rate: 0.3, warmup: 0, schedule: constant, log_every: 2,
        device: cpu, save_every: 2, eval_every: 2,
        arguments: {load_best_model_at_end: true, metric_for_best_model: eval_kl, greater_is_better: false}}
generate: {prompts: []}
"""
# the checkpoint that is loaded must not be the last
WORST = "train.arguments.greater_is_better=true"


pytestmark = pytest.mark.place(teacher={"hidden": 64, "layers": 3, "seed": 1}, student={"hidden": 64, "seed": 2})


def best_of(folder):
    """Return the checkpoint that the last one's state calls the best, which must not be the last."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    best = json.loads((last / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best.rpartition("/")[2] != last.name
    return folder / best.rpartition("/")[2]


@pytest.mark.parametrize("more", [[], ["student.lora.r=4", WORST]], ids=["full", "lora"])
def test_a_quantised_student_is_that_of_the_best_checkpoint(workplace, more):
    result = run(parse(RECIPE, more, name="best"))
    best = best_of(result.folder)
    assert run_command(["export", str(best), "-o", "of-checkpoint"]) == 0
    assert run_command(["export", str(result.folder), "-o", "of-run"]) == 0
    for file in ("model.safetensors", "quantised_scales.safetensors"):
        ours, theirs = (load_file(workplace / name / file) for name in ("of-run", "of-checkpoint"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


def test_projections_of_layers_are_those_of_the_best_checkpoint(workplace, watch):
    from distill.objectives import layer_matching

    seen, restore = [], layer_matching.LayerMatching.restore

    def noted(self, checkpoint):
        restore(self, checkpoint)
        seen.append((checkpoint.name, {str(n): each.weight.clone() for n, each in enumerate(self._projections())}))

    watch.setattr(layer_matching.LayerMatching, "restore", noted)
    term = "loss.terms=[{type: forward_kl}, {type: hidden_state, projection: learned}]"
    result = run(parse(RECIPE, ["student.quantise=null", term, WORST], name="best"))
    best = best_of(result.folder)
    ((name, weights),) = seen
    saved = load_file(best / layer_matching.FILE)
    assert name == best.name and saved.keys() == weights.keys() != set()
    assert all(torch.equal(saved[key], weights[key]) for key in saved)
