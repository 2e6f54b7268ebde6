"""The examples run, and the kernels install without the trainer."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from two_ranks import run_as_two

ROOT = Path(__file__).resolve().parents[2]


EXAMPLES = ROOT / "scripts" / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny products gain nothing from a second thread and lose much where the machine is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_own_loop_learns():
    losses = load("own_loop").main()
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.full
def test_graphed_loop_learns():
    losses, replays = load("graphed_loop").main()
    assert losses[-1] < 0.9 * losses[0] and replays == 0, losses


@pytest.mark.gpu
def test_graphed_loop_replays_to_the_same_losses():
    example = load("graphed_loop")
    losses, replays = example.main()
    assert replays >= 50 and losses == example.main(graphed=False)[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 85


@pytest.mark.full
def test_fsdp2_learns_the_same_on_one_and_two_processes():
    outputs = [run_as_two(EXAMPLES / "fsdp2.py", processes=count) for count in (1, 2)]
    one, two = ([float(number) for number in re.findall(r"\d+\.\d+", out)] for out in outputs)
    assert one[2] < 0.8 * one[0] and len(one) == 4
    assert two == pytest.approx(one, rel=1e-3)  # losses and gradient norms


def test_inside_trl_learns_the_same_for_any_accumulation():
    pytest.importorskip("trl", reason="needs pip install trl==1.16.0")
    example = load("trl_trainer")
    losses = example.main(steps=20)
    assert losses[-1] < 0.95 * losses[0], losses
    assert example.main(steps=3, accumulate=1) == pytest.approx(example.main(steps=3, accumulate=4), rel=1e-3)


def test_inside_transformers_trainer_learns_the_same_as_unpatched():
    example = load("hf_trainer")
    losses = example.main(steps=20)
    assert losses[-1] < 0.9 * losses[0], losses
    assert example.main(steps=3) == pytest.approx(example.main(steps=3, patched=False), rel=1e-4)


def test_inside_sft_trainer_learns_the_same_as_unpatched():
    trl = pytest.importorskip("trl", reason="needs pip install trl==1.16.0")
    example = load("trl_sft")
    losses = example.main(steps=20)
    assert losses[-1] < 0.9 * losses[0], losses
    plain = example.main(steps=3, trainer_class=trl.SFTTrainer, patched=False)
    assert example.main(steps=3) == pytest.approx(plain, rel=1e-4)
    assert example.main(steps=3, trainer_class=trl.SFTTrainer) == pytest.approx(plain, rel=1e-4)


@pytest.mark.full
def test_lightning_style_module_learns():
    losses, accuracies = load("lightning_style").main()
    assert losses[-1] < 0.7 * losses[0] and accuracies[-1] > accuracies[0], (losses, accuracies)


@pytest.mark.plain("True")
@pytest.mark.parametrize("patch_first", [True, False])
def test_example_with_lora_learns_and_loads(patch_first):
    losses, loaded = load("peft_lora").main(steps=30, patch_first=patch_first)
    assert losses[-1] < 0.9 * losses[0] and loaded == pytest.approx(losses[-1], rel=1e-4), (losses, loaded)


@pytest.mark.full
def test_kernels_are_a_package_of_their_own(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "kernels"  # a copy, so that building leaves nothing in the repository
    import shutil

    shutil.copytree(ROOT / "kernels", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(tmp_path), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("distill_kernels-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"distill_kernels"} and "distill_kernels/py.typed" in names
    needed = [line.split(":", 1)[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert sorted(line.split(">")[0] for line in needed) == ["torch", "triton"]
    shipped = {name for name in names if name.endswith(".py")}
    there = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels" / "distill_kernels").rglob("*.py")}
    assert shipped == there
    code = "import sys, distill_kernels; print(distill_kernels.__file__, 'transformers' in sys.modules)"
    where = tmp_path / "site"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(where)!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stdout.split() == [str(where / "distill_kernels" / "__init__.py"), "False"], run.stderr


def test_both_packages_require_the_same_versions():
    whole, kernels = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in ("", "kernels")
    )
    assert set(kernels["dependencies"]) <= set(whole["dependencies"])
    assert kernels["requires-python"] == whole["requires-python"]
