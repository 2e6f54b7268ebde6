"""Replication and sharding; a teacher sharded over two gloo processes gives one process's loss and gradients.

The file is also the program of the two processes.
"""

import datetime
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from two_ranks import run_as_two

from distill.core.ranks import exit_process

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
KINDS = ["tied", "untied"]


@pytest.mark.parametrize(
    "asked, teacher, world, expected",
    [
        ("auto", 15, 4, ("ddp", False, True)),
        ("auto", 90, 4, ("fsdp", False, True)),  # 90 + 48 does not fit, 90 + 30 does
        ("auto", 132, 4, ("fsdp", True, True)),
        ("auto", 800, 4, ("fsdp", True, False)),
        ("ddp", 132, 4, ("ddp", True, True)),
        ("fsdp", 15, 4, ("fsdp", False, True)),
        ("auto", 132, 1, ("ddp", False, False)),
    ],
)
def test_the_first_way_that_fits_is_taken(asked, teacher, world, expected):
    from distill.planning.placement import MemoryNeeds, choose_placement

    found = choose_placement(asked, MemoryNeeds(teacher * GIB, 4 * GIB, 48 * GIB, 30 * GIB), 130 * GIB, world)
    assert found[:3] == expected


@pytest.mark.parametrize("teachers, expected", [("sharded", ("ddp", True)), ("copied", ("ddp", False))])
def test_the_requested_placement_of_the_teacher_is_used(teachers, expected):
    from distill.planning.placement import MemoryNeeds, choose_placement

    found = choose_placement("auto", MemoryNeeds(15 * GIB, 4 * GIB, 48 * GIB, 30 * GIB), 130 * GIB, 4, teachers)
    assert found[:2] == expected


def gpu_of(monkeypatch, gib):
    from types import SimpleNamespace

    facts = SimpleNamespace(name="NVIDIA H100", total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    for module in ("devices", "cache_memory"):
        monkeypatch.setattr(f"distill.planning.{module}.family_in", lambda device: "sm_90")


def flagship(*overrides):
    from distill.recipe import load

    return load(
        ROOT / "recipes/llama3-8b-to-1b.yaml",
        ["teacher.init=random", "student.init=random", "data.source=synthetic", *overrides],
    )


@pytest.mark.parametrize(
    "gib, world, overrides, expected",
    [
        (140, 4, [], ("ddp", False, True)),
        (50, 4, [], ("fsdp", False, True)),  # 15 + 34 GiB do not fit
        (30, 4, [], ("fsdp", True, True)),
        (20, 4, [], ("fsdp", True, False)),
        (140, 4, ["parallel.strategy=fsdp"], ("fsdp", False, True)),
        (140, 4, ["teacher.config=llama-3.1-70b", "student.config=llama-3.1-8b"], ("fsdp", True, True)),
        (140, 1, [], ("ddp", False, True)),
    ],
)
def test_a_recipe_is_shared_by_what_fits(monkeypatch, gib, world, overrides, expected):
    from distill.planning.device_plan import DevicePlan
    from distill.planning.placement import estimate_placement

    gpu_of(monkeypatch, gib)
    recipe = flagship("train.tokens_per_step=null", *overrides)
    found = estimate_placement(DevicePlan.here(recipe, torch.device("cuda", 0), world))
    assert found[:3] == expected, str(found)
    if world > 1:
        assert f"each of {world} GPUs" in str(found)


def test_an_fp8_teacher_is_not_sharded(monkeypatch):
    from distill.models.patch.attention_choice import AttentionChoices
    from distill.planning.device_plan import DevicePlan
    from distill.planning.placement import place
    from distill.teachers.load_context import LoadContext
    from distill.teachers.opening import open_pair

    gpu_of(monkeypatch, 20)
    monkeypatch.setattr("distill.teachers.opening.family_in", lambda device: "sm_90")
    recipe, device = flagship("train.tokens_per_step=null", "teacher.dtype=fp8"), torch.device("cuda", 0)
    plan = DevicePlan.here(recipe, device, 4)
    context = LoadContext(device, plan.precision, place(plan), AttentionChoices(recipe, {}))
    why = r"teacher\.dtype: an fp8 teacher cannot be sharded.* \(of 19\.0 GiB usable on each of 4 GPUs"
    with pytest.raises(ValueError, match=why):
        open_pair(plan.source, plan.source.vocabulary(), context)


def gradients(kind, sharded):
    from tiny import tiny_model

    from distill.data.collator import Collator
    from distill.models.sharding import shard_teacher
    from distill.teachers.objective import DistillationObjective

    student = tiny_model(dtype=torch.float64, seed=0)
    teacher = tiny_model(dtype=torch.float64, hidden=64, seed=1, layers=3, tie=kind == "tied")
    if sharded:
        from torch.distributed.tensor import DTensor

        shard_teacher(teacher)
        assert all(isinstance(p, DTensor) for p in teacher.parameters()), "not sharded"
    objective = DistillationObjective(teacher, student, {"terms": [{"type": "jsd"}]})
    ids = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(5)).tolist()
    batch = Collator(2)([{"input_ids": row, "labels": row, "position_ids": list(range(9))} for row in ids])
    for _ in range(2):  # the second step gathers again what the first one let go
        student.zero_grad()
        loss = student(**objective.student_inputs(batch))["loss"]
        loss.backward()
    if sharded:
        assert all(isinstance(p, DTensor) for p in teacher.parameters()), "left whole after the step"
    return {"loss": loss.detach()} | {name: p.grad for name, p in student.named_parameters()}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_as_two(__file__, folder, timeout=240)
    return torch.load(folder / "results.pt", weights_only=True)


def random_teacher(folder, kind):
    """Random weights drawn in shards, the kernels swapped in by another model's verdicts; what the ranks see of it."""
    from tiny import tiny_config
    from torch.distributed.tensor import DTensor

    from distill.models.head import decoder_of, find_head
    from distill.recipe import LocalTeacherConfig
    from distill.teachers.backends.sharded import load_sharded_teacher

    tiny_config(layers=4, hidden=64, tie=kind == "tied", initializer_range=0.5).save_pretrained(folder / kind)
    dist.barrier()
    section = LocalTeacherConfig(init="random", config=str(folder / kind))
    before = torch.random.get_rng_state()
    teacher, report = load_sharded_teacher(
        section, device=torch.device("cpu"), dtype=torch.float32, attention=lambda small: "triton"
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(isinstance(p, DTensor) and not p.requires_grad for p in teacher.parameters())
    head, embedding = find_head(teacher).linear.weight, teacher.get_input_embeddings().weight
    hidden = decoder_of(teacher)(input_ids=torch.arange(9)[None], use_cache=False).last_hidden_state
    return {
        "swapped": dict(report.swapped),
        "tied": torch.equal(head.full_tensor(), embedding.full_tensor()),
        "std": head.full_tensor().std(),
        "norms": teacher.model.norm.weight.full_tensor(),
        "hidden": hidden,
        "inv_freq": teacher.model.rotary_emb.inv_freq,
    }


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_initialised_in_shards(two_processes, kind):
    from tiny import tiny_model

    from distill.models.patch.patching import patch

    whole = tiny_model(layers=4, hidden=64, tie=kind == "tied")
    found = two_processes[f"random {kind}"]
    assert found["swapped"] == dict(patch(whole, "teacher", attention=None).swapped)
    assert found["tied"] == (kind == "tied")
    assert found["std"] == pytest.approx(0.5, rel=0.1) and torch.equal(found["norms"], torch.ones(64))
    assert torch.isfinite(found["hidden"]).all() and found["hidden"].std() > 0.1
    torch.testing.assert_close(found["inv_freq"], whole.model.rotary_emb.inv_freq)


def failure(folder):
    """Return the error of a rank where only the first rank can detect the fault."""
    from tiny import tiny_config

    from distill.recipe import LocalTeacherConfig
    from distill.teachers.backends.sharded import load_sharded_teacher

    tiny_config().save_pretrained(folder / "hollow")  # a configuration without weights
    dist.barrier()
    try:
        load_sharded_teacher(
            LocalTeacherConfig(model=str(folder / "hollow")), device=torch.device("cpu"), dtype=torch.float32
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_fault_of_the_first_process_is_raised_by_all(two_processes):
    first, second = two_processes["faults"]
    assert first == second
    assert all("teacher.model" in fault for fault in two_processes["faults"]), two_processes["faults"]


def patience():
    """Read on the first process for longer than the processes' usual timeout."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from distill.core.ranks import broadcast_from_rank0

    dist.barrier()
    _set_pg_timeout(datetime.timedelta(seconds=2), None)
    return broadcast_from_rank0(lambda: time.sleep(4) or "read")


@pytest.mark.full
def test_others_wait_while_the_first_reads(two_processes):
    assert two_processes["patience"] == ["read", "read"]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_teacher_teaches_the_same(two_processes, kind):
    expected = gradients(kind, sharded=False)
    assert two_processes[kind].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(two_processes[kind][name], value, rtol=1e-10, atol=1e-12, msg=name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Path(sys.argv[1])
    results = {kind: gradients(kind, sharded=True) for kind in KINDS}
    results |= {f"random {kind}": random_teacher(work, kind) for kind in KINDS}
    faults = [""] * dist.get_world_size()
    dist.all_gather_object(faults, failure(work))
    results["faults"] = faults
    results["patience"] = [""] * dist.get_world_size()
    dist.all_gather_object(results["patience"], patience())
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[1]) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)
