"""Training that diverges with finite numbers is named or stopped, its figures make no claims, and settings that are far
outside of what is in use are pointed out beforehand."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
from test_run import PLACE
from test_run import recipe as small

from distill.core.errors import RunError
from distill.evaluation.evaluate import HeldOut, describe_reduction, relative_reduction
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import RecipeError, load, parse
from distill.recipe.shipped import shipped_recipes
from distill.recipe.unusual_values import unusual_settings
from distill.run import run
from distill.training.divergence_monitor import DivergenceMonitor

pytestmark = PLACE

RECIPE = "teacher: {model: a}\nstudent: {model: b}\ndata: {source: c}\ntrain: {steps: 2}\n"
SCHEDULED = "loss={temperature: 2, schedule: [{setting: temperature, steps: [0, 2], values: [1, 3]}]}"
VOCABULARY = 1000


def first_noticed(entries, *overrides, resumed_after=0):
    """The step at which a watch of these logged figures notices divergence; None where it does not."""
    watch = DivergenceMonitor(parse(RECIPE, overrides), VOCABULARY)
    history = [{**entry, "step": step} for step, entry in enumerate(entries, 1)]
    state = SimpleNamespace(log_history=history[:resumed_after], global_step=resumed_after)
    watch.on_train_begin(None, state, None)
    for entry in history[resumed_after:]:
        state.global_step = entry["step"]
        watch.on_log(None, state, None, logs=entry)
    return watch.since


def losses(*values, **more):
    return [{"loss": value, "cross_entropy": 2.0, **more} for value in values]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (losses(2, 7.1, 8, 9, 9), 4),  # above 3 x 2 + 1
        (losses(2, 7, 7, 7), None),
        (losses(2, 8, 8, 1, 8, 8), None),  # not three in a row
        (losses(0.01, 0.9, 0.9, 0.9), None),  # near 0 three times as much is little
        (losses(-1, 1.5, 1.5, 1.5), 4),  # a policy gradient's loss may be below 0
        (losses(math.nan, 2, 3, 3, 3), None),
        ([*losses(2), *[{"eval_loss": 8.0, "eval_cross_entropy": 2.0}, *losses(2)] * 3], 6),
        # uniform over the vocabulary, up from what was learned; and at the start of random weights
        ([{"loss": 1.0, "cross_entropy": value} for value in (3.0, math.log(1000), 6.95, 6.9)], 4),
        ([{"loss": 1.0, "cross_entropy": value} for value in (7.0, 6.8, 7.1, 7.0, 6.95)], None),
    ],
)
def test_divergence_is_noticed_at_the_expected_step(entries, expected):
    assert first_noticed(entries) == expected


def test_a_scheduled_loss_may_grow():
    """Its weights and temperature do; cross-entropy with the data does not depend on them."""
    assert first_noticed(losses(2, 20, 20, 20), SCHEDULED) is None
    assert first_noticed([{"loss": 1.0, "cross_entropy": value} for value in (1.0, 5.0, 5.0, 5.0)], SCHEDULED) == 4


def test_a_resumed_run_counts_on():
    assert first_noticed(losses(2, 8, 8, 8), resumed_after=3) == 4
    assert first_noticed(losses(2, 8, 8, 8, 8), resumed_after=4) == 4


FAST = ("train.learning_rate=30", "train.max_grad_norm=0", "train.log_every=1", "train.steps=8")


def test_a_diverging_run_warns_once_and_claims_nothing(workplace, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        result = run(small(*FAST))
    assert caplog.text.count("training diverges") == 1 and "lower train.learning_rate" in caplog.text
    assert "train.learning_rate: 30 is far outside of what is in use, 1e-06 to 0.001" in caplog.text
    assert math.isfinite(result.after.forward_kl) and result.after.forward_kl > result.before.forward_kl
    out = capsys.readouterr().out
    assert "reduction   none, worse than before training" in out
    card = (result.folder / "student" / "README.md").read_text()
    assert "worse than before training" in card


def test_a_diverging_run_is_stopped_where_that_is_set(workplace):
    with pytest.raises(RunError, match=r"^stopped at step \d: training has diverged: .*; lower train\.learning_rate"):
        run(small(*FAST, "train.on_divergence=stop"))
    rows = (workplace / "runs/tiny/metrics.jsonl").read_text().splitlines()
    assert 4 <= json.loads(rows[-1])["step"] < 8, "the step that showed it is in the figures"
    assert not (workplace / "runs/tiny/result.json").exists()


def test_no_share_of_a_gap_that_was_not_there_or_grew():
    before = HeldOut(10, 4.0, 1.0, 0.1, 5.0, 2.0, 1.0, 1.0)
    assert describe_reduction(before, before._replace(forward_kl=1.0)) == "75.0%"
    grown = before._replace(forward_kl=5.0)
    assert describe_reduction(before, grown) == "none, worse than before training (4.0000 before and 5.0000 after)"
    equal = before._replace(forward_kl=3e-6)
    assert math.isnan(relative_reduction(equal, grown)) and "worse than before" in describe_reduction(equal, grown)
    assert describe_reduction(equal, equal).startswith("none, it was about 0 before training")


@pytest.mark.parametrize(
    ("override", "warns"),
    [
        ("train.learning_rate=1.1e-2", True),
        ("train.learning_rate=1e-2", False),
        ("train.learning_rate=1e-9", True),
        ("train={steps: 2, learning_rate: 0.1, optimizer: sgd}", False),
        ("train.weight_decay=5", True),
        ("train.weight_decay=0", False),
        ("train.max_grad_norm=1e-4", True),
        ("loss.temperature=200", True),
        ("student.lora={r: 5000}", True),
        ("student.lora={}", False),
    ],
)
def test_values_a_decade_outside_of_use_are_pointed_out(override, warns):
    lines = unusual_settings(parse(RECIPE, [override]))
    assert [override.split("=")[0].split(".")[0] in line for line in lines] == [True] * warns


def test_shipped_recipes_are_within_what_is_in_use():
    for shipped in shipped_recipes():
        assert unusual_settings(load(shipped.path)) == [], shipped.path


def test_check_points_out_settings_and_refuses_reports_that_are_not_installed(workplace, monkeypatch):
    report = check_run(small("train.learning_rate=0.5", "train.report_to=codecarbon"), find_device("cpu"))
    assert any("train.learning_rate: 0.5 is far outside" in note for note in report.notes)
    assert [problem for problem in report.problems if problem.startswith("train.report_to: codecarbon is not ins")]
    assert not report.ok


def test_0_switches_checkpoints_and_evaluations_off(workplace):
    train = small("train.save_every=0", "train.eval_every=0").train
    assert train.save_every is None and train.eval_every is None
    with pytest.raises(RecipeError, match=r"train\.save_every: expected a number at least 0, got -1"):
        small("train.save_every=-1")
