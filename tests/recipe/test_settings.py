"""The settings reference and the JSON schema: complete, true, committed as generated, quick."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill.cli import run_command
from distill.commands import settings_schema
from distill.commands.settings_schema import find_settings, json_schema, settings
from distill.core.errors import Section
from distill.recipe import Parallel, RecipeError, parse, shipped
from distill.recipe.aliases import names_elsewhere
from distill.recipe.shipped import MODELINE, SCHEMA_FILE, copy_recipe, shipped_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BY_NAME = {setting.name: setting for setting in settings()}


def dotted(tree: object, prefix: str = "") -> set[str]:
    """Every path of a resolved recipe; items of lists under []."""
    paths = set()
    for key, value in tree.items() if isinstance(tree, dict) else ():
        paths.add(prefix + key)
        paths |= dotted(value, f"{prefix}{key}.")
        for item in value if isinstance(value, list) else ():
            paths |= dotted(item, f"{prefix}{key}[].")
    return paths


def test_every_field_is_there_with_its_meaning():
    full = parse(
        "{teachers: [{model: a}], student: {from_teacher: {layers: 2}, lora: {}}, train: {steps: 1},"
        "data: {source: x.jsonl, on_policy: {}}, loss: {terms: [{type: jsd}, {type: tvd}, {type: skew_forward_kl}]}}"
    )
    assert dotted(full.model_dump(mode="json")) <= set(BY_NAME)
    assert not [name for name, setting in BY_NAME.items() if len(setting.meaning) < 10], "a field without a docstring"
    assert set(names_elsewhere()) <= set(BY_NAME), "names of others for settings that are gone"


def test_docstrings_name_no_field_that_is_gone():
    for name, section in settings_schema._sections(Section):
        assert set(settings_schema.field_descriptions(section)) <= set(section.model_fields), name


def test_types_and_defaults_are_those_of_the_schema():
    assert BY_NAME["train.batch_size"][1:3] == ("whole number >= 1", "1")
    assert BY_NAME["student.vocabulary"][1:3] == ("keep | extend | cross", "keep")
    assert BY_NAME["loss.terms[].type"].type.split(" | ").count("tvd") == 1
    assert BY_NAME["loss.terms[].beta"][1:3] == ("number >= 0, <= 1", "0.5")
    assert BY_NAME["student.lora.targets"].type == "text | list of text"
    assert BY_NAME["data.sources[].source"].default == "required" and BY_NAME["train.arguments"].default == "{}"
    assert BY_NAME["train.batch_size"].elsewhere["axolotl"] == "micro_batch_size"


@pytest.mark.parametrize(
    "asked, found",
    [
        ("train.batch_size", ["train.batch_size"]),
        ("loss.terms.0.beta", ["loss.terms[].beta"]),
        ("lora", ["student.lora"]),
        ("parallel", ["parallel", *(f"parallel.{name}" for name in Parallel.model_fields)]),
        ("num_train_epochs", ["train.epochs"]),
        ("micro_batch_size", ["train.batch_size"]),
        ("lr", ["train.learning_rate"]),
        ("lora.save", ["student.lora.save"]),
        ("data.on_policy.fr", ["data.on_policy.fraction"]),
        ("smoothing", ["loss.label_smoothing"]),
    ],
)
def test_settings_are_found_by_path_part_and_other_names(asked, found):
    assert [setting.name for setting in find_settings(asked).settings] == found


@pytest.mark.parametrize(
    "asked, hint", [("bach_size", "did you mean batch_size?"), ("zzzz", "lists them all"), ("", "lists them all")]
)
def test_what_is_no_setting_gets_the_nearest(asked, hint):
    with pytest.raises(ValueError, match=rf"expected the name of a setting, got .*{hint.replace('?', '.')}"):
        find_settings(asked)


def test_the_command_prints_the_reference(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["settings", "train.batch_size"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("train.batch_size\n") and "micro_batch_size in axolotl" in out
    assert max(map(len, out.splitlines())) <= 80
    assert run_command(["settings", "train.zzzz"]) == 2
    assert run_command(["settings"]) == 0
    assert all(name in capsys.readouterr().out for name in ["data.max_length"])
    assert run_command(["settings", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(BY_NAME)


def test_the_committed_schema_is_the_generated_one(capsys):
    committed = (ROOT / "recipes" / SCHEMA_FILE).read_text()
    assert run_command(["schema"]) == 0
    assert capsys.readouterr().out == committed, "run python -m scripts.docs"


@functools.cache
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def accepts(recipe: object) -> bool:
    return validator().is_valid(recipe)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_name_the_schema_and_pass_it(path):
    from distill.recipe.yaml_text import parse_yaml

    assert path.read_text().splitlines()[0] == MODELINE + SCHEMA_FILE
    assert (path.parent / SCHEMA_FILE).is_file()
    assert accepts(parse_yaml(path.read_text(), str(path)))
    assert accepts(json.loads(parse(path.read_text()).model_dump_json())), "what a run writes"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"train": {"stepz": 1}},
        {"train": {"steps": "x"}},
        {"loss": {"terms": [{"type": "forwrd_kl"}]}},
        {"student": {"model": "b", "vocabulary": "kept"}},
        {"data": {}},
        {"train": {"steps": 1, "report_to": "wandb"}},
        {"train": {"steps": 1, "warmup": 0.1}},
        {"teacher": None},
        {"train": {"steps": 0}},
        {"surplus": 1},
    ],
)
def test_the_schema_refuses_what_a_recipe_refuses(change):
    tree = {"teacher": {"model": "a"}, "student": {"model": "b"}, "data": {"source": "c.jsonl"}, "train": {"steps": 1}}
    tree = {key: value for key, value in (tree | change).items() if value is not None}
    try:
        parse(json.dumps(tree))
    except RecipeError:
        assert not accepts(tree)
    else:
        assert accepts(tree)


def test_a_copy_names_the_schema_where_it_lies(tmp_path):
    copied = copy_recipe("quickstart", tmp_path)
    first, *rest = copied.read_text().splitlines()
    assert rest == (ROOT / "recipes/quickstart.yaml").read_text().splitlines()[1:]
    assert first == MODELINE + (shipped_folder() / SCHEMA_FILE).resolve().as_uri()


def test_titles_are_not_the_line_for_editors():
    assert all(recipe.title and "schema" not in recipe.title for recipe in shipped.shipped_recipes())


@pytest.mark.plain("['schema']")
@pytest.mark.parametrize("command", [["settings", "train"], ["schema"]])
def test_both_answer_without_torch_and_at_once(command):
    code = (
        "import sys, time; before = time.process_time(); from distill.cli import run_command;"
        f"code = run_command({command!r}); heavy = [n for n in ('torch', 'transformers') if n in sys.modules];"
        "print(code, heavy, time.process_time() - before, file=sys.stderr)"
    )
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    code, heavy, seconds = result.stderr.splitlines()[-1].split(maxsplit=2)
    assert (code, heavy) == ("0", "[]"), result.stderr
    assert float(seconds) < 1, f"{seconds} s of processor, {time.monotonic() - started:.1f} s in all"
