"""Single-line faults in a copy of the packages: the test that is named after what is wrong fails (tests/planted.py)."""

import os
import shutil
from pathlib import Path

import pytest
from forked import TEST_FOLDERS
from forked_pytest import Pytests
from planted import FAULTS

from distill.doctor.machine_checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("-n", "0", "-q", "-x", "-m", "full or not full", "-p", "no:cacheprovider")


@pytest.fixture(scope="module")
def run_tests(copy):
    """Runs tests by their ids against the packages in `copy`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(map(str, (copy, ROOT, *TEST_FOLDERS)))
    environment |= {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    paths = "pythonpath=" + " ".join(map(str, (copy, ROOT, *TEST_FOLDERS)))
    with Pytests(environment, ROOT) as pytests:
        yield lambda *ids: pytests.run(*OPTIONS, "-o", paths, *ids)


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
def test_without_a_fault_all_these_tests_pass(run_tests):
    done = run_tests(*{fault.test_id for fault in FAULTS})
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what for fault in FAULTS])
def test_the_test_named_after_it_sees(copy, run_tests, fault):
    path = copy / fault.path
    right = path.read_text()
    path.write_text(right.replace(fault.right, fault.wrong))
    try:
        done = run_tests(fault.test_id)
    finally:
        path.write_text(right)
        # bytecode is known by its source's second and size, which a fault may leave as they are
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()
    # an assertion that fails, not a file that cannot be imported
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:]
    assert "AssertionError" in done.stdout or "Mismatched elements" in done.stdout, done.stdout[-3000:]
