"""A run that is resumed with less memory: the steps left are the ones that an undisturbed run makes, row by row."""

import json
import logging
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_on_policy import on_policy, packed, pairs
from test_resume import WHOLE
from test_trainer import rows, trainer, weights
from tiny import tiny_model
from torch.utils.data import BatchSampler
from transformers import TrainerState
from transformers.trainer_utils import compare_trainer_and_checkpoint_args
from two_ranks import run_as_two

from distill.cli import run_command
from distill.recipe import dump, load, parse
from distill.training.progress import read_metrics
from distill.training.resuming import ResumePlan, resume_plan, smaller_batch
from distill.training.step_listeners import RolloutBatches
from distill.training.transformers_compat import without_known_warnings

STEPS, TAKEN = 8, 8  # of 18 rows an epoch takes steps of 8, 8 and 2 rows: 8 steps end within the third
FLOAT64 = {"rtol": 0, "atol": 1e-9}


class Seen:
    """A trainer's steps: the number of trained tokens and the rows of each."""

    def __init__(self, made):
        self.steps = {}
        samples = made.get_batch_samples

        def watched(*args):
            batches, count = samples(*args)
            ids = [row.tolist() for batch in batches for row in batch["input_ids"]]
            told = sorted([token for token in row if token != 2] for row in ids)  # without padding
            self.steps[made.state.global_step + 1] = (int(count), told)
            return batches, count

        made.get_batch_samples = watched


def made_of(folder, batch_size, student=None, **settings):
    defaults = {"max_steps": STEPS, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    return trainer(
        folder,
        student=student,
        dtype=torch.float64,
        data=settings.pop("data", rows(18)),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=TAKEN // batch_size,
        **(defaults | settings),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of 4 rows at a time, with a checkpoint behind each step; and what it took."""
    folder = tmp_path_factory.mktemp("whole")
    made = made_of(folder, 4, save_strategy="steps", save_steps=1)
    seen = Seen(made)
    made.train()
    return folder, made, seen.steps


@pytest.mark.plain("7-1-False")
@pytest.mark.parametrize(
    "step, batch_size, checkpointing",
    [
        (1, 2, False),  # in the middle of an epoch
        (2, 1, True),  # before its last step, which is not full
        (3, 2, True),  # between two
        (5, 8, False),  # more at a time than before
        (7, 1, False),  # in the epoch that the run ends in
    ],
)
def test_the_steps_left_are_the_same(undisturbed, tmp_path, step, batch_size, checkpointing):
    folder, whole, taken = undisturbed
    assert len(taken) == STEPS and [len(ids) for _, ids in taken.values()] == [8, 8, 2, 8, 8, 2, 8, 8]
    again = made_of(tmp_path, batch_size, gradient_checkpointing=checkpointing)
    seen = Seen(again)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert seen.steps == {number: taken[number] for number in range(step + 1, STEPS + 1)}
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(again.model)[name], value, **FLOAT64)


def test_intervals_are_those_of_now(undisturbed, tmp_path):
    """A checkpoint knows what it was made with; `Trainer` alone would go on with that, or fail where it was none."""
    folder, _, _ = undisturbed
    again = made_of(
        tmp_path, 2, save_strategy="steps", save_steps=3, logging_steps=2, eval_strategy="steps", eval_steps=4
    )
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    told = again.state.log_history[2:]  # behind those of the checkpoint
    assert [entry["step"] for entry in told if "loss" in entry] == [4, 6, 8]
    assert [entry["step"] for entry in told if "eval_loss" in entry] == [4, 8]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (3, 6, 8)]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["train_batch_size"] == 2


@pytest.mark.full
@pytest.mark.parametrize("size, room", [(1, 40), (3, 40), (3, 20)])
def test_answers_of_the_student_are_the_same_in_other_micro_batches(size, room, tmp_path):
    """Rows hold one document or several, also where not all responses fit into them."""
    data = pairs(18) if size == 1 else packed(pairs(54), size)

    def run(name, batch_size, checkpoint=None):
        student = tiny_model(dtype=torch.float64)
        made = made_of(
            tmp_path / name,
            batch_size,
            student=student,
            data=Dataset.from_list(data),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )
        made.add_callback(RolloutBatches(on_policy(student, fraction=0.7, max_length=room), made))
        seen = Seen(made)
        made.train(resume_from_checkpoint=checkpoint)
        return made, seen.steps

    whole, taken = run("whole", 4)
    again, left = run("again", 1, str(tmp_path / "whole/checkpoint-2"))
    if size == 1:
        assert left == {step: taken[step] for step in (3, 4)}
    assert [left[step][0] for step in (3, 4)] == [taken[step][0] for step in (3, 4)]  # learned; rows are packed anew
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(again.model)[name], value, **FLOAT64)


def test_trainer_logs_each_line_once(tmp_path):
    made, state = made_of(tmp_path, 2), TrainerState(train_batch_size=5, logging_steps=1)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("transformers.trainer_utils")
    logger.addHandler(handler)
    try:
        with without_known_warnings():
            compare_trainer_and_checkpoint_args(made.args, state)
            logger.warning("something else")
        assert told == ["something else"]
        state.train_batch_size = 6  # it says the same but once
        compare_trainer_and_checkpoint_args(made.args, state)
        assert "2 (from args) != 6" in told[1]
    finally:
        logger.removeHandler(handler)


# ------------------------------------------------------------------ the command


RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 6, batch_size: 4, tokens_per_step: 256, learning_rate: 0.1, optimizer: sgd, warmup: 0, log_every: 1,
        save_every: 3, device: cpu}
generate: {prompts: []}
"""


pytestmark = pytest.mark.place(**WHOLE | {"files": {"r.yaml": RECIPE}})


@pytest.fixture
def stopped(finished, tmp_path, monkeypatch):
    """A copy of it that ended behind step 3."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    run = folder / "runs/whole"
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "student")
    (run / "result.json").unlink()
    monkeypatch.chdir(folder)
    return folder


def resume(*overrides):
    return run_command(["run", "r.yaml", *overrides, "--name", "whole", "--resume"])


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / "runs/whole/metrics.jsonl")]


@pytest.mark.full
def test_a_run_resumes_with_smaller_micro_batches(stopped, finished, capsys):
    told = ["train.batch_size=1", "train.gradient_checkpointing=true", "teacher.offload=cpu"]
    assert resume(*told, "train.save_every=2", "data.workers=1") == 0
    out = capsys.readouterr().out
    assert (
        "resumed with changed settings that keep the training steps the same: teacher.offload 'cpu' (at the start "
        "null); data.workers 1 (at the start 0); train.batch_size 1 (at the start 4); train.gradient_checkpointing "
        "true (at the start false); train.save_every 2 (at the start 3)\n" in out
    )
    assert losses(stopped) == pytest.approx(losses(finished), rel=1e-5)
    ours, theirs = (load_file(path / "runs/whole/student/model.safetensors") for path in (stopped, finished))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)
    # the file is of what goes on now, and says what was before
    path = stopped / "runs/whole/recipe.yaml"
    assert load(path) == load("r.yaml", [*told, "train.save_every=2", "data.workers=1"])
    assert "# train.batch_size: 4 up to step 3, then 1\n" in path.read_text()
    # and once more, with the first of them as it was
    assert resume("train.batch_size=4") == 0
    assert "other settings" not in capsys.readouterr().out
    notes = [line for line in path.read_text().splitlines() if line.startswith("# train.batch_size")]
    assert notes == ["# train.batch_size: 4 up to step 3, then 1", "# train.batch_size: 1 up to step 6, then 4"]
    lock = (stopped / "runs/whole/lock.yaml").read_text()
    assert lock == (finished / "runs/whole/lock.yaml").read_text()


@pytest.mark.full
def test_advice_for_out_of_memory_works(finished, tmp_path, monkeypatch, capsys, at_step):
    folder = shutil.copytree(finished, tmp_path / "copy")
    shutil.rmtree(folder / "runs")
    monkeypatch.chdir(folder)

    def full(arguments):
        if arguments.per_device_train_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    at_step(4, full)
    assert run_command(["run", "r.yaml"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "runs/r/checkpoint-3 is kept: continue with the same command and --name r" in err
    assert run_command(["run", "r.yaml", "--resume"]) == 1  # without what it says
    capsys.readouterr()
    assert run_command(["run", "r.yaml", *shlex.split(err.split("the same command and ")[1])]) == 0
    assert "continuing from runs/r/checkpoint-3" in capsys.readouterr().out
    resumed = [row["loss"] for row in read_metrics(folder / "runs/r/metrics.jsonl")]
    assert resumed == pytest.approx(losses(finished), rel=1e-5)


@pytest.mark.plain(
    "['train.learning_rate=0.2']---resume: train.learning_rate differs from ",
    "['train.max_grad_norm=2']-train.gradient_checkpointing, train.cuda_graph, train.save_every",
    "['data.max_length=16']-recipe.yaml: expected 32, got 16",
    "['train.batch_size=2', 'train.tokens_per_step=128']-8 rows x data.max_length 32, so expected 256; got 128",
    "['train.batch_size=4', 'train.tokens_per_step=512']-expected 256; got 512",
)
@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["train.learning_rate=0.2"], "--resume: train.learning_rate differs from "),
        (["loss.terms.0.weight=0.5"], "recipe.yaml: expected 1.0, got 0.5"),
        (["train.max_grad_norm=2"], "train.gradient_checkpointing, train.cuda_graph, train.save_every"),
        (["train.steps=7"], "recipe.yaml: expected 6, got 7"),
        (["data.max_length=16"], "recipe.yaml: expected 32, got 16"),
        (
            ["student.lora={r: 2}"],
            "student.lora differs from runs/whole/recipe.yaml: expected null, got a section of 9",
        ),
        (["train.batch_size=3", "train.tokens_per_step=192"], "8 rows on 1 device(s), so expected one of 4, 2, 1"),
        (["train.batch_size=2", "train.tokens_per_step=128"], "8 rows x data.max_length 32, so expected 256; got 128"),
        (["train.batch_size=2", "train.tokens_per_step=null"], "expected 256; got null"),
        (["train.batch_size=4", "train.tokens_per_step=512"], "expected 256; got 512"),
    ],
)
def test_what_would_be_another_run_is_refused(stopped, capsys, overrides, expected):
    before = (stopped / "runs/whole/recipe.yaml").read_bytes()
    assert resume(*overrides) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1
    assert (stopped / "runs/whole/recipe.yaml").read_bytes() == before


@pytest.mark.full
def test_a_step_of_one_micro_batch_becomes_one_of_several(finished, stopped, capsys):
    """Without tokens_per_step, the step's size was batch_size's alone: given now, it keeps that."""
    path = stopped / "runs/whole/recipe.yaml"
    path.write_text(path.read_text().replace("batch_size: 4", "batch_size: 8").replace("step: 256", "step: null"))
    assert "batch_size: 8" in path.read_text() and "step: null" in path.read_text()
    assert resume("train.batch_size=2", "train.tokens_per_step=256") == 0
    assert losses(stopped) == pytest.approx(losses(finished), rel=1e-5)
    assert resume("train.batch_size=2", "train.tokens_per_step=null") == 2
    assert "expected 256; got null" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, expected",
    [
        (["train.arguments={auto_find_batch_size: true}"], "auto_find_batch_size takes it from the checkpoint"),
        (["train.arguments={dataloader_drop_last: true}"], r"dataloader_drop_last keeps \d+ of \d+ rows .*; keep 4"),
        (["data.on_policy={fraction: 0.5, samples: 2}"], "samples puts all answers of a prompt into one micro-batch"),
    ],
)
def test_a_batch_size_that_has_to_stay(stopped, capsys, more, expected):
    path = stopped / "runs/whole/recipe.yaml"
    settings = load("r.yaml", more)
    path.write_text(dump(settings))
    assert resume(*more, "train.batch_size=2") == 2
    assert re.search(expected, capsys.readouterr().err)


def notes(sizes, student, *, rows=18, processes=1, drop=False):
    """Return the messages of a run whose micro-batches change from the first of `sizes` to the second."""
    told = ResumePlan(None, Path("absent/recipe.yaml"), (("train.batch_size", *sizes),), (), processes)
    return told.notes(SimpleNamespace(fsdp=False, world_size=processes, dataloader_drop_last=drop), student, rows=rows)


def test_a_warning_says_that_dropout_changes_the_random_numbers():
    plain, drops = tiny_model(), tiny_model(attention_dropout=0.1)
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    assert notes((4, 2), plain) == []
    for model in (drops, adapted):
        assert notes((4, 2), model) == ["dropout uses other random numbers than with the previous micro-batch size"]


def kept_of_epoch(rows, size):
    """Return the rows that two processes take of an epoch with `drop_last`, as accelerate splits it."""
    shards = (BatchSamplerShard(BatchSampler(range(rows), size, True), 2, process) for process in (0, 1))
    return sum(len(batch) for shard in shards for batch in shard)


@pytest.mark.parametrize("rows", [16, 18, 20])
def test_rows_that_an_epoch_drops_are_reported(rows):
    kept = [kept_of_epoch(rows, size) for size in (4, 1)]
    assert notes((4, 1), tiny_model(), rows=rows, processes=2) == []
    if kept[0] == kept[1]:
        assert notes((4, 1), tiny_model(), rows=rows, processes=2, drop=True) == []
        return
    with pytest.raises(ValueError, match=rf"keeps {kept[0]} of {rows} rows .* and {kept[1]} with 1; keep 4"):
        notes((4, 1), tiny_model(), rows=rows, processes=2, drop=True)


@pytest.mark.plain("4-256-1-(2, 256)", "5-320-1-(2, 320)", "6-768-2-(3, 768)")
@pytest.mark.parametrize(
    "batch_size, tokens, processes, expected",
    [
        (4, 256, 1, (2, 256)),
        (6, None, 1, (3, 192)),
        (5, None, 1, (1, 160)),
        (5, 320, 1, (2, 320)),
        (1, 256, 1, (1, 256)),
        (4, None, 2, (2, 256)),
        (6, 768, 2, (3, 768)),
    ],
)
def test_the_next_smaller_batch_keeps_the_steps_rows(batch_size, tokens, processes, expected):
    recipe = parse(RECIPE, [f"train.batch_size={batch_size}", f"train.tokens_per_step={tokens or 'null'}"])
    assert smaller_batch(recipe, processes) == expected


@pytest.mark.parametrize(
    "processes, expected",
    [
        (1, "expected 256; got null"),
        (4, "has 8 rows: expected train.batch_size 4 on 2 processes, got 4 on 4; continue on 2 processes"),
    ],
)
def test_other_processes_do_not_make_steps_of_another_size(stopped, processes, expected):
    """Without tokens_per_step, it is the number of processes that makes the step."""
    run = stopped / "runs/whole"
    now = load("r.yaml", ["train.tokens_per_step=null"])
    (run / "recipe.yaml").write_text(dump(now))
    (run / "lock.yaml").write_text((run / "lock.yaml").read_text().replace("processes: 1", "processes: 2"))
    resume_plan(now, run, processes=2)
    with pytest.raises(ValueError, match=expected):
        resume_plan(now, run, processes=processes)
    resume_plan(load("r.yaml", ["train.tokens_per_step=256"]), run, processes=1)


def test_shards_are_not_read_by_one_process_nor_a_whole_student_into_shards(stopped, capsys):
    """A run with parallel.strategy: fsdp changes from several processes to one, and back."""
    run, now = stopped / "runs/whole", load("r.yaml")
    arguments = SimpleNamespace(fsdp=True, world_size=2, dataloader_drop_last=False)
    told = resume_plan(now, run, processes=1)
    with pytest.raises(ValueError, match=r"checkpoint-3 holds an unsharded student, .*; continue on one process"):
        told.notes(arguments, None, rows=9)
    (run / "checkpoint-3/pytorch_model_fsdp.bin").write_bytes(b"")
    assert told.notes(arguments, None, rows=9) == []
    before = (run / "recipe.yaml").read_text()
    assert resume("train.log_every=2") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "holds a sharded student (parallel.strategy: fsdp" in said[0], said
    assert (run / "recipe.yaml").read_text() == before


@pytest.mark.full
def test_resume_on_two_processes_takes_smaller_micro_batches(stopped, capsys):
    """The same weights with smaller micro-batches on as many processes; on fewer it is refused."""
    run_as_two("-m", "distill", "run", "r.yaml", "--name", "two", cwd=stopped)
    run = stopped / "runs/two"
    theirs = load_file(run / "student/model.safetensors")
    shutil.rmtree(run / "checkpoint-6")
    assert run_command(["run", "r.yaml", "train.batch_size=2", "--name", "two", "--resume"]) == 2
    told = "has 8 rows: expected train.batch_size 4 on 2 processes, got 2 on 1; continue on"
    assert told in capsys.readouterr().err
    said = run_as_two("-m", "distill", "run", "r.yaml", "train.batch_size=1", "--name", "two", "--resume", cwd=stopped)
    assert said.count("resumed with changed settings") == 1
    for name, value in load_file(run / "student/model.safetensors").items():
        torch.testing.assert_close(value, theirs[name])
