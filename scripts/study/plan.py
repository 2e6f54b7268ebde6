"""Plan of the study: configurations that differ in data, depth, objective and seed, and in nothing else.

A configuration is a list of recipe settings over `study.yaml`, so whatever a recipe can say can be compared: a new
objective, another kind of teacher, one line in `OBJECTIVES`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.recipe import Recipe, load

RECIPE = Path(__file__).parent / "study.yaml"
BASELINE = "cross-entropy"
OBJECTIVES: dict[str, tuple[str, ...]] = {
    BASELINE: ("loss.terms=[{type: cross_entropy}]",),
    "forward KL": ("loss.terms=[{type: forward_kl}]",),
    "reverse KL": ("loss.terms=[{type: reverse_kl}]",),
    "JSD": ("loss.terms=[{type: jsd, beta: 0.5}]",),
    "KL + cross-entropy": ("loss.terms=[{type: forward_kl, weight: 0.5}, {type: cross_entropy, weight: 0.5}]",),
    "forward KL, T = 2": ("loss.terms=[{type: forward_kl}]", "loss.temperature=2"),
    "forward KL, T = 4": ("loss.terms=[{type: forward_kl}]", "loss.temperature=4"),
}
# asked for by name only: the student's own words cost their generation, and need prompts
ON_POLICY = "data.on_policy={fraction: 0.5, max_new_tokens: 128}"
EXTRAS: dict[str, tuple[str, ...]] = {
    "reverse KL, half on-policy": ("loss.terms=[{type: reverse_kl}]", ON_POLICY),
    "JSD, half on-policy": ("loss.terms=[{type: jsd, beta: 0.5}]", ON_POLICY),
}
# what fp8 costs, each judged against the teacher in bf16; asked for by name or as the plan fp8
FP8: dict[str, tuple[str, ...]] = {
    "forward KL, fp8 teacher": ("teacher.dtype=fp8",),
    "forward KL, fp8 student": ("student.compute=fp8",),
    "forward KL, both fp8": ("teacher.dtype=fp8", "student.compute=fp8"),
}
KNOWN = OBJECTIVES | EXTRAS | FP8
WITHOUT_PROMPTS = ("python-stdlib",)
# one learning rate for all would favour whatever it suits: two objectives also at half and twice of it, one seed
LEARNING_RATES = {"learning rate x 0.5": 0.5, "learning rate x 2": 2.0}
PROBED = (BASELINE, "forward KL")
QUICK = (
    "data.max_length=128",
    "data.max_rows=60",
    "data.workers=0",
    "data.validation.max_rows=6",
    "train.batch_size=1",
    "train.tokens_per_step=128",
    "train.steps=2",
)


def told_of(recipe: Recipe, data: str) -> dict[str, Any]:
    """Return the settings of a recipe, with data given by name rather than path."""
    told = recipe.model_dump(mode="json", exclude_unset=True)
    told["data"]["source"] = data
    return told


def key_of(told: object) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def shown_of(settings: Sequence[str], data: str) -> list[str]:
    """Settings as a row keeps them: the data by their name, not by where they lie."""
    return [f"data.source={data}" if setting.startswith("data.source=") else setting for setting in settings]


class Setup(NamedTuple):
    """One configuration.

    Attributes:
        data: what it learns from, by name.
        layers: of the student.
        objective: a key of `KNOWN`, with a learning rate's name behind it where that is not the common one.
        seed: of the order of the data.
        settings: what is set over `study.yaml`.
    """

    data: str
    layers: int
    objective: str
    seed: int
    settings: tuple[str, ...]

    def recipe(self) -> Recipe:
        """The whole recipe of this configuration."""
        return load(RECIPE, self.settings)

    @property
    def key(self) -> str:
        """A hash of every setting but where the data lie; a row with this key need not be made again."""
        return key_of(told_of(self.recipe(), self.data))

    @property
    def shown(self) -> list[str]:
        """The settings as a row keeps them."""
        return shown_of(self.settings, self.data)

    def __str__(self) -> str:
        return f"{self.data}, {self.layers} layers, {self.objective}, seed {self.seed}"


def grid(
    sources: dict[str, tuple[str, ...]],
    *,
    layers: Sequence[int] = (10, 15),
    objectives: Sequence[str] = tuple(OBJECTIVES),
    seeds: int = 3,
    more: Sequence[str] = (),
    probe_rates: bool = True,
) -> list[Setup]:
    """All configurations, seed by seed, so that whatever time cuts off leaves whole comparisons.

    Args:
        sources: settings of each data set by its name.
        layers: depths of the student.
        objectives: keys of `KNOWN`; on-policy ones are left out where the data have no prompts.
        seeds: how many.
        more: settings of all configurations, such as those of a quick run.
        probe_rates: add the runs at other learning rates.

    Raises:
        ValueError: an objective that there is not.
    """
    for name in objectives:
        if name not in KNOWN:
            raise ValueError(f"--objectives: expected some of {', '.join(map(repr, KNOWN))}; got {name!r}")

    def setup(data: str, depth: int, objective: str, seed: int, name: str = "", *extra: str) -> Setup:
        settings = (
            *sources[data],
            f"student.from_teacher.layers={depth}",
            f"train.seed={seed}",
            *KNOWN[objective],
            *more,
            *extra,
        )
        return Setup(data, depth, ", ".join(filter(None, [objective, name])), seed, settings)

    found = [
        setup(data, depth, objective, seed)
        for seed in range(seeds)
        for data in sources
        for depth in layers
        for objective in objectives
        if objective not in EXTRAS or data not in WITHOUT_PROMPTS
    ]
    if probe_rates:
        rate = load(RECIPE, more).train.learning_rate
        found += [
            setup(next(iter(sources)), max(layers), objective, 0, name, f"train.learning_rate={rate * factor}")
            for objective in PROBED
            if objective in objectives
            for name, factor in LEARNING_RATES.items()
        ]
    return found
