"""Recipes of several stages: each starts from the student before it, resumes to the bit, and is checked beforehand."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_models
from transformers import AutoConfig

from distill.cli import run_command
from distill.core.folders import RECIPE_FILE
from distill.models.precision.quantised_formats import read_saved
from distill.recipe import RecipeError, dump, load, parse
from distill.run import run

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 3, intermediate: 96, importance: {rows: 4, layer_rows: 2}}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, save_every: 2, device: cpu}
generate: {prompts: []}
stages:
  - {name: prune}
  - {name: again, student: {from_teacher: {layers: 2, intermediate: 64}}}
  - {name: quantise, student: {quantise: {format: q4_0}}, train: {epochs: 1, learning_rate: 1e-4}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of three stages, in runs/tiny."""
    folder = tmp_path_factory.mktemp("stages")
    save_models(folder, text=TEXT, teacher={"layers": 4, "seed": 1, "hidden": 64})
    (folder / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(["run", "tiny.yaml"]) == 0
    return folder


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(folder):
    return load_file(folder / "student" / "model.safetensors")


def assert_same_student(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_each_stage_starts_from_the_student_before(place):
    """The stages' folders are runs, and the last one's is that of the whole."""
    folders = [folder for folder, _ in load("tiny.yaml").stage_runs(place / "runs/tiny")]
    assert [str(each.relative_to(place)) for each in folders] == [
        "runs/tiny/stages/1-prune",
        "runs/tiny/stages/2-again",
        "runs/tiny",
    ]
    shapes = [AutoConfig.from_pretrained(folder / "student") for folder in folders]
    assert [(c.num_hidden_layers, c.intermediate_size) for c in shapes] == [(3, 96), (2, 64), (2, 64)]
    assert set(read_saved(folders[2] / "student").by_name.values()) == {"q4_0", "q8_0"} and not read_saved(folders[1])
    for folder in folders:
        own = load(folder / RECIPE_FILE)
        assert own.stages == [] and run(own, name=f"alone-{folder.name}").folder.is_dir()
        assert_same_student(place / f"runs/alone-{folder.name}", folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["1-prune", "2-again"])
def test_a_run_that_ended_in_an_earlier_stage_resumes_to_the_same_bits(place, finished, stage, capsys):
    whole, ended = place / "runs/tiny", place / "runs/tiny/stages" / stage
    for path in [*whole.iterdir(), *whole.joinpath("stages").iterdir()]:
        if path.name == "stages" or path in (ended, place / "runs/tiny/stages/1-prune"):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("result.json", "manifest.json"):
        ended.joinpath(name).unlink()
    for name in ("student", "checkpoint-4"):
        shutil.rmtree(ended / name)
    assert run_command(["run", "tiny.yaml", "--resume"]) == 0
    said = capsys.readouterr().out
    assert f"continuing from {ended.relative_to(place)}/checkpoint-2" in said
    assert ("stages/1-prune, finished" in said) == (stage == "2-again")
    assert_same_student(whole, finished / "runs/tiny")


def test_a_new_run_takes_the_next_folder_while_stages_are_unfinished(place):
    for path in place.joinpath("runs/tiny").iterdir():
        if path.name != "stages":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run_command(["run", "tiny.yaml", "train.steps=1", "train.save_every=null"]) == 0
    assert (place / "runs/tiny-2/student").is_dir() and not (place / "runs/tiny/student").exists()


def test_stages_merge_settings_and_survive_dumping():
    recipe = parse(RECIPE, name="tiny")
    assert parse(dump(recipe), name="tiny") == recipe
    first, again, last = (recipe.of_stage(n, "before" if n else None) for n in range(3))
    assert first.student == recipe.student and first.train == recipe.train
    assert again.student.model == "before" and again.student.from_teacher.layers == 2
    assert again.student.from_teacher.importance is None and again.train == recipe.train
    assert last.student.model == "before" and last.student.from_teacher is None
    assert (last.train.steps, last.train.epochs, last.train.learning_rate) == (None, 1, 1e-4)
    assert last.train.batch_size == 2 and last.data == recipe.data


def test_mistakes_in_a_stage_are_named_before_anything_runs():
    for stages, message in (
        ("[{student: {quantise: {format: q9}}}]", r"stages.0: student.quantise.format"),
        ("[{}, {train: {stps: 3}}]", r"stages.1: train.stps: unknown"),
        ("[{name: a/b}]", r"stages.0.name"),
        ("[{eval: {}}]", r"stages.0.eval"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse(RECIPE, [f"stages={stages}"], name="tiny")
