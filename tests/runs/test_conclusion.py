"""No run is in vain: saving is tried beforehand, weights outlive a failing end, and a run that learns nothing fails."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import rows, trainer
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from distill import run_results
from distill.cli import run_command
from distill.models.load.save_check import check_saving, fix_generation_config
from distill.run_results import RunResults

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 2, batch_size: 2, learning_rate: 3e-3, warmup: 0, schedule: constant, log_every: 1, device: cpu}
generate: {prompts: []}
"""


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {number} and the student listens to it." for number in range(40)),
    files={"r.yaml": RECIPE},
    teacher={"seed": 1},
    student={"layers": 1, "seed": 2},
)


def contradict(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": False, "temperature": 0.6, "top_p": 0.9}))


# ------------------------------------------------------------------------------------------------ saving, tried first


def test_a_generation_config_that_contradicts_itself_is_mended_with_a_line(workplace, capsys):
    contradict(workplace / "student")
    assert run_command(["run", "r.yaml", "train.save_every=1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "student.model: in its generation_config.json temperature 0.6, top_p 0.9 have no effect (do_sample false"
        in said
    )
    for folder in ("student", "checkpoint-1", "checkpoint-2"):
        config = GenerationConfig.from_pretrained(workplace / "runs/r" / folder)
        config.validate(strict=True)
        assert config.eos_token_id == 0 and not config.do_sample
    assert json.loads((workplace / "student/generation_config.json").read_text())["temperature"] == 0.6, "left as it is"


def test_a_cut_student_is_mended_and_its_teacher_is_not_touched(workplace):
    contradict(workplace / "teacher")
    assert run_command(["run", "r.yaml", "student={from_teacher: {layers: 1}}", "student.lora={r: 2}"]) == 0
    GenerationConfig.from_pretrained(workplace / "runs/r/student").validate(strict=True)


def test_a_generation_config_that_nothing_mends_is_refused():
    model = tiny_model()
    model.generation_config.num_return_sequences = 3
    with pytest.raises(ValueError, match=r"^student\.model: its generation_config\.json cannot be saved .*: Greedy"):
        fix_generation_config(model, "student.model")


@pytest.mark.parametrize("part", ["configuration", "tokenizer"])
def test_student_that_cannot_be_saved_is_refused_before_training(part):
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def broken(*args, **kwargs):
        raise TypeError("not JSON")

    (model.config if part == "configuration" else tokenizer).save_pretrained = broken
    with pytest.raises(ValueError, match=rf"^student\.model: its {part} cannot be saved, .*: not JSON$"):
        check_saving(model, tokenizer, "student.model")


def test_trying_leaves_the_student_as_it_is():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert fix_generation_config(model, "student.model") == check_saving(model, tokenizer, "student.model") == []
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_tokenizer_that_decodes_differently_is_reported():
    tokenizer = tiny_tokenizer()
    written = tokenizer.save_pretrained

    def without_template(folder):
        tokenizer.chat_template = None
        written(folder)
        tokenizer.chat_template = "{{ messages }}"

    tokenizer.save_pretrained = without_template
    assert "another chat template" in check_saving(tiny_model(), tokenizer, "student.model")[0]


# ------------------------------------------------------------------------------------------------- the end of the run


@pytest.mark.plain("True-save_student")
@pytest.mark.parametrize("stage", ["measure", "save_student"])
@pytest.mark.parametrize("lora", [False, True])
def test_weights_outlive_what_fails_after_the_last_step(workplace, fault, capsys, stage, lora):
    owner = RunResults if stage == "measure" else run_results
    kept, calls = getattr(owner, stage), []

    def fails(*args):
        calls.append(args)
        if stage == "save_student" or len(calls) == 2:  # held-out figures are made before training, too
            raise RuntimeError("the card printer is out of paper")
        return kept(*args)

    arguments = ["run", "r.yaml", *(["student.lora={r: 2}"] if lora else [])]
    with fault.context() as fault:
        fault.setattr(owner, stage, fails)
        assert run_command(arguments) == 1
    said = capsys.readouterr().err
    assert (
        "distill: the card printer is out of paper; the student is trained, its weights are in runs/r/checkpoint-2"
        in said
    )
    assert "distill export runs/r/checkpoint-2 -o FOLDER" in said and said.count("\n") == 1
    assert run_command(["export", "runs/r", "-o", "none"]) == 2
    assert "or export the checkpoint runs/r/checkpoint-2" in capsys.readouterr().err
    assert run_command(["export", "runs/r/checkpoint-2", "-o", "exported"]) == 0
    assert (workplace / "exported/recipe.yaml").is_file() and (workplace / "exported/tokenizer.json").is_file()
    assert run_command([*arguments, "--name", "r", "--resume"]) == 0
    assert run_command([*arguments, "--name", "whole"]) == 0
    ours, resumed, whole = (
        load_file(workplace / name / "model.safetensors")
        for name in ("exported", "runs/r/student", "runs/whole/student")
    )
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert all(torch.equal(ours[name], value) for name, value in whole.items())


def test_an_adapter_to_a_cut_student_is_resumed_or_exported(workplace, fault, capsys):
    with fault.context() as fault:
        fault.setattr(run_results, "save_student", lambda *args: 1 / 0)
        assert run_command(["run", "r.yaml", "student={from_teacher: {layers: 1}}", "student.lora={r: 2}"]) == 1
    said = capsys.readouterr().err
    assert "runs/r/checkpoint-2: --resume continues from there, and distill export runs/r/checkpoint-2" in said
    assert run_command(["export", "runs/r/checkpoint-2", "-o", "exported"]) == 0
    assert (workplace / "exported/model.safetensors").is_file()


def test_a_damaged_checkpoint_is_not_exported(workplace, capsys):
    assert run_command(["run", "r.yaml", "train.save_every=2"]) == 0
    path = workplace / "runs/r/checkpoint-2/model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert run_command(["export", "runs/r/checkpoint-2", "-o", "out"]) == 2
    assert "runs/r/checkpoint-2: model.safetensors is damaged" in capsys.readouterr().err
    assert not (workplace / "out").exists()


# ------------------------------------------------------------------------------------------------------ standing still


def test_a_run_that_skipped_every_step_fails(workplace, capsys):
    """Only the training data hold the token whose embedding is not finite."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, tie=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("@").input_ids[0]] = math.nan
    save_tiny(workplace / "student", model, tokenizer)
    (workplace / "held.txt").write_text((workplace / "text.txt").read_text())
    (workplace / "text.txt").write_text("To @ everyone who listens to the teacher @ all times.\n" * 40)
    assert run_command(["run", "r.yaml", "data.validation={source: held.txt, max_rows: 2}"]) == 2
    said = capsys.readouterr().err
    assert "train: no step was taken: loss or gradient was NaN or infinite in all 2 steps of the run" in said
    assert not (workplace / "runs/r/student").exists() and not (workplace / "runs/r/result.json").exists()


def test_one_step_learns_whatever_the_warm_up(workplace):
    for warmup in (1, 4):
        assert run_command(["run", "r.yaml", "train.steps=1", f"train.warmup={warmup}", "--name", f"w{warmup}"]) == 0
        before, after = (
            load_file(workplace / name / "model.safetensors") for name in ("student", f"runs/w{warmup}/student")
        )
        assert any(not torch.equal(after[name], value) for name, value in before.items())


def rates(run):
    return [row["learning_rate"] for row in run.state.log_history if "loss" in row]


def test_a_resumed_warm_up_continues_as_it_began(tmp_path):
    settings = {
        "max_steps": 6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trainer(tmp_path / "whole", data=rows(), **settings)
    whole.train()
    assert rates(whole) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 0.5e-3])
    resumed = trainer(tmp_path / "resumed", data=rows(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert rates(resumed) == rates(whole)
