"""Compatibility of settings is derived from what they require and what a recipe provides, without torch."""

import functools
import itertools
import re

import pytest

from distill.recipe import LocalTeacherConfig, RecipeError, dump, parse
from distill.recipe.compatibility import APART, COMMANDS, PROPERTIES, REQUIREMENTS, conflicts, require_command
from distill.recipe.teachers import describe_teacher

BASE = "data: {source: x.jsonl}\ntrain: {steps: 3}\n"
ONE = "teacher: {model: t}\nstudent: {model: s}\n" + BASE
SERVER = "type: server, url: 'http://127.0.0.1:1'"
BACKENDS = {
    "local": "model: t",
    "local top k": "model: t, top_k: 8",
    "student": "type: student",
    "average": "type: student, ema: 0.9",
    "server": SERVER,
    "server's top k": SERVER + ", top_k: 8",
    "cache": "type: cache, path: there",
    "stored": "model: t, online_cache: there",
    "stored top k": "model: t, online_cache: there, online_cache_format: top_k",
    "launched": "model: t",
}
ROWS = {"same": "", "context": ", context: {template: 'Know that {hint}'}", "retokenised": ""}
COMBINATIONS = ("alone", "mixture", "routed")
PRODUCT = list(itertools.product(BACKENDS, ROWS, COMBINATIONS))
FORM = re.compile(r"^recipe: (.+): requires (.+); got (.+); (.+)$")


def overrides_of(backend, rows, combination):
    """The overrides of `ONE` by which a recipe has a point of the product."""
    section = BACKENDS[backend] + ROWS[rows]
    given = [f"teacher={{{section}}}"]
    if combination == "mixture":
        given = ["teacher=null", f"teachers=[{{{section}}}, {{model: u, weight: 3}}]"]
    if combination == "routed":
        given = [
            "teacher=null",
            f"teachers=[{{{section}, route: a}}, {{model: u, route: b}}]",
            "data.fields.teacher=domain",
        ]
    given += ["student.vocabulary=cross"] * (rows == "retokenised")
    return given + ["parallel={teacher: served, teacher_gpus: 1}"] * (backend == "launched")


def faults_of(overrides):
    """Return the refusals, one line each; several tests go over the same recipes."""
    return _faults_of(tuple(overrides))


@functools.cache
def _faults_of(overrides):
    try:
        parse(ONE, overrides)
    except RecipeError as error:
        assert all("\n" not in fault for fault in error.faults)
        return list(error.faults)
    return []


WITH = {
    "on-policy": ["data.on_policy={}"],
    "hard labels": ["loss.terms=[{type: forward_kl}, {type: cross_entropy}]"],
    "separate terms": ["loss.terms=[{type: top_k_reverse_kl}]"],
    "teacher's top k": ["teacher={type: server, url: 'http://127.0.0.1:1', top_k: 8}"],
    "label smoothing": ["loss={terms: [{type: forward_kl}, {type: cross_entropy}], label_smoothing: 0.1}"],
    "z-loss": ["loss={terms: [{type: forward_kl}, {type: cross_entropy}], z_loss: 0.1}"],
    "plugin": ["loss.plugin={file: p.py, sha256: " + "0" * 64 + "}"],
    "running text": ["data.format=text"],
    "answers to running text": ["data.format=text", "data.on_policy={}"],
    "random tokens": ["data.source=synthetic"],
    "streamed data": ["data.streaming=true"],
    "streamed turns": ["data.streaming=true", "data.on_policy={turns: all}"],
    "fp8 teacher": ["teacher.dtype=fp8"],
    "int8 teacher": ["teacher.dtype=int8"],
    "offloaded teacher": ["teacher.offload=cpu"],
    "sharded teacher": ["parallel.teacher=sharded"],
    "launched server": ["parallel={teacher: served, teacher_gpus: 1}"],
    "kept teacher": ["teacher.online_cache=there"],
    "cut student": ["student={from_teacher: {layers: 1}}"],
    "cut checkpoint": ["student={model: s, from_teacher: {layers: 1}}"],
    "teacher's context": ["teacher.context={template: 'Be brief.'}"],
    "context of responses": ["teacher.context={template: '{{ best.answer }}', syntax: jinja}"],
    "context of single responses": [
        "teacher.context={template: '{{ best.answer }}', syntax: jinja}",
        "data.on_policy={}",
    ],
    "context of responses without rewards": [
        "teacher.context={template: '{{ best.answer }}', syntax: jinja}",
        "data.on_policy={samples: 2}",
        "train.batch_size=2",
    ],
    "context of feedback": ["teacher.context={template: '{{ feedback }}', syntax: jinja}", "data.on_policy={}"],
    "teacher's template variables": ["teacher.chat_template_kwargs={enable_thinking: true}"],
    "student as teacher, with its own template variables": [
        "teacher={type: student, chat_template_kwargs: {enable_thinking: true}}",
        "data.chat_template_kwargs={enable_thinking: true}",
    ],
    "student as teacher": ["teacher={type: student, context: {template: 'Be brief.'}}"],
    "running average": ["teacher={type: student, ema: 0.9, context: {template: 'Be brief.'}}"],
    "teacher for some steps": [
        "loss={terms: [{type: cross_entropy}, {type: forward_kl}], "
        "schedule: [{setting: terms.1.weight, steps: [0, 9], values: [0, 1]}]}"
    ],
    "two contexts": [
        "teacher=null",
        "teachers=[{model: t, context: {template: 'Be brief.'}}, {model: u, context: {template: 'Be long.'}}]",
    ],
    "LoRA": ["student.lora={r: 2}"],
    "fp8 student": ["student.compute=fp8"],
    "quantised student": ["student.quantise={format: q4_0}"],
    "quantised adapters": ["student.quantise={format: q4_0}", "student.lora={r: 2}"],
    "quantised shards": ["student.quantise={format: q4_0}", "parallel.strategy=fsdp"],
    "quantised adapters in shards": [
        "student.quantise={format: q4_0}",
        "student.lora={r: 2}",
        "parallel.strategy=fsdp",
    ],
    "layers": ["loss.terms=[{type: forward_kl}, {type: hidden_state}]"],
    "graphed layers that are compared": [
        "loss.terms=[{type: forward_kl}, {type: attention_relation}]",
        "train.cuda_graph=true",
    ],
}


# points of the product that are refused, and the property that is missing
K_TOKENS = ("local top k", "server's top k", "stored top k")
REFUSED = {
    **{(backend, "retokenised", combination): "hidden states" for backend in K_TOKENS for combination in COMBINATIONS},
    **{(backend, rows, "mixture"): "hidden states to mix" for backend in K_TOKENS for rows in ROWS},
    **{("launched", rows, combination): "one teacher" for rows in ROWS for combination in ("mixture", "routed")},
    **{(backend, "retokenised", "mixture"): "one teacher a token" for backend in BACKENDS},
}


@pytest.mark.parametrize(("backend", "rows", "combination"), PRODUCT, ids=str)
def test_every_backend_goes_with_all_rows_and_combinations(backend, rows, combination):
    """But for what is named; `type: student` needs a context, without which it would teach nothing."""
    faults = faults_of(overrides_of(backend, rows, combination))
    if backend in ("student", "average") and rows != "context":
        assert "type: student needs context" in faults[0]
    elif (name := REFUSED.get((backend, rows, combination))) is None:
        assert not faults
    else:
        required = [found[2] for fault in faults if (found := FORM.match(fault))]
        assert len(required) == len(faults) and PROPERTIES[name].what in required, faults


def test_a_refusal_names_what_is_required_what_is_given_and_what_gives_it():
    (fault,) = faults_of([*overrides_of("cache", "same", "alone"), "data.on_policy={}"])
    assert FORM.match(fault).groups() == (
        "data.on_policy",
        "a teacher that computes outputs for rows it has not seen",
        "teacher.type: cache",
        "set teacher.type to model or server, without teacher.online_cache",
    )
    (fault,) = faults_of([*overrides_of("server", "same", "routed"), *WITH["teacher for some steps"]])
    assert "teacher.type: server: requires a divergence of weight above 0 in every step" in fault


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["loss.terms=[{type: jsd}]"], "loss.terms: divergences other than forward_kl alone or reverse_kl alone: req"),
        (["loss.terms=[{type: forward_kl}, {type: reverse_kl}]"], "loss.terms: divergences other than forward_kl al"),
        (["loss.schedule=[{setting: temperature, steps: [0, 4], values: [1, 2]}]"], "loss.schedule: temperature"),
    ],
)
@pytest.mark.parametrize("backend", K_TOKENS)
@pytest.mark.parametrize("combination", ["alone", "routed"])
def test_k_tokens_are_for_one_kl_at_one_temperature(backend, combination, overrides, told):
    (fault,) = faults_of([*overrides_of(backend, "same", combination), *overrides])
    assert told in fault and "top_k" in fault
    mixed = ["loss.temperature=2", "loss.terms=[{type: reverse_kl, weight: 2}, {type: cross_entropy}]"]
    if backend != "stored top k":  # which has no outputs for rollouts
        tailed = ["data.on_policy={}", "loss.terms=[{type: top_k_reverse_kl, tail: sampled}]"]
        given = overrides_of(backend, "same", combination)
        assert not faults_of([*given, *tailed])
        (fault,) = faults_of([*given, *tailed, "loss.temperature=2"])
        assert "tail: sampled beside other terms or with loss.temperature other than 1" in fault
    assert not faults_of([*overrides_of(backend, "same", combination), *mixed])


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["parallel.strategy=fsdp"], "parallel.strategy: fsdp"),
        (["student={model: s, from_teacher: {layers: 1}}"], "student.from_teacher"),
        (["student.vocabulary=extend"], "student.vocabulary: extend"),
        (["student.lora={r: 2, head: true}"], "student.lora.head: true"),
        (["student={model: s, lora: {r: 2}, quantise: {format: q8_0}}"], "student.lora with student.quantise"),
        (["parallel={teacher: served, teacher_gpus: 1}"], "teacher.ema"),
    ],
)
def test_a_running_average_needs_all_weights_of_its_checkpoint(overrides, given):
    """A frozen copy of the student needs none of that."""
    (fault,) = faults_of([*overrides_of("average", "context", "alone"), *overrides])
    assert f"got {given};" in fault and "ema" in fault
    assert not faults_of([*overrides_of("student", "context", "alone"), *overrides])


def test_several_teachers_are_not_sharded():
    for combination in ("mixture", "routed"):
        (fault,) = faults_of([*overrides_of("local", "same", combination), "parallel.teacher=sharded"])
        assert "parallel.teacher: sharded: requires one teacher; got teachers" in fault


def test_a_property_that_nothing_requires_is_none():
    required = {name for requirement in REQUIREMENTS for name in requirement.properties}
    assert required | {name for names in COMMANDS.values() for name in names} == PROPERTIES.keys()
    assert len(APART) <= 12


@pytest.mark.full
def test_every_requirement_is_met_by_one_recipe_and_missed_by_another():
    """No row of the table is dead: each property is found missing in a recipe of the product."""
    missed = set()
    for point in PRODUCT:
        for feature in [[], *WITH.values(), [*WITH["int8 teacher"], *WITH["cut student"]]]:
            for fault in faults_of([*overrides_of(*point), *feature]):
                missed |= {name for name, own in PROPERTIES.items() if f"requires {own.what};" in fault}
    of_commands = {"one teacher for all rows", "weights", "student's prompts", "a model"}
    assert missed >= PROPERTIES.keys() - of_commands, PROPERTIES.keys() - of_commands - missed


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_require_properties(command):
    refused = []
    for point in (
        ("local", "same", "alone"),
        ("server", "same", "alone"),
        ("local", "context", "alone"),
        ("local", "retokenised", "alone"),
        ("local", "same", "mixture"),
        ("local", "same", "routed"),
        ("cache", "same", "alone"),
    ):
        recipe = parse(ONE, overrides_of(*point))
        assert not list(conflicts(recipe))
        lacks = [name for name in COMMANDS[command] if PROPERTIES[name].missing(recipe) is not None]
        if not lacks:
            require_command(recipe, command)
            continue
        refused.append(point)
        with pytest.raises(ValueError, match=f"distill {command}: requires {PROPERTIES[lacks[0]].what}; got"):
            require_command(recipe, command)
    assert refused and ("local", "same", "alone") not in refused


def test_members_have_weights_by_route():
    described = describe_teacher(parse(ONE, overrides_of("local", "same", "routed")))
    assert described.weights == (1.0, 1.0) and described.routes == ("a", "b")
    assert describe_teacher(parse(ONE, overrides_of("local", "same", "mixture"))).weights == (0.25, 0.75)


def test_recipes_with_several_teachers():
    base = "student: {model: s}\ndata: {source: x.jsonl}\ntrain: {steps: 3}\n"
    recipe = parse("teachers: [{model: a, weight: 0.7}, {model: b, adapter: c}]\n" + base, ["teachers.1.weight=3"])
    assert recipe.teacher == LocalTeacherConfig(model="a") and [t.weight for t in recipe.teachers] == [0.7, 3.0]
    assert parse(dump(recipe)) == recipe and "\nteacher:" not in dump(recipe)


def test_a_teacher_in_fp8_may_have_another_tokenizer():
    assert not faults_of([*overrides_of("local", "retokenised", "alone"), "teacher.dtype=fp8"])
