"""Imports: how many of our files each entry point loads, and public names that are found when first used."""

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_models

from scripts import house

ROOT = Path(__file__).resolve().parents[1]
LAZY = {
    "distill": ROOT / "distill" / "__init__.py",
    "distill_kernels": ROOT / "kernels" / "distill_kernels" / "__init__.py",
}


LOSSES = "from distill_kernels import FusedKLLoss, FusedAdamW, rms_norm"
PRIMITIVE = "from distill_kernels import softmax"
MOST_OF_A_RUN = 124
RUN = """
import contextlib
os.chdir({folder!r})
with contextlib.redirect_stdout(sys.stderr):
    from distill import recipe, run
    run.run(recipe.load("plain.yaml"))
"""
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false}
train: {steps: 2, batch_size: 2, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, text and a recipe."""
    folder = tmp_path_factory.mktemp("plain")
    text = "\n".join(f"The teacher explains line {number} and the student listens." for number in range(40))
    save_models(folder, text=text, teacher={"layers": 3}, student={"seed": 1})
    (folder / "plain.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    """Modules that each statement loads, in processes that are forked from one."""
    imports = (f"import {module}" for module, _, _ in house.LOADED)
    return house.loaded_modules(LOSSES, PRIMITIVE, RUN.format(folder=str(folder)), *imports)


@pytest.mark.parametrize("module, package, most", house.LOADED)
def test_entry_points_load_few_files(loaded, module, package, most):
    found = house.of_package(loaded[f"import {module}"], package)
    assert module in found or not module.startswith(f"{package}.")
    assert len(found) <= most, "\n".join(found)


def test_a_whole_run_with_a_local_teacher_loads_few_files(loaded, folder):
    assert (folder / "runs/plain/student/model.safetensors").is_file()
    ours = house.of_package(loaded[RUN.format(folder=str(folder))], "distill")
    assert len(ours) <= MOST_OF_A_RUN, "\n".join(ours)
    unused = ("sharded", "fp8", "served", "stored", "patching", "prune", "generation", "resuming")
    assert [name for name in ours if any(part in name for part in unused)] == []


def test_the_default_import_of_the_kernels_loads_no_primitive(loaded):
    assert "distill_kernels.losses.modules" in loaded[LOSSES]
    assert not [name for name in loaded[LOSSES] if name.startswith("distill_kernels.primitives")]
    primitives = [name for name in loaded[PRIMITIVE] if "primitives." in name]
    assert primitives == ["distill_kernels.primitives.row_softmax"]


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
