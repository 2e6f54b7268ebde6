"""Runs whose student is cut from its teacher by width: the same bits again, resumed, with stored teachers, planned."""

import json
from pathlib import Path

import pytest
import torch
from tiny import save_models
from transformers import AutoModelForCausalLM
from two_ranks import run_as_two

from distill.cli import run_command
from distill.doctor import examine
from distill.doctor.invariants import CHECKS
from distill.models.prune import importance
from distill.recipe import load, parse
from distill.run import run
from distill.teachers import calibration

LINES = (f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
TEXT = "\n".join(LINES)
CUT = "{layers: 3, hidden: 24, heads: 2, kv_heads: 1, intermediate: 40, importance: {rows: 8, layer_rows: 2}}"
RECIPE = f"""
teacher: {{model: teacher}}
student: {{from_teacher: {CUT}}}
data: {{source: text.txt, max_length: 32, cache: false, validation: {{fraction: 0.1}}}}
train: {{steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu}}
generate: {{prompts: [Hello], max_new_tokens: 5}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two teachers, text, the recipe, and the run `whole` of it."""
    folder = tmp_path_factory.mktemp("narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DISTILL_CACHE", str(folder / "cache"))
        save_models(folder, text=TEXT, teacher={"layers": 4, "seed": 1}, other={"layers": 4, "seed": 3})
        Path("tiny.yaml").write_text(RECIPE)
        run(recipe(), name="whole")
    return folder


@pytest.fixture
def place(workplace, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(workplace / "cache"))
    return workplace


def recipe(*overrides):
    return parse(RECIPE, [*overrides], name="tiny")


def student(name):
    return AutoModelForCausalLM.from_pretrained(Path("runs", name, "student"))


def assert_equal(one, other):
    """Two runs, by their names, have the same held-out figures and weights."""
    figures = [json.loads(Path("runs", name, "result.json").read_text()) for name in (one, other)]
    assert figures[0]["before"] == figures[1]["before"] and figures[0]["after"] == figures[1]["after"]
    first, second = student(one).state_dict(), student(other).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.fixture
def choices(watch):
    """Numbers of rows by which parts were chosen, once for each time."""
    calls, choose = [], importance.select_parts

    def counted(model, cut, rows):
        calls.append(len(rows))
        return choose(model, cut, rows)

    watch.setattr(calibration, "select_parts", counted)
    return calls


@pytest.mark.full
def test_a_run_is_the_same_again_and_its_student_loads(place, capsys, choices):
    one = run(recipe("data.cache=true"), name="one")
    out = capsys.readouterr().out
    assert "layers 0" in out and "hidden 24, heads 2 (1 of keys and values), MLP columns 40" in out
    assert_equal("one", "whole")
    assert one.after.forward_kl < one.before.forward_kl
    assert choices == [8]
    run(recipe("data.cache=true"), name="two")
    assert_equal("one", "two")
    assert choices == [8], "a choice that is stored is made again"
    brief = ("data.cache=true", "train.steps=1", "generate.prompts=[]")
    run(recipe(*brief), name="three")
    assert choices == [8], "the number of steps chooses anew"
    run(recipe(*brief, "teacher.model=other"), name="four")
    run(recipe(*brief, "student.from_teacher.intermediate=41"), name="five")
    run(recipe(*brief, "train.seed=5"), name="six")
    assert choices == [8] * 4, "another teacher, shape and order of rows choose anew"
    config = student("one").config
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (24, 8, 3)


@pytest.mark.full
def test_interrupted_and_resumed_equals_uninterrupted(place, interrupted):
    interrupted(lambda: run(recipe("train.save_every=2"), name="parts"), step=3)
    assert (place / "runs/parts/checkpoint-2").exists() and not (place / "runs/parts/student").exists()
    run(recipe("train.save_every=2"), name="parts", resume=True)
    assert_equal("parts", "whole")


@pytest.mark.full
def test_a_cached_teacher_holds_the_student_that_was_cut(place, capsys):
    assert run_command(["cache", "tiny.yaml", "--out", "stored", "--hidden"]) == 0
    cached = run(recipe("teacher={type: cache, path: stored}"), name="cached")
    plain = run(recipe("train.learning_rate=1e-12", "train.steps=1"), name="plain")
    stored = AutoModelForCausalLM.from_pretrained("stored/student").state_dict()
    for name, value in student("plain").state_dict().items():
        torch.testing.assert_close(stored[name], value, rtol=1e-5, atol=1e-7)
    assert cached.before.forward_kl == pytest.approx(plain.before.forward_kl, rel=1e-3)
    assert cached.after.forward_kl < cached.before.forward_kl
    with pytest.raises(ValueError, match=r"from_teacher: a cached teacher has no weights to cut from; .* holds"):
        run(recipe("teacher={type: cache, path: stored}", "student.from_teacher.hidden=16"), name="another")


@pytest.mark.full
def test_a_teacher_whose_outputs_are_kept_cuts_once(place, choices):
    for name in ("first", "second"):
        run(recipe("teacher.online_cache=kept", "train={epochs: 1, steps: null, tokens_per_step: 512}"), name=name)
    assert_equal("first", "second")


@pytest.mark.full
def test_adapters_and_random_teachers_train(place):
    lora = run(recipe("student.lora={r: 2}", "train.learning_rate=2e-2"), name="lora")
    assert lora.after.forward_kl < lora.before.forward_kl
    assert student("lora").config.hidden_size == 24
    run(
        recipe("teacher={init: random, config: teacher, model: teacher}", "data.source=synthetic", "data.max_rows=64"),
        name="drawn",
    )
    assert student("drawn").config.intermediate_size == 40


@pytest.mark.full
@pytest.mark.parametrize(
    "student",
    [
        "{from_teacher: {layers: 2}, lora: {r: 2}}",
        f"{{from_teacher: {CUT}, lora: {{r: 2}}}}",
        "{model: other, from_teacher: {layers: 2}, lora: {r: 2}}",
        "{init: random, config: teacher, lora: {r: 2, head: true}}",
    ],
)
def test_a_checkpoint_of_an_adapter_without_a_base_to_name_is_exported(place, student, capsys, recwarn):
    run(recipe(f"student={student}", "train.learning_rate=2e-2", "train.save_every=4"), name="lora")
    assert not [each for each in recwarn if "config file in None" in str(each.message)]
    for folder in ("adapter", "checkpoint-4"):
        assert (
            json.loads(Path("runs/lora", folder, "adapter_config.json").read_text())["base_model_name_or_path"] is None
        )
    assert run_command(["export", "runs/lora/checkpoint-4", "-o", "exported"]) == 0
    found = AutoModelForCausalLM.from_pretrained("exported").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained("runs/lora/student").state_dict().items():
        assert torch.equal(found[name], value), name
    capsys.readouterr()
    assert run_command(["generate", "runs/lora/adapter", "-p", "Hello"]) == 2
    error = capsys.readouterr().err
    assert "names no base model: expected base_model_name_or_path, got None" in error and error.count("\n") == 1
    save_models(place, text=TEXT, teacher={"layers": 4, "seed": 8}, other={"layers": 4, "seed": 9})
    random = "init: random" in student
    assert run_command(["export", "runs/lora/checkpoint-4", "-o", "again"]) == (0 if random else 2)
    assert random or "its base model, made again from" in capsys.readouterr().err


@pytest.mark.full
def test_two_processes_train_one_student(place):
    run_as_two("-m", "distill", "run", "tiny.yaml", "--name", "two", cwd=place)
    two, alone = (json.loads((place / "runs" / name / "result.json").read_text()) for name in ("two", "whole"))
    assert two["before"]["forward_kl"] == pytest.approx(alone["before"]["forward_kl"], rel=1e-4)


@pytest.mark.full
def test_invariants_hold_on_a_narrow_student(place, without):
    """Those of whole runs are in the tests above."""
    without.setattr(examine, "RUN_CHECKS", ())
    checks = list(examine.examine(load("tiny.yaml")))
    assert len(checks) == len(CHECKS) and all(check.passed for check in checks), checks


def test_a_check_knows_the_shape_without_weights(place, capsys):
    assert run_command(["check", "tiny.yaml"]) == 0
    narrow = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in student("whole").parameters())
    assert f"{count / 1e6:.2f} M" in narrow or f"{count:,}" in narrow, narrow


@pytest.mark.parametrize(
    "override, said",
    [
        ("student.from_teacher.hidden=64", r"student\.from_teacher\.hidden: expected 1 to 32"),
        ("student.from_teacher.heads=3", r"student\.from_teacher\.heads: expected 1 \(kv_heads\) times 1 to 2"),
        ("student.from_teacher={keep: [0], importance: {}}", r"importance: keep names the layers"),
        ("student.from_teacher={importance: {}}", r"give exactly one of layers"),
        ("student.from_teacher={hidden: 16, importance: {metric: max}}", r"metric"),
    ],
)
def test_a_shape_that_cannot_be_is_one_error_and_leaves_nothing(place, override, said):
    with pytest.raises(ValueError, match=said):
        run(recipe(override))
    assert [folder.name for folder in (place / "runs").iterdir()] == ["whole"]
