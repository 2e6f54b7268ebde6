"""The command line as a person meets it: exit codes, one line for a mistake, quick answers, where a run goes."""

import json
import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import typer
from typer.models import OptionInfo

from distill.cli import app, run_command
from distill.core.folders import run_folder
from distill.recipe import RecipeError, load, parse

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "{teacher: {model: big}, student: {model: small}, data: {source: x.jsonl}, train: {steps: 10}}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def fake_run(monkeypatch):
    """Stands in for `distill.run`, so that the command is tested without training; records the call."""
    module = types.ModuleType("distill.run")
    module.calls, module.error = [], None

    def run(recipe, *, name, resume, lock, plugin):
        module.calls.append((recipe, name, resume))
        module.lock, module.plugin = lock, plugin
        if module.error is not None:
            raise module.error

    module.run = run
    monkeypatch.setitem(sys.modules, "distill.run", module)
    return module


def distill(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, as installed."""
    return subprocess.run(
        [sys.executable, "-m", "distill", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["validate", "-h"], ["recipes", "--help"]])
def test_help_shows_examples_and_succeeds(arguments, capsys):
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "Usage: distill" in out
    if "recipes" not in arguments:
        assert f"  distill {arguments[0] if len(arguments) > 1 else 'run'} " in out


def test_version_is_printed(capsys):
    from distill import __version__

    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"distill {__version__}\n"


def test_validate_prints_a_recipe_that_reads_back(folder, capsys):
    Path("x.jsonl").touch()
    assert run_command(["validate", "mine.yaml", "train.steps=7"]) == 0
    assert parse(capsys.readouterr().out) == load("mine.yaml", ["train.steps=7"])
    assert run_command(["validate", "mine.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load("mine.yaml").model_dump(mode="json")


def test_validate_answers_within_a_second_and_without_torch():
    code = (
        "import sys; from distill.cli import run_command; code = run_command(['validate', 'recipes/quickstart.yaml']);"
        "heavy = [name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules];"
        "print(heavy, file=sys.stderr); sys.exit(code)"
    )
    elapsed = []
    for _ in range(5):  # processor time, the least of five: the machine may be busy with other things
        start = os.times()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        end = os.times()
        elapsed.append(end.children_user + end.children_system - start.children_user - start.children_system)
        # before it, where the package with the model is not installed, a line that says so
        assert result.returncode == 0 and result.stderr.splitlines()[-1] == "[]", result.stderr
        assert "name: quickstart" in result.stdout
        if elapsed[-1] < 1:
            break
    assert min(elapsed) < 1, elapsed


def test_recipes_are_listed_and_copied(folder, capsys):
    assert run_command(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "quickstart  " in out and "llama-3.2-1b" in out
    assert run_command(["recipes", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert "quickstart" in {recipe["name"] for recipe in listing["recipes"]}
    assert run_command(["recipes", "copy", "quickstart", "own.yaml"]) == 0
    assert "wrote own.yaml" in capsys.readouterr().out
    assert load("own.yaml").name == "own"


@pytest.mark.full
def test_completion_offers_recipes(folder):
    from distill.commands.arguments import complete_recipe

    assert complete_recipe("quick") == ["quickstart"]
    assert complete_recipe("mi") == ["mine.yaml"]
    assert distill(_DISTILL_COMPLETE="complete_bash", COMP_WORDS="distill val", COMP_CWORD="1").stdout == "validate\n"


# ------------------------------------------------------------------------------------------------------------ mistakes


def test_exit_codes_of_the_installed_command():
    result = distill("validate", "recipes/quickstart.yaml", "train.steps=0")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        f"distill: {Path('recipes/quickstart.yaml')}: train.steps: expected a number at least 1, got 0\n"
    )
    assert distill("validate", "quickstart").returncode == 0
    assert distill("validate", "quickstart", "x=1", RANK="3").stderr.startswith("distill (rank 3): ")


def test_a_user_error_within_a_run_is_one_line_and_a_bug_is_not(folder, fake_run, capsys, monkeypatch):
    fake_run.error = ValueError("data.source: x.jsonl does not exist")
    assert run_command(["run", "mine.yaml"]) == 2
    assert capsys.readouterr().err == "distill: data.source: x.jsonl does not exist\n"
    monkeypatch.setenv("DISTILL_TRACE", "1")
    with pytest.raises(ValueError, match="does not exist"):
        run_command(["run", "mine.yaml"])
    fake_run.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(["run", "mine.yaml"])


# ---------------------------------------------------------------------------------------------------------------- runs


def test_run_hands_over_the_resolved_recipe(folder, fake_run):
    assert run_command(["run", "mine.yaml", "train.steps=3", "--name", "trial"]) == 0
    (recipe, name, resume) = fake_run.calls[0]
    assert recipe == load("mine.yaml", ["train.steps=3"])
    assert (name, resume) == ("trial", False) and fake_run.lock is None


def test_runs_are_written_to_output_dir(folder, fake_run, monkeypatch, capsys):
    monkeypatch.setenv("SCRATCH", str(folder / "scratch"))
    make_run(folder / "scratch" / "trial")
    for given in (["--output-dir", "scratch"], ["output_dir=$SCRATCH"]):
        assert run_command(["run", "mine.yaml", *given, "--name", "trial"]) == 2
        assert "scratch/trial already holds a run" in capsys.readouterr().err
    assert run_command(["run", "mine.yaml", "--output-dir", "scratch", "--name", "trial", "--resume-if-any"]) == 0
    assert fake_run.calls[-1][0].output_dir == "scratch" and fake_run.calls[-1][2]
    assert run_command(["run", "mine.yaml", "output_dir=$NOWHERE/runs"]) == 2
    assert "output_dir: '$NOWHERE/runs': expected variables that are set" in capsys.readouterr().err

    def run(recipe, *, name, **_):
        Path("scratch", "trial", "checkpoint-5").mkdir(parents=True)
        raise KeyboardInterrupt

    fake_run.run = run
    (folder / "scratch" / "trial" / "recipe.yaml").unlink()
    assert run_command(["run", "mine.yaml", "--output-dir", "scratch", "--name", "trial"]) == 130
    assert "distill run mine.yaml 'output_dir=\"scratch\"' --name trial --resume" in capsys.readouterr().err


def test_only_the_first_process_asks_for_a_free_folder(folder, fake_run, monkeypatch, capsys):
    make_run(folder / "runs" / "trial")
    monkeypatch.setenv("RANK", "1")
    fake_run.error = KeyboardInterrupt()
    assert run_command(["run", "mine.yaml", "--name", "trial"]) == 130
    assert len(fake_run.calls) == 1 and capsys.readouterr().err == ""


def test_ctrl_c_prints_how_to_resume(folder, fake_run, capsys):
    fake_run.error = KeyboardInterrupt()
    assert run_command(["run", "mine.yaml", "data.source=my chats.jsonl"]) == 130
    assert "interrupted before the first checkpoint" in capsys.readouterr().err

    def run(recipe, *, name, **_):
        Path("runs", name or "mine", "checkpoint-5").mkdir(parents=True)
        raise KeyboardInterrupt

    fake_run.run = run
    assert run_command(["run", "mine.yaml", "data.source=my chats.jsonl"]) == 130
    assert capsys.readouterr().err == (
        "distill: interrupted; continue with: distill run mine.yaml 'data.source=my chats.jsonl' --name mine --resume\n"
    )
    Path("own.py").write_text("TERMS = {}")
    assert run_command(["run", "mine.yaml", "--plugin", "own.py", "--name", "other"]) == 130
    assert "distill run mine.yaml --plugin own.py --name other --resume" in capsys.readouterr().err


def make_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: x")


def test_a_run_takes_the_next_free_folder(tmp_path):
    runs = tmp_path / "runs"
    assert run_folder("mine", runs=runs) == runs / "mine"
    make_run(runs / "mine")
    assert run_folder("mine", runs=runs) == runs / "mine-2"
    make_run(runs / "mine-2")
    assert run_folder("mine", runs=runs) == runs / "mine-3"
    (runs / "other").mkdir()
    assert run_folder("other", runs=runs) == runs / "other", "an empty folder holds no run"
    assert not (runs / "mine-3").exists(), "asking makes nothing"


def test_a_name_that_holds_a_run_is_refused_saying_how_to_resume(tmp_path):
    runs = tmp_path / "runs"
    assert run_folder("mine", name="trial", runs=runs) == runs / "trial"
    make_run(runs / "trial")
    with pytest.raises(RecipeError, match="already holds a run; --resume continues it"):
        run_folder("mine", name="trial", runs=runs)
    assert run_folder("mine", name="trial", resume=True, runs=runs) == runs / "trial"
    for bad in ("", "..", "a/b", "-x", "a\n", "x" * 101):
        with pytest.raises(RecipeError, match="--name: expected"):
            run_folder("mine", name=bad, runs=runs)


def test_links_to_what_is_not_there_are_named(tmp_path):
    runs, absent = tmp_path / "runs", tmp_path / "scratch"
    runs.symlink_to(absent)
    with pytest.raises(RecipeError, match=r"runs: is a link to .*scratch, which does not exist"):
        run_folder("mine", runs=runs)
    absent.mkdir()
    assert run_folder("mine", runs=runs) == runs / "mine"
    (runs / "mine").symlink_to(tmp_path / "gone")
    with pytest.raises(RecipeError, match=r"mine: is a link to .*gone, which does not exist"):
        run_folder("mine", name="mine", runs=runs)
    assert run_folder("mine", runs=runs) == runs / "mine-2", "a free name is one that a folder can be made of"
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"output_dir: expected a folder, got .*file is a file"):
        run_folder("mine", runs=tmp_path / "file")


def test_resume_takes_the_latest_run_of_the_recipe(tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(RecipeError, match="no run of mine"):
        run_folder("mine", resume=True, runs=runs)
    for name in ("mine", "mine-2", "mine-3"):
        make_run(runs / name)
    assert run_folder("mine", resume=True, runs=runs) == runs / "mine-3"


# ------------------------------------------------------------------------------------------------------------- library


@pytest.mark.full
def test_names_of_the_library_come_lazily():
    code = (
        "import sys, distill; assert 'torch' not in sys.modules; from distill import cli;"
        "from distill.core import console; assert 'torch' not in sys.modules; import distill_kernels;"
        "assert all(getattr(distill, name) is getattr(distill_kernels, name) for name in distill_kernels.__all__);"
        "assert set(distill_kernels.__all__) < set(dir(distill))\n"
        "try: distill.FusedNothing\n"
        "except AttributeError as error: print(error)"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "module 'distill' has no attribute 'FusedNothing'"


def test_tables_are_plain_outside_a_terminal(capsys):
    from distill.core.console import show_table

    show_table(["", "KL"], [["before", "12.5"], ["[after]", "3.1"]], numbers=True)
    assert capsys.readouterr().out == "           KL\nbefore   12.5\n[after]   3.1\n"


@pytest.mark.full
def test_the_command_makes_waiting_threads_sleep_by_default():
    """Read by OpenMP when torch is loaded, so it must be there before."""
    code = (
        "import os, sys; from distill import cli; "
        "cli.run_command = lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); cli.main()"
    )
    for given, expected in (({}, "PASSIVE False\n"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE False\n")):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_an_option_named_like_its_metavar_names_its_flag():
    """typer 0.27 makes `--NAME` of an option `name` with metavar NAME, unless the flag is written."""
    for shown, command in typer.main.get_command(app).commands.items():
        for name, kind in typing.get_type_hints(command.callback, include_extras=True).items():
            for info in getattr(kind, "__metadata__", ()):
                if isinstance(info, OptionInfo) and info.metavar == name.upper():
                    # typer keeps the first name as the default
                    assert info.default == f"--{name}", f"distill {shown} --{name}"
