"""The invariants that start runs, resume and ranks, and each shown to fail once its fault is put in."""

import os
import time
from pathlib import Path

import pytest
from distill_kernels import FusedDistillationLoss
from test_invariants import subject

from distill.doctor import invariants, invariants_runs
from distill.training.trainer import DistillationTrainer


def dropping():
    return subject({"terms": [{"type": "jsd"}]}, attention_dropout=0.1)


def test_resume_is_exact():
    finding = invariants_runs.resume_is_exact(dropping())
    assert finding.passed, finding


def forget_optimizer(fault):
    fault.setattr(DistillationTrainer, "_load_optimizer_and_scheduler", lambda *_: None)


def forget_random_state(fault):
    fault.setattr(DistillationTrainer, "_load_rng_state", lambda *_: None)


def teacher_is_another_one(fault):
    load = DistillationTrainer._load_optimizer_and_scheduler

    def changed(self, checkpoint):
        load(self, checkpoint)
        if checkpoint is not None:
            self.objective.teacher.models["teacher"].lm_head.weight.data.mul_(1.5)

    fault.setattr(DistillationTrainer, "_load_optimizer_and_scheduler", changed)


@pytest.mark.plain("forget_random_state")
@pytest.mark.parametrize(
    "fault", [forget_optimizer, forget_random_state, teacher_is_another_one], ids=lambda fault: fault.__name__
)
def test_resume_fails_where_something_is_forgotten(fault, monkeypatch):
    fault(monkeypatch)
    finding = invariants_runs.resume_is_exact(dropping())
    assert not finding.passed and "weights" in finding.detail


@pytest.mark.full  # started by torchrun; forked ones are in tests/teachers/test_conformance.py
def test_ranks_change_nothing():
    finding = invariants_runs.ranks_change_nothing(subject({"terms": [{"type": "jsd"}]}))
    assert finding.passed, finding


@pytest.mark.full
def test_ranks_change_nothing_where_there_is_dropout(forked_ranks):
    """Two processes draw other dropout masks than one."""
    finding = invariants_runs.ranks_change_nothing(subject({"terms": [{"type": "jsd"}]}, kind="gpt2"))
    assert finding.passed, finding


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, says",
    [
        ("raise ValueError('the real\\nreason')", "two processes failed: ValueError: the real"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL (kill -9; most often the system"),
    ],
    ids=["raises", "is killed"],
)
def test_the_reason_of_failed_processes_is_in_the_result(tmp_path, fault, says):
    program = tmp_path / "fails.py"
    program.write_text(fault)
    finding = invariants_runs.ranks_change_nothing(subject(), program=[str(program)])
    assert not finding.passed and says in finding.detail and "=====" not in finding.detail, finding


@pytest.mark.slow  # it waits for the time to be up
def test_ranks_that_never_end_are_ended(tmp_path, limit):
    program, alive = tmp_path / "sleeps.py", tmp_path / "alive"
    program.write_text(f"import os, time; open({str(alive)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)")
    limit.setattr(invariants_runs, "MINUTES", 1)
    finding = invariants_runs.ranks_change_nothing(subject(), program=[str(program)])
    assert not finding.passed and "did not end" in finding.detail, finding
    for process in alive.read_text().split():
        with pytest.raises(ProcessLookupError):
            _wait_for_the_end_of(int(process))


def _wait_for_the_end_of(process, seconds=10):
    """Raises ProcessLookupError once it is gone, or is a zombie that only waits to be counted."""
    for _ in range(seconds * 10):
        os.kill(process, 0)
        if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


@pytest.mark.parametrize(
    "said, reason",
    [
        ("", "no output"),
        ("=====\nsomething odd\n=====", "something odd"),
        (
            "Traceback (most recent call last):\n[rank1]: torch.OutOfMemoryError: CUDA out of memory\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n=====",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("python: No module named x\n====", "python: No module named x"),
        ("  exitcode  : -11 (pid: 9)\n====", "a process was ended by SIGSEGV"),
    ],
)
def test_the_reason_is_found_in_the_output(said, reason):
    assert invariants_runs.failure_reason(said) == reason


def forget_data_order(fault):
    make = invariants_runs.TrainingArguments
    fault.setattr(invariants_runs, "TrainingArguments", lambda *a, **k: make(*a, **k, ignore_data_skip=True))


def test_resume_fails_where_the_data_begin_anew(monkeypatch):
    forget_data_order(monkeypatch)
    finding = invariants_runs.resume_is_exact(dropping())
    assert not finding.passed and "logged losses" in finding.detail, finding


def test_a_negative_divergence_fails(fault):
    forward = FusedDistillationLoss.forward

    def lowered(self, *args, **kwargs):
        found = forward(self, *args, **kwargs)
        return found - 10 if self.reduction == "none" else found

    fault.setattr(FusedDistillationLoss, "forward", lowered)
    finding = invariants.divergence_of_equal_models_is_zero(subject())
    assert not finding.passed and "smallest of any token -" in finding.detail, finding


@pytest.mark.full
def test_ranks_fail_where_each_divides_by_its_own_count(tmp_path, forked_ranks):
    program = tmp_path / "faulty.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom distill.doctor import invariants_runs\n"
        "from distill.training.trainer import DistillationTrainer\n"
        "count = lambda self, batches, device: sum((b['labels'][:, 1:] != -100).sum() for b in batches) * 2\n"
        "DistillationTrainer._get_num_items_in_batch = count\n"
        "invariants_runs._main(Path(sys.argv[-1]))\n"
    )
    assert Path(program).exists()
    finding = invariants_runs.ranks_change_nothing(subject({"terms": [{"type": "jsd"}]}), program=[str(program)])
    assert not finding.passed and "differ by" in finding.detail, finding
