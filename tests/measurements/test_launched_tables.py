"""Tables of launched kernels beside PyTorch's and beside published figures: ratios, bounds and what is missing."""

import math

import pytest

from scripts import launched_tables
from scripts.launched_tables import OURS, REPORTED


def row(shape, candidate, ms, **more):
    made = {"gpu": launched_tables.GPU, "case": "earlier", "shape": shape, "candidate": candidate, "ms": ms, **more}
    return made | {"torch": "2", "triton": "3", "driver": "5", "commit": "abc", "date": "2026-01-01"}


def test_the_docs_table_divides_pytorchs_time_by_ours():
    rows = []
    for name in REPORTED:
        for way, ours in (("launched", 2.0), ("in a graph", 1.0)):
            rows.append(row(f"{name}, {way}", OURS, ours))
            note = "ours 3 x; our bytes at a copy's rate: 4.25 x; more"
            rows.append(row(f"{name}, {way}", "naive", 3.0, note=note))
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
