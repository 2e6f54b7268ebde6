"""Settings under their former names: read with one line that gives the present name, refused under both."""

import copy
import json
import logging
import re
import subprocess
from pathlib import Path

import pytest

from distill.core.errors import RecipeError
from distill.recipe import dump, parse
from distill.recipe import renamed as names

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.findall(
    r"^\| `(.+)` \| `(.+)` \|$",
    (ROOT / "docs/reference/settings/index.md").read_text(encoding="utf-8").partition("## Renamed settings")[2],
    re.MULTILINE,
)
RECIPE = "teacher: {{model: t{teacher}}}\nstudent: {{model: s}}\ndata: {{source: x{data}}}\ntrain: {{steps: 2}}\n"


def recipe(teacher="", data="", overrides=(), **options):
    return parse(RECIPE.format(teacher=teacher, data=data), overrides, **options)


@pytest.fixture(autouse=True)
def lines(caplog):
    names._logged.clear()
    with caplog.at_level(logging.WARNING, logger="distill.recipe.renamed"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "former, present",
    [
        ({"teacher": ", keep: k"}, {"teacher": ", online_cache: k"}),
        (
            {"teacher": ", keep: k, keep_as: hidden_fp8"},
            {"teacher": ", online_cache: k, online_cache_format: hidden_fp8"},
        ),
        (
            {"teacher": ", type: server, url: http://h:1, send: fp8, wait: 5"},
            {"teacher": ", type: server, url: http://h:1, transfer_dtype: fp8, timeout: 5"},
        ),
        ({"teacher": ", keep: k, as: hidden_fp8"}, {"teacher": ", online_cache: k, online_cache_format: hidden_fp8"}),
        (
            {"overrides": ["parallel.teacher=ranks", "parallel.teacher_ranks=2"]},
            {"overrides": ["parallel={teacher: served, teacher_gpus: 2}"]},
        ),
        (
            {"overrides": ["stages=[{teacher: {keep: k}}, {train: {steps: 3}}]", "stages.1.teacher.keep=j"]},
            {"overrides": ["stages=[{teacher: {online_cache: k}}, {teacher: {online_cache: j}, train: {steps: 3}}]"]},
        ),
        ({"data": ", on_policy: {ahead: 2}"}, {"data": ", on_policy: {max_staleness: 2}"}),
        ({"overrides": ["teacher.keep=k"]}, {"overrides": ["teacher.online_cache=k"]}),
        ({"overrides": ["data.on_policy={ahead: 1}"]}, {"overrides": ["data.on_policy={max_staleness: 1}"]}),
        ({"teacher": ", keep: k", "overrides": ["teacher.keep=j"]}, {"overrides": ["teacher.online_cache=j"]}),
        ({"teacher": ", online_cache: k", "overrides": ["teacher.keep="]}, {}),
    ],
)
def test_former_names_set_the_present_fields_with_one_log_line(former, present, lines):
    assert recipe(**present) == recipe(**present) and not lines()
    read = recipe(**former)
    assert read == recipe(**present) == recipe(**former)
    assert len(lines()) == len(set(lines())) > 0 and all(
        "the former name is read until 1.0" in line for line in lines()
    )


def test_members_of_several_teachers_are_read_too(lines):
    text = RECIPE.format(teacher="", data="").replace(
        "teacher: {model: t}", "teachers: [{model: t, keep: k}, {model: u}]"
    )
    several = parse(text, ["teachers.1.keep=j"])
    assert [teacher.online_cache for teacher in several.teachers] == ["k", "j"]
    assert lines() == ["teacher.keep is now teacher.online_cache; the former name is read until 1.0"]


def tree_with(setting, value):
    """Return the tree of a recipe that sets nothing but `setting`, given as `section.name`."""
    for part in reversed(setting.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("former, present", TABLE)
def test_each_row_of_the_table_is_read_with_one_line_that_names_both(former, present, lines):
    (old, _, old_value), (new, _, new_value) = former.partition(": "), present.partition(": ")
    tree = tree_with(old, old_value or "any")
    names.rename_settings(tree)
    assert tree == tree_with(new, new_value or "any")
    assert lines() == [f"{former} is now {present}; the former name is read until 1.0"]


def test_present_names_are_fields_and_former_ones_are_none():
    written = dump(recipe(data=", on_policy: {max_staleness: 1}"))
    for former, present in names.RENAMED.items():
        assert f" {present.rpartition('.')[2]}:" in written and f" {former.rpartition('.')[2]}:" not in written


def settings_of(schema):
    """Return the paths of all settings of a recipe's JSON schema, each with the values that it lists."""
    found = {}

    def walk(node, path, depth=0):
        assert depth < 12
        if "$ref" in node:
            walk(schema["$defs"][node["$ref"].rpartition("/")[2]], path, depth + 1)
        for inner in [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]:
            walk(inner, path, depth)
        if isinstance(node.get("items"), dict):
            walk(node["items"], f"{path}[]", depth + 1)
        values = found.setdefault(path, set())
        values.update(value for value in [*node.get("enum", ()), node.get("const")] if isinstance(value, str))
        for name, inner in node.get("properties", {}).items():
            walk(inner, f"{path}.{name}".lstrip("."), depth + 1)

    walk(schema, "")
    return found


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.full
def test_every_name_and_value_that_a_setting_ever_had_is_read_or_named_as_removed():
    """The table and the reader agree: what an earlier commit's schema had, and today's has not, is in one of them."""
    schema = "recipes/recipe.schema.json"
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the history of the repository")
    today = settings_of(json.loads((ROOT / schema).read_text()))
    ever = {}
    commits = git("log", "--format=%h", "--diff-filter=AM", "--", schema).split()
    for commit in commits:
        for setting, values in settings_of(json.loads(git("show", f"{commit}:{schema}"))).items():
            ever.setdefault(setting, set()).update(values)
    gone = {(setting, None) for setting in ever.keys() - today.keys()}
    gone |= {(setting, value) for setting in ever.keys() & today.keys() for value in ever[setting] - today[setting]}
    assert len(commits) > 30 and gone
    read, removed = set(), set()
    for setting, value in gone:
        plain = re.sub(r"^teachers\[\]\.", "teacher.", setting)
        before = tree_with(plain, value or "any")
        tree = copy.deepcopy(before)
        try:
            names.rename_settings(tree)
        except RecipeError as error:
            assert "was removed" in str(error)
            removed.add(plain)
        else:
            assert tree != before, f"{plain}={value}: an earlier version's recipe had it; it is neither read nor named"
            read.add(f"{plain}: {value}" if value else plain)
    assert read == {former for former, _ in TABLE} and removed == set(names.REMOVED)


def test_removed_settings_are_refused_with_what_to_use_unless_they_change_nothing():
    text = RECIPE.format(teacher="", data="")
    expected = "train.compile: was removed; leave it out: train.cuda_graph, auto by itself, is faster"
    for given in (
        lambda: parse(text, ["train.compile=true"]),
        lambda: parse(text.replace("steps: 2", "steps: 2, compile: true")),
    ):
        with pytest.raises(RecipeError) as raised:
            given()
        assert raised.value.args[0] == expected or expected in str(raised.value)
    assert parse(text.replace("steps: 2", "steps: 2, compile: false")) == parse(text)
