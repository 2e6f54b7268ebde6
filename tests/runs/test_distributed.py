"""Two gloo processes against one: DDP through the trainer, FSDP2 through accelerate, the same gradients to rounding.

The file is also the program of the two processes: it runs every case in one start and saves what it got.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from grids import chosen
from two_ranks import run_as_two

from distill.core.ranks import exit_process

DDP_CASES = ["tied", "untied", "lora"]
FSDP_CASES = [f"{kind} {accumulation}" for kind in ("tied", "untied", "lora") for accumulation in (1, 4)]
BIG_COUNT = 65_373  # bf16 would make 65,280 of it


def models(kind):
    from peft import LoraConfig, get_peft_model
    from tiny import tiny_model

    student = tiny_model(dtype=torch.float64, tie=kind == "tied")
    if kind == "lora":
        torch.manual_seed(7)
        student = get_peft_model(student, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])).double()
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return student, tiny_model(dtype=torch.float64, hidden=64, seed=1)


def rows(count=16):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        length = 5 + number % 6
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        masked = 1 + number % 4  # the ranks get different numbers of trained tokens
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:], "position_ids": list(range(length))})
    return Dataset.from_list(made)


def train_with_trainer(kind, folder, *, batch_size, accumulation):
    """Two SGD steps of 8 sequences; returns weights and logged figures."""
    from transformers import TrainingArguments

    from distill.training.trainer import DistillationTrainer

    student, teacher = models(kind)
    loss = {"temperature": 2.0, "terms": [{"type": "forward_kl"}, {"type": "cross_entropy", "weight": 0.5}]}
    trainer = DistillationTrainer(
        student,
        teacher,
        TrainingArguments(
            str(folder),
            max_steps=2,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=3,
        ),
        loss=loss,
        train_dataset=rows(),
        eval_dataset=rows(8),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    figures = {
        key: [entry[key] for entry in logged]
        for key in ("loss", "kl", "agreement", "trained_tokens")
        if key in logged[0]
    }
    figures["held_out"] = trainer.evaluate()["eval_loss"]
    weights = {name: p.detach() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    return {"weights": weights, "figures": figures}


def objective_for(student, teacher):
    from distill.teachers.objective import DistillationObjective

    return DistillationObjective(
        teacher, student, {"terms": [{"type": "jsd"}, {"type": "cross_entropy", "weight": 0.5}]}
    )


def micro_batches(count):
    from distill.data.collator import Collator

    data, collate = rows(), Collator(2)
    size = len(data) // count
    return [collate([data[index] for index in range(start, start + size)]) for start in range(0, len(data), size)]


def whole_gradient(kind):
    """Gradients of the mean over all rows, in one process and one batch."""
    student, teacher = models(kind)
    (batch,) = micro_batches(1)
    student(**objective_for(student, teacher).student_inputs(batch))["loss"].backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def shard(student, dtype=None):
    """Shard as accelerate does under FSDP2; `fsdp=True` alone would run DDP on a CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype else None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=policy,
        reshard_after_forward=True,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    student = fsdp2_prepare_model(accelerator, student)
    assert all(isinstance(p, DTensor) for p in student.parameters()), "not sharded"
    return student


def sharded_gradient(kind, accumulation):
    """The same from FSDP2 on two ranks, each with half of the micro-batches."""
    student, teacher = models(kind)
    objective = objective_for(student, teacher)
    student = shard(student)
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = micro_batches(world * accumulation)
    count = torch.tensor(sum(batch["valid_rows"].numel() for batch in batches))
    for number, batch in enumerate(batches[rank::world]):
        student.set_requires_gradient_sync(number == accumulation - 1)
        (student(**objective.student_inputs(batch, num_items=count))["loss"] * world).backward()
    return {name: p.grad.full_tensor() for name, p in student.named_parameters() if p.grad is not None}


def what_reaches_the_loss():
    """dtypes and the count that arrive at the loss under FSDP2's bf16 policy."""
    from tiny import tiny_model

    student, teacher = tiny_model(tie=False), tiny_model(seed=1)
    objective = objective_for(student, teacher)
    student = shard(student, torch.bfloat16)
    seen, forward = {}, objective.loss.forward

    def spy(hidden, weight, teacher_hidden, teacher_weight, labels, **more):
        seen.update(weight=weight.dtype, teacher=teacher_hidden.dtype, count=more["num_items"].clone())
        return forward(hidden, weight, teacher_hidden.to(hidden.dtype), teacher_weight.to(hidden.dtype), labels, **more)

    objective.loss.forward = spy
    (batch,) = micro_batches(1)
    student(**objective.student_inputs(batch, num_items=torch.tensor(BIG_COUNT)))
    return seen


def run_all(folder, ddp, fsdp):
    """Body of each of the two processes."""
    torch.set_num_threads(1)
    results = {}
    for kind in ddp.split(","):
        results[kind] = train_with_trainer(kind, folder / kind, batch_size=2, accumulation=2)
    for case in fsdp.split(","):
        kind, accumulation = case.split()
        results[case] = sharded_gradient(kind, int(accumulation))
    results["policy"] = what_reaches_the_loss()
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("two")
    run_as_two(__file__, folder, *(",".join(chosen(request, argument)) for argument in ("kind", "case")))
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.mark.plain("tied")
@pytest.mark.parametrize("kind", DDP_CASES)
def test_ddp_equals_one_process(two_processes, kind, tmp_path):
    alone = train_with_trainer(kind, tmp_path, batch_size=8, accumulation=1)
    start = dict(models(kind)[0].named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in alone["weights"].items())
    for name, value in alone["weights"].items():
        torch.testing.assert_close(two_processes[kind]["weights"][name], value, rtol=1e-9, atol=1e-9, msg=name)
    for name, values in alone["figures"].items():
        assert two_processes[kind]["figures"][name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.plain("tied 1", "lora 4")
@pytest.mark.parametrize("case", FSDP_CASES)
def test_fsdp2_equals_one_process(two_processes, case):
    expected, got = whole_gradient(case.split()[0]), two_processes[case]
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_fsdp2_casts_neither_the_count_nor_the_teacher(two_processes):
    seen = two_processes["policy"]
    assert seen["weight"] == torch.bfloat16  # the policy did apply
    assert seen["teacher"] == torch.float32
    assert seen["count"].dtype == torch.int64 and seen["count"] == BIG_COUNT


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), *sys.argv[2:])
