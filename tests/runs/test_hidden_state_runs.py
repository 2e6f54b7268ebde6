"""Runs whose loss compares layers: metrics, the saved student, resuming with the projection to the bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from two_ranks import run_as_two

from distill.cli import run_command
from distill.training.progress import read_metrics

RUN = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
loss: {terms: [{type: forward_kl}, {type: hidden_state, projection: learned, weight: 0.5}, {type: attention_relation}]}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, schedule: constant, log_every: 1, save_every: 2,
        device: cpu}
generate: {prompts: []}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))


pytestmark = pytest.mark.place(
    text=TEXT,
    files={"r.yaml": RUN},
    teacher={"layers": 4, "hidden": 64, "seed": 1},
    student={"layers": 2},
    run=["run r.yaml --name whole"],
)


def test_metrics_and_the_saved_student(finished):
    run = finished / "runs/whole"
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    for row in metrics:
        expected = row["kl"] + 0.5 * row["hidden_state"] + row["attention_relation"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics[-1]["hidden_state"] < metrics[0]["hidden_state"]
    assert not any("projection" in name for name in load_file(run / "student/model.safetensors"))
    assert not (run / "student/layer_projections.safetensors").exists()


def test_a_resumed_run_has_the_projection_to_the_bit(workplace, finished):
    run = workplace / "runs/whole"
    shutil.rmtree(run / "checkpoint-4")
    (run / "result.json").unlink()
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
    for file in ("checkpoint-4/layer_projections.safetensors", "student/model.safetensors"):
        ours, theirs = (load_file(folder / "runs/whole" / file) for folder in (workplace, finished))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    begun, ended = (load_file(run / f"checkpoint-{n}/layer_projections.safetensors")["0"] for n in (2, 4))
    assert not torch.equal(begun, ended)


def test_a_checkpoint_without_the_projection_is_refused(workplace, capsys):
    run = workplace / "runs/whole"
    shutil.rmtree(run / "checkpoint-4")
    (run / "result.json").unlink()
    (run / "checkpoint-2/layer_projections.safetensors").unlink()
    manifest = json.loads((run / "checkpoint-2/manifest.json").read_text())
    manifest["files"].pop("layer_projections.safetensors")
    (run / "checkpoint-2/manifest.json").write_text(json.dumps(manifest))
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 1
    assert (
        "expected layer_projections.safetensors, since the recipe has a learned projection" in capsys.readouterr().err
    )


@pytest.mark.full
@pytest.mark.parametrize("parallel", [[], ["strategy=fsdp", "teacher=sharded"]], ids=["ddp", "fsdp"])
def test_two_processes_train_the_projection_as_one_does(workplace, finished, parallel):
    """Both start from one projection, average its gradients, and end with the weights of one process."""
    settings = ["train.batch_size=1", *(f"parallel.{setting}" for setting in parallel)]
    command, run = ["-m", "distill", "run", "r.yaml", "--name", "two", *settings], workplace / "runs/two"
    files = ("checkpoint-4/layer_projections.safetensors", "student/model.safetensors")
    run_as_two(*command, cwd=workplace)
    made = [load_file(run / file) for file in files]
    for weights, file in zip(made, files, strict=True):
        for name, expected in load_file(finished / "runs/whole" / file).items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)
    if parallel:  # a projection in shards is restored from the checkpoint's whole one
        shutil.rmtree(run / "checkpoint-4")
        (run / "result.json").unlink()
        run_as_two(*command, "--resume", cwd=workplace)
        for weights, file in zip(made, files, strict=True):
            assert all(torch.equal(value, weights[name]) for name, value in load_file(run / file).items())
