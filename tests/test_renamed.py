"""Settings under their former names: read with one line that gives the present name, refused under both."""

import logging

import pytest

from distill.core.errors import RecipeError
from distill.recipe import dump, parse
from distill.recipe import renamed as names

RECIPE = "teacher: {{model: t{teacher}}}\nstudent: {{model: s}}\ndata: {{source: x{data}}}\ntrain: {{steps: 2}}\n"


def recipe(teacher="", data="", overrides=(), **options):
    return parse(RECIPE.format(teacher=teacher, data=data), overrides, **options)


@pytest.fixture(autouse=True)
def lines(caplog, monkeypatch):
    monkeypatch.setattr(names, "_logged", set())
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


def test_both_names_of_a_setting_are_refused():
    with pytest.raises(RecipeError, match=r"teacher\.keep: is the former name of teacher\.online_cache"):
        recipe(", keep: k, online_cache: k")
    with pytest.raises(RecipeError, match=r"data\.on_policy\.ahead: is the former name"):
        recipe(overrides=["data.on_policy={ahead: 1, max_staleness: 1}"])


def test_a_run_of_an_earlier_version_is_read_in_silence(lines):
    assert recipe(", keep: k", of_run=True).teacher.online_cache == "k" and not lines()


def test_present_names_are_fields_and_former_ones_are_none():
    written = dump(recipe(data=", on_policy: {max_staleness: 1}"))
    for former, present in names.RENAMED.items():
        assert f" {present.rpartition('.')[2]}:" in written and f" {former.rpartition('.')[2]}:" not in written


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
