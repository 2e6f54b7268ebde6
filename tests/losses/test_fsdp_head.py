"""Two processes that share the parameters (FSDP2) against one that has everything.

The file is also the program of the two processes: it runs every case in one start and saves what it got.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distill_kernels import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedKLLoss,
    FusedTopKKLLoss,
    LossTerm,
    TeacherHead,
    head_loss,
)
from helpers import assert_as_good_as_torch, realistic_heads
from torch import nn
from two_ranks import run_as_two

from distill.core.ranks import exit_process

MIXED = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]
V, H, HT = 61, 16, 24  # 61: the ranks hold 31 and 30 rows
FSDP_KINDS = ("tied", "untied", "teacher")
FSDP_CASES = [(kind, accumulation) for kind in FSDP_KINDS for accumulation in (1, 4)]


class Small(nn.Module):
    """An embedding, one layer and a head, tied or not; the forward is the loss."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.layer, self.lm_head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V, bias=not tied)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids, teacher, **named):
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        return head_loss(self.lm_head, FusedDistillationLoss(MIXED), hidden, **teacher, **named)


def fsdp_gradients(kind, accumulation, device, mesh=None):
    """Gradients of the mean over 8 sequences; with `mesh` every rank has half of them, and of the parameters."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model, teacher_head = Small(kind == "tied").double().to(device), nn.Linear(HT, V).double().to(device)
    ids, hidden = torch.randint(0, V, (8, 5), device=device), torch.randn(8, 5, HT, device=device).double()
    labels = ids.roll(-1, 1).masked_fill(torch.rand(8, 5, device=device) < 0.3, -100)
    world, rank = (1, 0) if mesh is None else (2, mesh.get_local_rank())
    teacher = {"teacher_weight": teacher_head.weight, "teacher_bias": teacher_head.bias}
    if kind == "teacher":
        teacher = {"teacher_head": teacher_head.requires_grad_(False)}
    if mesh is not None:
        for part in (model.layer, *(() if kind == "tied" else (model.lm_head,)), model):
            fully_shard(part, mesh=mesh)
        if kind == "teacher":
            fully_shard(teacher_head, mesh=mesh)
    for number, batch in enumerate(torch.arange(8).chunk(world * accumulation)[rank::world]):
        if mesh is not None:
            model.set_requires_gradient_sync(number == accumulation - 1)
        given = teacher | {"teacher_hidden": hidden[batch]}
        loss = model(ids[batch], given, labels=labels[batch], num_items=(labels != -100).sum())
        (loss * world).backward()
    return {name: p.grad.full_tensor() if mesh is not None else p.grad for name, p in model.named_parameters()}


def mistakes(device, mesh):
    """Return the error messages of arguments that are in shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def cut(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    x, w, xt, wt = realistic_heads(14, V, H, HT)
    ids, logprobs = torch.zeros(14, 1, dtype=torch.int64), torch.zeros(14, 1)
    plain, tokens, both = FusedKLLoss(), FusedTopKKLLoss(), FusedDistillationLoss(MIXED[:2])
    tries = {
        "student": lambda: plain(x, cut(w), xt, wt),
        "teacher": lambda: plain(x, w, xt, cut(wt)),
        "hidden": lambda: plain(cut(x), w, xt, wt),
        "lora": lambda: plain(x, w, xt, wt, student_lora=(torch.ones(2, H), cut(torch.ones(V, 2)), 1.0)),
        "mixture": lambda: both(x, w, teachers=[TeacherHead(xt, wt), TeacherHead(xt, cut(wt))]),
        "tokens": lambda: tokens(x, cut(w), ids, logprobs),
        "ids": lambda: tokens(x, w, cut(ids), logprobs),
    }
    messages = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def run_all(folder, device):
    """Body of each of the two processes."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    data = init_device_mesh(device.type, (2,), mesh_dim_names=("data",))
    results = {f"fsdp {kind} {n}": fsdp_gradients(kind, n, device, data) for kind, n in FSDP_CASES}
    results["mistakes"] = mistakes(device, init_device_mesh(device.type, (2,), mesh_dim_names=("tp",)))
    leave_behind(results, folder)


def leave_behind(results, folder):
    torch.save(results, folder / f"results{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


def start(folder, device, *which):
    """The device, and what the two processes got on it."""
    run_as_two(__file__, folder, device, *which, device=device)
    results = [torch.load(folder / f"results{rank}.pt", weights_only=True, map_location="cpu") for rank in range(2)]
    return torch.device(device), results


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def two(request, tmp_path_factory):
    return start(tmp_path_factory.mktemp("two"), request.param)


@pytest.mark.parametrize("kind, accumulation", FSDP_CASES)
def test_a_head_sharded_by_fsdp2(two, kind, accumulation):
    device, ranks = two
    for name, gradient in fsdp_gradients(kind, 1, device).items():
        got = ranks[0][f"fsdp {kind} {accumulation}"][name]
        assert_as_good_as_torch(got, gradient, gradient, torch.float64, name)


@pytest.mark.parametrize(
    "name, said",
    [
        ("student", "student_weight: expected a whole tensor.*head_loss"),
        ("teacher", "teacher_weight: expected a whole tensor.*head_loss"),
        ("hidden", "student_hidden: expected a whole tensor"),
        ("lora", "student_lora: expected a whole tensor"),
        ("mixture", r"teachers\[1\]: teacher_weight: expected a whole tensor"),
        ("tokens", "student_weight: expected a whole tensor"),
        ("ids", "teacher_ids.*plain"),
    ],
)
def test_tensors_in_shards_are_refused_by_name(two, name, said):
    for rank in two[1]:
        assert re.search(said, rank["mistakes"][name])


def test_head_loss_of_whole_heads_equals_the_loss():
    x, w, xt, wt = realistic_heads(7, V, H, HT)
    heads = [nn.Linear(H, V), nn.Linear(HT, V)]
    heads[0].weight.data, heads[1].weight.data = w, wt
    labels, loss = torch.randint(0, V, (7,)), FusedDistillationLoss(MIXED)
    expected = loss(x, w, xt, wt, labels, student_bias=heads[0].bias, teacher_bias=heads[1].bias)
    assert torch.equal(head_loss(heads[0], loss, x, xt, labels=labels, teacher_head=heads[1]), expected)
    assert torch.equal(head_loss(heads[0], loss, x, xt, wt, labels, teacher_bias=heads[1].bias), expected)
    hard = FusedCrossEntropyLoss()
    assert torch.equal(head_loss(heads[0], hard, x, labels=labels), hard(x, w, labels, student_bias=heads[0].bias))
    assert "forward" not in vars(heads[0]) and heads[0](x).shape == (7, V)
    with pytest.raises(ValueError, match="teacher_head"):
        head_loss(heads[0], loss, x, xt, wt, labels, teacher_head=heads[1])


if __name__ == "__main__":
    kind = torch.device(sys.argv[2])
    if kind.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    run_all(Path(sys.argv[1]), kind)
