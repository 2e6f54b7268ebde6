"""Two processes that share the vocabulary, or the parameters (FSDP2), against one that has everything.

The file is also the program of the two processes: it runs every case in one start and saves what it got.
"""

import functools
import os
import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from cut_heads import given_to_rank, whole_gradients
from dense_loss import ALL_TERMS
from distill_kernels import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedKLLoss,
    LossTerm,
    TokenStats,
    head_loss,
)
from distill_kernels.losses import sharded_heads
from helpers import assert_as_good_as_torch, realistic_heads
from torch import nn
from two_ranks import run_as_two

from distill.core.ranks import leave

MIXED = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]
HARD = {"label_smoothing": 0.1, "z_loss": 1e-3}
V, H, HT = 61, 16, 24  # 61: the ranks hold 31 and 30 columns


class Case(NamedTuple):
    """One loss and how its heads reach the ranks."""

    terms: list
    settings: MappingProxyType = MappingProxyType({})
    student: str = "rows"  # own rows as plain tensors; "dtensor": cut DTensors on a mesh named tp; "whole": plain
    teacher: str = "rows"
    columns: int | None = None
    bias: bool = False
    lora: bool = False
    weights: bool = False
    frozen: bool = False
    compiled: bool = False
    nothing: bool = False  # every label is ignored
    dtype: torch.dtype = torch.float64


CASES = {term.type: Case([term]) for term in ALL_TERMS} | {
    "float32": Case(MIXED, dtype=torch.float32),
    "bfloat16": Case(MIXED, dtype=torch.bfloat16),
    "dtensors": Case(MIXED, student="dtensor", teacher="dtensor", bias=True),
    "cut inside the last shard": Case(MIXED, student="dtensor", teacher="dtensor", columns=50, bias=True),
    "second rank without columns": Case(MIXED, HARD, columns=20, bias=True, lora=True),
    "whole teacher": Case(MIXED, student="dtensor", teacher="whole", bias=True),
    "whole student": Case(MIXED, student="whole", teacher="dtensor", bias=True, lora=True),
    "everything": Case(
        MIXED,
        HARD | {"temperature": 2.0, "student_logit_scale": 0.6, "student_softcap": 8.0, "teacher_softcap": 20.0},
        bias=True,
        lora=True,
        weights=True,
    ),
    "frozen head": Case(MIXED, frozen=True, lora=True),
    "nothing counts": Case(MIXED, nothing=True),
    "rows apart": Case(MIXED, {"reduction": "none"}),
    "compiled": Case(MIXED, student="dtensor", teacher="dtensor", bias=True, compiled=True),
    "compiled, own rows": Case(MIXED, bias=True, lora=True, compiled=True),
}
FSDP_KINDS = ("tied", "untied", "teacher", "over tensor parallel")
FSDP_CASES = [(kind, accumulation) for kind in FSDP_KINDS for accumulation in (1, 4)]


def draw(case, device):
    x, w, xt, wt = realistic_heads(14, V, H, HT, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, case.columns or V, (14,), generator=generator)
    labels[slice(None) if case.nothing else [2, 9]] = -100
    extra = {"bias": (V,), "teacher_bias": (V,), "a": (3, H), "b": (V, 3)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in extra.items()}
    named |= {"x": x, "w": w, "xt": xt, "wt": wt}
    made = {name: tensor.to(device, case.dtype) for name, tensor in named.items()}
    return made, labels.to(device), torch.rand(14, generator=generator).to(device)


def outcome_of(case, device, mesh=None):
    """Loss, statistics and all gradients of the whole tensors; with `mesh` from this rank's part of them."""
    t, labels, weights = draw(case, device)
    group = None if mesh is None or "dtensor" in (case.student, case.teacher) else mesh.get_group()

    give = functools.partial(given_to_rank, t, mesh)
    leaves = {"x": t["x"].clone().requires_grad_(), "w": give("w", case.student).requires_grad_(not case.frozen)}
    named = {"token_weights": weights if case.weights else None, "vocab_size": case.columns}
    if case.bias:
        leaves["bias"] = give("bias", case.student).requires_grad_()
        named |= {"student_bias": leaves["bias"], "teacher_bias": give("teacher_bias", case.teacher)}
    if case.lora:
        leaves |= {"a": t["a"].clone().requires_grad_(), "b": give("b", case.student).requires_grad_()}
        named["student_lora"] = (leaves["a"], leaves["b"], 0.5)
    if group is not None:
        named["tp_group"] = group
    module = FusedDistillationLoss(case.terms, **case.settings)
    if case.compiled:
        module = torch.compile(module, fullgraph=True, backend="aot_eager")
    teacher = (t["xt"], give("wt", case.teacher))
    loss, stats = module(leaves["x"], leaves["w"], *teacher, labels, return_stats=True, **named)
    (loss * torch.linspace(1, 2, loss.numel(), device=device).view(loss.shape)).sum().backward()
    return {"loss": loss.detach(), **whole_gradients(leaves, case.student, mesh), **stats._asdict()}


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
    """Gradients of the mean over 8 sequences; with `mesh` every rank has half of them, and of the parameters.

    Over tensor parallel, both ranks share the vocabulary and all sequences, and FSDP2 has one rank of its own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(5)
    model, teacher_head = Small(kind == "tied").double().to(device), nn.Linear(HT, V).double().to(device)
    ids, hidden = torch.randint(0, V, (8, 5), device=device), torch.randn(8, 5, HT, device=device).double()
    labels = ids.roll(-1, 1).masked_fill(torch.rand(8, 5, device=device) < 0.3, -100)
    world, rank = (1, 0) if mesh is None else (2, mesh.get_local_rank())
    if mesh is not None and kind == "over tensor parallel":
        both = init_device_mesh(device.type, (1, 2), mesh_dim_names=("data", "tp"))
        for name, parameter in list(model.lm_head.named_parameters()):
            setattr(model.lm_head, name, nn.Parameter(distribute_tensor(parameter.data, both["tp"], [Shard(0)])))
        mesh, world, rank = both["data"], 1, 0
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


def tied_tensor_parallel(accumulation, device, mesh=None):
    """Gradient of one matrix that is both embedding and head, cut over the ranks as a DTensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(6)
    whole, ids = torch.randn(V, H, device=device).double(), torch.randint(0, V, (8, 5), device=device)
    teacher = torch.randn(8, 5, HT, device=device).double(), torch.randn(V, HT, device=device).double()
    weight = nn.Parameter(whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)]))
    for batch in torch.arange(8).chunk(accumulation):
        if mesh is None:
            hidden = nn.functional.embedding(ids[batch], weight)
        else:
            tokens = distribute_tensor(ids[batch], mesh, [Replicate()])
            hidden = nn.functional.embedding(tokens, weight).redistribute(placements=[Replicate()])
        loss = FusedKLLoss("reverse")(hidden, weight, teacher[0][batch], teacher[1], num_items=40)
        loss.backward()
    return {"weight": weight.grad if mesh is None else weight.grad.full_tensor()}


def mistakes(device, mesh):
    """What is said of heads that cannot be taken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    t, labels, _ = draw(CASES["float32"], device)
    unnamed = init_device_mesh(device.type, (2,))
    cut = {name: distribute_tensor(t[name], mesh, [Shard(0)]) for name in ("w", "wt")}
    tries = {
        "fsdp": (t["x"], distribute_tensor(t["w"], unnamed, [Shard(0)]), t["xt"], t["wt"]),
        "fsdp teacher": (t["x"], t["w"], t["xt"], distribute_tensor(t["wt"], unnamed, [Shard(0)])),
        "by columns": (t["x"], distribute_tensor(t["w"], mesh, [Shard(1)]), t["xt"], t["wt"]),
        "hidden": (distribute_tensor(t["x"], mesh, [Shard(0)]), cut["w"], t["xt"], t["wt"]),
        "cut elsewhere": (t["x"], cut["w"], t["xt"], distribute_tensor(t["wt"][:52], mesh, [Shard(0)])),
        "widths": (t["x"], cut["w"], t["xt"], t["wt"][:50]),
    }
    tries["fsdp beside tp"] = (t["x"], cut["w"], *tries["fsdp teacher"][2:])
    named = {"cut elsewhere": {"vocab_size": 50}}
    said = {}
    for name, tensors in tries.items():
        try:
            FusedKLLoss()(*tensors, labels=labels, **named.get(name, {}))
        except ValueError as error:
            said[name] = str(error)
    return said


def run_all(folder, device):
    """What each of the two processes does."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    data = init_device_mesh(device.type, (2,), mesh_dim_names=("data",))
    results = {name: outcome_of(case, device, mesh) for name, case in CASES.items()}
    results |= {f"fsdp {kind} {n}": fsdp_gradients(kind, n, device, data) for kind, n in FSDP_CASES}
    results |= {f"tied {n}": tied_tensor_parallel(n, device, mesh) for n in (1, 4)}
    results["mistakes"] = mistakes(device, mesh)
    torch.save(results, folder / f"results{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def start(folder, device):
    run_as_two(__file__, folder, device, device=device)
    return [torch.load(folder / f"results{rank}.pt", weights_only=True, map_location="cpu") for rank in range(2)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two(request, tmp_path_factory):
    """The device, and what the two processes got on it."""
    return torch.device(request.param), start(tmp_path_factory.mktemp("two"), request.param)


def test_a_later_group_of_the_same_name_is_asked_for_its_rows(monkeypatch):
    asked, groups = [], ["the first", "the second"]

    class Ranks:
        def __init__(self, group):
            self.group = group

        def gather(self, own):
            asked.append(self.group)
            return torch.stack([own, own])

    monkeypatch.setattr(sharded_heads, "Ranks", Ranks)
    monkeypatch.setattr(sharded_heads, "group_named", lambda name: groups[0])
    weight = torch.ones(5, 2)
    assert [sharded_heads._row_counts(weight, "0") for _ in range(2)] == [[5, 5]] * 2 and asked == ["the first"]
    del groups[0]
    sharded_heads._row_counts(weight, "0")
    assert asked == ["the first", "the second"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(two, name):
    device, ranks = two
    case = CASES[name]
    alone, exact = (outcome_of(case._replace(dtype=dtype), device) for dtype in (case.dtype, torch.float64))
    assert ranks[0][name].keys() == alone.keys()
    for field, right in exact.items():
        dtype = torch.float32 if field in TokenStats._fields and case.dtype == torch.float64 else case.dtype
        for rank in ranks:
            if right is None:
                assert rank[name][field] is None, field
            else:
                assert_as_good_as_torch(rank[name][field], alone[field], right, dtype, field)
        if field in ("loss", "dx", "da", *TokenStats._fields) and right is not None:
            assert torch.equal(ranks[0][name][field], ranks[1][name][field]), f"{field} differs between the ranks"


@pytest.mark.parametrize("kind, accumulation", FSDP_CASES)
def test_a_head_sharded_by_fsdp2(two, kind, accumulation):
    device, ranks = two
    for name, gradient in fsdp_gradients(kind, 1, device).items():
        got = ranks[0][f"fsdp {kind} {accumulation}"][name]
        assert_as_good_as_torch(got, gradient, gradient, torch.float64, name)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_tied_head_cut_over_the_vocabulary(two, accumulation):
    device, ranks = two
    right = tied_tensor_parallel(1, device)["weight"]
    assert_as_good_as_torch(ranks[1][f"tied {accumulation}"]["weight"], right, right, torch.float64)


@pytest.mark.parametrize(
    "name, said",
    [
        ("fsdp", "student_weight.*head_loss"),
        ("fsdp teacher", "teacher_weight.*head_loss"),
        ("by columns", r"student_weight.*Shard\(0\)"),
        ("hidden", "student_hidden.*Replicate"),
        ("cut elsewhere", "teacher_weight.*same columns"),
        ("widths", "teacher_weight.*61 rows"),
        ("fsdp beside tp", "teacher_weight.*head_loss"),
    ],
)
def test_mistakes_are_named(two, name, said):
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
