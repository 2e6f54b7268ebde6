"""The study: every configuration is a recipe, rows are not made twice, verdicts follow from rows and nothing else."""

import json
import os
import re
import signal

import pytest
from tiny import save_models

from distill.recipe import load
from scripts.study.__main__ import main
from scripts.study.plan import BASELINE, OBJECTIVES, RECIPE, grid
from scripts.study.plot import draw
from scripts.study.runs import finished
from scripts.study.verdict import markdown, overview, sentences

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports

SOURCES = {"gsm8k": ("data.source=a.jsonl",), "python-stdlib": ("data.source=python-stdlib",)}


# ---------------------------------------------------------------- plan


def test_configurations_differ_in_nothing_but_what_is_compared():
    setups = grid(SOURCES)
    assert len(setups) == 2 * 2 * len(OBJECTIVES) * 3 + 4
    assert len({setup.key for setup in setups}) == len(setups)
    common = load(RECIPE)
    for setup in setups:
        recipe = setup.recipe()
        assert recipe.train.seed == setup.seed and recipe.student.from_teacher.layers == setup.layers
        same_train = recipe.train.model_copy(update={"seed": 0, "learning_rate": common.train.learning_rate})
        assert same_train == common.train, "equal tokens, schedule and batch for all"
        assert "learning rate" in setup.objective or recipe.train.learning_rate == common.train.learning_rate
        assert recipe.teacher == common.teacher and recipe.data.max_length == common.data.max_length
    seeds = [setup.seed for setup in setups[: 2 * 2 * len(OBJECTIVES)]]
    assert set(seeds) == {0}, "a seed is whole before the next begins"


def test_a_key_depends_on_settings_but_not_on_the_data_path():
    here, there = grid(SOURCES)[0], grid({"gsm8k": ("data.source=/elsewhere/b.jsonl",)})[0]
    assert here.key == there.key and here.shown == there.shown
    on_policy = grid(SOURCES, objectives=["reverse KL, half on-policy"], seeds=1)
    assert {setup.data for setup in on_policy} == {"gsm8k"}, "running text has no prompts to answer"
    assert all(setup.recipe().data.on_policy.fraction == 0.5 for setup in on_policy)
    assert here.key != grid(SOURCES, more=["train.steps=7"])[0].key
    with pytest.raises(ValueError, match="--objectives: expected some of 'cross-entropy'"):
        grid(SOURCES, objectives=["KL"])


# ---------------------------------------------------------------- runs


@pytest.mark.full
def test_on_policy_is_one_more_configuration(tiny_study, tmp_path):
    few = ["train.steps=2", "data.on_policy.max_new_tokens=4"]
    code, said = tiny_study("--objectives", "reverse KL, half on-policy", "--seeds", "1", more=few)
    assert code == 0 and "1/1 gsm8k, 2 layers, reverse KL, half on-policy, seed 0" in said.out, said.err
    (row,) = finished(tmp_path / "out")
    assert "data.on_policy={fraction: 0.5, max_new_tokens: 128}" in row["settings"]


@pytest.fixture
def tiny_study(tmp_path, monkeypatch, capsys):
    """The command on a teacher of tens of kilobytes: call it with more arguments."""
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 3, "seed": 1})
    lines = [{"question": f"What is {n} plus {n}?", "answer": f"It is {n + n}, since {n} twice."} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    small = [
        "teacher.model=teacher",
        "teacher.config=null",
        "student.config=null",
        "data.max_length=96",
        "data.workers=0",
        "train.batch_size=2",
        "train.tokens_per_step=192",
        "train.steps=6",
        "train.learning_rate=5e-3",
    ]

    def study(*options, more=()):
        common = ["--data", "sums.jsonl", "--out", "out", "--sources", "gsm8k", "--layers", "2"]
        code = main([*common, "--set", *small, *more, *options])
        return code, capsys.readouterr()

    return study


@pytest.mark.full
def test_the_path_from_configurations_to_tables(tiny_study, tmp_path):
    objectives = ["--objectives", BASELINE, "forward KL", "--no-rates"]
    code, said = tiny_study(*objectives, "--seeds", "1", "--minutes", "0")
    assert code == 2 and "stopped: 2 configurations wait" in said.out and "no rows in out" in said.err
    code, said = tiny_study(*objectives, "--seeds", "2")
    assert code == 0 and "4/4 gsm8k, 2 layers, forward KL, seed 1" in said.out
    rows = finished(tmp_path / "out")
    assert len(rows) == len({row["key"] for row in rows}) == 4
    for row in rows:
        assert str(tmp_path) not in json.dumps(row)
        assert [point["tokens"] for point in row["curve"]] == [0, 192, 384, 576, 768, 1152]
        value, low, high = row["after"]["forward_kl"]
        assert low <= value <= high and row["curve"][-1]["forward_kl"] == value
        assert row["curve"][0]["forward_kl"] == row["before"]["forward_kl"]
    seeds = [row for row in rows if row["objective"] == "forward KL"]
    assert len(seeds) == 2 and seeds[0]["before"] == seeds[1]["before"], "held-out rows do not depend on the seed"
    assert seeds[0]["after"] != seeds[1]["after"]
    trained = seeds[0]["gap_closed"][0]
    assert trained > 0, "training on the teacher's distribution brings the student closer"
    verdict = (tmp_path / "out" / "verdict.md").read_text()
    assert "**gsm8k, 2 layers**" in verdict and "forward KL" in verdict
    drawing = (tmp_path / "out" / "study.svg").read_text()
    assert drawing.startswith("<svg ") and "prefers-color-scheme: dark" in drawing
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing.split("</style>", 1)[1]))
    changed = set(re.findall(r'\[style\*="(?:fill|stroke): (#[0-9a-f]{6})"\]', drawing))
    assert len(drawn) > 3 and drawn <= changed, "every colour has its counterpart in the dark"
    # again: everything is there; a row cut short is made anew
    (path,) = (tmp_path / "out").glob("*.jsonl")
    code, said = tiny_study(*objectives, "--seeds", "2")
    assert code == 0 and "4 have their row" in said.out and len(finished(tmp_path / "out")) == 4
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + '\n{"key": "half')
    assert len(finished(tmp_path / "out")) == 3


@pytest.mark.full
def test_a_training_that_a_signal_ends_makes_no_row(tiny_study, tmp_path, at_step):
    at_step(0, lambda arguments: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        tiny_study("--objectives", "forward KL", "--no-rates", "--seeds", "1")
    assert not finished(tmp_path / "out")


def test_a_picture_of_any_of_the_objectives(tmp_path):
    draw([row("forward KL, fp8 teacher", seed, 1.0 + seed) for seed in range(2)], tmp_path / "part.svg")
    assert "fp8 teacher" in (tmp_path / "part.svg").read_text()


def test_shares_are_disjoint_and_together_everything(tiny_study, tmp_path, hardware):
    class NoBench:
        def __init__(self, setups, held_out):
            self.cuts = {}

    def made(setup, bench):
        return row(setup.objective, setup.seed, 1.0 + setup.seed) | {"key": setup.key, "tokens_per_s": 1}

    hardware.setattr("scripts.study.runs.Bench", NoBench)
    hardware.setattr("scripts.study.runs.run_one", made)
    wanted = ["--objectives", BASELINE, "forward KL", "JSD", "--seeds", "3", "--no-rates"]
    shares = []
    for number in range(4):  # of 9 configurations
        code, said = tiny_study(*wanted, "--out", f"part-{number}", "--share", f"{number}/4")
        assert code == 0, said.err
        shares.append({row["key"] for row in finished(tmp_path / f"part-{number}")})
        assert f"{len(shares[-1])} configurations, 0 have their row" in said.out
    code, said = tiny_study(*wanted, "--out", "alone")
    everything = {row["key"] for row in finished(tmp_path / "alone")}
    assert sorted(map(len, shares)) == [2, 2, 2, 3] and len(everything) == 9
    assert set().union(*shares) == everything, "with these sizes they are disjoint too"
    texts = [path.read_text() for number in range(4) for path in (tmp_path / f"part-{number}").glob("*.jsonl")]
    (tmp_path / "together").mkdir()
    (tmp_path / "together" / "gpu.jsonl").write_text("".join(texts))
    assert "9 have their row" in tiny_study(*wanted, "--out", "together")[1].out


@pytest.mark.parametrize("text", ["3/3", "4/3", "0/0", "x/2", "1", "1/2/3", "", "-1/2", "0.5/2"])
def test_a_share_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--out", "out", f"--share={text}"])
    assert ended.value.code == 2
    assert f"argument --share: invalid share value: {text!r}" in capsys.readouterr().err


def test_mistakes_are_one_line(tiny_study, tmp_path):
    code, said = tiny_study("--objectives", "KL")
    assert code == 2 and said.err.startswith("study: --objectives: expected") and said.err.count("\n") == 1
    (tmp_path / "sums.jsonl").unlink()
    code, said = tiny_study()
    assert code == 2 and "--data: expected GSM8K's train split" in said.err


# ---------------------------------------------------------------- verdict


def row(objective, seed, kl):
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
    }


def test_only_differences_beyond_the_seeds_count():
    rows = [row(BASELINE, seed, 1.0 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL", seed, 0.8 + 0.01 * seed) for seed in range(3)]
    rows += [row("JSD", seed, 0.95 + 0.1 * seed) for seed in range(3)]
    rows += [row("reverse KL", seed, 1.2 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL, T = 2", 0, 0.5), row("forward KL, learning rate x 2", 0, 0.4)]
    (line,) = sentences(rows)
    assert "closer to the teacher than cross-entropy alone: forward KL (-20%)" in line
    assert "not told apart from it: JSD" in line and "further away: reverse KL (+20%)" in line
    assert "one seed, so untested: forward KL, T = 2 (-50%)" in line and "learning rate" not in line
    text = markdown(rows)
    assert "| forward KL | 3 | 0.8100 ± 0.0100 | 0.790 to 0.830 |" in text
    assert "perplexity 148.41; teacher 7.39" in text and "| one seed | one seed |" in text
    assert text.index("| cross-entropy |") < text.index("| forward KL |") < text.index("| JSD |")
    assert "| **forward KL, learning rate x 2** | **1** |" in text, "the lowest mean stands out"


def test_the_overview_has_a_column_a_setting_and_marks_the_best():
    rows = [row(BASELINE, seed, 1.0 + 0.01 * seed) for seed in range(3)]
    rows += [row("forward KL", seed, 0.8 + 0.01 * seed) for seed in range(3)]
    rows += [{**row(BASELINE, 0, 2.0), "layers": 15}]
    text = overview(rows)
    assert "| objective | gsm8k, 10 layers | gsm8k, 15 layers |" in text
    agreement = f"{rows[0]['after']['agreement'][0]:.0%}"
    assert f"| forward KL | **0.8100 ± 0.0100, {agreement}** |  |" in text
    assert f"| cross-entropy | 1.0100 ± 0.0100, {agreement} | **2.0000, {agreement}** |" in text
    assert "forward KL (-20%)" in text


FACTS = {"gpu": "H200", "torch": "2.11", "commit": "abc", "date": "2026-11-21"}


def test_the_readmes_tables_come_from_the_rows(tmp_path):
    from scripts import readme

    text = "before\n<!-- study -->\nstale\n<!-- end rows -->\nafter\n"
    assert readme.fill(text, [], tmp_path) == text.replace("stale\n", ""), "without rows nothing is said"
    (tmp_path / "h200.jsonl").write_text(json.dumps({**row("forward KL", 0, 0.75), **FACTS}) + "\n")
    filled = readme.fill(text, [], tmp_path)
    assert "stale" not in filled and "0.7500" in filled and "<sub>H200, torch 2.11" in filled
    assert filled.startswith("before\n<!-- study -->\nWhich loss ") and filled.endswith("-->\nafter\n")
    assert "| objective | gsm8k, 10 layers |" in filled and readme.fill(filled, [], tmp_path) == filled
    for path in re.findall(r"\]\((.+?)\)", filled):
        assert (readme.ROOT / "docs" / path).is_file(), f"{path} is pointed at"
