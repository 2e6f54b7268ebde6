"""Plan of the second study: sources of the teacher's outputs, on two parts of GSM8K's prompts.

    cache       the teacher loaded (online), or read from a cache of 64 tokens a position: all others as one outcome, or
                tokens drawn so that the gradient is unbiased; equal tokens
    own words   a student distilled on the data's answers goes on: on them again, or on what it says itself; equal
                optimizer steps, equal rows of tokens a step, from the same weights

A configuration is a list of recipe settings over `study.yaml`, as in the first plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distill.recipe import Recipe, load
from scripts.study.plan import QUICK, RECIPE, key_of, shown_of, told_of

CACHE, OWN = "cache", "own words"
K = 64
ONLINE = "online"
CACHED = {"cached, others as one": "bucket", "cached, drawn": "sampled"}

FORWARD, REVERSE = (f"loss.terms=[{{type: {kind}_kl}}]" for kind in ("forward", "reverse"))
OFF = "off-policy, reverse KL"  # what on-policy is held against: the same loss on the data's answers
SECOND = {
    "off-policy, forward KL": (FORWARD,),
    OFF: (REVERSE,),
    "half on-policy, reverse KL": (REVERSE, "data.on_policy={fraction: 0.5, max_new_tokens: 160}"),
    "on-policy, reverse KL": (REVERSE, "data.on_policy={fraction: 1.0, max_new_tokens: 160}"),
}
# the second stage is a third as long, at a quarter of the rate
SHORTER = ("train.steps=80", "train.learning_rate=2e-4")
NAMES = {CACHE: (ONLINE, *CACHED), OWN: tuple(SECOND)}
BASES = {CACHE: ONLINE, OWN: OFF}


class TeacherSetup(NamedTuple):
    """One configuration.

    Attributes:
        data: what it learns from, by name.
        layers: of the student.
        part: `cache` or `own words`.
        objective: what is compared, a name of the part.
        seed: of the order of the data, and of what the student says.
        settings: what is set over `study.yaml`.
        first: the same of the stage before; empty where the student starts as it was cut.
        tail: of the cache that stands for the teacher; None for the teacher itself.
    """

    data: str
    layers: int
    part: str
    objective: str
    seed: int
    settings: tuple[str, ...]
    first: tuple[str, ...] = ()
    tail: str | None = None

    def recipe(self) -> Recipe:
        """The whole recipe of this configuration."""
        return load(RECIPE, self.settings)

    def stage_before(self) -> Recipe:
        """The whole recipe of the first stage."""
        return load(RECIPE, self.first)

    @property
    def key(self) -> str:
        """A hash of every setting but where the data lie; a row with this key need not be made again."""
        stages = [self.recipe(), *([self.stage_before()] if self.first else [])]
        told = [told_of(recipe, self.data) for recipe in stages]
        return key_of([self.part, self.tail, K if self.tail else None, *told])

    @property
    def shown(self) -> list[str]:
        """The settings as a row keeps them."""
        return shown_of(self.settings, self.data)

    def __str__(self) -> str:
        return f"{self.part}, {self.layers} layers, {self.objective}, seed {self.seed}"


def grid(
    source: tuple[str, ...],
    *,
    layers: Sequence[int] = (15,),
    parts: Sequence[str] = (CACHE, OWN),
    seeds: int = 3,
    more: Sequence[str] = (),
    quick: bool = False,
) -> list[TeacherSetup]:
    """All configurations, seed by seed, so that whatever time cuts off leaves whole comparisons.

    Args:
        source: settings of GSM8K's data.
        layers: depths of the student.
        parts: of the plan.
        seeds: how many.
        more: settings of all configurations.
        quick: two steps of tiny batches: does the path work?
    """
    small = QUICK if quick else ()
    found = []
    for seed in range(seeds):
        for depth in layers:
            common = (*source, f"student.from_teacher.layers={depth}", f"train.seed={seed}", *small)
            if CACHE in parts:
                found += [
                    TeacherSetup("gsm8k", depth, CACHE, name, seed, (*common, FORWARD, *more), tail=CACHED.get(name))
                    for name in NAMES[CACHE]
                ]
            if OWN in parts:
                for name, settings in SECOND.items():
                    size = () if quick else SHORTER
                    words = ("data.on_policy.max_new_tokens=8",) if quick and len(settings) > 1 else ()
                    second = (*common, *size, *settings, *words, *more)
                    found.append(TeacherSetup("gsm8k", depth, OWN, name, seed, second, (*common, FORWARD, *more)))
    return found
