"""Folders of runs: runs/<recipe>, the next free runs/<recipe>-2, or the given name.

`output_dir` replaces runs/.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from distill.core.errors import RecipeError, RunError, quote
from distill.core.files import UNFINISHED

RUNS = Path("runs")
RECIPE_FILE = "recipe.yaml"
RESULT_FILE = "result.json"
KERNELS_FILE = "kernels.json"
RUN_LOCK = ".lock"
STAGES = "stages"  # folder of a run's stages before the last, each of which is a run
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def runs_folder(output_dir: str) -> Path:
    """Return the folder of all runs that a recipe's `output_dir` names, with `~` and `$VARIABLES` expanded.

    Raises:
        RecipeError: A variable is not set.
    """
    folder = os.path.expandvars(output_dir)
    if "$" in folder:
        raise RecipeError([f"output_dir: {quote(output_dir)}: expected variables that are set in the environment"])
    return Path(folder).expanduser()


def run_folder(recipe_name: str, *, name: str | None = None, resume: bool = False, runs: Path = RUNS) -> Path:
    """Return the folder of a run; nothing is created or changed.

    Args:
        recipe_name: The recipe's `name`, used where `name` is None.
        resume: Return the folder of an existing run: that of `name`, else the latest of the recipe.

    Raises:
        RecipeError: A bad name, `--name` of a run that exists (without `resume`), nothing to resume, or a link or file
            where a folder is needed.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise RecipeError(
            [f"--name: expected 1 to 100 letters, digits, '.', '_', '-' (no sign first), got {quote(name)}"]
        )
    _refuse_dangling_link(runs)
    check_folder(runs, "output_dir")
    if resume:
        return _latest(recipe_name, name, runs)
    if name is not None:
        _refuse_dangling_link(runs / name)
        if _taken(runs / name):
            raise RecipeError(
                [f"--name {name}: {runs / name} already holds a run; --resume continues it, another name starts anew"]
            )
        return runs / name
    candidates = itertools.chain([recipe_name], (f"{recipe_name}-{number}" for number in itertools.count(2)))
    return next(runs / candidate for candidate in candidates if not _taken(runs / candidate))


def check_folder(folder: Path, field: str) -> None:
    """Check that a folder exists or can be made."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            return
        if place.is_symlink() or place.exists():
            kind = f"a link to {place.readlink()}, which does not exist" if place.is_symlink() else "a file"
            raise RecipeError([f"{field}: expected a folder, got {quote(str(folder))}: {place} is {kind}"])


def check_new_folder(folder: Path, field: str) -> None:
    """Raise a RecipeError that names `field` for a folder that holds files, or cannot be made."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError([f"{field}: {folder} exists and is not an empty folder; name another"])
    check_folder(folder, field)


def check_output_file(path: Path, field: str) -> None:
    """Raise a RecipeError that names `field` for a file that cannot be written: a folder, or in one that is absent."""
    if path.is_dir():
        raise RecipeError([f"{field}: expected a file to write, got the folder {path}"])
    if not path.absolute().parent.is_dir():
        raise RecipeError([f"{field}: expected a file in an existing folder, but {path.parent} does not exist"])


def check_folder_free(folder: Path) -> None:
    """Check that a folder, whose lock is held, still holds no run.

    Raises:
        RunError: Another run has begun there since `run_folder` chose it, while models were loaded.
    """
    if _taken(folder, but=STAGES):
        raise RunError(
            f"{folder}: another run began there while this one was loading and is unchanged; start this one again "
            "with another --name"
        )


def _latest(recipe_name: str, name: str | None, runs: Path) -> Path:
    if name is not None:
        if not has_begun(runs / name):
            raise RecipeError([f"--resume: {runs / name} holds no run to resume (it has no {RECIPE_FILE})"])
        return runs / name
    latest = None
    for number in itertools.count(1):
        folder = runs / (recipe_name if number == 1 else f"{recipe_name}-{number}")
        if not _taken(folder):
            break
        latest = folder if has_begun(folder) else latest
    if latest is None:
        raise RecipeError([f"--resume: no run of {recipe_name} in {runs} to resume"])
    return latest


def has_begun(folder: Path) -> bool:
    """Return whether a folder holds a run that can be resumed: its recipe, or stages of a run that ended in one."""
    return (folder / RECIPE_FILE).is_file() or (folder / STAGES).is_dir()


def root_of(folder: Path) -> Path:
    """Return the folder of the whole run that a stage's folder belongs to; that of any other run is its own."""
    return folder.parent.parent if folder.parent.name == STAGES else folder


def _taken(folder: Path, but: str = RUN_LOCK) -> bool:
    """Return whether a folder holds a run; an empty one, or one whose run wrote no recipe, does not."""
    if not folder.is_dir():
        return folder.is_file() or (folder.is_symlink() and not folder.exists())
    names = [path.name for path in folder.iterdir()]
    return any(name not in (RUN_LOCK, but) and not (name[0] == "." and name.endswith(UNFINISHED)) for name in names)


def _refuse_dangling_link(path: Path) -> None:
    """Raise where a path is a dangling link (such as to a disk that is not mounted)."""
    if path.is_symlink() and not path.exists():
        raise RecipeError([f"{path}: is a link to {path.readlink()}, which does not exist"])
