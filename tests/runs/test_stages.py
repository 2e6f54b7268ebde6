"""Recipes of several stages: each starts from the student before it, resumes to the bit, and is checked beforehand."""

import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from distill.cli import run_command
from distill.core.folders import RECIPE_FILE
from distill.models.precision.quantised_formats import read_saved
from distill.recipe import dump, load, parse
from distill.run import run
from distill.training.error_translation import translated

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
  - {name: quantise, student: {quantise: {format: q4_0, start: nearest}}, train: {epochs: 1, learning_rate: 1e-4}}
"""


FOLDERS = ("stages/1-prune", "stages/2-again", ".")


pytestmark = pytest.mark.place(
    text=TEXT, files={"tiny.yaml": RECIPE}, teacher={"layers": 4, "seed": 1, "hidden": 64}, run=["run tiny.yaml"]
)


def weights(folder):
    return load_file(folder / "student" / "model.safetensors")


def assert_same_student(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_each_stage_starts_from_the_student_before(workplace):
    """The stages' folders are runs, and the last one's is that of the whole."""
    folders = [folder for folder, _ in load("tiny.yaml").stage_runs(workplace / "runs/tiny")]
    assert [str(each.relative_to(workplace)) for each in folders] == [
        "runs/tiny/stages/1-prune",
        "runs/tiny/stages/2-again",
        "runs/tiny",
    ]
    shapes = [AutoConfig.from_pretrained(folder / "student") for folder in folders]
    assert [(c.num_hidden_layers, c.intermediate_size) for c in shapes] == [(3, 96), (2, 64), (2, 64)]
    assert set(read_saved(folders[2] / "student").by_name.values()) == {"q4_0", "q8_0"} and not read_saved(folders[1])
    assert all(load(folder / RECIPE_FILE).stages == [] for folder in folders)


@pytest.mark.full
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stages_own_recipe_trains_the_same_student(workplace, folder):
    own = workplace / "runs/tiny" / folder
    assert run(load(own / RECIPE_FILE), name="alone").folder.is_dir()
    assert_same_student(workplace / "runs/alone", own)


@pytest.mark.full
@pytest.mark.parametrize("stage", ["1-prune", "2-again"])
def test_a_run_that_ended_in_an_earlier_stage_resumes_to_the_same_bits(workplace, finished, stage, capsys):
    whole, ended = workplace / "runs/tiny", workplace / "runs/tiny/stages" / stage
    for path in [*whole.iterdir(), *whole.joinpath("stages").iterdir()]:
        if path.name == "stages" or path in (ended, workplace / "runs/tiny/stages/1-prune"):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("result.json", "manifest.json"):
        ended.joinpath(name).unlink()
    for name in ("student", "checkpoint-4"):
        shutil.rmtree(ended / name)
    assert run_command(["run", "tiny.yaml", "--resume"]) == 0
    said = capsys.readouterr().out
    assert f"continuing from {ended.relative_to(workplace)}/checkpoint-2" in said
    assert ("stages/1-prune, finished" in said) == (stage == "2-again")
    assert_same_student(whole, finished / "runs/tiny")


def test_a_new_run_takes_the_next_folder_while_stages_are_unfinished(workplace):
    for path in workplace.joinpath("runs/tiny").iterdir():
        if path.name != "stages":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run_command(["run", "tiny.yaml", "stages=[{name: one}]", "train.steps=1", "train.save_every=null"]) == 0
    assert (workplace / "runs/tiny-2/student").is_dir() and not (workplace / "runs/tiny/student").exists()


def end_before_the_last_stage(run_folder):
    """Leave a run as it is when it ends between its second stage and its last."""
    for path in run_folder.iterdir():
        if path.name != "stages":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.plain(
    "stages.0.train={learning_rate: 1e-4}-train.learning_rate",
    "stages.1.student={from_teacher: {layers: 1}}-student.from_teacher",
)
@pytest.mark.parametrize(
    "override, named",
    [
        ("stages.0.train={learning_rate: 1e-4}", "train.learning_rate"),
        ("train.steps=6", "train.steps"),
        ("data.max_length=16", "data.max_length"),
        ("train.seed=9", "train.seed"),
        ("train.tokens_per_step=64", "train.tokens_per_step"),
        ("stages.1.student={from_teacher: {layers: 1}}", "student.from_teacher"),
    ],
)
def test_a_finished_stage_is_resumed_with_its_own_settings_only(workplace, override, named, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    assert run_command(["run", "tiny.yaml", override, "--resume"]) == 2
    assert named in capsys.readouterr().err
    assert not (workplace / "runs/tiny/student").exists()


def test_a_finished_stage_is_resumed_with_its_own_data_only(workplace, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    (workplace / "text.txt").write_text(TEXT.replace("teacher", "preacher"))
    assert run_command(["run", "tiny.yaml", "--resume"]) == 2
    assert "data" in capsys.readouterr().err and not (workplace / "runs/tiny/student").exists()


def test_a_later_stage_is_refused_another_teacher_than_the_earlier_ones_had(workplace, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    path = workplace / "teacher/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert run_command(["run", "tiny.yaml", "--resume"]) == 2
    assert "teacher" in capsys.readouterr().err and not (workplace / "runs/tiny/student").exists()


@pytest.mark.full
@pytest.mark.parametrize("content", ["{", "{}"], ids=["cut", "empty"])
def test_a_damaged_result_is_no_finished_stage(workplace, finished, content, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    (workplace / "runs/tiny/stages/1-prune/result.json").write_text(content)
    assert run_command(["run", "tiny.yaml", "--resume"]) == 0
    assert "1-prune, finished" not in capsys.readouterr().out
    assert_same_student(workplace / "runs/tiny", finished / "runs/tiny")


@pytest.mark.plain("model.safetensors-1-prune", "tokenizer.json-2-again")
@pytest.mark.parametrize("stage", ["1-prune", "2-again"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_no_stage_starts_from_a_damaged_student(workplace, stage, name, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    path = workplace / "runs/tiny/stages" / stage / "student" / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert run_command(["run", "tiny.yaml", "--resume"]) == 2
    assert f"{name} is damaged" in capsys.readouterr().err and not (workplace / "runs/tiny/student").exists()


@pytest.mark.full
def test_a_staged_run_may_be_moved(workplace, finished, capsys):
    end_before_the_last_stage(workplace / "runs/tiny")
    (workplace / "runs/tiny").rename(workplace / "runs/moved")
    for name in ("result.json", "manifest.json"):  # the second stage has begun, from the first one's student
        (workplace / "runs/moved/stages/2-again" / name).unlink()
    assert run_command(["run", "tiny.yaml", "--name", "moved", "--resume-if-any"]) == 0
    assert capsys.readouterr().out.count(", finished") == 1
    assert_same_student(workplace / "runs/moved", finished / "runs/tiny")


def test_messages_in_a_stage_name_the_command_of_the_whole_run(workplace):
    recipe = load("tiny.yaml")
    full = OSError(errno.ENOSPC, "No space left on device")
    line = translated(full, recipe, workplace / "runs/tiny/stages/1-prune")
    assert "with --name tiny --resume" in line and "1-prune --resume" not in line


@pytest.mark.full
def test_every_stage_is_planned(workplace, capsys):
    """None of the stages need have been trained; each has the sizes of the student before it."""
    shutil.rmtree(workplace / "runs")
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu"]) == 0
    out = capsys.readouterr().out
    for number, name in enumerate(("prune", "again", "quantise"), 1):
        assert f"=== stage {number} of 3: {name}" in out
    assert out.count("verdict     fits and can run") == 3
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and [stage["name"] for stage in found["stages"]] == ["prune", "again", "quantise"]
    sizes = [stage["student"]["parameters"] for stage in found["stages"]]
    assert sizes[0] > sizes[1] == sizes[2]
    steps = [stage["steps"] for stage in found["stages"]]
    assert steps[:2] == [4, 4] and steps[2] is not None, "the data of a later stage are not read"
    assert not (workplace / "runs").exists()


@pytest.mark.full
def test_a_plan_is_of_the_students_that_are_trained(workplace, capsys):
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu", "--json"]) == 0
    for stage, folder in zip(json.loads(capsys.readouterr().out)["stages"], FOLDERS, strict=True):
        trained = sum(value.numel() for value in weights(workplace / "runs/tiny" / folder).values())
        assert stage["student"]["parameters"] == trained


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ("{train: {optimizer: galore_adamw}}", "stages.2 (stage): train.optimizer: galore_adamw: expected its package"),
        ("{student: {from_teacher: {intermediate: 65}}}", "stages.2 (stage): student.from_teacher.intermediate"),
        ("{data: {source: none.txt}}", "stages.2 (stage): "),
    ],
)
def test_a_later_stage_that_cannot_run_fails_the_check(workplace, stage, named, capsys):
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu", f"stages.2={stage}"]) in (1, 2)
    said = capsys.readouterr()
    assert named in " ".join((said.out + said.err).split())
    text = said.out + said.err
    assert text.count("tiny/stages/") == text.count("runs/tiny/stages/"), "names the plan's temporary folder"


@pytest.mark.full
def test_the_quantisation_of_a_later_stage_is_planned(workplace, capsys):
    """40 columns are no whole blocks of q4_0."""
    stage = "{student: {from_teacher: {intermediate: 40}, quantise: {format: q4_0}}}"
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu", "--json", f"stages.2={stage}"]) == 0
    notes = [" ".join(each["notes"]) for each in json.loads(capsys.readouterr().out)["stages"]]
    assert ["student.quantise: 2 matrices" in text for text in notes] == [False, False, True]


@pytest.mark.full
def test_a_later_stage_that_does_not_fit_fails_the_check(workplace, capsys):
    wide = "stages.2={name: wide, data: {max_length: 512}, train: {batch_size: 16384, tokens_per_step: null}}"
    assert run_command(["check", "tiny.yaml", "--gpu", "24GB", "--no-data", wide]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "stages.2 (wide): memory: the peak of" in out
    assert out.count("verdict fits and can run") == 2


@pytest.mark.full
def test_the_export_of_the_last_stage_is_checked(workplace, capsys):
    last = ["stages.2={name: last, student: {from_teacher: {intermediate: 63}}}", "export={gguf: q4_0}"]
    assert run_command(["check", "tiny.yaml", "--gpu", "cpu", *last]) == 1
    assert "PROBLEM" in capsys.readouterr().out


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
