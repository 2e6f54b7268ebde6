"""Rules of the house that no linter holds: what is imported when, which names stay free, what is documented.

Floors of packages, and what `distill.recipe` and the kernels may import, are held by `lint-imports`; docstrings of
modules and classes by ruff (both in pyproject.toml).
"""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"distill": ROOT / "distill", "distill_kernels": ROOT / "kernels" / "distill_kernels"}


@pytest.mark.parametrize(
    "statement, forbidden",
    [
        ("import distill", ("torch", "transformers")),
        ("import distill.recipe", ("torch", "transformers", "datasets")),
        ("from distill.__main__ import main; main()", ("torch", "transformers", "datasets")),
    ],
)
def test_help_and_validation_answer_without_torch(statement, forbidden):
    code = f"""
import sys
sys.argv = ["distill", "--help"]
try:
    {statement}
except SystemExit:
    pass
print([name for name in {forbidden!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]", f"{statement} brings in {result.stdout.splitlines()[-1]}"


def test_cases_of_a_plain_run_exist(pytestconfig):
    """Of all tests that were collected: a name that no case has any more would move its test under `-m full`."""
    if any("[" in given for given in pytestconfig.args):
        pytest.skip("single cases were asked for")
    assert pytestconfig.unknown_cases == []


@pytest.mark.full
def test_kernels_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, 'kernels');"
        "import distill_kernels; [getattr(distill_kernels, name) for name in distill_kernels.__all__]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_name_kernels_stays_free():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py shadows Hugging Face's kernels"
    assert not (ROOT / "tests" / "kernels").exists(), "tests/kernels becomes a package named kernels"


def private_imports(text: str, package: str) -> list[str]:
    """Return the private names that a file of `package` imports from other packages of ours."""
    found = []
    for module, names in re.findall(r"^\s*from ([\w.]+) import (\([^)]*\)|.*)", text, re.MULTILINE):
        if module.partition(".")[0] in PACKAGES and module.rpartition(".")[0] != package:
            private = re.findall(r"(?<![\w.])_(?!_)\w+", re.sub(r" as \w+|#.*", "", names))
            found += [f"{module}.{name}" for name in private]
    return found


def test_private_names_stay_in_their_package():
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            package = ".".join([name, *path.relative_to(folder).parent.parts])
            assert private_imports(path.read_text(), package) == [], path.relative_to(ROOT)
    assert private_imports("from distill.core.files import _lock", "distill.data") == ["distill.core.files._lock"]
    inner = "def f():\n    from distill.core.files import (\n        a as _a,\n        _lock,  # _no\n    )\n"
    assert private_imports(inner, "distill.data") == ["distill.core.files._lock"]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            assert found.__doc__, f"{package}.{name} has no docstring"
