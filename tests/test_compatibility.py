"""The compatibility table of settings is read without torch, and every refusal is one line."""

import pytest

from distill.recipe import RecipeError, Teacher, dump, parse
from distill.recipe.compatibility import COMMANDS, CONFLICTS, FEATURES, KINDS, require_command
from distill.recipe.teachers import describe_teacher, kind_of
from distill.teachers.registry import SOURCES

BASE = "data: {source: x.jsonl}\ntrain: {steps: 3}\n"
ONE = "teacher: {model: t}\nstudent: {model: s}\n" + BASE
# how a recipe comes to have each kind of teacher, and each feature
OF_KIND = {
    "model": [],
    "cache": ["teacher={type: cache, path: there}"],
    "server": ["teacher={type: server, url: 'http://127.0.0.1:1'}"],
    "keep": ["teacher.keep=there"],
    "launched": ["parallel={teacher: served, teacher_gpus: 1}"],
    "mixture": ["teacher=null", "teachers=[{model: t}, {model: u, weight: 3}]"],
    "cross": ["student.vocabulary=cross"],
    "routed": [
        "teacher=null",
        "teachers=[{model: t, route: a}, {model: u, route: b}]",
        "data.fields.teacher=domain",
    ],
    "context": ["teacher.context={template: 'Know that {hint}'}"],
}
WITH = {
    "on-policy": ["data.on_policy={}"],
    "hard labels": ["loss.terms=[{type: forward_kl}, {type: cross_entropy}]"],
    "separate terms": ["loss.terms=[{type: top_k_reverse_kl}]"],
    "teacher's top k": ["teacher={type: server, url: 'http://127.0.0.1:1', top_k: 8}"],
    "label smoothing": ["loss={terms: [{type: forward_kl}, {type: cross_entropy}], label_smoothing: 0.1}"],
    "z-loss": ["loss={terms: [{type: forward_kl}, {type: cross_entropy}], z_loss: 0.1}"],
    "plugin": ["loss.plugin={file: p.py, sha256: " + "0" * 64 + "}"],
    "running text": ["data.format=text"],
    "random tokens": ["data.source=synthetic"],
    "fp8 teacher": ["teacher.dtype=fp8"],
    "int8 teacher": ["teacher.dtype=int8"],
    "offloaded teacher": ["teacher.offload=cpu"],
    "sharded teacher": ["parallel.teacher=sharded"],
    "launched server": ["parallel={teacher: served, teacher_gpus: 1}"],
    "kept teacher": ["teacher.keep=there"],
    "cut student": ["student={from_teacher: {layers: 1}}"],
    "teacher's context": ["teacher.context={template: 'Be brief.'}"],
    "student as teacher": ["teacher={type: student, context: {template: 'Be brief.'}}"],
    "running average": ["teacher={type: student, ema: 0.9, context: {template: 'Be brief.'}}"],
    "teacher for some steps": [
        "loss={terms: [{type: cross_entropy}, {type: forward_kl}], "
        "schedule: [{setting: terms.1.weight, steps: [0, 9], values: [0, 1]}]}"
    ],
    "LoRA": ["student.lora={r: 2}"],
    "fp8 student": ["student.compute=fp8"],
    "compiled layers": ["train.compile=true"],
}


def test_the_table_knows_every_kind_and_feature():
    assert set(KINDS) == set(SOURCES) == set(OF_KIND) and set(FEATURES) == set(WITH)
    names = set(KINDS) | set(FEATURES)
    assert all({conflict.first, conflict.second} <= names for conflict in CONFLICTS)
    assert all(set(kinds) <= set(KINDS) for kinds in COMMANDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_what_a_recipe_spells(kind):
    recipe = parse(ONE, OF_KIND[kind])
    assert kind_of(recipe) == describe_teacher(recipe).kind == kind
    described = describe_teacher(recipe)
    assert abs(sum(described.weights) - len(set(described.routes or [""]))) < 1e-12
    for command, kinds in COMMANDS.items():
        if kind not in kinds:
            require_command(recipe, command)
            continue
        with pytest.raises(ValueError) as refused:
            require_command(recipe, command)
        assert str(refused.value) == kinds[kind] and "\n" not in kinds[kind]


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: f"{conflict.first}, {conflict.second}")
def test_every_conflict_is_refused_in_one_line(conflict):
    """The message is the table's, unless a section has refused the setting already."""
    overrides = [*(OF_KIND | WITH)[conflict.first], *WITH[conflict.second]]
    with pytest.raises(RecipeError) as refused:
        parse(ONE, overrides)
    assert all("\n" not in fault for fault in refused.value.faults)
    assert any(conflict.message in fault for fault in refused.value.faults), refused.value.faults


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_pairs_that_are_not_in_the_table_are_taken_or_refused_in_one_line(kind, feature):
    try:
        recipe = parse(ONE, [*OF_KIND[kind], *WITH[feature]])
    except RecipeError as error:
        assert error.faults and all("\n" not in fault for fault in error.faults)
    else:
        assert FEATURES[feature](recipe)


def test_recipes_with_several_teachers():
    base = "student: {model: s}\ndata: {source: x.jsonl}\ntrain: {steps: 3}\n"
    recipe = parse("teachers: [{model: a, weight: 0.7}, {model: b, adapter: c}]\n" + base, ["teachers.1.weight=3"])
    assert recipe.teacher == Teacher(model="a") and [t.weight for t in recipe.teachers] == [0.7, 3.0]
    assert parse(dump(recipe)) == recipe and "\nteacher:" not in dump(recipe)
    for text, told in (
        ("teachers: [{mode: a}]", "teachers.0.mode: unknown field; did you mean model"),
        ("teachers: {model: a}", "teachers: expected a list"),
        ("teachers: []", "teacher: required field is missing"),
        ("teachers: [{model: a}]\nteacher: {model: b}", "give either teacher or teachers; got both"),
        ("teachers: [{model: a, weight: 0}]", "every weight is 0"),
        ("teachers: [{model: a, weight: -1}]", "teachers.0.weight"),
        ("teachers: [{model: a, dtype: fp8}]", "teachers.0: dtype: fp8 works for one teacher only"),
    ):
        with pytest.raises(RecipeError) as error:
            parse(f"{text}\n{base}")
        assert len(error.value.faults) == 1 and told in error.value.faults[0]


def test_recipes_that_cannot_cross():
    base = "data: {source: x.jsonl}\ntrain: {steps: 3}\nteacher: {model: t}\n"
    for text, told in (
        ("student: {from_teacher: {layers: 2}, vocabulary: cross}", "vocabulary: cross needs a student.model"),
        ("student: {init: random, config: c, vocabulary: cross}", "vocabulary: cross needs a student.model"),
    ):
        with pytest.raises(RecipeError, match=told):
            parse(text + "\n" + base)
    with pytest.raises(RecipeError, match=r"fp8 does not work with student\.vocabulary: cross"):
        parse(base + "student: {model: s, vocabulary: cross}", ["teacher.dtype=fp8"])
    several = base.replace("teacher: {model: t}", "teachers: [{model: t}]") + "student: {model: s, vocabulary: cross}"
    with pytest.raises(RecipeError, match="cross compares with one teacher"):
        parse(several)
