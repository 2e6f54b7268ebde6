"""Benchmark candidates compute the same thing: gradients on the CPU at small sizes; nothing is timed."""

import copy
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from helpers import realistic_heads, relative_error
from tiny import tiny_model

from distill.commands import bench
from distill.teachers.objective import DistillationObjective
from scripts.bench import __main__, fp8_step, loss_rivals, on_policy, small, step

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


def test_every_case_hands_over_rows_as_they_come():
    names = {path.stem for path in Path(__main__.__file__).parent.glob("*.py")} - __main__.NOT_CASES
    cases = {name: importlib.import_module(f"scripts.bench.{name}").run for name in names}
    assert {"losses", "layers", "step", "experts", "first_step"} < set(cases)
    assert not [name for name, run in cases.items() if not inspect.isgeneratorfunction(run)]


CASE = """
import os, signal, sys, time, types
from scripts.bench import __main__, harness

def run(quick, only):
    yield harness.Row("case", "shape", "measured in time", 2.0)
    if only == "fails":
        1 / 0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def table(rows, shown=harness.table):
    if "late" in sys.argv:  # once more: `timeout` sends it to the process and to its group
        os.kill(os.getpid(), signal.SIGTERM)
    return shown(rows)

harness.table = table
sys.modules["scripts.bench.launch"] = types.SimpleNamespace(run=run, NEEDS_CUDA=False)
sys.argv = ["bench", "launch", "--no-record", "--only", sys.argv[1]]
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("ending, code", [("late", 143), ("fails", 1)])
def test_benchmark_that_ends_early_shows_its_rows(ending, code):
    """A benchmark that ends early, by SIGTERM (twice) or an error, shows its rows."""
    root = Path(__main__.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CASE, ending], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert "case  shape\n  measured in time" in done.stdout and "2.0000 ms" in done.stdout
    assert ("ZeroDivisionError" in done.stderr) == (ending == "fails")


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_rivals_in_plain_pytorch_agree(beta):
    """Full logits, and chunks of rows whose gradient is written by its formula, against the definition in float64."""
    operands = realistic_heads(7, 200, 16, 24)
    x, w = (t.requires_grad_() for t in operands[:2])
    wide = [t.detach().double().requires_grad_(i < 2) for i, t in enumerate(operands)]
    exact = FusedDistillationLoss([LossTerm("jsd", 1.0, beta=beta)])(*wide)
    right = [exact, *torch.autograd.grad(exact, wide[:2])]

    def compute(z_s, z_t, scale):
        loss, gradient = loss_rivals.loss_and_logit_gradient(z_s, z_t, beta)
        return loss * scale, gradient * scale

    chunks = loss_rivals.CompiledChunks.apply(x, w, *operands[2:], compute, 3, torch.float32)
    for loss in (chunks, loss_rivals.full_logits(*operands, beta)):
        for one, other in zip([loss, *torch.autograd.grad(loss, (x, w))], right, strict=True):
            assert relative_error(one, other) < 1e-5


def test_unsloth_zoo_is_loaded_by_its_file_or_named_as_missing(monkeypatch, tmp_path):
    name = "unsloth_zoo fused_linear_jsd"
    loss_rivals._unsloth_module.cache_clear()
    monkeypatch.setenv("UNSLOTH_FUSED_LINEAR", str(tmp_path / "gone.py"))
    with pytest.raises(ImportError, match=r"UNSLOTH_FUSED_LINEAR: expected .*fused_linear\.py, got .*gone\.py"):
        loss_rivals.rivals(0.5)[name]()
    monkeypatch.delenv("UNSLOTH_FUSED_LINEAR")
    try:
        loss_rivals.rivals(0.5)[name]()
    except ImportError as error:
        assert str(error) == "unsloth_zoo is not installed, and UNSLOTH_FUSED_LINEAR names no file of it"


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("rows", [None, 3])
def test_unsloth_zoo_computes_the_same_loss(beta, rows):
    loss_rivals._unsloth_module.cache_clear()
    try:
        loss = loss_rivals._unsloth(beta, rows)
    except ImportError as error:
        pytest.skip(str(error))
    operands = realistic_heads(7, 200, 16, 24)
    leaves = [t.requires_grad_() for t in operands[:2]]
    wide = [t.detach().double().requires_grad_(i < 2) for i, t in enumerate(operands)]
    exact = FusedDistillationLoss([LossTerm("jsd", 1.0, beta=beta)])(*wide)
    found = loss(SimpleNamespace(x=operands[0], w=operands[1], x_teacher=operands[2], w_teacher=operands[3]))
    right = [exact, *torch.autograd.grad(exact, wide[:2])]
    for one, other in zip([found, *torch.autograd.grad(found, leaves)], right, strict=True):
        assert relative_error(one, other) < 1e-5


def test_small_models_are_picked_exactly():
    assert small.chosen(False, "smollm2 ours; qwen2.5 plain") == [("smollm2", "ours"), ("qwen2.5", "plain")]
    assert small.chosen(False, "flagship") == [("flagship", name) for name in small.CANDIDATES]
    assert small.chosen(False, "compile: layers") == [(pair, "compile: layers") for pair in small.PAIRS]
    with pytest.raises(ValueError, match="got smollm2 our"):
        small.chosen(False, "smollm2 our")
    assert not any("default" in name or pair != "smollm2" for pair, name in small.chosen(True, ""))


def test_a_failing_candidate_is_a_row_with_the_reason(monkeypatch):
    shown = 'print(\'result {"ms": 2.0, "joules": 1.0, "peak_mib": 3.0}\', flush=True)'

    def of(code):
        begin = subprocess.Popen
        with monkeypatch.context() as inside:
            inside.setattr(subprocess, "Popen", lambda _, **more: begin([sys.executable, "-c", code], **more))
            inside.setenv("BENCH_LIMIT", "2")
            return next(small.run(False, "flagship ours"))

    stopped = of(f"import time; {shown}; time.sleep(60)")  # its time was there already
    assert (
        stopped.ms == 2
        and stopped.joules == 1
        and stopped.tokens_per_s == 8192 / 2 * 1e3
        and stopped.note == "not done after 2 s"
    )
    failed = of("import os; assert os.environ['TORCHINDUCTOR_CACHE_DIR']; raise RuntimeError('as captured')")
    assert failed.ms != failed.ms and failed.tokens_per_s is None and failed.note == "RuntimeError: as captured"


def test_a_rival_in_fp8_ends_at_its_limit(monkeypatch, capsys):
    begin = subprocess.Popen

    def rows(code):
        with monkeypatch.context() as inside:
            inside.setattr(subprocess, "Popen", lambda _, **more: begin([sys.executable, "-c", code], **more))
            inside.setenv("BENCH_LIMIT", "1")
            return list(fp8_step.run(False, "torchao"))

    shown = '{"case": "fp8_step", "shape": "s", "candidate": "torchao", "ms": 2.0, "joules": 1.0, "note": "split"}'
    (row,) = rows(f"print('result ' + {shown!r})")
    assert (row.ms, row.joules, row.note) == (2.0, 1.0, "split")
    assert rows("import time; time.sleep(60)") == []
    assert "torchao fp8 + compile: RuntimeError: not done after 1 s" in capsys.readouterr().err


def test_torchao_leaves_the_compiler_as_it_is(monkeypatch):
    """Settings of torchao would make inductor try each kernel in many forms."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    from torch._inductor import config

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    teacher, student = tiny_model(seed=0, dtype=torch.bfloat16), tiny_model(seed=1, dtype=torch.bfloat16)
    fp8_step.rival("torchao fp8 + compile", teacher, student, {})
    assert type(teacher.model.layers[0].mlp.down_proj.weight).__name__ == "Float8Tensor"
    assert not config.coordinate_descent_tuning


def test_steps_are_picked_by_pair_and_variant():
    assert [len(variants) for _, _, variants in step.chosen(False, "")] == [5, 4, 4]
    assert step.chosen(True, "") == [("llama-3.1-8b", "llama-3.2-1b", ("plain", "liger", "distill", "distill-fp8"))]
    assert step.chosen(False, "distill,compile") == [("llama-3.1-8b", "llama-3.2-1b", ("distill", "compile"))]
    assert step.chosen(False, "qwen2.5") == [step.PAIRS["qwen2.5"]] and "compile" in step.PAIRS["qwen2.5"][2]
    assert step.chosen(False, "qwen2.5 compile,distill") == [("qwen2.5-7b", "qwen2.5-1.5b", ("compile", "distill"))]


def test_steps_of_heads_of_two_sizes_have_one_loss(device):
    """Heads padded to different sizes, as Qwen2.5-7B's and 1.5B's, give the same loss."""
    teacher, student = tiny_model(seed=0, vocab_size=300).to(device), tiny_model(seed=1, vocab_size=275).to(device)
    ids = torch.arange(40, device=device).reshape(2, 20) * 7 % 275
    rows = torch.cat([torch.arange(19), 20 + torch.arange(19)]).to(device)
    batch, clock = {"input_ids": ids, "labels": ids, "valid_rows": rows}, SimpleNamespace(enter=lambda phase: None)
    learners = [copy.deepcopy(student) for _ in range(2)]
    of = [torch.optim.SGD(learner.parameters(), lr=0.1) for learner in learners]
    plain = bench.plain_step(teacher, learners[0], batch, of[0])(clock).item()
    ours = bench.our_step(DistillationObjective(teacher, learners[1]), learners[1], batch, of[1])(clock).item()
    assert plain > 0.01 and ours == pytest.approx(plain, rel=1e-4)


def test_on_policy_prompts_have_the_tokens_that_they_were_given_and_rows_name_the_best_rival():
    tokenizer = on_policy.tokenizer_of(300)
    made = on_policy.prompts(40, 300)
    assert [len(tokenizer(text)["input_ids"]) for text in made] == on_policy.lengths(40)
    assert 90 < sum(on_policy.lengths(2000)) / 2000 < 110
    figures = {"ms": 1e3, "joules": 5.0, "learned": 100.0, "peak_mib": 200.0}
    results = [("TRL, 16 x 4", figures, ""), ("TRL, 64 x 1", figures | {"ms": 2e3}, "")]
    rows = on_policy.rows_of("tiny", on_policy.PAIRS["smollm2"], [*results, ("ours", figures | {"ms": 250.0}, "")])
    assert [row.tokens_per_s for row in rows] == [100, 50, 400]
    assert "4.00 x, 1.00 of the memory of TRL, 16 x 4" in rows[2].note


@pytest.mark.parametrize(
    "spans, share, whole",
    [
        ([(0, 4)], 1.0, 4),
        ([(6, 8), (0, 4)], 0.75, 8),
        ([(0, 4), (1, 2), (3, 6), (8, 10)], 0.8, 10),  # nested and overlapping, on two streams
        ([(5, 7), (5, 7)], 1.0, 2),
    ],
)
def test_overlapping_kernels_count_once(spans, share, whole):
    assert small.busy_share(spans) == (pytest.approx(share), whole)


def test_short_gaps_between_kernels_count_as_busy_where_wanted():
    assert small.busy_share([(0, 4), (5, 7), (9, 10)], bridged=1) == (pytest.approx(0.8), 10)


def test_no_traced_kernel_is_an_error():
    with pytest.raises(ValueError, match="found none"):
        small.busy_share([])
