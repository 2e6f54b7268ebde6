"""The doctor's checks of each kernel on this machine: wrong results and processes that end are findings."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import faulty_job
from test_machine import ROOT

from distill.doctor import machine, machine_checks
from distill.doctor.check_result import CheckResult
from distill.doctor.machine_checks import CHECKS

MUTATIONS = {
    "layers/rope.py": ("x2 * cos2 + x1 * sin2", "x2 * cos2 - x1 * sin2"),
    "layers/rms_norm_kernels.py": (
        "dx = (dnormed - normed * along) * rstd",
        "dx = (dnormed - normed * along * 0.9) * rstd",
    ),
}


ONLY = """
import json, sys, torch
from interpreter import mend_interpreter
mend_interpreter()
from distill.doctor.machine_checks import check_kernel
print(json.dumps({name: check_kernel(name, torch.device("cpu")).passed for name in sys.argv[1:]}))
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
    }
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", ONLY, *expected]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == expected


@pytest.mark.parametrize("name", CHECKS)
def test_a_result_that_is_off_by_a_hundredth_fails(name, monkeypatch):
    """The third result, after the exact one and that of the reference in fp32, is the one that is judged."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check, calls = CHECKS[name], []
    assert machine_checks.check_kernel(name, torch.device("cpu")).passed

    @functools.wraps(check.call)
    def off(**tensors):
        made = check.call(**tensors)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        calls.append(outputs[-1].dtype)
        if len(calls) == 3:
            outputs[-1] = outputs[-1] * 1.01 + (not outputs[-1].is_floating_point())
        return outputs

    monkeypatch.setitem(CHECKS, name, check._replace(call=off))
    assert machine_checks.check_kernel(name, torch.device("cpu")).passed is False
    assert len(calls) == 3


def test_a_kernel_that_ends_its_process_is_the_finding_and_the_next_are_run():
    jobs = [(f"job {number}", functools.partial(faulty_job, number)) for number in range(6)]
    findings = list(machine.run_in_processes(jobs, "cpu", limit_s=2.0, method="fork"))
    assert [(finding.name, finding.passed) for finding in findings] == [
        (f"job {number}", number in (0, 5)) for number in range(6)
    ]
    details = [finding.detail for finding in findings]
    assert details[1].startswith("the process ended by SIGKILL")
    assert details[2:5] == [
        "CUDA error",
        "the process ended with code 70: LLVM ERROR: no such register",
        "no result for 2 s: a compiler says something",
    ]


def test_checks_that_cannot_begin_are_one_finding():
    (finding,) = machine.run_in_processes([("job", faulty_job)] * 2, "no such device", method="fork")
    assert finding.name == "kernels" and finding.passed is False
    assert finding.detail.startswith("the process ended with code 1")


def test_every_gpu_is_rated_and_one_of_each_name_is_checked(monkeypatch, hardware):
    names = ["NVIDIA A", "NVIDIA A", "NVIDIA B"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    hardware.setattr(machine, "run_in_processes", lambda jobs, device: [CheckResult(device, True, str(len(jobs)))])
    every = str(len(CHECKS) + 2)
    assert [(result.name, result.detail) for result in machine.check_machine()] == [
        ("GPU 0 cuda:0", every),
        ("GPU 1 cuda:1", "2"),
        ("GPU 2 cuda:2", every),
    ]
    assert [name for name, _ in machine.RATES] == ["copy", "GEMM"]


def test_a_gpu_that_is_held_back_is_named():
    fine = machine_checks.rated("copy", 3000.0, "GB/s", 3350, machine_checks.LEAST_COPY)
    assert fine.passed and fine.detail == "3,000 GB/s, 90% of the data sheet's 3,350"
    slow = machine_checks.rated("copy", 1500.0, "GB/s", 3350, machine_checks.LEAST_COPY)
    assert not slow.passed and "45% of" in slow.detail and "nvidia-smi" in slow.detail
    assert machine_checks.rated("copy", 10.0, "GB/s", None, 0.6) == ("copy", True, "10 GB/s", None)
