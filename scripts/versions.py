"""The suite's core on the oldest and the newest torch and transformers that pyproject.toml allows.

python -m scripts.versions install transformers-oldest transformers-newest  # to ~/.cache/distill-versions, 0.3 GB each
python -m scripts.versions install torch-oldest torch-newest                # 7 GB each: their wheels bring CUDA
python -m scripts.versions                                                  # runs the core on all that are installed

An installation is a folder of packages that is put before those of this environment; everything else is as it is here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = Path(os.environ.get("DISTILL_VERSIONS", Path.home() / ".cache" / "distill-versions"))
TRIES = 3  # of a download
# the losses' definitions and kernels, a layer, launch plans, patched models, a run, and one that is resumed
CORE = (
    "tests/ops/test_torch_internals.py",
    "tests/losses/test_divergence.py",
    "tests/losses/test_linear_loss.py",
    "tests/ops/test_rms_norm.py",
    "tests/ops/test_launch_plans.py",
    "tests/models/test_patching.py::test_outputs_and_gradients_stay",
    "tests/runs/test_run.py::test_a_run_writes_everything_and_the_student_loads",
    "tests/runs/test_run.py::test_interrupted_and_resumed_equals_uninterrupted",
)


class Version(NamedTuple):
    """Versions of packages beside which the core is run.

    Attributes:
        package: Package whose bound in pyproject.toml it is.
        oldest: Take the oldest release in place of the newest.
        more: Further requirements of the installation.
        left_out: Tests of the core that cannot run there, by the reason.
    """

    package: str
    oldest: bool
    more: tuple[str, ...] = ()
    left_out: Mapping[str, str] = MappingProxyType({})


VERSIONS = {
    # numpy as it is here: other packages were compiled for it
    "transformers-oldest": Version("transformers", True, ("numpy==2.4.6",)),
    "transformers-newest": Version("transformers", False, ("numpy==2.4.6",)),
    "torch-oldest": Version(
        "torch",
        True,
        ("numpy<2.4",),  # which Triton's interpreter needs until 3.6
        {
            "tests/losses/test_linear_loss.py::test_weight_gradient_accumulation_rounds_once": "the interpreter of "
            "Triton 3.5 takes strides of tensor descriptors for bytes"
        },
    ),
    "torch-newest": Version("torch", False),
}


def requirement(version: Version) -> str:
    """Return the requirement of pyproject.toml for a package, narrowed to the oldest release if that is wanted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (each for each in project["dependencies"] if re.match(rf"{version.package}\W", each))
    oldest = re.search(r">=\s*([\d.]+)", bounds)
    assert oldest is not None, f"pyproject.toml: expected a lower bound of {version.package}, got {bounds}"
    return f"{version.package}=={oldest[1]}.*" if version.oldest else bounds


def install(name: str) -> None:
    """Install the packages of a version, in place of an earlier installation."""
    version = VERSIONS[name]
    unfinished = PLACE / f"{name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished)]
    for attempt in range(1, TRIES + 1):
        done = subprocess.run([*command, requirement(version), *version.more], check=False)
        if done.returncode == 0:
            break
        if attempt == TRIES:
            raise SystemExit(f"{name}: pip could not install {requirement(version)}")
    shutil.rmtree(PLACE / name, ignore_errors=True)
    unfinished.rename(PLACE / name)


def run_core(name: str) -> bool:
    """Run the core on an installation; return whether it passed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLACE / name), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    versions = "import torch, triton, transformers as t; print(torch.__version__, triton.__version__, t.__version__)"
    made = subprocess.run([sys.executable, "-c", versions], env=environment, capture_output=True, text=True, check=True)
    torch, triton, transformers = made.stdout.split()
    print(f"== {name}: torch {torch}, triton {triton}, transformers {transformers}", flush=True)
    left_out = [f"--deselect={test}" for test in VERSIONS[name].left_out]
    for test, why in VERSIONS[name].left_out.items():
        print(f"left out: {test}: {why}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-r",
        "fE",
        "--disable-warnings",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.run([*command, *left_out, *CORE], cwd=ROOT, env=environment, check=False).returncode == 0


def main(arguments: list[str]) -> None:
    """Install what the command line names, or run the core on what is installed."""
    if arguments[:1] == ["install"] and arguments[1:] and set(arguments[1:]) <= set(VERSIONS):
        for name in arguments[1:]:
            install(name)
        return
    if arguments and not set(arguments) <= set(VERSIONS):
        raise SystemExit(f"{__doc__}\nexpected names among {', '.join(VERSIONS)}, got {' '.join(arguments)}")
    failed = []
    for name in arguments or VERSIONS:
        if not (PLACE / name).exists():
            print(f"== {name}: not installed (python -m scripts.versions install {name})", flush=True)
        elif not run_core(name):
            failed.append(name)
    if failed:
        raise SystemExit(f"failed on {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
