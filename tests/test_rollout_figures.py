"""What a run on the student's own answers tells of them in every log line, and draws."""

import json

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.generation import decode_loop
from distill.recipe import parse
from distill.reports.curves import charts_of
from distill.run import run
from distill.training.progress import read_metrics

RECIPE = (
    "teacher: {model: teacher}\nstudent: {model: student}\nloss: {terms: [{type: reverse_kl}]}\n"
    "data: {source: pairs.jsonl, max_length: 64, cache: false, on_policy: {fraction: 0.5, max_new_tokens: 8}}\n"
    "train: {steps: 4, log_every: 2, batch_size: 2, learning_rate: 1e-2}\ngenerate: {prompts: []}\n"
)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    for seed, name in enumerate(("student", "teacher", "other")):
        save_tiny(tmp_path / name, tiny_model(tokenizer, seed=seed), tokenizer)
    rows = [{"prompt": f"Say {n}?", "completion": f"It is {n}.", "domain": ("even", "odd")[n % 2]} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)


def rows_of(*overrides):
    return read_metrics(run(parse(RECIPE, overrides)).folder / "metrics.jsonl")


def test_engine_and_trainer_agree_on_what_was_drawn(workplace):
    rows = rows_of()
    assert [row["step"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert 0 <= row["rollout_gap"] < 1e-5 and row["rollouts"] > 0
        assert {"rollout_length", "rollout_truncated", "rollout_repeated", "agreement", "student_entropy",
                "teacher_entropy", "kl"} <= set(row)  # fmt: skip


def test_an_engine_that_draws_from_something_else_is_seen(workplace, monkeypatch):
    monkeypatch.setattr(decode_loop, "as_wide", lambda scores: scores.float() * 1.2)
    assert all(row["rollout_gap"] > 0.01 for row in rows_of())


def test_weights_one_step_old_are_seen(workplace):
    """With `ahead` the gap is that between the weights of two steps: none in the first, which has drawn for itself."""
    rows = rows_of("data.on_policy.ahead=1", "data.on_policy.fraction=1", "train.log_every=1")
    assert rows[0]["rollout_gap"] < 1e-5 < 1e-3 < rows[-1]["rollout_gap"]


def test_routes_have_lines_of_their_own(workplace):
    rows = rows_of(
        "teacher=null", "teachers=[{model: teacher, route: even}, {model: other, route: odd}]",
        "data.fields.teacher=domain",
    )  # fmt: skip
    charts = {panel.title: [line.name for line in lines] for panel, lines in charts_of(rows)}
    assert charts["agreement with teacher (%), by route"] == ["even", "odd"]
    assert any(title.startswith("KL to teacher") and lines == ["even", "odd"] for title, lines in charts.items())
    for words in ("cut off", "repeat themselves", "tokens in an answer", "apart", "student's entropy"):
        assert any(words in title for title in charts), words


def test_a_run_on_the_datas_answers_draws_none_of_it():
    rows = [{"step": n, "loss": 1.0, "kl": 0.5, "tokens_per_second": 3.0} for n in range(3)]
    titles = [panel.title for panel, _ in charts_of(rows)]
    assert len(titles) == 3 and not any("answer" in title or "route" in title for title in titles)
