"""The earlier report's table: every configuration is there, forms agree with fp64, notes hold the right ratios."""

import importlib
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from scripts import launched_tables
from scripts.bench import attention, earlier, layers
from scripts.bench.earlier import OURS, Comparison, Form, Line, lines, measure

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


class OnCpu(TorchFunctionMode):
    """Redirection of tensors that a benchmark puts on the GPU to the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture
def times(hardware):
    """Candidates take these milliseconds, by label: launched, and in a graph (whatever it repeats)."""
    found = {"launched": {}, "in a graph": {}}
    graphs = {}

    def graphed(run, calls):
        run()
        graphs[run] = calls
        return run

    def time_in_turn(candidates, **settings):
        calls = [graphs.get(run) for run in candidates.values()]
        for run in candidates.values():
            run()
        if "settle" in settings:
            return {n: found["in a graph"].get(n, 1.0) * c for n, c in zip(candidates, calls, strict=True)}
        return {n: found["launched"].get(n, 1.0) for n in candidates}

    hardware.setattr(earlier, "graphed", graphed)
    hardware.setattr(earlier, "time_in_turn", time_in_turn)
    hardware.setattr(earlier, "host_microseconds", lambda run, calls: 5.0)
    return found


def form(moved, error=0.0, **more):
    return Form(lambda: None, moved, {"y": error}, **more)


def test_every_reported_figure_is_there():
    found = lines()
    assert sorted(line.reported for line in found if line.reported) == sorted(
        [1.35, 1.70, 2.52, 2.71, 6.21, 10.55, 14.36, 14.65, 1.41, 3.36, 3.45, 2.13, 1.94, 1.94, 3.94]
    )
    names = [line.name for line in found]
    assert len(set(names)) == len(names) == 19
    assert len(lines(quick=True)) == 15


def test_notes_hold_both_ratios_and_what_the_bytes_allow(times):
    times["launched"] |= {OURS: 2.0, "slow": 3.0}
    times["in a graph"] |= {OURS: 0.5, "slow": 2.0}
    forms = {OURS: form(10**9), "slow": form(3 * 10**9, in_graph=lambda: None)}
    rows = measure(Line("name", 6.5, lambda: Comparison(forms, graph_calls=7)), copy=4.0)
    assert [row.shape for row in rows] == ["name, launched"] * 2 + ["name, in a graph"] * 2
    assert [row.ms for row in rows] == pytest.approx([2.0, 3.0, 0.5, 2.0])
    assert rows[2].tb_per_s == pytest.approx(2.0) and rows[2].floor_ratio == pytest.approx(2.0)
    assert rows[3].tb_per_s == pytest.approx(1.5)
    said = (
        "reported 6.50 x; ours 1.50 x launched; ours 4.00 x in a graph; ours at 2.00 TB/s, 50 % of a copy; "
        "this form moves 3.00 x our bytes; our bytes at a copy's rate: 8.00 x"
    )
    assert rows[1].note == said and rows[3].note == f"{said}; capturable=True, as a graph asks"
    assert not rows[0].note and rows[0].host_us == 5.0 and rows[2].host_us is None


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_wrong_results_are_not_timed(times, error):
    rows = measure(Line("name", None, lambda: Comparison({OURS: form(8), "wrong": form(8, error)})), copy=4.0)
    assert [math.isnan(row.ms) for row in rows] == [False, True, False, True]
    assert rows[1].note == "wrong, not timed"
    rows = measure(Line("name", 2.0, lambda: Comparison({OURS: form(8, error), "naive": form(8)})), copy=4.0)
    assert rows[1].note == "reported 2.00 x" and rows[1].ms == 1.0


def test_kernels_without_a_graph_are_timed_as_launched(times, hardware):
    def refuse(run, calls):
        raise RuntimeError("capture failed\nand more")

    hardware.setattr(earlier, "graphed", refuse)
    rows = measure(Line("name", 2.0, lambda: Comparison({OURS: form(8), "naive": form(8)})), copy=4.0)
    assert [math.isnan(row.ms) for row in rows] == [False, False, True, True]
    assert rows[1].note == "reported 2.00 x; ours 1.00 x launched"
    assert rows[3].note == "no graph holds it: capture failed"


@pytest.mark.parametrize("kind", ["forward", "backward", "bias_gelu", "adamw", "decode"])
def test_forms_agree(times, monkeypatch, hardware, limit, kind):
    """Each kind's forms, small and on the CPU, pass the gate and can be called again and again."""

    def draw(shape, dtype):
        batch, heads, kv_heads, positions, size = shape
        return [torch.randn(batch, positions, n, size, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads) * 2]

    hardware.setattr(attention, "draw", draw)
    adam = importlib.import_module("torch.optim.adam")  # torch.optim hides it
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda: ["cpu"])
    limit.setattr(layers, "ROTATE_BYTES", 1 << 14)
    limit.setattr(earlier, "ROTATE_BYTES", 1 << 14)
    build = {
        "forward": lambda: earlier._attention((2, 2, 2, 17, 16), False),
        "backward": lambda: earlier._attention((1, 2, 2, 17, 16), True),
        "bias_gelu": lambda: earlier._bias_gelu((2, 3, 256)),
        "adamw": lambda: earlier._adamw(1000),
        "decode": lambda: earlier._decode((2, 2, 2, 16, 16)),
    }[kind]
    with OnCpu():
        comparison = build()
        rows = measure(Line(kind, None, lambda: comparison), copy=4.0)
    assert len(rows) == 2 * len(comparison.forms) >= 4
    for row in rows:
        assert not math.isnan(row.ms), row
        assert max(row.error.values()) < 5e-3, row
        assert row.candidate == OURS or "ours 1.00 x launched; ours 1.00 x in a graph" in row.note


def test_a_wrong_form_fails_the_gate(times, hardware, limit):
    limit.setattr(layers, "ROTATE_BYTES", 1 << 14)
    right = layers.layers()["bias_gelu"]
    wrong = right._replace(ours=lambda x, bias: torch.nn.functional.relu(x + bias))
    hardware.setattr(layers, "layers", lambda: {"bias_gelu": wrong})
    with OnCpu():
        rows = measure(Line("gelu", 1.0, lambda: earlier._bias_gelu((2, 3, 256))), copy=4.0)
    assert [math.isnan(row.ms) for row in rows] == [True, False, False] * 2


def row(shape, candidate, ms, **more):
    made = {"gpu": launched_tables.GPU, "case": "earlier", "shape": shape, "candidate": candidate, "ms": ms, **more}
    return made | {"torch": "2", "triton": "3", "driver": "5", "commit": "abc", "date": "2026-01-01"}


def test_the_docs_table_divides_pytorchs_time_by_ours():
    rows = []
    for line in lines():
        for way, ours in (("launched", 2.0), ("in a graph", 1.0)):
            rows.append(row(f"{line.name}, {way}", OURS, ours))
            note = "ours 3 x; our bytes at a copy's rate: 4.25 x; more"
            rows.append(row(f"{line.name}, {way}", "naive", 3.0, note=note))
    table = launched_tables.kernels(rows).splitlines()
    assert len([line for line in table if "against naive" in line]) == 15
    assert all("| **1.50 x** | **3.00 x** | 4.25 x |" in line for line in table[2:17])
    with pytest.raises(ValueError, match="no row of"):
        launched_tables.kernels(rows[4:])


def test_generation_that_was_not_measured_here_says_so():
    shape = launched_tables.INFERENCE[0].shape
    rows = [row(shape, "Triton only", 512.0), row(shape, "ours on cuBLAS, CUDA graph", math.nan)]
    table = launched_tables.inference([{**one, "case": "cuda_free"} for one in rows]).splitlines()
    assert table[2] == "| Llama3-8B, H100 | 10.61 | 8.59 | 2.00 | not run | failed its check | not run |"
    assert table[4].endswith("| not run | not run | not run | not run |")


def test_host_times_of_launched_calls_stand_beside_pytorchs():
    rows = [
        {**row("64 x 2048", candidate, 1.0, host_us=host), "case": f"launch rms_norm, {direction}"}
        for direction, ours, theirs in (("forward", 15.0, 10.0), ("forward and backward", 60.0, 80.0))
        for candidate, host in (("distill", ours), ("PyTorch", theirs))
    ]
    table = launched_tables.launched(rows).splitlines()
    assert table[2] == "| rms_norm, 64 x 2048 | 15 | 10 | **1.50 x** | 60 | 80 | **0.75 x** |"
