"""The study of a reward beside the teacher: rows, the reward, recipes, the table from rows."""

import pytest

from distill.recipe import load
from scripts.study.rewards import (
    ALONE,
    BEFORE,
    COUNT,
    METHODS,
    RECIPE,
    REWARDED,
    SHOTS,
    markdown,
    right,
    rows_of,
)

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


def test_rows_are_sums_that_no_other_rows_show():
    learned, held_out = rows_of()
    assert (learned, held_out) == rows_of()
    prompts = [row["prompt"] for row in learned + held_out]
    assert len(set(prompts)) == len(prompts) == 2 * COUNT
    for row in learned + held_out:
        assert str(eval(row["prompt"].rstrip("= "))) == row["right"]
        assert not any(line.startswith(row["prompt"]) for line in SHOTS.splitlines())
        assert right("", row["completion"] + "\n3 + 4", row) == 1.0
        for wrong in (row["completion"] + "1", f" x{row['completion']}", "", " -" + row["right"]):
            assert right("", wrong, row) == 0.0, wrong


def test_both_methods_differ_in_the_reward_alone():
    plain, rewarded = (load(RECIPE, [METHODS[method]]) for method in (ALONE, REWARDED))
    assert rewarded.loss.terms[0] == plain.loss.terms[0] and len(plain.loss.terms) == 1
    assert rewarded.loss.rewarded is rewarded.loss.terms[1] and rewarded.loss.rewarded.reward.endswith(":right")
    assert rewarded.model_copy(update={"loss": plain.loss}) == plain


def test_the_table_has_intervals_and_the_difference():
    made = [{"method": BEFORE, "seed": 0, "right": {"learned": "1000", "held out": "0000"}}]
    for seed, more in enumerate(("1100", "1110", "1100")):
        made += [
            {"method": ALONE, "seed": seed, "right": {"learned": "1000", "held out": "1000"}},
            {"method": REWARDED, "seed": seed, "right": {"learned": more, "held out": "1000"}},
        ]
    text = markdown(made)
    assert f"| {BEFORE} | 1 | 25.0 | 0.0 |" in text and f"| {ALONE} | 3 | 25.0 ± 0.0 | 25.0 ± 0.0 |" in text
    assert "adds 33.3 ± 35.9 points (learned; 3 of 3 seeds above 0) and 0.0 ± 0.0 points (held out; 0 of 3" in text
