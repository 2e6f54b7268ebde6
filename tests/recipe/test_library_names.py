"""Settings whose names are transformers' are refused by validation, without importing it."""

import dataclasses
import json

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from distill.cli import run_command
from distill.recipe import parse
from distill.recipe.library_names import argument_names, optimizer_names

RECIPE = "{teacher: {model: t}, student: {model: s}, data: {source: x.txt}, train: {steps: 1}}"


def test_the_names_are_those_of_the_library():
    assert set(optimizer_names()) == {each.value for each in OptimizerNames}
    assert set(argument_names()) == {each.name for each in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("override", ["train.optimizer=adafactor", "train.arguments.adam_beta2=0.95"])
def test_known_names_are_taken(override):
    parse(RECIPE, [override], name="x")


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", "[" * 100_000, '{"before": 3}', '{"after": {"forward_kl": "much"}}', '{"answers": 7}']
)
def test_a_damaged_result_is_one_line_of_report_and_compare(tmp_path, monkeypatch, capsys, content):
    for name in ("a", "b"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
        (folder / "result.json").write_text(content)
    monkeypatch.chdir(tmp_path)
    for command in (["report", "a"], ["compare", "a", "b"]):
        assert run_command(command) == 2
        said = capsys.readouterr().err
        assert "result.json" in said and "unexpected" not in said and len(said.strip().splitlines()) == 1
