"""Ways that are timed once: kept on disk, shared by processes, off where bits must not depend on a clock."""

import json
from typing import NamedTuple

import pytest
import torch
from distill_kernels import flash_attention, launch, tuning
from distill_kernels.attention.operands import Tiles, neighbouring_tiles
from distill_kernels.launch import FAMILIES, INTERPRETER
from distill_kernels.losses import projection
from distill_kernels.losses.operands import Head
from distill_kernels.losses.projection import CUBLAS, ChunkLogits, Transform, projection_candidates
from forked import PIPE, Forked, clean_environment
from helpers import relative_error


class Way(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


WAYS, CPU = (Way(64, 64, 4, 2), Way(32, 64, 4, 2), Way(32, 64, 8, 2)), torch.device("cpu")


@pytest.fixture
def clock(monkeypatch, hardware, tmp_path):
    """A family without measured tables, and a timer that gives what it is told: `clock.times`, `clock.asked`."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DISTILL_TUNE", raising=False)
    monkeypatch.setitem(FAMILIES, INTERPRETER, FAMILIES[INTERPRETER]._replace(measured=False))
    for name in ("_used", "_preset"):
        hardware.setattr(tuning, name, {})
    hardware.setattr(tuning, "_record_path", [])

    def timer(launches):
        timer.asked += 1
        for each in launches:
            each()
        return timer.times or [2.0, 1.0, *[3.0] * (len(launches) - 2)]

    timer.times, timer.asked = None, 0
    hardware.setattr(tuning, "median_milliseconds", timer)
    return timer


def choose(shape=(64, 2048), ways=WAYS):
    return tuning.autotune("attention dq", shape, ways, lambda way: None, CPU)


def another_process(hardware):
    hardware.setattr(tuning, "_used", {})


def test_the_fastest_candidate_is_cached(clock, monkeypatch, caplog):
    assert choose() == WAYS[1] and choose() == WAYS[1] and clock.asked == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention dq 64 2048: timed 3 candidates in ") and "GPU: 32 64 4 2 (cached in " in line
    another_process(monkeypatch)
    assert choose() == WAYS[1] and clock.asked == 1, "read from the disk"
    assert choose((128, 2048)) == WAYS[1] and clock.asked == 2
    kept = {"attention dq 64 2048": "32 64 4 2", "attention dq 128 2048": "32 64 4 2"}
    assert json.loads(tuning.cache_file(CPU).read_text()) == kept


@pytest.mark.parametrize(
    "times, place",
    [([1.0, 0.98, 2.0], 0), ([1.0, 0.96, 2.0], 1), ([float("inf")] * 3, 0), ([float("inf"), 9.0, 8.0], 2)],
)
def test_another_candidate_must_exceed_the_minimum_speedup(clock, times, place):
    clock.times = times
    assert choose() == WAYS[place]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"attention dq 64 2048": [1]}', "\xff", '{"attention dq 64 2048": "1 2 3 4"}']
)
def test_a_malformed_cache_file_is_ignored(clock, monkeypatch, text):
    choose()
    tuning.cache_file(CPU).write_bytes(text.encode("latin1"))
    another_process(monkeypatch)
    assert choose() == WAYS[1] and clock.asked == 2
    assert tuning.read_choices(tuning.cache_file(CPU)) == {"attention dq 64 2048": "32 64 4 2"}


def test_autotuning_is_disabled_by_settings(clock, monkeypatch, hardware):
    monkeypatch.setenv("DISTILL_TUNE", "0")
    assert choose() == WAYS[0]
    monkeypatch.delenv("DISTILL_TUNE")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose() == WAYS[0]
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = launch.device_facts(CPU)
    hardware.setattr(tuning, "device_facts", lambda device: gpu)
    assert tuning.autotune("attention dq", (64, 2048), WAYS, lambda way: None, torch.device("cuda", 0)) == WAYS[0]
    assert clock.asked == 0 and not tuning.cache_file(CPU).exists()
    assert choose() == WAYS[1], "nothing of this stays"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose() == WAYS[0], "deterministic: whatever was timed before"
    finally:
        torch.use_deterministic_algorithms(False)


def test_measured_families_time_nothing(clock, monkeypatch):
    assert FAMILIES["sm_90"].measured
    assert not any(family.measured for name, family in FAMILIES.items() if name not in ("sm_90", INTERPRETER))
    monkeypatch.setitem(FAMILIES, INTERPRETER, FAMILIES[INTERPRETER]._replace(measured=True))
    assert choose() == WAYS[0] and clock.asked == 0


def test_without_a_writable_cache_nothing_is_timed(clock, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose() == choose() == WAYS[0] and clock.asked == 0
    assert [record.getMessage()[:48] for record in caplog.records] == [
        "attention dq: not autotuned, since the choice can"[:48]
    ]


def test_cache_file_depends_on_triton_release_and_source(clock, monkeypatch, hardware):
    files = {tuning.cache_file(CPU)}
    hardware.setattr(tuning, "source_hash", lambda: "other")
    files.add(tuning.cache_file(CPU))
    monkeypatch.setattr("triton.__version__", "9.9")
    files.add(tuning.cache_file(CPU))
    monkeypatch.setenv("DISTILL_FAMILY", "sm_80")
    files.add(tuning.cache_file(CPU))
    assert len(files) == 4


def test_a_resumed_run_presets_recorded_choices(clock, monkeypatch, tmp_path):
    path = tmp_path / "run" / "kernels.json"
    tuning.record_choices(path)
    assert not path.exists(), "nothing chosen yet"
    choose(), choose((128, 2048))
    assert (
        tuning.read_choices(path) == tuning.read_choices(tuning.cache_file(CPU)) and len(tuning.read_choices(path)) == 2
    )
    another_process(monkeypatch)
    tuning.preset_choices({"attention dq 64 2048": "32 64 8 2"})
    monkeypatch.setenv("DISTILL_TUNE", "0")
    assert choose() == WAYS[2], "what the run chose, whatever this machine would"
    assert choose((128, 2048)) == WAYS[0]


AS_A_RANK = """
import random, sys, time, torch
from distill_kernels import tuning
from distill_kernels.launch import FAMILIES, INTERPRETER
FAMILIES[INTERPRETER] = FAMILIES[INTERPRETER]._replace(measured=False)
def timer(launches):
    print("timed", flush=True)
    time.sleep(0.3)
    return [random.random() for _ in launches]
tuning.median_milliseconds = timer
for shape in range(3):
    ways = tuple((i,) for i in range(8))
    print(tuning.autotune("attention dq", (shape,), ways, print, torch.device("cpu")), flush=True)
"""


@pytest.mark.full
def test_concurrent_processes_agree_and_time_once(clock, tmp_path):
    environment = clean_environment()
    ranks = [Forked(["-c", AS_A_RANK], cwd=tmp_path, env=environment, stdout=PIPE) for _ in range(2)]
    outputs = [rank.communicate()[0].splitlines() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    choices = [[line for line in lines if line != "timed"] for lines in outputs]
    assert choices[0] == choices[1] and len(choices[0]) == 3
    assert sum(lines.count("timed") for lines in outputs) == 3


def test_neighbouring_tiles_are_few_distinct_and_in_range():
    for tile in (Tiles(64, 32, 4, 2), Tiles(128, 64, 8, 2), Tiles(32, 16, 4, 1)):
        near = neighbouring_tiles(tile)
        assert near[0] == tile and 6 <= len(near) <= 10 and len(set(near)) == len(near)
        assert all(16 <= each.keys <= 128 and 16 <= each.queries <= 128 and each.stages for each in near)


@pytest.mark.full
def test_autotuned_attention_gives_the_same_result(kernel_device, clock):
    if kernel_device.type == "cuda":
        pytest.skip("a fake timer, and tiles of the interpreter")
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))

    def results():
        out = flash_attention(q, k, v)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    timed = results()
    assert clock.asked == 3
    chosen = tuning.read_choices(tuning.cache_file(CPU))
    assert [key.split(" 16 ")[0] for key in chosen] == ["attention dk and dv", "attention dq", "attention forward"]
    FAMILIES[INTERPRETER] = FAMILIES[INTERPRETER]._replace(measured=True)
    for one, other in zip(timed, results(), strict=True):
        assert relative_error(one, other) < 1e-6


def test_autotuned_projection_gives_the_same_result(kernel_device, clock, monkeypatch):
    """The kernel with sums beside the product, through pointers, and products by the library with a fold."""
    if kernel_device.type == "cuda":
        pytest.skip("a fake timer")
    monkeypatch.setitem(FAMILIES, INTERPRETER, FAMILIES[INTERPRETER]._replace(tma=False, measured=False))
    ways = projection_candidates(launch.device_facts(CPU))
    assert ways[0] == CUBLAS and 6 <= len(ways) <= 10
    head = Head(torch.randn(20, 40).bfloat16(), torch.randn(300, 40).bfloat16())
    transform, made = Transform(1.0, 0.0, 1.0, False), []
    for place in range(2):
        clock.times = [1.0] * len(ways)
        clock.times[place] = 0.5
        tuning._used.clear()
        tuning.cache_file(CPU).unlink(missing_ok=True)
        out = ChunkLogits(torch.zeros(20, 320, dtype=torch.float16)[:, :300], *(torch.zeros(20, 2) for _ in range(3)))
        projection.project(head, head.hidden, out, transform)
        made.append(out)
    assert clock.asked == 2
    for one, other in zip(*made, strict=True):
        assert relative_error(one, other) < 1e-3
