"""The kernels as Hugging Face's `kernels` loads them: from a folder, beside the package, under names of their own."""

import importlib
import importlib.util
import json
import pkgutil
import sys
import tomllib
from pathlib import Path

import distill_kernels
import pytest
import torch

from scripts import hub_kernel

SOURCE = Path(distill_kernels.__file__).parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub_kernel.write(SOURCE, folder)
    return folder


def loaded(folder, backend="cpu"):
    """Load a variant as `kernels` 0.17 does: its __init__.py as a module with the metadata's id for a name."""
    variant = folder / "build" / f"torch-{backend}"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def losses(package):
    torch.manual_seed(0)
    student, teacher = torch.randn(8, 32, requires_grad=True), torch.randn(8, 64)
    heads = torch.randn(96, 32, requires_grad=True), torch.randn(96, 64)
    loss = package.FusedKLLoss()(student, heads[0], teacher, heads[1])
    compiled = torch.compile(package.FusedKLLoss(), fullgraph=True, backend="eager")(
        student, heads[0], teacher, heads[1]
    )
    return [loss, compiled, *torch.autograd.grad(loss, (student, heads[0]))]


@pytest.mark.full
def test_it_computes_what_the_package_does_beside_it(built):
    kernel = loaded(built)
    assert all(map(torch.equal, losses(kernel), losses(distill_kernels)))
    assert kernel.FusedKLLoss is not distill_kernels.FusedKLLoss and set(kernel.__all__) == set(distill_kernels.__all__)
    for name in kernel.__all__:
        assert getattr(kernel, name).__module__.startswith(f"{kernel.__name__}."), name


def test_every_module_is_imported_from_the_folder(built):
    kernel = loaded(built, "cuda")
    before = {name for name in sys.modules if name.startswith("distill_kernels.")}
    found = [module.name for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}.")]
    for name in found:
        importlib.import_module(name)
    assert len(found) > 50
    assert {name for name in sys.modules if name.startswith("distill_kernels.")} == before


def test_its_description_names_the_folders_that_are_there(built):
    general = tomllib.loads((built / "build.toml").read_text())["general"]
    variants = [built / "build" / f"torch-{backend}" for backend in general["backends"]]
    assert sorted(variants) == sorted((built / "build").iterdir())
    assert {json.loads((variant / "metadata.json").read_text())["name"] for variant in variants} == {general["name"]}


def test_a_name_that_would_lead_into_the_package_is_refused():
    assert hub_kernel.relocated("from distill_kernels.a.b import c\n", 1, "ops") == "from ..a.b import c\n"
    assert (
        hub_kernel.relocated('names = {"distill_kernels.a": "b"}\n', 0, "ops") == 'names = {__package__ + ".a": "b"}\n'
    )
    with pytest.raises(ValueError, match="line 1: expected no name of the package, got import distill_kernels as x"):
        hub_kernel.relocated("import distill_kernels as x\n", 0, "ops")


def test_the_library_loads_it(built):
    rust = pytest.importorskip("kernels._rust")  # the folder kernels/ of this repository is a package of that name
    kernels = importlib.import_module("kernels")
    rust.Build.open(built)  # parses build.toml
    assert all(map(torch.equal, losses(kernels.get_local_kernel(built, backend="cpu")), losses(distill_kernels)))
