"""Recipes drawn at random, of students that answer: each run goes on from any of its checkpoints to the bit, learns the
same of other micro-batches, and holds all that doctor holds of it."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file
from test_crash import rows
from tiny import save_models

from distill.doctor.examine import examine
from distill.recipe import RecipeError, load
from distill.recipe.resume_policy import why_batch_size_stays
from distill.run import run

STEPS = 5
# how each part of a recipe may be; what does not go together is drawn again
CHOICES = {
    "data.packing": ["true", "false"],
    "data.max_length": ["80", "160"],
    "train.batch_size": ["2", "4"],
    "train.gradient_checkpointing": ["true", "false"],
    "train.seed": ["0", "7"],
    "loss.temperature": ["1", "1.5"],
}
ANSWERS = {
    "fraction": ["1", "1", "0.4"],
    "max_new_tokens": ["3", "9", "40"],
    "temperature": ["1", "0.7", "0"],
    "top_k": ["0", "0", "5"],
    "top_p": ["1", "1", "0.8"],
    "min_p": ["0", "0", "0.05"],
    "stop": ["[]", "['a']"],
    "samples": ["1", "1", "2"],
    "engine": ["distill", "distill", "transformers"],
    "batch_size": ["64", "3"],
    "max_staleness": ["0", "1", "2", "3"],
}
LOSSES = [
    "{type: reverse_kl}",
    "{type: jsd, beta: 0.3}",
    "{type: forward_kl}",
    "{type: top_k_reverse_kl, k: 8}",
    "{type: policy_gradient}",
    "{type: policy_gradient, importance: true, clip: 0.2, discount: 0.5}",
]
TEACHERS = [
    ["teacher.model=teacher"],
    ["teacher.model=teacher", "teacher.context={template: 'Know that {hint}. '}"],
    ["teacher=null", "teachers=[{model: teacher}, {model: other, weight: 2}]"],
    [
        "teacher=null",
        "teachers=[{model: teacher, route: even}, {model: other, route: odd}]",
        "data.fields.teacher=domain",
    ],
]
STUDENTS = [[], ["student.lora={r: 4}"]]
RECIPE = f"""
teacher: {{model: teacher}}
student: {{model: student}}
data: {{source: pairs.jsonl, cache: false, validation: {{fraction: 0.1}}, on_policy: {{}}}}
train: {{steps: {STEPS}, tokens_per_step: 640, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 1,
        arguments: {{save_total_limit: 9}}, device: cpu}}
generate: {{prompts: []}}
"""


def drawn(seed):
    """A recipe that may be run, and what it was made of."""
    draw = random.Random(seed)
    while True:
        own = ", ".join(f"{name}: {draw.choice(values)}" for name, values in ANSWERS.items())
        overrides = [
            *(f"{name}={draw.choice(values)}" for name, values in CHOICES.items()),
            f"data.on_policy={{{own}}}",
            f"loss.terms=[{draw.choice(LOSSES)}]",
            *draw.choice(TEACHERS),
            *draw.choice(STUDENTS),
        ]
        try:
            return load("recipe.yaml", overrides), overrides
        except RecipeError:
            continue


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    models = {"teacher": {"seed": 1, "layers": 3}, "other": {"seed": 3, "hidden": 48}, "student": {"seed": 2}}
    save_models(folder, **models)
    made = [
        {
            "prompt": f"Say {n}{'!' * (n % 9)}",
            "completion": f"It is {n}." * (1 + n % 2),
            "hint": f"{n} is {n * n}",
            "domain": ("even", "odd")[n % 2],
        }
        for n in range(90)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, made)))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def trained(recipe, name, **more):
    """Return the logs of a run in this process, without times, and its student's weights."""
    run(recipe, name=name, **more)
    AcceleratorState._reset_state()
    PartialState._shared_state.clear()
    folder = Path("runs", name)
    log = [{key: value for key, value in row.items() if "second" not in key} for row in rows(folder)]
    return log, load_file(next((folder / "student").glob("*model.safetensors")))


def cut_off(name, again, step):
    """Leave the run as if killed after its checkpoint of this step."""
    shutil.copytree(f"runs/{name}", f"runs/{again}")
    Path(f"runs/{again}/result.json").unlink()
    shutil.rmtree(f"runs/{again}/student")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(f"runs/{again}/checkpoint-{later}")


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 3, 4, 6])  # each kind of teacher, student and engine among them
def test_runs_go_on_from_any_checkpoint_and_in_other_micro_batches(workplace, monkeypatch, seed):
    monkeypatch.chdir(workplace)
    recipe, overrides = drawn(seed)
    log, weights = trained(recipe, f"whole-{seed}")
    assert len(log) == STEPS and sum(row["rollouts"] for row in log) > 0, overrides
    step = random.Random(seed).randrange(1, STEPS)
    cut_off(f"whole-{seed}", f"again-{seed}", step)
    log_again, weights_again = trained(recipe, f"again-{seed}", resume=True)
    assert log_again == log, (step, overrides)
    assert all(torch.equal(weights_again[name], weights[name]) for name in weights), (step, overrides)
    if why_batch_size_stays(recipe) is None:
        other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batch_size": 1})})
        log_other, weights_other = trained(other, f"other-{seed}")
        for ours, theirs in zip(log_other, log, strict=True):
            assert ours["rollouts"] == theirs["rollouts"], overrides
            assert ours["trained_tokens"] == theirs["trained_tokens"], overrides
        for name, value in weights.items():
            torch.testing.assert_close(weights_other[name], value, rtol=1e-3, atol=1e-4, msg=f"{name}: {overrides}")


@pytest.mark.full
def test_doctor_finds_no_fault(workplace, forked_ranks, monkeypatch):
    monkeypatch.chdir(workplace)
    recipe, overrides = drawn(100)
    findings = list(examine(recipe))
    assert len(findings) > 10 and all(finding.passed is not False for finding in findings), (findings, overrides)
