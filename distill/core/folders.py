"""Where a run's files go: runs/<recipe>, the next free runs/<recipe>-2, or the name that was asked for.

`output_dir` puts another folder in the place of runs/.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from distill.core.faults import RecipeError, RunError, show
from distill.core.files import UNFINISHED

RUNS = Path("runs")
RECIPE_FILE = "recipe.yaml"
RESULT_FILE = "result.json"
KERNELS_FILE = "kernels.json"
RUN_LOCK = ".lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def runs_folder(output_dir: str) -> Path:
    """The folder of all runs that a recipe's `output_dir` names, with `~` and `$VARIABLES` filled in.

    Raises:
        RecipeError: a variable that is not set.
    """
    folder = os.path.expandvars(output_dir)
    if "$" in folder:
        raise RecipeError([f"output_dir: {show(output_dir)}: expected variables that are set in the environment"])
    return Path(folder).expanduser()


def run_folder(recipe_name: str, *, name: str | None = None, resume: bool = False, runs: Path = RUNS) -> Path:
    """The folder of a run; nothing is created or changed.

    Args:
        recipe_name: the recipe's `name`; the run is called so where `name` is None.
        name: `--name`.
        resume: continue the run that is there: that of `name`, else the latest of the recipe.
        runs: the folder of all runs.

    Raises:
        RecipeError: a bad name, `--name` of a run that exists (without `resume`), nothing to resume, or a link or file
            where a folder is needed.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise RecipeError(
            [f"--name: expected letters, digits, '.', '_' and '-' (first a letter or digit), got {show(name)}"]
        )
    _refuse_dead_link(runs)
    require_folder(runs, "output_dir")
    if resume:
        return _latest(recipe_name, name, runs)
    if name is not None:
        _refuse_dead_link(runs / name)
        if _taken(runs / name):
            raise RecipeError(
                [f"--name {name}: {runs / name} holds a run already; --resume continues it, another name starts anew"]
            )
        return runs / name
    candidates = itertools.chain([recipe_name], (f"{recipe_name}-{number}" for number in itertools.count(2)))
    return next(runs / candidate for candidate in candidates if not _taken(runs / candidate))


def require_folder(folder: Path, field: str) -> None:
    """Hold that a folder is there or can be made, as far as the names above it say.

    Raises:
        RecipeError: it, or what it would lie in, is a file or a link to what does not exist; names `field`.
    """
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.is_symlink() or place.exists():
            kind = f"a link to {place.readlink()}, which does not exist" if place.is_symlink() else "a file"
            raise RecipeError([f"{field}: expected a folder, got {show(str(folder))}: {place} is {kind}"])


def require_free(folder: Path) -> None:
    """Hold that a folder, whose lock is taken, still holds no run.

    Raises:
        RunError: another run has begun there since `run_folder` chose it, while models were loaded.
    """
    if _taken(folder):
        raise RunError(
            f"{folder}: another run began there while this one was loading; nothing of it was touched: start this one "
            "again, with a --name of its own"
        )


def _latest(recipe_name: str, name: str | None, runs: Path) -> Path:
    if name is not None:
        if not (runs / name / RECIPE_FILE).is_file():
            raise RecipeError([f"--resume: {runs / name} holds no run to continue (it has no {RECIPE_FILE})"])
        return runs / name
    latest = None
    for number in itertools.count(1):
        folder = runs / (recipe_name if number == 1 else f"{recipe_name}-{number}")
        if not _taken(folder):
            break
        latest = folder if (folder / RECIPE_FILE).is_file() else latest
    if latest is None:
        raise RecipeError([f"--resume: no run of {recipe_name} in {runs} to continue"])
    return latest


def _taken(folder: Path) -> bool:
    """A folder that is empty, or in which a run ended before it wrote its recipe, counts as free."""
    if not folder.is_dir():
        return folder.is_file() or (folder.is_symlink() and not folder.exists())
    names = [path.name for path in folder.iterdir()]
    return any(name != RUN_LOCK and not (name[0] == "." and name.endswith(UNFINISHED)) for name in names)


def _refuse_dead_link(path: Path) -> None:
    """Refuse a link to what is not there (a disk that is not mounted), which no folder can be made of."""
    if path.is_symlink() and not path.exists():
        raise RecipeError([f"{path}: is a link to {path.readlink()}, which does not exist"])
