"""Recipes that extend another: what a child inherits, what it replaces, and where its parent is searched."""

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from distill.cli import app
from distill.commands.settings_schema import find_settings, json_schema
from distill.recipe import dump, load, parse
from distill.recipe.loss import TemperaturePair
from distill.recipe.shipped import find_recipe

BASE = """
name: the-base
teacher: {model: big, dtype: float32}
student: {model: small, lora: {r: 4, alpha: 8}}
data: {source: chats.jsonl, validation: {fraction: 0.1}}
loss: {terms: [{type: forward_kl}, {type: cross_entropy, weight: 0.5}]}
train: {steps: 10, tokens_per_step: 4096, learning_rate: 1e-4}
"""


def write(folder: Path, **texts: str) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.yaml" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    return paths


def test_a_child_replaces_deeply_what_it_sets_and_inherits_the_rest(tmp_path):
    child = """
extends: base.yaml
student: {lora: {r: 16}}
loss: {terms: [{type: jsd, beta: 0.1}]}
train: {epochs: 0.5}
"""
    recipe = load(write(tmp_path, base=BASE, child=child)["child"], ["train.learning_rate=2e-4"])
    assert recipe.name == "child", "a child's runs are not among those of its parent"
    assert (recipe.teacher.model, recipe.teacher.dtype, recipe.data.validation.fraction) == ("big", "float32", 0.1)
    assert (recipe.student.model, recipe.student.lora.r, recipe.student.lora.alpha) == ("small", 16, 8)
    assert [term.type for term in recipe.loss.terms] == ["jsd"], "a list is replaced"
    assert (recipe.train.steps, recipe.train.epochs, recipe.train.learning_rate) == (None, 0.5, 2e-4)
    assert "extends" not in dump(recipe) and parse(dump(recipe)) == recipe


def test_a_section_of_a_child_or_a_stage_replaces_a_number(tmp_path):
    base = BASE.replace("loss: {", "loss: {temperature: 2, ")
    pair = "loss: {temperature: {student: 1.1}}"
    recipe = load(write(tmp_path, base=base, child=f"extends: base.yaml\n{pair}\n")["child"])
    assert recipe.loss.temperatures == TemperaturePair(teacher=1.0, student=1.1)
    staged = parse(base, [f"stages=[{{name: one}}, {{name: two, {pair}}}]"])
    texts = [staged.of_stage(0, None).loss.temperature_text, staged.of_stage(1, "start").loss.temperature_text]
    assert texts == ["2", "1 (teacher), 1.1 (student)"]


def test_a_chain_is_searched_next_to_each_file_and_ends_at_a_shipped_recipe(tmp_path, monkeypatch):
    write(tmp_path / "shared", middle="extends: quickstart\ntrain: {steps: 7}\ndata: {source: rows.jsonl}\n")
    paths = write(tmp_path / "mine", child="extends: ../shared/middle.yaml\n")
    monkeypatch.chdir(tmp_path)
    recipe = load(paths["child"])
    shipped = load(find_recipe("quickstart"))
    assert (recipe.train.steps, recipe.teacher, recipe.student) == (7, shipped.teacher, shipped.student)
    assert recipe.data.source == "rows.jsonl", "other paths stay relative to the working directory"


def test_former_names_meet_the_present_ones_of_the_parent(tmp_path):
    base = BASE + "parallel: {teacher: served, teacher_gpus: 1}\n"
    child = "extends: base.yaml\nparallel: {teacher_ranks: 2}\n"
    assert load(write(tmp_path, base=base, child=child)["child"]).parallel.teacher_gpus == 2


@pytest.mark.full
def test_validate_prints_the_resolved_recipe_and_editors_know_a_child(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = write(tmp_path, child="extends: quickstart\ntrain: {steps: 3}\n")
    printed = CliRunner().invoke(app, ["validate", str(paths["child"]), "--json"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout)["train"]["steps"] == 3 and "extends" not in json.loads(printed.stdout)
    schema = json_schema()
    jsonschema.validate({"extends": "quickstart", "train": {"log_every": 3}, "data": {"max_length": 9}}, schema)
    for incomplete in ({"train": {"steps": 3}}, {"teacher": {}, "student": {}, "data": {}, "train": {"steps": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(incomplete, schema)
    assert find_settings("train").settings[0].default == "required"
    assert find_settings("extends").settings[0].meaning
