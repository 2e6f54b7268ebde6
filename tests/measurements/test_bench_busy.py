"""The share of time a GPU is busy, from spans that overlap, nest and leave gaps; its recipes are valid."""

import pytest

from distill.recipe import load
from scripts.bench.busy import LAST, RECIPES, busy_share
from scripts.bench.many_gpus import DRY, ROOT

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


@pytest.mark.parametrize(
    "spans, share, whole",
    [
        ([(0, 4)], 1.0, 4),
        ([(6, 8), (0, 4)], 0.75, 8),
        ([(0, 4), (1, 2), (3, 6), (8, 10)], 0.8, 10),  # nested and overlapping, on two streams
        ([(5, 7), (5, 7)], 1.0, 2),
    ],
)
def test_overlaps_count_once(spans, share, whole):
    assert busy_share(spans) == (pytest.approx(share), whole)


def test_short_gaps_count_as_busy_where_wanted():
    assert busy_share([(0, 4), (5, 7), (9, 10)], bridged=1) == (pytest.approx(0.8), 10)


def test_nothing_traced_is_an_error():
    with pytest.raises(ValueError, match="found none"):
        busy_share([])


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid(name):
    path, *overrides = RECIPES[name]
    recipe = load(ROOT / path, [*DRY, *overrides, f"train.steps={LAST + 1}", "train.log_every=100"])
    assert recipe.train.batch_size * recipe.data.max_length == 8192
    assert (recipe.student.lora is not None) == (name == "lora")
