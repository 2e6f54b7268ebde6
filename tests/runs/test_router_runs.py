"""Runs whose student is a mixture of experts: losses of its routers, their figures, resuming, two processes."""

import contextlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_models
from two_ranks import run_as_two

from distill.cli import run_command
from distill.models.meta_models import meta_student
from distill.recipe import Student
from distill.reports.report import write_report
from distill.training.progress import read_metrics

RUN = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
loss: {terms: [{type: forward_kl}]}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, schedule: constant, log_every: 1, save_every: 2,
        eval_every: 2, device: cpu}
generate: {prompts: []}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))
MIXTURE = {
    "kind": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
ASKS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoint-2 and checkpoint-4, whose student's configuration asks for load balancing."""
    folder = tmp_path_factory.mktemp("routers")
    save_models(
        folder, text=TEXT, teacher={**MIXTURE, "seed": 1}, student={**MIXTURE, **ASKS, "seed": 2}, dense={"seed": 3}
    )
    (folder / "r.yaml").write_text(RUN)
    with contextlib.chdir(folder):
        assert run_command(["run", "r.yaml", "--name", "whole"]) == 0
    return folder


def test_the_loss_and_the_figures_are_logged(finished, capsys):
    rows = read_metrics(finished / "runs/whole/metrics.jsonl")
    for row in rows:
        assert row["loss"] == pytest.approx(row["kl"] + 0.5 * row["router_balance"], rel=1e-5)
        assert (
            1 < row["router_load"] <= 4 / 2 and 0 < row["router_entropy"] < 1.3863 and 0 < row["router_agreement"] < 1
        )
    held_out = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in held_out] == [2, 4]
    for row in held_out:
        assert row["eval_loss"] == pytest.approx(row["eval_kl"] + 0.5 * row["eval_router_balance"], rel=1e-5)
        assert row["eval_router_agreement"] > 0
    page = write_report(finished / "runs/whole").read_text()
    assert "router load (busiest expert over mean)" in page and "experts in common with teacher" in page


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(workplace, finished):
    run = workplace / "runs/whole"
    shutil.rmtree(run / "checkpoint-4")
    (run / "result.json").unlink()
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
    ours, theirs = (load_file(folder / "runs/whole/student/model.safetensors") for folder in (workplace, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads((workplace / "student/config.json").read_text())["output_router_logits"]


@pytest.mark.full
@pytest.mark.parametrize("more", [["train.gradient_checkpointing=true"], ["student.lora.r=4"]], ids=["again", "lora"])
def test_layers_computed_again_and_adapters_have_the_losses_too(workplace, finished, more):
    assert run_command(["run", "r.yaml", "--name", "more", *more]) == 0
    rows = read_metrics(workplace / "runs/more/metrics.jsonl")
    first = read_metrics(finished / "runs/whole/metrics.jsonl")[0]
    assert rows[0]["router_balance"] == pytest.approx(first["router_balance"], rel=1e-5)
    if "student.lora.r=4" not in more:  # the gradients are those of the run that keeps its activations
        weights, expected = (
            load_file(f / "student/model.safetensors") for f in (workplace / "runs/more", finished / "runs/whole")
        )
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


FROZEN = ["student.freeze=[router]"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "more"),
    [([], []), (["parallel.strategy=fsdp"], []), (["parallel.strategy=fsdp"], FROZEN)],
    ids=["ddp", "fsdp", "fsdp-frozen"],
)
def test_two_processes_and_two_micro_batches_train_alike(workplace, parallel, more):
    """Both divide a step into the same micro-batches of one row: each counts by its trained tokens."""
    one = ["run", "r.yaml", "--name", "one", "train.batch_size=1", "train.tokens_per_step=64", *more]
    assert run_command(one) == 0
    command = ["-m", "distill", "run", "r.yaml", "--name", "two", "train.batch_size=1", *parallel, *more]
    run_as_two(*command, cwd=workplace)
    ours, theirs = (load_file(workplace / f"runs/{name}/student/model.safetensors") for name in ("two", "one"))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5)
    two, one = (read_metrics(workplace / f"runs/{name}/metrics.jsonl")[0] for name in ("two", "one"))
    for name in ("loss", "router_balance", "router_load", "router_entropy", "router_agreement", "eval_router_load"):
        if name in one:
            assert two[name] == pytest.approx(one[name], rel=1e-5), name


@pytest.mark.full
def test_frozen_routers_stay_as_they_are(workplace, capsys):
    assert run_command(["check", "r.yaml"]) == 0
    assert "loss.router: the loss has 0.5 x load balancing" in capsys.readouterr().out
    trained = [meta_student(Student(model="student", freeze=parts), None).shape.trained for parts in ([], ["router"])]
    assert trained[0] - trained[1] == 2 * 4 * 32
    assert run_command(["run", "r.yaml", "--name", "frozen", *FROZEN]) == 0
    before, after = (load_file(workplace / place / "model.safetensors") for place in ("student", "runs/frozen/student"))
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert sorted(name for name in before if torch.equal(before[name], after[name])) == sorted(routers)
    assert run_command(["check", "r.yaml", "student.model=dense", *FROZEN]) == 2
    assert "student.freeze: router: expected a mixture of experts" in capsys.readouterr().err


TERM = ["loss.terms=[{type: forward_kl}, {type: router, weight: 0.5}]"]


@pytest.mark.full
def test_the_term_between_routers(workplace, capsys):
    assert run_command(["run", "r.yaml", "--name", "term", *TERM]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 x forward_kl + 0.5 x router, and the losses of the student's routers" in shown
    assert "router load " in shown and "experts in common " in shown
    rows = read_metrics(workplace / "runs/term/metrics.jsonl")
    for row in rows:
        expected = row["kl"] + 0.5 * row["router_balance"] + 0.5 * row["router"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert rows[-1]["router"] < rows[0]["router"]
    assert run_command(["check", "r.yaml", "student.model=dense", *TERM]) == 1
    assert "router expects two mixtures of as many experts" in " ".join(capsys.readouterr().out.split())
    assert run_command(["validate", "r.yaml", "teacher={type: cache, path: rows}", *TERM]) == 2
    assert "a teacher whose layers are computed in the run's own processes" in capsys.readouterr().err


def test_losses_of_routers_of_a_dense_student_are_refused(workplace, capsys):
    command = ["r.yaml", "student.model=dense", "loss.router.balance=0.1"]
    assert run_command(["check", *command]) == 1
    shown = capsys.readouterr()
    assert "loss.router: expected a student that is a mixture of experts" in shown.out + shown.err
    assert run_command(["run", *command]) == 2
    assert "loss.router: expected a student that is a mixture of experts" in capsys.readouterr().err
