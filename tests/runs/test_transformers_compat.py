"""Behaviour of transformers' own Trainer that `TransformersCompat` corrects: a test fails once upstream changes.

Each test runs the plain `Trainer` of the installed transformers beside ours. Where the plain half fails, the override
is no longer needed as it stands: read upstream again, then adapt or delete it.
"""

import logging
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import Trainer, TrainingArguments

from distill.core.errors import RunError
from distill.data.packing import BLOCK
from distill.training.checkpoints import UNFINISHED
from distill.training.module_cache import cache_modules
from distill.training.trainer import DistillationTrainer

ROWS = [{"input_ids": [3 + n, 5, 7, 11, 13, 17], "labels": [3 + n, 5, 7, 11, 13, 17]} for n in range(6)]


def arguments(folder, **settings):
    defaults = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    defaults |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False, "seed": 3}
    return TrainingArguments(str(folder), **(defaults | settings))


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def plain(folder, rows=ROWS, **settings):
    """Transformers' own trainer."""
    data = Dataset.from_list(rows)
    return Trainer(
        tiny_model(), arguments(folder, **settings), train_dataset=data, eval_dataset=data, data_collator=collate
    )


def ours(folder, rows=ROWS, **settings):
    """Our trainer."""
    data = Dataset.from_list(rows)
    return DistillationTrainer(
        tiny_model(), tiny_model(seed=1), arguments(folder, **settings), train_dataset=data, eval_dataset=data
    )


SAVED = {"save_strategy": "steps", "save_steps": 1}


# ---------------------------------------------------------------------------------------------------- private methods


def test_trainer_shuffles_turns_of_a_chat_apart(tmp_path):
    rows = [{**ROWS[0], BLOCK: [number // 4]} for number in range(32)]

    def is_together(made):
        blocks = [number // 4 for number in made._get_train_sampler()]
        return len([at for at in range(1, 32) if blocks[at] != blocks[at - 1]]) == 7

    assert not is_together(plain(tmp_path, rows)), "upstream keeps blocks together: _get_train_sampler is not needed"
    assert is_together(ours(tmp_path, rows))


def test_trainer_counts_tokens_that_nothing_predicts(tmp_path):
    """Two documents of a packed row: the first token of the second is predicted by nothing."""
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6, 7, 8]]), "labels": torch.tensor([[3, 4, 5, 6, 7, 8]])}
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2]])
    masked = batch | {"labels": torch.full((1, 6), -100)}
    device = torch.device("cpu")
    theirs, own = plain(tmp_path), ours(tmp_path)
    assert int(theirs._get_num_items_in_batch([batch], device)) == 5, "upstream counts what is trained"
    assert int(theirs._get_num_items_in_batch([masked], device)) == 0, "upstream never divides by 0"
    assert int(own._get_num_items_in_batch([batch], device)) == 4
    assert int(own._get_num_items_in_batch([masked], device)) == 1


def test_trainer_walks_all_modules_to_clip(tmp_path, monkeypatch):
    def walked(made):
        made.create_optimizer_and_scheduler(2)
        cache_modules(made.model)
        for parameter in made.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        calls, own = [], torch.nn.Module.named_parameters

        def count(self, *more, **settings):
            calls.append(self)
            return own(self, *more, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "named_parameters", count)
            norm = made._clip_grad_norm(made.model)
        return len(calls), float(norm)

    (times, theirs), (none, own) = walked(plain(tmp_path)), walked(ours(tmp_path))
    assert times > 0, "upstream walks no modules: _clip_grad_norm is not needed for that"
    assert none == 0 and own == pytest.approx(theirs)


def lose_a_weight(checkpoint):
    """A checkpoint without one of its weights; the weight's name."""
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    del weights[name]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    return name


def test_trainer_resumes_without_the_weights_that_are_missing(tmp_path, caplog):
    for make, folder in ((plain, tmp_path / "plain"), (ours, tmp_path / "ours")):
        make(folder, max_steps=1, **SAVED).train()
        lose_a_weight(folder / "checkpoint-1")
    with caplog.at_level(logging.WARNING):
        resumed = plain(tmp_path / "plain", max_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "plain/checkpoint-1"))
    assert resumed.state.global_step == 2, "upstream refuses: _load_from_checkpoint may be its own"
    with pytest.raises(RunError, match=r"its files lack model\.layers\.0\.self_attn\.q_proj\.weight"):
        ours(tmp_path / "ours", max_steps=2).train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-1"))


def test_trainer_takes_a_best_model_without_the_weights_that_are_missing(tmp_path):
    for make, folder in ((plain, tmp_path / "plain"), (ours, tmp_path / "ours")):
        make(folder, max_steps=1, **SAVED).train()
        lose_a_weight(folder / "checkpoint-1")
    theirs, own = plain(tmp_path / "plain"), ours(tmp_path / "ours")
    theirs.state.best_model_checkpoint = str(tmp_path / "plain/checkpoint-1")
    own.state.best_model_checkpoint = str(tmp_path / "ours/checkpoint-1")
    theirs._load_best_model()  # a warning at most
    with pytest.raises(RunError):
        own._load_best_model()


def test_torch_cannot_load_an_optimizer_without_state_into_shards():
    """The call that `Trainer` makes for a sharded student; `_load_optimizer_and_scheduler` goes around it."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        with pytest.raises(AssertionError, match="Expected device to be set"):
            set_optimizer_state_dict(model, optimizer, state, options=options)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make, is_left", [(plain, True), (ours, False)])
def test_trainer_leaves_a_checkpoint_that_is_not_whole(tmp_path, monkeypatch, make, is_left):
    def killed(self, *more):
        raise OSError("the disk is full")

    monkeypatch.setattr(Trainer, "_save_rng_state", killed)
    with pytest.raises(OSError, match="the disk is full"):
        make(tmp_path, **SAVED).train()
    assert (tmp_path / "checkpoint-1").exists() == is_left, "upstream writes checkpoints aside: delete _save_checkpoint"


def test_trainer_asks_for_the_folder_of_a_checkpoint(tmp_path, monkeypatch):
    """The seam by which ours puts an unfinished checkpoint into another folder."""
    made, folders = plain(tmp_path, max_steps=1, **SAVED), []
    monkeypatch.setattr(made, "_get_output_dir", lambda trial: folders.append(trial) or str(tmp_path / "aside"))
    made.train()
    assert folders and (tmp_path / "aside/checkpoint-1/trainer_state.json").is_file()
    seen, own = [], ours(tmp_path, max_steps=1, **SAVED)
    save = own.save_model
    monkeypatch.setattr(own, "save_model", lambda folder, **more: (seen.append(Path(folder)), save(folder, **more))[1])
    own.train()
    assert [path.parent.name for path in seen] == [UNFINISHED] and (tmp_path / "checkpoint-1").is_dir()


# ----------------------------------------------------------------------------------- public methods, and the callback


@pytest.mark.parametrize("make, expected", [(plain, 4), (ours, 3)])
def test_trainer_makes_a_step_after_the_last_one(tmp_path, make, expected):
    """A run of three steps, the last of them in the middle of an epoch, that is resumed when it is over."""
    settings = {"max_steps": 3, "per_device_train_batch_size": 1, **SAVED}
    make(tmp_path, **settings).train()
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == expected


@pytest.mark.parametrize("make, expected", [(plain, [2, 4]), (ours, [1, 2, 3, 4])])
def test_trainer_logs_at_the_intervals_of_the_checkpoint(tmp_path, make, expected):
    make(tmp_path, max_steps=2, logging_steps=2, **SAVED).train()
    resumed = make(tmp_path, max_steps=4, logging_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    logged = [entry["step"] for entry in resumed.state.log_history if "loss" in entry]
    assert logged == [step for step in expected if step > 1]


@pytest.mark.parametrize("make, expected", [(plain, []), (ours, [2])])
def test_trainer_leaves_out_the_evaluation_in_which_a_run_ended(tmp_path, monkeypatch, make, expected):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_strategy": "steps", "max_steps": 3}
    first = make(tmp_path, **settings)

    def killed(*more, **settings):
        first._save_checkpoint(first.model, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    evaluated = [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry]
    assert [step for step in evaluated if step < 3] == expected


@pytest.mark.parametrize("make, expected", [(plain, 0.0), (ours, 0.25)])
def test_trainer_begins_a_warm_up_at_a_rate_of_0(tmp_path, make, expected):
    made = make(tmp_path, learning_rate=1.0, warmup_steps=4, max_steps=6)
    made.create_optimizer_and_scheduler(6)
    assert made.lr_scheduler.get_last_lr()[0] == expected
