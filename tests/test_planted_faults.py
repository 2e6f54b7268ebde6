"""Single-line faults in a copy of the packages: the test that is named after what is wrong fails (tests/planted.py)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS

from distill.doctor.machine_checks import CHECKS

ROOT = Path(__file__).resolve().parents[1]


def run_tests(copy: Path, *ids: str) -> subprocess.CompletedProcess[str]:
    """Run tests against the packages in `copy`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(map(str, (copy, ROOT, ROOT / "tests")))
    environment |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-x",
        "-m",
        "full or not full",
        "-p",
        "no:cacheprovider",
    ]
    paths = f"pythonpath={copy} {ROOT} {ROOT / 'tests'}"
    return subprocess.run(
        [*command, "-o", paths, *ids], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copies of both packages, sound between tests."""
    folder = tmp_path_factory.mktemp("planted")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels" / "distill_kernels", folder / "distill_kernels", ignore=ignored)
    shutil.copytree(ROOT / "distill", folder / "distill", ignore=ignored)
    return folder


def test_the_table_names_lines_and_checks_of_the_doctor():
    kernels = [fault for fault in FAULTS if fault.path.startswith("distill_kernels/")]
    assert len(kernels) >= 30 and len(FAULTS) - len(kernels) >= 4
    for fault in FAULTS:
        path = ROOT / ("kernels" if fault in kernels else "") / fault.path
        assert path.read_text().count(fault.right) == 1, fault
        assert fault.example is None or fault.example in CHECKS, fault
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


@pytest.mark.full
def test_without_a_fault_all_these_tests_pass(copy):
    done = run_tests(copy, *{fault.test_id for fault in FAULTS})
    assert done.returncode == 0, done.stdout[-3000:]


# half a minute of two cores for three of them: a third under `-m full`, all with `-m "full or slow or not full"`
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, fault in enumerate(FAULTS)],
    ids=[fault.what for fault in FAULTS],
)
def test_the_test_named_after_it_sees(copy, fault):
    path = copy / fault.path
    right = path.read_text()
    path.write_text(right.replace(fault.right, fault.wrong))
    try:
        done = run_tests(copy, fault.test_id)
    finally:
        path.write_text(right)
    # an assertion that fails, not a file that cannot be imported
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert "AssertionError" in done.stdout or "Mismatched elements" in done.stdout, done.stdout[-3000:]
