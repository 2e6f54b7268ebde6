"""Rules of the house that code can hold: who may import whom, and which names must stay free."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels" / "distill_kernels"


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def test_kernels_import_only_torch_and_triton():
    allowed = set(sys.stdlib_module_names) | {"torch", "triton", "distill_kernels"}
    files = sorted(KERNELS.rglob("*.py"))
    assert files
    for path in files:
        foreign = imported_packages(path) - allowed
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_the_name_kernels_stays_free():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py shadows Hugging Face's kernels"
    assert not (ROOT / "tests" / "kernels").exists(), "tests/kernels becomes a package named kernels"


@pytest.mark.parametrize(
    "module, forbidden",
    [
        ("distill", ("torch", "transformers")),
        ("distill.recipe", ("torch", "transformers", "datasets")),
        ("distill.cli", ("torch", "transformers", "datasets")),
    ],
)
def test_light_modules_import_nothing_heavy(module, forbidden):
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]", f"import {module} brings in {result.stdout.strip()}"


def test_kernels_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, 'kernels');"
        "import distill_kernels; print(sorted(distill_kernels.__all__)[:1])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_files_keep_to_one_idea():
    for folder in ("distill", "kernels", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            length = len(path.read_text().splitlines())
            assert length <= 450, f"{path.relative_to(ROOT)} has {length} lines"
            assert path.stem != "utils", path
