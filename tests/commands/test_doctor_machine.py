"""The doctor's checks of each kernel on this machine: wrong results and processes that end are findings."""

import functools
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys

import distill_kernels
import pytest
import torch
from distill_kernels.examples import VALUE_TYPES
from distill_kernels.losses import DIVERGENCES
from distill_kernels.quantisation.formats import FORMATS
from forked import PLACES, TEST_FOLDERS
from helpers import faulty_job
from test_machine import ROOT

from distill.doctor import machine, machine_checks
from distill.doctor.check_result import CheckResult
from distill.doctor.machine_checks import CHECKS

MUTATIONS = {
    "layers/rope.py": ("x2 * cos2 + x1 * sin2", "x2 * cos2 - x1 * sin2"),
    "layers/rms_norm_kernels.py": (
        "dx = (dnormed - normed * mean_dn_n) * rstd",
        "dx = (dnormed - normed * mean_dn_n * 0.9) * rstd",
    ),
}


ONLY = """
import json, sys, torch
from interpreter import mend_interpreter
mend_interpreter()
from distill.doctor.machine_checks import check_kernel
print(json.dumps({name: check_kernel(name, torch.device("cpu")).passed for name in sys.argv[1:]}))
"""


LAUNCHED = """
import dataclasses, json, torch
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from interpreter import mend_interpreter
mend_interpreter()
from distill_kernels.examples import EXAMPLES, TINY
from distill_kernels.launch import interpreted
from distill.doctor.machine_checks import results_of
interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
launched, run = set(), InterpretedFunction.run
def note(self, *args, **settings):
    launched.add((self.fn.__module__.partition(".")[2], self.fn.__name__))
    return run(self, *args, **settings)
InterpretedFunction.run = note
with interpreted():
    for example in EXAMPLES.values():
        for dtype in example.dtypes:
            tensors = example.tensors(TINY)
            floating = [key for key, x in tensors.items() if x.is_floating_point() and key not in example.fixed]
            results_of(example, tensors | {key: tensors[key].to(dtype) for key in floating})
print(json.dumps(sorted(launched)))
"""
# kernels of compiled.jsonl that no example launches through the interpreter
NOT_LAUNCHED = {
    # for long rows and caches, of which the interpreter would take minutes
    *(
        ("extras.row_softmax", f"_{name}")
        for name in ("forward_loop", "backward_loop", "forward_split_statistics", "forward_split_write")
    ),
    *(("extras.row_softmax", f"_backward_split_{name}") for name in ("product", "write")),
    ("decoding.cached_attention", "_combine_kernel"),
    ("attention.split_kv", "_merge_kernel"),
    ("attention.split_kv", "_add_kernel"),
    ("layers.layer_norm_kernels", "_column_kernel"),
    # of 16-bit weights of more than one chunk of rows
    ("losses.accumulate", "_accumulate_kernel"),
    ("losses.accumulate", "_scaled_accumulate_kernel"),
    # where a step may be skipped
    ("optim.adamw_kernels", "count_kernel"),
    # of the decoding step, which takes a model: tests/models/test_fused_decode.py
    ("decoding.attention", "_attention_kernel"),
    ("decoding.fused_linear", "_product_kernel"),
    *(("decoding.tokens", f"_{name}_kernel") for name in ("embed", "finish", "scores")),
}


@pytest.mark.full
def test_a_kernel_that_is_wrong_is_named(tmp_path):
    shutil.copytree(ROOT / "kernels" / "distill_kernels", tmp_path / "distill_kernels")
    for name, (right, wrong) in MUTATIONS.items():
        path = tmp_path / "distill_kernels" / name
        assert right in path.read_text(), name
        path.write_text(path.read_text().replace(right, wrong))
    expected = {"rope": False, "rms_norm": False, "add_rms_norm": False, "layer_norm": True, "swiglu": True}
    path = os.pathsep.join(map(str, (tmp_path, ROOT, *TEST_FOLDERS)))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", ONLY, *expected]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == expected


# what was checked before the list followed from the examples
CHECKED_BEFORE = """
fused_kl_loss; fused_jsd_loss; fused_cross_entropy_loss; TeacherHead; fused_top_k_kl_loss: bucket; kl_div; jsd
cross_entropy; kl_probabilities: batchmean; rms_norm; add_rms_norm; layer_norm; swiglu; geglu; bias_gelu
rope: whole heads; softmax; flash_attention: causal; flash_attention: causal, packed documents
decode_attention: one token; KVCache; sample_tokens: greedy; split_k_linear; triton_linear; fp8_linear; lora_linear
FusedAdamW: three steps
"""


def test_every_divergence_quantiser_and_public_op_is_checked():
    assert {name for name in re.split(r"[;\n] ?", CHECKED_BEFORE) if name} <= set(CHECKS)
    for kind in DIVERGENCES:
        assert {f"fused_distillation_loss: {kind}", f"distillation_loss: {kind}"} <= set(CHECKS)
    for name, form in FORMATS.items():
        assert f"fake_quantise_into: {name}" in CHECKS and (f"learned_gradients: {name}" in CHECKS) == form.is_learned
    assert set(distill_kernels.__all__) - VALUE_TYPES <= set(CHECKS)


@pytest.mark.full
def test_every_compiled_kernel_has_an_example_or_a_reason():
    rows = [json.loads(line) for line in (ROOT / "scripts" / "compiled.jsonl").read_text().splitlines()]
    compiled = {(row["module"], row["kernel"]) for row in rows}
    path = os.pathsep.join(map(str, PLACES))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    made = subprocess.run([sys.executable, "-c", LAUNCHED], capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    launched = {(module, kernel) for module, kernel in json.loads(made.stdout)}
    assert compiled - launched == NOT_LAUNCHED


@pytest.fixture(scope="module")
def all_imported():
    """Kernels are made for the interpreter where it is chosen when their module is imported, and tests unset it."""
    for module in pkgutil.walk_packages(distill_kernels.__path__, "distill_kernels."):
        importlib.import_module(module.name)


@pytest.mark.usefixtures("all_imported")
@pytest.mark.parametrize("name", CHECKS)
def test_a_result_that_is_off_by_a_hundredth_fails(name, monkeypatch):
    """The third result, after the exact one and that of the reference in fp32, is the one that is judged."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check, calls = CHECKS[name], []
    assert machine_checks.check_kernel(name, torch.device("cpu")).passed

    @functools.wraps(check.run)
    def off(**tensors):
        made = check.run(**tensors)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        calls.append(outputs[-1].dtype)
        if len(calls) == 3:
            outputs[-1] = outputs[-1] * 1.01 + (not outputs[-1].is_floating_point())
        return outputs

    monkeypatch.setitem(CHECKS, name, check._replace(run=off))
    assert machine_checks.check_kernel(name, torch.device("cpu")).passed is False
    assert len(calls) == 3


@pytest.mark.full
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
