"""The command on a GPU, end to end: memory that runs out, kill -9 and --resume, the examination, figures as JSON.

What is asked of a GPU is asked of the CPU too where that can answer (`-m slow`): the same functions, so that they are
known to be right before a GPU runs them.
"""

import json
import os
import re

import pytest
import torch
from test_crash import check, finish, start
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.core.folders import RUN_LOCK
from distill.core.manifest import MANIFEST
from distill.doctor import examine, invariants, invariants_runs
from distill.models.patch import attention, patching
from distill.recipe import load

STEPS, BATCH, LARGE = 24, 2, 400
RECIPE = f"""
teacher: {{model: teacher}}
student: {{from_teacher: {{layers: 2}}}}
data: {{source: text.txt, max_length: 256, cache: false, validation: {{fraction: 0.05}}}}
train: {{steps: {STEPS}, batch_size: {BATCH}, tokens_per_step: {2 * BATCH * 256}, learning_rate: 1e-3, warmup: 0,
        log_every: 1, save_every: 1, deterministic: true, device: DEVICE}}
generate: {{prompts: []}}
"""
TEXT = "\n".join(
    f"The teacher explains line {number} and the student listens to it once more." for number in range(1900)
)
# the first GiB of the GPU is all there is; on a CPU, batches that are too large for it are told so
CAPPED = """
import torch
torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory)
from distill.cli import main
main()
"""
TOLD = """
import torch
from distill.training.trainer import DistillationTrainer
step = DistillationTrainer.training_step
def limited(self, model, inputs, *args, **more):
    if len(inputs["input_ids"]) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 1 GiB.")
    return step(self, model, inputs, *args, **more)
DistillationTrainer.training_step = limited
from distill.cli import main
main()
"""
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def machine(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine's GPU answers itself")
    return request.param


@pytest.fixture(scope="module")
def visible(machine):
    """Return the environment of a process that uses one GPU, or none."""
    if machine == "cpu":
        return {"gpu": ""}
    return {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


@pytest.fixture(scope="module")
def capped(machine, visible):
    """The same, in one GiB of its memory."""
    return visible | {"program": ("-c", CAPPED if machine == "cuda" else TOLD)}


@pytest.fixture(scope="module")
def workplace(machine, tmp_path_factory):
    folder = tmp_path_factory.mktemp(machine)
    tokenizer = tiny_tokenizer()
    hidden = 256 if machine == "cuda" else 32  # heads of 64 on a GPU
    save_tiny(
        folder / "teacher", tiny_model(tokenizer, layers=4, hidden=hidden, seed=1, initializer_range=0.06), tokenizer
    )
    (folder / "text.txt").write_text(TEXT)
    (folder / "recipe.yaml").write_text(RECIPE.replace("DEVICE", machine))
    return folder


@pytest.fixture(scope="module")
def too_large(workplace, capped):
    """The exit code of a run whose micro-batch does not fit, and what it said."""
    more = [f"train.batch_size={LARGE}", f"train.tokens_per_step={LARGE * 256}", "--name", "large"]
    code = start(workplace, *more, **capped).wait(timeout=300)
    return code, (workplace / "out.txt").read_text()


@pytest.fixture(scope="module")
def undisturbed(workplace, too_large, capped):
    """A whole run of small batches in the memory that was too little for large ones."""
    finish(workplace, "--name", "whole", **capped)
    return workplace / "runs" / "whole"


@pytest.fixture
def there(workplace, monkeypatch):
    """Run in that folder, with the memory of earlier tests' tensors freed."""
    monkeypatch.chdir(workplace)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return workplace


def as_json(capsys, *arguments, code=0):
    """Return the output of a command, which is JSON and nothing else."""
    assert run_command([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- runs


def test_memory_that_runs_out_is_one_line_and_leaves_nothing_half_written(workplace, too_large):
    code, said = too_large
    assert code == 1, said[-4000:]
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("distill: ")]
    assert "the GPU is out of memory: CUDA out of memory. Tried to allocate" in line and len(line) < 600
    assert f"set train.batch_size from {LARGE} to {LARGE // 2}, half of the activations" in line
    assert "train.gradient_checkpointing to true" in line and "`distill check`" in line
    folder = workplace / "runs" / "large"
    written = {path.name for path in folder.iterdir()} if folder.exists() else set()
    whole = {"recipe.yaml", "lock.yaml", "attention.json", "before.json", "metrics.jsonl", MANIFEST}
    assert written <= {RUN_LOCK, *whole}, written
    for path in folder.glob("*.json"):
        json.loads(path.read_text())


def test_smaller_batches_run_in_the_same_memory(undisturbed):
    result = json.loads((undisturbed / "result.json").read_text())
    assert result["steps"] == STEPS and result["after"]["forward_kl"] < result["before"]["forward_kl"]
    assert (undisturbed / "student" / "config.json").exists()


def test_killed_and_resumed_is_the_same_to_the_bit(workplace, undisturbed, visible):
    check(workplace, undisturbed, "killed", kills=1, seed=2, steps=STEPS, **visible)


def test_eval_agrees_with_the_run(there, undisturbed, capsys):
    told = as_json(capsys, "eval", "whole")
    after = json.loads((undisturbed / "result.json").read_text())["after"]
    assert told["tokens"] == after["tokens"] and told["measure"] == "KL"
    for name, figure in told["figures"].items():
        assert figure["low"] <= figure["value"] <= figure["high"], name
    # the run's student computes in bf16 from fp32 weights, eval's has bf16 weights
    assert told["figures"]["forward_kl"]["value"] == pytest.approx(after["forward_kl"], rel=0.25)
    assert 0 <= told["figures"]["agreement"]["value"] <= 1


def test_generate_answers(there, undisturbed, capsys):
    (answer,) = as_json(capsys, "generate", "whole", "-p", "The teacher", "--with-teacher", "--max-new-tokens", "16")
    assert answer["prompt"] == "The teacher" and {"student", "teacher"} < set(answer)
    again = as_json(capsys, "generate", "whole", "-p", "The teacher", "--max-new-tokens", "16")
    assert again[0]["student"] == answer["student"], "the likeliest token is the same every time"


# ---------------------------------------------------------------- before a run


PLAIN = "train.deterministic=false"  # a setting of the whole process, which has other tests to run


@pytest.mark.gpu
def test_check_agrees_with_two_measured_steps(there, capsys):
    told = as_json(capsys, "check", "recipe.yaml", PLAIN, "--probe")
    assert told["ok"] and told["device"]["cuda"] and told["problems"] == []
    measured, parts = told["measured"], told["memory"]["parts"]
    assert parts["teacher"] + parts["student"] < measured["peak"]
    assert 0 < measured["seconds"] < 30
    assert measured["predicted_over_measured"] == pytest.approx(told["memory"]["peak"] / measured["peak"])


@pytest.mark.gpu
def test_attention_that_does_not_fit_is_not_taken_for_one_that_refuses(fault):
    def full(*tensors, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    fault.setattr(attention, "flash_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        attention.autotune_attention(1, 2, 2, 64, 64, torch.bfloat16, backward=False)


@pytest.mark.gpu
def test_bench_times_the_step(there, capsys):
    found = as_json(capsys, "bench", "recipe.yaml", PLAIN, "--steps", "2")
    rows = {row["variant"]: row for row in found}
    assert list(rows) == ["plain", "distill", "distill-graphs", "plain (again)"]
    assert "launched" not in rows["distill-graphs"]["note"]
    assert rows["distill-graphs"]["loss"] == pytest.approx(rows["distill"]["loss"], rel=1e-3)
    for row in found:
        assert row["ms"] > 0 and row["tokens_per_second"] > 0 and row["peak_gib"] > 0
        assert all(value >= 0 for value in row["phases"].values()) and set(row["phases"]) >= {"teacher", "backward"}
    # the same loss on the same tokens; of six small steps one optimizer rounds to the nearest bf16, the other at random
    assert rows["distill"]["loss"] == pytest.approx(rows["plain"]["loss"], rel=0.2)


def test_all_invariants_hold(there, machine, capsys):
    code = run_command(["doctor", "recipe.yaml", PLAIN, "--small", "--json"])
    told = json.loads(capsys.readouterr().out)
    findings = {row["name"]: row for row in told["recipe"]}
    assert len(findings) == len(invariants.CHECKS) + len(invariants_runs.RUN_CHECKS)
    assert all(row["passed"] for row in findings.values()), [row for row in findings.values() if not row["passed"]]
    # two ranks of NCCL cannot share a GPU: with one, the CPU answers, and the line says so
    how = {0: "gloo, CPU)", 1: "gloo, CPU, without a second GPU)"}.get(torch.cuda.device_count(), "NCCL)")
    assert how in findings["ranks"]["detail"]
    assert ("deterministic kernels" in findings["resume"]["detail"]) == (machine == "cuda")
    # a machine that is short of something is told so, and that is exit code 1 as well
    assert code == int(not all(line["fine"] for line in told["environment"])), told["environment"]


# ---------------------------------------------------------------- faults that only kernels can have


@pytest.fixture
def subject(there, machine):
    if machine == "cuda":
        return examine.prepare(load("recipe.yaml", [PLAIN]), small=True)
    from distill_kernels.launch import interpreted

    made = examine.prepare(load("recipe.yaml", [PLAIN, "data.max_length=64", "train.tokens_per_step=128"]), small=True)
    made.rows = made.rows[:2]  # which make one of two documents
    return made, interpreted


def examined(check, subject):
    """A finding; on a CPU its kernels run in the interpreter."""
    if not isinstance(subject, tuple):
        return check(subject)
    with subject[1]():
        return check(subject[0])


def test_hidden_states_in_bf16_before_the_heads_are_seen(subject, fault):
    from distill_kernels.losses import fused

    assert examined(invariants.fused_equals_reference, subject).passed
    project = fused.project

    def rounded(head, hidden, *more, **settings):
        return project(head, hidden.bfloat16().to(hidden.dtype), *more, **settings)

    fault.setattr(fused, "project", rounded)
    finding = examined(invariants.fused_equals_reference, subject)
    assert not finding.passed, finding


def test_attention_across_documents_is_seen(subject, machine, fault):
    if machine == "cpu":  # where the examination leaves the models' own attention in place
        patch = patching.patch
        fault.setattr(patching, "patch", lambda model, role, attention: patch(model, role, attention="triton"))
    assert examined(invariants.patching_changes_nothing, subject).passed
    flash = attention.flash_attention
    bounds = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

    def leaking(*tensors, **settings):
        return flash(*tensors, **{name: value for name, value in settings.items() if name not in bounds})

    fault.setattr(attention, "flash_attention", leaking)
    # a patch tries it out, and would leave the model's own attention in place, which has no fault
    fault.setattr(patching, "isolates_documents", lambda model: True)
    finding = examined(invariants.patching_changes_nothing, subject)
    assert not finding.passed and re.search(r"differ by \d", finding.detail), finding
