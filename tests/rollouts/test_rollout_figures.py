"""Rollout metrics of on-policy runs, in log lines and plots."""

import pytest
import torch

from distill.generation import sequence_slots
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.targets import HeadForward, StepInputs
from distill.recipe import parse
from distill.reports.curves import charts_of
from distill.run import run
from distill.training.progress import read_metrics

RECIPE = (
    "teacher: {model: teacher}\nstudent: {model: student}\nloss: {terms: [{type: reverse_kl}]}\n"
    "data: {source: pairs.jsonl, max_length: 64, cache: false, on_policy: {fraction: 0.5, max_new_tokens: 8}}\n"
    "train: {steps: 4, log_every: 2, batch_size: 2, learning_rate: 1e-2}\ngenerate: {prompts: []}\n"
)


PAIRS = [{"prompt": f"Say {n}?", "completion": f"It is {n}.", "domain": ("even", "odd")[n % 2]} for n in range(40)]
pytestmark = pytest.mark.place(
    files={"pairs.jsonl": PAIRS}, student={"seed": 0}, teacher={"seed": 1}, other={"seed": 2}
)


def rows_of(*overrides):
    return read_metrics(run(parse(RECIPE, overrides)).folder / "metrics.jsonl")


@pytest.mark.full
def test_engine_and_trainer_agree_on_sampled_log_probabilities(workplace):
    rows = rows_of()
    assert [row["step"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert 0 <= row["rollout_gap"] < 1e-5 and row["rollouts"] > 0
        assert {
            "rollout_length",
            "rollout_truncated",
            "rollout_repeated",
            "agreement",
            "student_entropy",
            "teacher_entropy",
            "kl",
        } <= set(row)


@pytest.mark.full
def test_the_top_1_tokens_of_both_are_compared(workplace):
    """A teacher that is the student agrees everywhere in the first step; another one in part."""
    more = ("train.log_every=1", "data.on_policy.fraction=1")
    alike, other = (rows_of(f"teacher.model={name}", *more) for name in ("student", "teacher"))
    assert alike[0]["overlap"] == 1.0 and all(0 <= row["overlap"] < 1 for row in other)


def test_overlap_is_that_of_dense_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, targets, own, theirs = (
        torch.randn(*shape, generator=generator) for shape in ((2, 5, 8), (2, 5, 6), (40, 8), (48, 6))
    )
    teacher = HiddenFormat(StoredHead(HeadWeights(theirs, None, None)), LogitTransform())
    a, b = torch.randn(2, 8, generator=generator), torch.randn(40, 2, generator=generator)
    call = HeadForward(hidden, HeadWeights(own, None, (a, b, 0.5)), StepInputs(targets, None, True), None, None)
    rows = torch.tensor([1, 3, 8])
    (shares,) = teacher.overlap(teacher.pair(LogitTransform(), 40, None), call, rows).values()
    likeliest = [
        z.flatten(0, 1)[rows, :40].topk(8).indices.tolist()
        for z in (hidden @ (own + 0.5 * b @ a).T, targets @ theirs.T)
    ]
    assert shares.tolist() == [len(set(x) & set(y)) / 8 for x, y in zip(*likeliest, strict=True)]
    assert len(set(shares.tolist())) > 1


def test_an_engine_that_draws_from_something_else_is_seen(workplace, fault):
    fault.setattr(sequence_slots, "at_least_float32", lambda scores: scores.float() * 1.2)
    assert all(row["rollout_gap"] > 0.01 for row in rows_of())


def test_weights_one_step_old_are_seen(workplace):
    """The gap with `max_staleness` is that between two steps' weights: none in the first, whose weights sample both."""
    rows = rows_of("data.on_policy.max_staleness=1", "data.on_policy.fraction=1", "train.log_every=1")
    assert all((row["rollout_gap"] > 1e-3) == (row["step"] % 2 == 0) for row in rows) and rows[0]["rollout_gap"] < 1e-5


@pytest.mark.full
def test_routes_have_lines_of_their_own(workplace):
    rows = rows_of(
        "teacher=null",
        "teachers=[{model: teacher, route: even}, {model: other, route: odd}]",
        "data.fields.teacher=domain",
    )
    charts = {panel.title: [line.name for line in lines] for panel, lines in charts_of(rows)}
    assert charts["agreement with teacher (%), by route"] == ["even", "odd"]
    assert any(title.startswith("KL to teacher") and lines == ["even", "odd"] for title, lines in charts.items())
    for words in ("truncated", "repetitive rollouts", "rollout length (tokens)", "gap", "student's entropy"):
        assert any(words in title for title in charts), words


def test_a_run_on_the_datas_answers_draws_none_of_it():
    rows = [{"step": n, "loss": 1.0, "kl": 0.5, "tokens_per_second": 3.0} for n in range(3)]
    titles = [panel.title for panel, _ in charts_of(rows)]
    assert len(titles) == 3 and not any("answer" in title or "route" in title for title in titles)
