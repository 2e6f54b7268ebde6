"""The repository holds files of known kinds only, one version, and hooks that run what CI runs."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import distill
from scripts import tracked
from scripts.tracked import File, fault

ROOT = Path(__file__).resolve().parents[2]


def test_every_tracked_file_is_of_a_known_kind():
    files = tracked.tracked()
    assert len(files) > 500
    assert [f"{file.path}: {fault(file)}" for file in files if fault(file)] == []


@pytest.mark.parametrize(
    "path, mode, size",
    [
        (".dmypy.json", "100644", 70),
        ("distill/.dmypy.json", "100644", 70),
        ("model.safetensors", "100644", 70),
        ("distill/data/rows.pkl", "100644", 70),
        ("tests/test_a.py.orig", "100644", 70),
        ("scripts/run.sh", "100644", 70),
        ("build/lib/a.py", "100644", 70),
        ("distill/run.py", "100755", 70),
        ("distill/link.py", "120000", 70),
        ("scripts/bench/results/gpu.jsonl", "100644", 2 << 20),
    ],
)
def test_other_kinds_modes_and_sizes_are_refused(path, mode, size):
    assert fault(File(path, mode, size))


def test_the_check_names_the_file_and_fails(tmp_path, capsys):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "README.md").write_text("A page.")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    assert tracked.main(tmp_path) == 0
    (tmp_path / ".dmypy.json").write_text("{}")
    assert tracked.main(tmp_path) == 0, "what is not tracked is nobody's concern"
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    capsys.readouterr()
    assert tracked.main(tmp_path) == 1
    assert capsys.readouterr().out.startswith(".dmypy.json: expected one of .md, ")


def test_both_distributions_have_the_version_of_the_package():
    toolkit, kernels = (
        tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "kernels/pyproject.toml")
    )
    assert toolkit["project"]["dynamic"] == ["version"] and "version" not in toolkit["project"]
    assert toolkit["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "distill.__version__"}
    assert kernels["project"]["version"] == distill.__version__


def test_the_changelog_opens_with_what_is_unreleased_and_names_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]"
    released = [section for section in sections if f"[{distill.__version__}]" in section]
    assert released == sections[1:2] if len(sections) > 1 else f"released as {distill.__version__}" in text


def test_hooks_run_what_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    commands = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert [entry for entry in entries if entry not in commands] == []
    tools = ("lint-imports", "ruff", "mypy", "zensical", "python -m scripts.docs", "python -m scripts.tracked")
    assert {command for command in commands if command.startswith(tools)} == set(entries)
