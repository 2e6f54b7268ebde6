"""The plan of teachers that see more: rows of tasks, runs as recipes, errors that stop nothing, tables from rows."""

import argparse
import json
import time

import pytest

from scripts.study import privileged
from scripts.study.privileged_plan import BOTH, runs
from scripts.study.privileged_verdict import markdown, mean_and_interval
from scripts.study.tasks import MIXED, TASKS, rows_of

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


@pytest.mark.parametrize("name", TASKS)
def test_held_out_questions_are_neither_learned_nor_shown(name):
    learned, held_out = rows_of(name)
    assert rows_of(name) == (learned, held_out), "the same in every process"
    questions = [{row["prompt"] for row in rows} for rows in (learned, held_out)]
    assert not questions[0] & questions[1] and len(questions[1]) == len(held_out) == TASKS[name].held_out
    for row in learned + held_out:
        assert f"{row['prompt']} " not in row["shots"] and f"{row['prompt']} " not in row["both"]
        assert TASKS[name].is_right(row["completion"], row["right"]), "the data's own answer is right"
        assert not TASKS[name].is_right("\n" + row["completion"] + " 0 and more", row["right"])
    assert TASKS["sums"].is_right(" 3 + 4 = 7. The answer is 7.\n\nQuestion: 8", "7")


def test_every_run_is_a_recipe_of_its_own_and_finds_the_models_it_needs(tmp_path):
    every = runs(3)
    assert len({run.key for run in every}) == len(every) == len({str(run) for run in every})
    kept = {run.keeps for run in every} - {""}
    assert kept == {f"tuned-{task}" for task in (*MIXED, BOTH)}
    for run in every:
        assert set(run.needs) <= kept
        recipe = run.recipe(tmp_path, [f"student.model={tmp_path}"])
        teachers = [teacher.model for teacher in recipe.teachers] or [recipe.teacher.model]
        named = {str(tmp_path / name) for name in run.needs}
        assert recipe.train.seed == run.seed and named == {model for model in teachers if model}


def test_a_run_that_breaks_leaves_a_row_and_the_next_one_begins(tmp_path, monkeypatch, fault):
    wanted = [run for run in runs(1) if run.task == "sums"][:3]

    def made(run, folder, device, more):
        if run == wanted[1]:
            raise RuntimeError("out of\nmemory")
        return {"right": {"sums": "10"}, "kl": [1.0, 0.5], "seconds": 1}

    fault.setattr(privileged, "run_one", made)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    (tmp_path / "begun").mkdir()
    for name, text in {
        "sums-train.jsonl": "",
        "facts.json": '{"gpu": "cpu"}',
        "name": "cpu.jsonl",
        "done": wanted[0].key,
    }.items():
        (tmp_path / name).write_text(text)
    args = argparse.Namespace(
        work=tmp_path,
        out=tmp_path,
        device="cpu",
        workers=1,
        seeds=1,
        only=list(map(str, wanted)),
        set=[],
        quick=False,
        last=0.0,
        until=time.time() + 60,
    )
    assert privileged.work(args) == 0
    rows = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == [run.key for run in wanted[1:]], "what has its row is not made again"
    assert rows[0]["error"] == "RuntimeError: out of" and rows[1]["right"] == {"sums": "10"}


def test_tables_follow_from_rows_alone():
    row = {"part": "few-shot prompt", "task": "past", "kl": [2.0, 0.5], "right": {"past": "1100"}}
    base, other = "cross-entropy, the teacher's answers", "reverse KL, own answers"
    rows = [row | {"method": other, "seed": seed, "right": {"past": "111" + bit}} for seed, bit in enumerate("010")]
    rows += [row | {"method": base, "seed": seed} for seed in range(3)]
    rows += [row | {"method": "policy gradient", "seed": 0, "error": "no room"}]
    text = markdown(rows)
    assert f"| {base} | 3 | 50.0 ± 0.0 |" in text and f"| {other} | 3 | 83.3 ± 35.9 |" in text
    assert f"- not told apart: {other} (+33.3 points)." in text
    assert text.index(f"| {base} |") < text.index(f"| {other} |"), "in the plan's order, whatever ended first"
    assert "2.00 to 0.50" in text and "No row: policy gradient, seed 0: no room" in text
    assert mean_and_interval([0.25]) == "25.0", "one seed has no interval"


@pytest.mark.parametrize(("right", "kind"), [("1" * 46 + "0" * 14, "not told apart"), ("1" * 20 + "0" * 40, "worse")])
def test_methods_are_compared_over_questions_not_over_equal_seeds(right, kind):
    row = {"part": "worked solutions", "task": "sums", "kl": [1.0, 0.5]}
    rows = [
        {**row, "method": method, "seed": seed, "right": {"sums": bits}}
        for method, bits in (("cross-entropy, the solutions", "0" * 12 + "1" * 48), ("reverse KL, own answers", right))
        for seed in range(2)
    ]
    assert f"- {kind}: reverse KL, own answers" in markdown(rows)
