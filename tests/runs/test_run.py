"""Whole runs of tiny models: what is written, what is printed, resume, and bad input that leaves nothing behind."""

import json
import re
from datetime import UTC, datetime

import pytest
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.core.folders import RUN_LOCK
from distill.core.launch import command_line
from distill.models import dtypes as precision
from distill.planning import steps as steps_of_a_run
from distill.recipe import Data, Train, dump, load, parse
from distill.run import run
from distill.training.progress import read_metrics

TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(80))


PLACE = pytest.mark.place(text=TEXT, teacher={"layers": 4, "seed": 1}, student={"seed": 2}, other={"tokens": 270})
pytestmark = PLACE


def recipe(*overrides):
    return parse(
        """
        teacher: {model: teacher}
        student: {from_teacher: {layers: 2}}
        data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
        train: {steps: 6, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 2}
        generate: {prompts: [Hello], max_new_tokens: 5}
        """,
        ["train.device=cpu", *overrides],
        name="tiny",
    )


def test_a_run_writes_everything_and_the_student_loads(workplace, curves, capsys):
    command_line.clear()  # of a test before this one
    result = run(recipe("train.save_every=4", "train.eval_every=3"))
    assert result.folder.as_posix() == "runs/tiny" and result.steps == 6
    written = (
        "recipe.yaml lock.yaml before.json metrics.jsonl checkpoint-4 checkpoint-6 student result.json samples.md "
        "curves.svg manifest.json"
    )
    assert sorted(path.name for path in result.folder.iterdir() if path.name != RUN_LOCK) == sorted(written.split())
    began, ended = (json.loads((result.folder / name).read_text()) for name in ("before.json", "result.json"))
    assert datetime.fromisoformat(began["started"]) <= datetime.fromisoformat(ended["finished"]) <= datetime.now(UTC)
    assert re.fullmatch(r"\w+ \w+ CPU, \d+ cores", began["device"]) and began["command"] is None, "called from Python"
    assert (result.folder / "curves.svg").read_text().count(">held out<") == 1
    assert result.after.forward_kl < result.before.forward_kl
    assert result.kl_reduction == pytest.approx(1 - result.after.forward_kl / result.before.forward_kl)
    assert dump(load(result.folder / "recipe.yaml")) == dump(recipe("train.save_every=4", "train.eval_every=3"))
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "student")
    assert student.config.num_hidden_layers == 2 and student.config.use_cache
    assert student.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=3).shape[1] > 3
    assert (result.folder / "student" / "README.md").read_text().count("Relative reduction")
    assert [row["step"] for row in read_metrics(result.folder / "metrics.jsonl")] == [1, 2, 3, 4, 6]
    assert json.loads((result.folder / "result.json").read_text())["gap_closed"] == result.kl_reduction
    out = capsys.readouterr().out
    for expected in (
        "teacher     teacher",
        "layers 0, 3",
        "vocabularies match",
        "6 of 128 tokens",
        "step 6/6",
        "kl ",
        "prompt: Hello",
        "student after",
        "reduction   ",
    ):
        assert expected in out, expected


@pytest.mark.full
def test_lora_and_another_loss(workplace):
    result = run(
        recipe(
            "student={model: student, lora: {r: 4, alpha: 8, head: true}}",
            "train.learning_rate=2e-2",
            "loss={temperature: 2.0, terms: [{type: jsd, beta: 0.4}, {type: reverse_kl, weight: 0.3}]}",
        )
    )
    assert result.after.forward_kl < result.before.forward_kl
    assert (result.folder / "adapter" / "adapter_model.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(result.folder / "student").config.vocab_size == 259


def test_interrupted_and_resumed_equals_uninterrupted(workplace, interrupted):
    overrides = ("train.save_every=2", "data.packing=true")
    whole = run(recipe(*overrides), name="whole")
    interrupted(lambda: run(recipe(*overrides), name="parts"), step=3, micro_batches=1)
    assert (workplace / "runs/parts/checkpoint-2").exists() and not (workplace / "runs/parts/student").exists()
    with pytest.raises(ValueError, match=r"--resume: .* differs from"):
        run(recipe(*overrides, "train.learning_rate=1e-3"), name="parts", resume=True)
    parts = run(recipe(*overrides), name="parts", resume=True)
    assert parts.after == whole.after and parts.before == whole.before
    a, b = (AutoModelForCausalLM.from_pretrained(result.folder / "student") for result in (whole, parts))
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    steps = [[(row["step"], row["loss"]) for row in read_metrics(r.folder / "metrics.jsonl")] for r in (whole, parts)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["student={model: other}"], "vocabular|token by token"),
        (["teacher.model=nowhere"], r"teacher\.model"),
        (["data.source=missing.jsonl"], r"data\.source"),
        (["data.max_length=1024", "train.tokens_per_step=2048"], r"data\.max_length: expected at most 512"),
        (["train.tokens_per_step=200"], r"train\.tokens_per_step: expected a multiple .* = 64, such as 192 or 256"),
        (["student.lora={targets: q_prj}"], r"q_prj"),
        (["train.arguments={bogus: 1}"], r"train\.arguments\.bogus"),
        (["student.from_teacher={layers: 9}"], r"student\.from_teacher\.layers"),
        (["train.optimizer=adamm"], "adamm"),
    ],
)
def test_bad_input_is_one_error_and_leaves_nothing(workplace, overrides, message):
    before = sorted(workplace.iterdir())
    with pytest.raises(ValueError, match=message) as error:
        run(recipe(*overrides))
    assert len(str(error.value).splitlines()) == 1
    assert sorted(workplace.iterdir()) == before


def test_a_name_that_is_taken_is_refused(workplace):
    (workplace / "runs" / "mine").mkdir(parents=True)
    (workplace / "runs" / "mine" / "recipe.yaml").write_text("x")
    with pytest.raises(ValueError, match="--resume continues it"):
        run(recipe(), name="mine")


def test_cuda_requested_and_absent_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"train\.device: expected a CUDA device"):
        precision.resolve_device(Train(steps=1, device="cuda"))


def test_random_models_on_random_tokens_need_no_tokenizer(workplace):
    for name, layers in (("big", 3), ("small", 1)):
        tiny_model(layers=layers).config.save_pretrained(workplace / name)
    result = run(
        recipe(
            "teacher={init: random, config: big}",
            "student={init: random, config: small}",
            "data.source=synthetic",
            "data.max_rows=64",
        )
    )
    assert result.steps == 6 and not (result.folder / "samples.md").exists()


@pytest.mark.parametrize("tokens, world, steps", [(None, 1, 1), (4096, 1, 4), (4096, 2, 2), (1024, 1, 1)])
def test_tokens_per_step_is_kept_whatever_the_number_of_devices(tokens, world, steps):
    train, data = Train(steps=1, tokens_per_step=tokens, batch_size=4), Data(source="x", max_length=256)
    assert steps_of_a_run.accumulation_steps(train, data, world) == steps


def test_epochs_become_steps():
    train, data = Train(epochs=1.5, batch_size=4), Data(source="x")
    assert steps_of_a_run.total_steps(train, data, rows=50, accumulation=2, world=2) == 6
    several = Data(source="x", on_policy={"samples": 2})
    assert steps_of_a_run.total_steps(train, several, rows=50, accumulation=2, world=2) == 11  # 6.25 of 2 rows x 4


@pytest.mark.parametrize(
    "overrides, student, autocast",
    [
        ([], torch.float32, torch.bfloat16),
        (["student.dtype=bfloat16"], torch.bfloat16, None),
        (["student.lora={r: 4}"], torch.bfloat16, torch.bfloat16),  # adapters are float32
        (["train.precision=float32"], torch.float32, None),
        (["train.precision=float32", "student.dtype=bfloat16"], torch.bfloat16, None),
    ],
)
def test_precision_on_a_gpu_with_bf16(monkeypatch, overrides, student, autocast):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    found = precision.resolve_precision(recipe(*overrides), torch.device("cuda"))
    assert (found.student, found.autocast) == (student, autocast)
    on_cpu = precision.resolve_precision(recipe(), torch.device("cpu"))
    assert (on_cpu.compute, on_cpu.student, on_cpu.autocast) == (torch.float32, torch.float32, None)
