"""Rows that do not divide by the processes: each is learned once an epoch, by DDP and FSDP2, resumed or not.

The file is also the program of the two processes: it runs every case in one start and saves what each of them saw.
"""

import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from grids import chosen
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerCallback
from two_ranks import run_as_two

from distill.core.ranks import exit_process
from distill.training.samplers import EmptyPaddedBatchSampler, without_repeated_rows

EXACT = {"rtol": 1e-9, "atol": 1e-9}


class Case(NamedTuple):
    """A run: how the student is shared, rows, rows of a step, and rows at a time of each of two processes."""

    way: str
    rows: int
    together: int
    size: int
    own_words: bool = False


# 9 rows in steps of 4 end with 1, which the second process has no part of; of 13 in steps of 8 the last has 5 rows
CASES = {
    "copies": Case("ddp", 9, 4, 2),
    "copies, accumulated": Case("ddp", 13, 8, 2),
    "answers": Case("ddp", 9, 4, 2, own_words=True),
    "shards": Case("fsdp", 9, 4, 2),
    "shards, accumulated": Case("fsdp", 13, 8, 2),
}
RESUMED = {"copies": 2, "shards": 2, "copies, accumulated": 1, "shards, accumulated": 2}  # to the rows at a time then


class Watch(TrainerCallback):
    """A trainer's steps as this process sees them: trained tokens, own rows, own loss, and the weights behind it."""

    def __init__(self):
        self.steps = {}

    def attach(self, made):
        self.made = made
        samples, step = made.get_batch_samples, made.training_step

        def get_batch_samples(*args):
            batches, count = samples(*args)
            told = [[token for token in row if token != 2] for batch in batches for row in batch["input_ids"].tolist()]
            number = made.state.global_step + 1
            self.steps[number] = {"count": int(count), "rows": [row for row in told if row], "loss": 0.0}
            return batches, count

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            self.steps[made.state.global_step + 1]["loss"] += loss.item() / made.accelerator.num_processes
            return loss

        made.get_batch_samples, made.training_step = get_batch_samples, training_step
        made.add_callback(self)

    def on_step_end(self, args, state, control, **kwargs):
        named = self.made.accelerator.unwrap_model(self.made.model).named_parameters()
        self.steps[state.global_step]["weights"] = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu().clone() for name, p in named
        }


def train(case, folder, *, processes, size=None, device="cpu", **settings):
    """Two epochs of a case; the steps, and the held-out figures behind them."""
    from test_on_policy import on_policy, pairs
    from test_trainer import rows
    from tiny import tiny_model
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import TrainingArguments

    from distill.training.step_listeners import RolloutBatches
    from distill.training.trainer import DistillationTrainer

    os.environ.pop("ACCELERATE_USE_FSDP", None)
    size = size or (case.size if processes == 2 else case.together)
    sharded = processes > 1 and case.way == "fsdp"
    student = tiny_model(dtype=torch.float64, tie=case.way == "ddp")
    made = DistillationTrainer(
        student,
        tiny_model(seed=1, hidden=64, dtype=torch.float64),
        TrainingArguments(
            str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=case.together // size // processes,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=3,
            max_grad_norm=0.5,
            **({"save_strategy": "no"} | settings.pop("saves", {})),
            **(
                {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
                if sharded
                else {}
            ),
        ),
        loss={"terms": [{"type": "forward_kl"}, {"type": "cross_entropy", "weight": 0.5}]},
        train_dataset=Dataset.from_list(pairs(case.rows)) if case.own_words else rows(case.rows),
        eval_dataset=rows(7, seed=5),
    )
    if sharded:  # gradients in the weights' own float64
        made.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    if case.own_words:
        made.add_callback(RolloutBatches(on_policy(student, fraction=0.7), made))
    watch = Watch()
    watch.attach(made)
    made.train(**settings)
    return {"steps": watch.steps, "held_out": made.evaluate(), "layout": type(next(made.model.parameters())).__name__}


def run_all(folder, device, *names):
    """Body of each of the two processes."""
    from accelerate.state import AcceleratorState, PartialState

    torch.set_num_threads(1)
    found = {}
    for name in names:
        case, place = CASES[name], folder / name
        found[name] = train(case, place, processes=2, device=device, saves={"save_strategy": "steps", "save_steps": 1})
        if name in RESUMED:  # at the end of the first epoch's first step, and within the second epoch
            steps = len(found[name]["steps"])
            for step in (1, steps // 2 + 1):
                checkpoint = str(place / f"checkpoint-{step}")
                found[f"{name} from {step}"] = train(
                    case,
                    place / "again",
                    processes=2,
                    size=RESUMED[name],
                    device=device,
                    resume_from_checkpoint=checkpoint,
                )
        AcceleratorState._reset_state()
        PartialState._shared_state.clear()
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


def seen_by_both(folder, device, names):
    """Return the rows that both processes saw, by case."""
    run_as_two(__file__, folder, device, *names, device=device)
    both = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    return {name: (both[0][name], both[1][name]) for name in both[0]}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, request):
    return seen_by_both(tmp_path_factory.mktemp("two"), "cpu", chosen(request, "name"))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    return seen_by_both(tmp_path_factory.mktemp("two"), "cuda", CASES)


def hold_steps(first, second, expected):
    """The steps of two processes against those of one."""
    assert first.keys() == second.keys() == expected.keys()
    for number, whole in expected.items():
        one, other = first[number], second[number]
        assert sorted(one["rows"] + other["rows"]) == sorted(whole["rows"])
        assert one["count"] == other["count"] == whole["count"]
        assert one["loss"] + other["loss"] == pytest.approx(whole["loss"], rel=1e-9)
        for name, value in whole["weights"].items():
            torch.testing.assert_close(one["weights"][name], value, **EXACT, msg=f"step {number}: {name}")


def hold_case(seen, name, folder, device):
    """Two processes make the steps of one, and judge as one does."""
    case, (one, other) = CASES[name], seen[name]
    alone = train(case, folder, processes=1, device=device)
    assert one["layout"] == ("DTensor" if case.way == "fsdp" else "Parameter"), "not shared as asked for"
    steps = alone["steps"]
    assert [len(step["rows"]) for step in steps.values()] == 2 * ([4, 4, 1] if case.rows == 9 else [8, 5])
    assert len({tuple(map(tuple, step["rows"])) for step in steps.values()}) == len(steps), "the epochs are alike"
    hold_steps(one["steps"], other["steps"], steps)
    for figure in ("eval_loss", "eval_kl", "eval_agreement", "eval_cross_entropy"):  # of 7 rows, one at a time
        assert one["held_out"][figure] == pytest.approx(alone["held_out"][figure], rel=1e-9), figure


def hold_resumed(seen, name):
    """Within an epoch and before its last step, also with smaller micro-batches; SGD in shards has nothing to load."""
    whole = seen[name][0]["steps"], seen[name][1]["steps"]
    for step in (1, len(whole[0]) // 2 + 1):
        left = {
            number: {
                **whole[0][number],
                **{key: whole[0][number][key] + whole[1][number][key] for key in ("rows", "loss")},
            }
            for number in whole[0]
            if number > step
        }
        assert left
        one, other = seen[f"{name} from {step}"]
        hold_steps(one["steps"], other["steps"], left)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_steps_of_one(two_processes, tmp_path, name):
    hold_case(two_processes, name, tmp_path, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_makes_the_steps_that_are_left(two_processes, name):
    hold_resumed(two_processes, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_make_the_steps_of_one(two_gpus, tmp_path, monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hold_case(two_gpus, name, tmp_path, "cuda")
    if name in RESUMED:
        hold_resumed(two_gpus, name)


# ------------------------------------------------------------------- the rows of an epoch


def dealt(rows, size, processes, skip=0, **how):
    """Micro-batches of each process."""
    found = []
    for process in range(processes):
        shard = BatchSamplerShard(BatchSampler(range(rows), size, False), processes, process, **how)
        loader = DataLoader(range(rows), batch_sampler=shard, collate_fn=list)
        without_repeated_rows(loader, processes)
        loader = skip_first_batches(loader, skip) if skip else loader
        found.append(list(loader))
        assert len(found[-1]) == len(loader)
    return found


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 9, 12, 13])
@pytest.mark.parametrize("size, processes", [(1, 2), (2, 2), (2, 3), (4, 2)])
def test_every_row_once_in_the_order_of_one_process(rows, size, processes):
    Accelerator(cpu=True)
    found = dealt(rows, size, processes)
    together = list(zip(*found, strict=True))  # as many micro-batches on every process
    assert [[row for batch in turn for row in batch] for turn in together] == list(
        BatchSampler(range(rows), size * processes, False)
    )
    assert dealt(rows, size, processes, even_batches=False) == found
    assert dealt(rows, size, processes, skip=1) == [batches[1:] for batches in found]
    if processes == 2:
        assert dealt(rows, 2 * size, processes, split_batches=True) == found


def test_samplers_of_others_and_dropped_batches_stay(caplog):
    loader = DataLoader(range(9), batch_sampler=BatchSamplerShard(BatchSampler(range(9), 2, True), 2, 0))
    before = loader.batch_sampler.batch_sampler
    assert (
        without_repeated_rows(loader, 2).batch_sampler.batch_sampler is before
    )  # the rest is dropped: nothing to fill up
    alone = DataLoader(range(9), batch_size=2)
    assert without_repeated_rows(alone, 1) is alone and type(alone.batch_sampler) is BatchSampler

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        without_repeated_rows(DataLoader(Stream(), batch_size=2), 2)
    assert "rows of Stream are not distributed by a batch sampler" in caplog.text


def test_lengths_of_no_rows():
    assert list(EmptyPaddedBatchSampler([], 2, 3)) == [] and len(EmptyPaddedBatchSampler([], 2, 3)) == 0


# ------------------------------------------------------------------- no rows at all


def none_left(subject):
    """A micro-batch of no rows through both models, as part of a step of 5 tokens."""
    objective = subject.objective()
    batch = subject.batch([])
    assert batch["labels"].shape == (1, 2) and (batch["labels"] == -100).all() and len(batch["valid_rows"]) == 0
    subject.student.train()
    output = subject.student(**objective.student_inputs(batch, num_items=torch.tensor(5)))
    assert output["loss"] == 0 and (output["statistics"] == 0).all()
    output["loss"].backward()
    for name, parameter in subject.student.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name  # DDP waits for every one


@pytest.mark.plain("several", "answering", "sampled")
@pytest.mark.parametrize("kind", ["several", "across", "answering", "bucket", "sampled", "hidden"])
def test_no_rows_give_a_loss_and_gradients_of_0(kind, tmp_path):
    from subjects import SUBJECTS, Caches

    none_left(SUBJECTS[kind]() if kind in SUBJECTS else Caches(tmp_path).subject(kind))


def test_no_rows_have_no_document_to_answer():
    from test_on_policy import COLLATE, on_policy
    from tiny import tiny_model

    batch = COLLATE([])
    (made,) = on_policy(tiny_model()).replace([batch], 0, COLLATE)
    assert made is batch


def test_a_custom_collator_is_never_called_with_no_rows():
    from distill.data.collator import Collator

    collate = Collator(7, omit_plain_positions=True, custom=lambda rows: {"rows": rows[0]})
    assert collate([3]) == {"rows": 3}
    batch = collate([])
    assert batch["input_ids"].tolist() == [[7, 7]] and "position_ids" not in batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_fused_losses_of_no_rows(kernel_device, dtype, lora):
    from distill_kernels import ChunkedLoss, FusedDistillationLoss, FusedTopKKLLoss, LossTerm

    def draw(*shape, grad=True):
        return torch.randn(shape, device=kernel_device, dtype=dtype).requires_grad_(grad)

    none = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    labels = torch.full((4,), -100, device=kernel_device)
    both = {"num_items": torch.tensor(5, device=kernel_device), "valid_rows": none}
    ids, said = torch.zeros(4, 3, dtype=torch.int32, device=kernel_device), draw(4, 3, grad=False).log_softmax(-1)
    mixed = FusedDistillationLoss([LossTerm("jsd", 1.0, beta=0.3), LossTerm("cross_entropy", 0.5)], temperature=2.0)
    losses = [
        lambda x, w, t, **more: mixed(x, w, *t, labels, return_stats=True, **more)[0],
        lambda x, w, t, **more: FusedTopKKLLoss("forward", "bucket")(x, w, ids, said, labels, **more),
        lambda x, w, t, **more: ChunkedLoss(lambda s, t, y: (s - t).square().sum(-1))(x, w, *t, labels, **more),
    ]
    for loss in losses:
        x, w, a, b = draw(4, 16), draw(48, 16), draw(2, 16), draw(48, 2)
        value = loss(
            x,
            w,
            (draw(4, 16, grad=False), draw(48, 16, grad=False)),
            **both,
            student_lora=(a, b, 0.5) if lora else None,
        )
        value.backward()
        assert value == 0
        for tensor in (x, w, a, b) if lora else (x, w):
            assert tensor.grad is not None and (tensor.grad == 0).all()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), *sys.argv[2:])
