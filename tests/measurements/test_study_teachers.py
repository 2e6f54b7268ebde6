"""The study's second plan: caches and the student's own words, from configurations to tables."""

import json

import pytest
from test_study import FACTS, tiny_study  # noqa: F401 (a fixture)

from distill.recipe import load
from scripts.study.plan import RECIPE
from scripts.study.runs import finished
from scripts.study.teacher_runs import final_number
from scripts.study.teacher_verdict import markdown, sentences
from scripts.study.teachers import CACHE, NAMES, OFF, ONLINE, OWN, SECOND, grid

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports

SOURCE = ("data.source=a.jsonl", "data.fields={prompt: question, completion: answer}")


def test_configurations_differ_in_nothing_but_the_teachers_word():
    setups = grid(SOURCE)
    assert len(setups) == len({setup.key for setup in setups}) == 3 * (3 + 4)
    common = load(RECIPE)
    for setup in setups:
        recipe = setup.recipe()
        assert recipe.train.seed == setup.seed and recipe.student.from_teacher.layers == 15
        assert recipe.train.tokens_per_step == common.train.tokens_per_step, "equal tokens a step"
        if setup.part == CACHE:
            assert recipe.train.steps == common.train.steps and not setup.first and recipe.data.on_policy is None
            assert [term.type for term in recipe.loss.terms] == ["forward_kl"]
        else:
            assert setup.stage_before().train.steps == common.train.steps > recipe.train.steps
            assert setup.stage_before().data.on_policy is None
    for seed in range(3):
        second = [setup for setup in setups if setup.part == OWN and setup.seed == seed]
        assert len({setup.first for setup in second}) == 1, "all go on from the same student"
        assert len({setup.recipe().train.model_dump_json() for setup in second}) == 1, "with the same steps and rate"
        assert [s.recipe().data.on_policy.fraction for s in second if s.recipe().data.on_policy] == [0.5, 1.0]
    assert [setup.seed for setup in setups] == sorted(setup.seed for setup in setups), "a seed is whole before the next"


def test_a_key_depends_on_both_stages_but_not_on_the_data_path():
    here, there = grid(SOURCE), grid(("data.source=/elsewhere/b.jsonl", SOURCE[1]))
    assert [setup.key for setup in here] == [setup.key for setup in there] and here[0].shown == there[0].shown
    changed = [setup._replace(first=(*setup.first, "train.steps=7")) for setup in here if setup.first]
    assert not {setup.key for setup in changed} & {setup.key for setup in here}
    assert len({here[1]._replace(tail=tail).key for tail in (None, "bucket", "sampled")}) == 3


FEW = ["train.steps=4", "train.log_every=1"]


@pytest.mark.full
def test_the_study_compares_cached_and_online_teachers(tiny_study, tmp_path):  # noqa: F811
    code, said = tiny_study("--plan", "teachers", "--parts", CACHE, "--seeds", "1", more=FEW)
    assert code == 0, said.err
    rows = {row["objective"]: row for row in finished(tmp_path / "out", "teachers")}
    assert set(rows) == set(NAMES[CACHE]) and finished(tmp_path / "out") == [], "rows of the two plans stay apart"
    online = rows.pop(ONLINE)
    for row in rows.values():
        assert row["before"] == online["before"] and row["learned_tokens"] == online["learned_tokens"] > 0
        assert row["gap_closed"][0] > 0 and row["after"] != online["after"], (
            "another signal, judged by the same teacher"
        )
        assert row["after"]["forward_kl"][0] == pytest.approx(online["after"]["forward_kl"][0], rel=0.2)
        assert [point["tokens"] for point in row["curve"]] == [point["tokens"] for point in online["curve"]]
    text = (tmp_path / "out" / "teachers.md").read_text()
    assert "A teacher on disk, 2 layers" in text and "one seed, untested" in text
    assert (tmp_path / "out" / "teachers.svg").read_text().startswith("<svg ")
    code, said = tiny_study("--plan", "teachers", "--parts", CACHE, "--seeds", "1", more=FEW)
    assert code == 0 and "3 have their row" in said.out, "nothing is run twice"


@pytest.mark.full
def test_the_study_continues_on_policy(tiny_study, tmp_path, limit):  # noqa: F811
    limit.setattr("scripts.study.teacher_runs.LONGEST", 6)
    kept = {name: SECOND[name] for name in (OFF, "on-policy, reverse KL")}
    words = ("loss.terms=[{type: reverse_kl}]", "data.on_policy={fraction: 1.0, max_new_tokens: 6}")
    limit.setattr("scripts.study.teachers.SECOND", kept | {"on-policy, reverse KL": words})
    code, said = tiny_study(
        "--plan", "teachers", "--parts", OWN, "--seeds", "1", more=["train.steps=2", "train.log_every=1"]
    )
    assert code == 0, said.err
    off, on = finished(tmp_path / "out", "teachers")
    assert off["before"] == on["before"], "both go on from the same weights"
    assert off["after"] != on["after"] and on["learned_tokens"] != off["learned_tokens"]
    assert off["own"]["answers"] == on["own"]["answers"] == off["right"][1]
    for row in (off, on):
        value, low, high = row["own"]["reverse_kl"]
        assert low <= value <= high and 0 < row["own"]["length"] <= 6 and 0 <= row["own"]["truncated"] <= 1
        assert row["teacher_right"] == off["teacher_right"] and str(tmp_path) not in json.dumps(row)
    text = (tmp_path / "out" / "teachers.md").read_text()
    assert "on-policy, reverse KL against off-policy, reverse KL" in text and "they say nothing here" in text


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


# ---------------------------------------------------------------- verdict


def row(part, objective, seed, kl, *, own=1.0, teacher_right=(5, 300), right=3):
    figure = [kl, kl - 0.01, kl + 0.01]
    curve = [{"tokens": n, "forward_kl": 4 - (4 - kl) * n / 4e6, "reverse_kl": kl} for n in (0, 2e6, 4e6)]
    return {
        "plan": "teachers",
        "part": part,
        "objective": objective,
        "layers": 15,
        "seed": seed,
        "tokens": 4_000_000,
        "before": {"forward_kl": 4.0},
        "after": {"forward_kl": figure, "reverse_kl": figure, "agreement": [0.5] * 3},
        "gap_closed": [1 - kl / 4, 0, 1],
        "tokens_per_s": 1000,
        "learned_tokens": 10**6,
        "curve": curve,
        "own": {"forward_kl": [own, 0, 9], "reverse_kl": [own, 0, 9]},
        "right": [right, 300],
        "teacher_right": list(teacher_right),
    }


def test_a_cache_is_as_good_only_within_the_seeds():
    drawn, bucket = "cached, drawn", "cached, others as one"
    rows = [row(CACHE, ONLINE, seed, 1.0 + 0.02 * seed) for seed in range(3)]
    rows += [row(CACHE, drawn, seed, 1.01 + 0.02 * seed) for seed in range(3)]
    rows += [row(CACHE, bucket, seed, 1.3 + 0.02 * seed) for seed in range(3)]
    far, near = sentences(rows)
    assert (
        near.startswith("- cached, drawn, 15 layers: +1.0%") and "not told apart" in near and "2 of 2 moments" in near
    )
    assert "cached, others as one" in far and "+29.4% (p < 0.001)" in far and "0 of 2 moments" in far
    assert "one online seed, which has no range" in sentences([rows[0], rows[3]])[0]
    text = markdown(rows)
    assert "| online | 3 | 1.0200 ± 0.0200 |" in text and text.index("| online") < text.index("| cached, drawn |")


def test_right_answers_count_only_where_they_can_tell():
    def rows(teacher, right):
        every = [row(OWN, name, seed, 1 + 0.01 * seed, teacher_right=teacher) for name in SECOND for seed in range(3)]
        return [one | {"right": [right, 300]} for one in every]

    poor, able = sentences(rows((4, 300), 3))[-1], sentences(rows((120, 300), 90))[-1]
    assert "the teacher itself gets 4 of 300 right (1.3%)" in poor and "differ by 1.8%" in poor
    assert "they say nothing here" in poor and "say nothing" not in able
    assert sentences(rows((0, 300), 0))[-1].endswith("gets 0 of 300 right (0.0%): they say nothing here.")
    assert "on-policy, reverse KL 30.0%" in able and "below 7.8% are not told apart" in able


def test_the_studys_sentences_have_metrics_of_rollouts_too():
    rows = [row(OWN, OFF, seed, 1 + 0.01 * seed, own=0.8 + 0.01 * seed) for seed in range(3)]
    rows += [row(OWN, "on-policy, reverse KL", seed, 1.2 + 0.01 * seed, own=0.4 + 0.01 * seed) for seed in range(3)]
    first = sentences(rows)[0]
    assert "held-out forward KL +19.8% (p < 0.001)" in first and "on own words, reverse KL -49.4% (p < 0.001)" in first
    assert "| off-policy, reverse KL | 3 |" in markdown(rows) and "9 of 900" in markdown(rows)


def test_the_readmes_second_block_has_rows_of_its_own(tmp_path):
    from scripts import readme

    text = "<!-- study -->\n<!-- end rows -->\n\n<!-- study teachers -->\nstale\n<!-- end rows -->\nafter\n"
    empty = text.replace("stale\n", "")
    assert readme.fill(text, [], tmp_path) == empty
    rows = [row(CACHE, name, seed, 1.0 + 0.02 * seed) | FACTS for name in NAMES[CACHE] for seed in range(3)]
    (tmp_path / "h200-teachers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    filled = readme.fill(text, [], tmp_path)
    assert filled.startswith("<!-- study -->\n<!-- end rows -->\n\n<!-- study teachers -->\nTraining from cached ")
    assert "| online | 3 | 1.0200 ± 0.0200 |" in filled and "stale" not in filled and filled.count("<sub>H200") == 1
    assert readme.fill(filled, [], tmp_path) == filled
    (tmp_path / "h200-teachers.jsonl").unlink()
    assert readme.fill(filled, [], tmp_path) == empty, "tables do not outlive their rows"


def test_the_docs_have_a_place_for_both_plans():
    from scripts import readme

    lines = (readme.ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    first, second = (lines.index(marker) for marker in ("<!-- study -->", "<!-- study teachers -->"))
    assert first < lines.index(readme.END, first) < second < lines.index(readme.END, second)
    assert readme.END in lines[first:second], "each block has an end of its own"
