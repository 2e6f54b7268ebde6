"""The benchmark of teachers elsewhere: its plans, that all cases run, and that none can hold up the others."""

import json
import sys
import time

import psutil
import pytest

from scripts.bench import elsewhere
from scripts.bench.many_gpus import RECIPE, ROOT, metrics_of, run_until

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports

HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(300)
"""


def lives(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_that_hangs_ends_in_time_with_all_that_it_started(tmp_path):
    """Ranks are in sessions of their own, and keep the pipe that is read."""
    begun = time.monotonic()
    with run_until([sys.executable, "-c", HANGS], tmp_path, "", begun + 1.0, stdout=-1) as process:
        child, *rest = process.stdout.read().split()
    assert time.monotonic() - begun < 20 and not rest
    while lives(int(child)):  # a killed process has closed its files before it is gone
        assert time.monotonic() - begun < 20
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="hung: no end in its time"):
        metrics_of(tmp_path, [sys.executable, "-c", HANGS, "hung"], "", 3, begun + 0.5)
    assert time.monotonic() - begun < 20


def test_one_that_has_logged_enough_is_ended(tmp_path):
    lines = [json.dumps({"step": step, "tokens_per_second": 1.0}) for step in range(4)]
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tok']))
    words = [sys.executable, "-c", "import time; time.sleep(300)", "x"]
    assert len(metrics_of(tmp_path, words, "", 4, time.monotonic() + 100)) == 4


def test_a_failing_case_is_reported_and_stops_no_other(monkeypatch, capsys):
    def fails(folder, until):
        metrics_of(folder, [sys.executable, "-c", "raise SystemExit('no such GPU')", "x"], "", 3, until)

    monkeypatch.setitem(elsewhere.CASES, "launched", fails)
    monkeypatch.setitem(elsewhere.CASES, "ddp", lambda folder, until: ["row"])
    assert list(elsewhere.run(False, "launched,ddp")) == ["row"]
    said = capsys.readouterr().out
    assert "launched failed: x: ended with 1\nno such GPU" in said and "ddp: " in said


def test_plan_prefers_served_teachers_to_shards_and_copies_in_fp8_to_served():
    """70B to 8B on two H200."""
    served, shards, copies = (
        elsewhere.planned(elsewhere.LARGE_RECIPE, [*elsewhere.LARGE, *overrides])
        for overrides in elsewhere.LARGE_WAYS.values()
    )
    assert shards[0] < served[0] < copies[0]
    assert (served[1], shards[1], copies[1]) == (False, True, True)  # of an fp8 teacher copies are taken; bf16 is cut
    assert elsewhere.planned(RECIPE, ["parallel.strategy=ddp", "parallel.teacher=copied"])[1]


@pytest.fixture
def tiny(tmp_path, limit):
    base = json.loads((ROOT / "recipes/architectures/llama-3.2-1b/config.json").read_text())
    for name, layers in (("teacher", 3), ("student", 2)):
        small = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        small |= {"bos_token_id": 1, "eos_token_id": 2}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(base | small))
    shapes = [f"{name}.config={tmp_path / name}" for name in ("teacher", "student")]
    small = [*shapes, "train.device=cpu", "train.precision=float32", "student.dtype=float32", "data.max_length=64"]
    limit.setattr(elsewhere, "SMALLER", small)


@pytest.mark.parametrize("case", ["served", "keep", "large"])
def test_cases_run(case, tiny):
    """The runs of `launched` and `ddp` are two of the three ways of `large` with another recipe."""
    if case != "large":
        elsewhere.SMALLER.append("teacher.dtype=float32")
    rows = list(elsewhere.run(False, case))
    assert len(rows) == {"served": 5, "keep": 2, "large": 3}[case]
    assert all(row.tokens_per_s > 0 for row in rows)
