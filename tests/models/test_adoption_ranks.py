"""A patched model on two gloo processes, under DDP and FSDP2: the gradients of one process with all rows."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from test_adoption import batch
from test_patching import assert_same
from test_shared_input import nodes
from tiny import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from two_ranks import run_as_two

import distill

WRAPS = ("ddp", "fsdp", "fsdp of single projections")
MASK = torch.tensor([[1] * 13, [1] * 9 + [0] * 4])


def inputs_of(rows):
    inputs = {**batch(), "attention_mask": MASK}
    inputs["labels"] = inputs["labels"].masked_fill(MASK == 0, -100)
    items = int((inputs["labels"][:, 1:] != -100).sum())
    return {name: tensor[rows] for name, tensor in inputs.items()} | {"num_items_in_batch": items}


def step(wrap, rank):
    model = tiny_model(tie=False).train()
    distill.patch(model)
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        single = [] if wrap == "fsdp" else [p for layer in model.model.layers for p in layer.mlp.children()]
        for unit in (*single, *model.model.layers, model.lm_head):
            fully_shard(unit, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    output = wrapped(**inputs_of(slice(rank, rank + 1)))
    shared, refused = nodes(output.loss.grad_fn), ""
    try:
        output.logits.sum()
    except RuntimeError as error:
        refused = str(error)
    (2 * output.loss).backward()  # gradients are averaged over ranks; the loss is a sum over the items of both
    gradients = {
        name.removeprefix("module."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in wrapped.named_parameters()
    }
    return {
        "gradients": gradients,
        "refused": refused,
        "shared": shared,
        "cut": isinstance(model.lm_head.weight, DTensor),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "found.pt"
    run_as_two(__file__, path)
    return torch.load(path)


@pytest.mark.parametrize("wrap", WRAPS)
def test_two_processes_learn_as_one(found, wrap):
    model = tiny_model(tie=False).train()
    model(**inputs_of(slice(None))).loss.backward()
    assert found[wrap]["cut"] == (wrap != "ddp")
    assert found[wrap]["shared"] == (2 if "single" in wrap else 4)  # what others have not gathered yet is not read
    for name, parameter in model.named_parameters():
        assert_same(found[wrap]["gradients"][name], parameter.grad, 2e-4)


def test_logits_are_refused_under_fsdp_and_computed_under_ddp(found):
    assert "sharded (FSDP)" in found["fsdp"]["refused"] and not found["ddp"]["refused"]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {wrap: step(wrap, dist.get_rank()) for wrap in WRAPS}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    dist.barrier()
    os._exit(0)
