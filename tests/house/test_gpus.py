"""Tests that need GPUs run where there are some, whatever fixtures tell the program."""

import threading
import time
from types import SimpleNamespace

import gpus
import pytest
import torch
import two_ranks


@pytest.mark.full
def test_two_processes_start_while_the_program_is_told_of_one_gpu(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os\nprint('rank', os.environ['RANK'])")
    monkeypatch.setattr(two_ranks, "GPUS", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert sorted(two_ranks.run_as_two(program, device="cuda").split("\n")) == ["", "rank 0", "rank 1"]


@pytest.mark.parametrize(
    "reason, count, wrong",
    [
        (gpus.NEEDS_ONE, 0, False),
        (gpus.NEEDS_ONE, 1, True),
        (gpus.NEEDS_TWO, 1, False),
        (gpus.NEEDS_TWO, 2, True),
        ("needs triton", 2, False),
    ],
)
def test_a_skip_for_lack_of_gpus_fails_where_they_are(reason, count, wrong):
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_x.py", 3, f"Skipped: {reason}"))
    gpus.fail_wrong_skip(report, count)
    assert (report.outcome == "failed") is wrong


def test_heavy_tests_of_two_workers_take_turns(tmp_path):
    inside, most = [], []

    def heavy():
        with gpus.one_at_a_time(tmp_path / "lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    workers = [threading.Thread(target=heavy) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert most == [1] * 4


def test_much_memory_is_given_back(monkeypatch):
    freed = []
    monkeypatch.setattr(gpus, "GPUS", 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: [0, 3 << 30][device])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    gpus.give_memory_back()
    assert freed == [True]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 20)
    gpus.give_memory_back()
    assert freed == [True]
