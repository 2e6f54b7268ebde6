"""The doctor's checks of each kernel on this machine: wrong results and processes that end are findings."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_machine import ROOT

from distill.doctor import machine, machine_process
from distill.doctor.machine_checks import CHECKS, SMALL

MUTATIONS = {
    "layers/rope.py": ("x2 * cos2 + x1 * sin2", "x2 * cos2 - x1 * sin2"),
    "layers/rms_norm_kernels.py": (
        "dx = (dnormed - normed * along) * rstd",
        "dx = (dnormed - normed * along * 0.9) * rstd",
    ),
}


ONLY = """
import sys
from interpreter import mend_interpreter
mend_interpreter()
from distill.doctor import machine_process
machine_process.JOBS = [job for job in machine_process.JOBS if job[0] in sys.argv[1].split(",")]
machine_process.main("cpu", 0)
"""


@pytest.mark.full
def test_a_kernel_that_is_wrong_is_named(tmp_path):
    shutil.copytree(ROOT / "kernels" / "distill_kernels", tmp_path / "distill_kernels")
    for name, (right, wrong) in MUTATIONS.items():
        path = tmp_path / "distill_kernels" / name
        assert right in path.read_text(), name
        path.write_text(path.read_text().replace(right, wrong))
    expected = {
        "rotary embedding": False,
        "RMSNorm": False,
        "residual and RMSNorm": False,
        "LayerNorm": True,
        "SwiGLU": True,
        "GEMM": True,
    }
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", ONLY, ",".join(expected)]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    findings = [json.loads(line) for line in made.stdout.splitlines()]
    found = {row["finding"]["name"]: row["finding"]["passed"] for row in findings if "finding" in row}
    assert {name.split(",")[0]: passed for name, passed in found.items()} == expected, made.stderr


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_result_that_is_off_by_a_hundredth_fails(check):
    """On the references that a CPU runs, in fp32; what a layer in fp8 is allowed is five times that."""
    wrong = 0.01 if check.allowed is None else 0.1

    def off(**tensors):
        made = check.ours(**tensors)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        outputs[-1] = outputs[-1] * (1 + wrong) + (not outputs[-1].is_floating_point())
        return outputs

    assert machine_process.check_kernel(check, torch.device("cpu"), SMALL).passed
    assert machine_process.check_kernel(check._replace(ours=off), torch.device("cpu"), SMALL).passed is False


CHILD = """
import json, os, sys, time
first = int(sys.argv[2])
for number in range(first, 6):
    print("a compiler says something")
    print(json.dumps({"number": number}), flush=True)
    if number == 1: os.abort()
    if number == 3: print("LLVM ERROR: no such register", file=sys.stderr); os._exit(70)
    if number == 4: time.sleep(600)
    finding = {"name": f"job {number}", "passed": number != 2, "detail": "CUDA error" * (number == 2), "seconds": 0.5}
    print(json.dumps({"number": number, "finding": finding}), flush=True)
    if number == 2: sys.exit(3)
"""


@pytest.mark.full
def test_a_kernel_that_ends_its_process_is_the_finding_and_the_next_are_run(monkeypatch):
    monkeypatch.setattr(machine, "CHILD", [sys.executable, "-c", CHILD])
    monkeypatch.setattr(machine, "JOBS", [(f"job {number}", None) for number in range(6)])
    monkeypatch.setattr(machine, "LIMIT_S", 5.0)
    findings = list(machine._results("cuda:0", 0, "GPU 0 "))
    assert [(finding.name, finding.passed) for finding in findings] == [
        (f"GPU 0 job {number}", number in (0, 5)) for number in range(6)
    ]
    details = [finding.detail for finding in findings]
    assert details[1].startswith("the process ended by SIGABRT")
    assert details[2:5] == [
        "CUDA error",
        "the process ended with code 70: LLVM ERROR: no such register",
        "no output for 5 s",
    ]


def test_checks_that_cannot_begin_are_one_finding(monkeypatch):
    monkeypatch.setattr(machine, "CHILD", [sys.executable, "-c", "raise SystemExit('no module')"])
    (finding,) = machine._results("cuda:0", 0, "")
    assert finding == ("kernels", False, "the process ended with code 1: no module", None)


def test_every_gpu_is_rated_and_one_of_each_name_is_checked(monkeypatch):
    names = ["NVIDIA A", "NVIDIA A", "NVIDIA B"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(machine, "_results", lambda *given: [given])
    all_but_rates = len(machine.JOBS) - 2
    assert list(machine.check_machine()) == [
        ("cuda:0", 0, "GPU 0 "),
        ("cuda:1", all_but_rates, "GPU 1 "),
        ("cuda:2", 0, "GPU 2 "),
    ]
    assert [name for name, _ in machine.JOBS[all_but_rates:]] == ["copy", "GEMM"]


def test_a_gpu_that_is_held_back_is_named():
    fine = machine_process._rated("copy", 3000.0, "GB/s", 3350, machine_process.LEAST_COPY)
    assert fine.passed and fine.detail == "3,000 GB/s, 90% of the data sheet's 3,350"
    slow = machine_process._rated("copy", 1500.0, "GB/s", 3350, machine_process.LEAST_COPY)
    assert not slow.passed and "45% of" in slow.detail and "nvidia-smi" in slow.detail
    assert machine_process._rated("copy", 10.0, "GB/s", None, 0.6) == ("copy", True, "10 GB/s", None)
