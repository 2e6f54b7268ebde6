"""Public names of both packages: found when first used, the same everywhere, as type checkers see them."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAZY = {
    "distill": ROOT / "distill" / "__init__.py",
    "distill_kernels": ROOT / "kernels" / "distill_kernels" / "__init__.py",
}


def test_kernels_are_imported_without_the_compiler():
    """torch._dynamo and what it imports are 800 modules, more than a second."""
    every = (
        "import sys, distill_kernels as k; print([getattr(k, n) for n in k.__all__] and 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", every], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_are_those_that_type_checkers_see(package):
    """Names in `__all__`, imports under TYPE_CHECKING and the table that is read at run time agree."""
    module = importlib.import_module(package)
    seen = {"__version__"} if package == "distill" else set()
    for block in ast.parse(LAZY[package].read_text()).body:
        if isinstance(block, ast.If):
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                names = {alias.name for alias in node.names}
                for name in names - {"*"}:
                    assert getattr(module, name) is getattr(importlib.import_module(node.module), name)
                seen |= names - {"*"}
    assert seen == set(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'softmaxx'"):
        module.softmaxx  # noqa: B018


def test_names_of_the_kernels_pickle_and_are_the_same_everywhere():
    import distill_kernels

    import distill

    for name in distill_kernels.__all__:
        found = getattr(distill_kernels, name)
        assert getattr(distill, name) is found
        assert pickle.loads(pickle.dumps(found)) is found
