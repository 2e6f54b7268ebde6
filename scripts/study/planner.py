"""Plans of studies: from a YAML file to the runs that it stands for.

    plan:       name of the study, which its rows carry
    extends:    another plan, whose fields hold where this one has none
    recipe:     settings that all runs have in common, a recipe beside the plans
    seeds:      number of seeds; all runs of a seed come before those of the next
    judge:      functions of judges.py that measure a student before and after training
    made:       files and models that runs read as {work}/NAME, and how prepare.py makes them
    quick:      settings with which a run takes seconds
    parts:      grids of runs. In each, `vary` lists axes (columns of the rows), and each axis its levels with the
                recipe settings that make them; a part's runs are all combinations. Instead of settings a level may
                have a mapping with `settings` and
                    seeds   the seeds that it is run with, where these are not all
                    only    levels of other axes that it is combined with
                    train   false: the student is judged as it is
                    reads   column of the held-out rows that stands before the question when answers are judged
                    probe   true: a question of its own (seed 0), which no verdict compares
                    asked   true: left out unless `--only` names it
    table, verdict, picture    what report.py makes of the rows

`{work}`, `{data}`, `{seed}` and the names of axes are replaced in settings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distill.recipe import Recipe, load

FOLDER = Path(__file__).parent
PLANS = FOLDER / "plans"


@dataclass(frozen=True)
class Run:
    """One student that is trained and judged.

    Attributes:
        names: Levels by axis, with `seed`, and `part` where the plan has several; columns of its row.
        settings: Settings over the plan's recipe, with placeholders.
        shared: Those that all runs of the part have: they name the teacher that judges.
        judge: Names of the functions that judge it.
        options: Options of its levels: `train`, `reads`, `probe`, `asked`.
    """

    names: dict[str, Any]
    settings: tuple[str, ...]
    shared: tuple[str, ...]
    judge: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def filled(self, settings: Sequence[str], places: Mapping[str, Any]) -> list[str]:
        """Return settings with `{work}`, `{data}` and the run's own names in place; other braces are YAML's."""
        known = {axis: str(level).replace(" ", "-") for axis, level in self.names.items()}
        known |= {name: str(value) for name, value in places.items()}
        return [re.sub(r"\{(\w+)\}", lambda name: known.get(name[1], name[0]), text) for text in settings]

    def __str__(self) -> str:
        return ", ".join(
            f"{axis} {level}" if isinstance(level, int) else str(level) for axis, level in self.names.items()
        )


@dataclass(frozen=True)
class Plan:
    """A study.

    Attributes:
        name: Name that its rows carry.
        fields: Fields of the YAML file.
        runs: All runs, in their order.
    """

    name: str
    fields: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def recipe_file(self) -> Path:
        """The recipe that all runs have in common."""
        return FOLDER / self.fields["recipe"]

    def recipe(self, run: Run, places: Mapping[str, Any], more: Sequence[str] = (), *, shared: bool = False) -> Recipe:
        """Return the whole recipe of a run, or with `shared` what all runs of its part have of it."""
        settings = run.shared if shared else run.settings
        return load(self.recipe_file, [*run.filled(settings, places), *more])

    def levels(self, axis: str) -> dict[str, Mapping[str, Any]]:
        """Return the options of an axis' levels over all parts, in the plan's order."""
        return {
            level: options(found)
            for part in self.fields["parts"]
            for level, found in part["vary"].get(axis, {}).items()
        }


def options(level: Any) -> dict[str, Any]:
    """Return a level as a mapping: one that is settings alone has no other option."""
    if not isinstance(level, dict):
        level = {"settings": level}
    return level | {"settings": _flat(level.get("settings"))}


def _flat(settings: Any) -> list[str]:
    """Return settings as one list: YAML's anchors put lists into lists."""
    if settings is None:
        return []
    return [settings] if isinstance(settings, str) else [text for part in settings for text in _flat(part)]


def read_plan(name: str | Path) -> Plan:
    """Read a plan by its name, or from a file.

    Raises:
        ValueError: There is none.
    """
    fields = _fields(name)
    return Plan(fields["plan"], fields, tuple(_runs(fields)))


def plan_names() -> list[str]:
    """Return the names of all plans."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def _fields(name: str | Path) -> dict[str, Any]:
    path = Path(name) if str(name).endswith(".yaml") else PLANS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"--plan: expected a YAML file or one of {', '.join(plan_names())}; got {name}")
    fields: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    parent = fields.get("extends")
    return (_fields(path.parent / f"{parent}.yaml") if parent else {}) | fields


def _runs(fields: Mapping[str, Any]) -> Iterator[Run]:
    for seed in range(fields["seeds"]):
        for part in fields["parts"]:
            yield from _grid(part, seed, fields)


def _grid(part: Mapping[str, Any], seed: int, fields: Mapping[str, Any]) -> Iterator[Run]:
    """Yield a part's runs of one seed: all combinations of its levels but those that a level leaves out."""
    axes: dict[str, dict[Any, Any]] = part["vary"]
    for combination in itertools.product(*axes.values()):
        names = dict(zip(axes, combination, strict=True))
        chosen = [options(axes[axis][level]) for axis, level in names.items()]
        if not all(_fits(level, names, seed) for level in chosen):
            continue
        merged = {key: value for level in chosen for key, value in level.items()}
        shared = tuple(part.get("settings", ()))
        own = tuple(text for level in chosen for text in level["settings"])
        yield Run(
            {**({"part": part["part"]} if "part" in part else {}), **names, "seed": seed},
            (*shared, f"train.seed={seed}", *own),
            shared,
            tuple(part.get("judge", fields.get("judge", ()))),
            {key: merged[key] for key in ("train", "reads", "probe", "asked") if key in merged},
        )


def _fits(level: Mapping[str, Any], names: Mapping[str, Any], seed: int) -> bool:
    seeds = level.get("seeds", [0] if level.get("probe") else None)
    if seeds is not None and seed not in seeds:
        return False
    return all(names[axis] in wanted for axis, wanted in level.get("only", {}).items())
