"""Two processes that share the vocabulary, or the parameters (FSDP2), against one that has everything.

The file is also the program of the two processes: it runs every case in one start and saves what it got.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cut_heads import ROWS, WIDTHS, Case, H, V, check_ranks, draw, outcome_of, refusals
from dense_loss import ALL_TERMS
from distill_kernels import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedKLLoss,
    FusedTopKKLLoss,
    LossTerm,
    TeacherHead,
    head_loss,
)
from distill_kernels.losses import sharded_heads
from helpers import assert_as_good_as_torch, realistic_heads
from torch import nn
from two_ranks import run_as_two

from distill.core.ranks import exit_process

KL = [LossTerm("forward_kl", 1.0)]
MIXED = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]
SEVERAL = [LossTerm("jsd", 0.5, beta=0.3), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]
HARD = {"label_smoothing": 0.1, "z_loss": 1e-3}
TWISTED = {"temperature": 2.0, "student_logit_scale": 0.6, "student_softcap": 8.0}
HT = WIDTHS[0]
CUT, TWO = ("dtensor",), ("rows", "rows")
READINGS = [
    ("forward", "bucket"),
    ("reverse", "bucket"),
    ("forward", "renormalize"),
    ("reverse", "renormalize"),
    ("forward", "sampled"),
]
CASES = {term.type: Case([term]) for term in ALL_TERMS} | {
    "float32": Case(MIXED, dtype=torch.float32),
    "bfloat16": Case(MIXED, dtype=torch.bfloat16),
    "dtensors": Case(MIXED, student="dtensor", teachers=CUT, bias=True),
    "cut inside the last shard": Case(MIXED, student="dtensor", teachers=CUT, columns=50, bias=True),
    "second rank without columns": Case(MIXED, HARD, columns=20, bias=True, lora=True),
    "whole teacher": Case(MIXED, student="dtensor", teachers=("whole",), bias=True),
    "whole student": Case(MIXED, student="whole", teachers=CUT, bias=True, lora=True),
    "everything": Case(MIXED, HARD | TWISTED | {"teacher_softcap": 20.0}, bias=True, lora=True, weights=True),
    "frozen head": Case(MIXED, frozen=True, lora=True),
    "nothing counts": Case(MIXED, nothing=True),
    "rows apart": Case(MIXED, {"reduction": "none"}),
    "compiled": Case(MIXED, student="dtensor", teachers=CUT, bias=True, compiled=True),
    "compiled, own rows": Case(MIXED, bias=True, lora=True, compiled=True),
}
CASES |= {f"{direction} {tail}": Case(None, {"direction": direction, "tail": tail}) for direction, tail in READINGS}
CASES |= {
    f"top-k {name}": case
    for name, case in {
        "float32": Case(None, {"ce_weight": 0.3}, dtype=torch.float32),
        "bfloat16": Case(None, {"ce_weight": 0.3, "tail": "sampled"}, dtype=torch.bfloat16),
        "dtensor": Case(None, {"ce_weight": 0.3}, student="dtensor", bias=True),
        "cut inside the last shard": Case(None, {"ce_weight": 0.3}, student="dtensor", columns=50, bias=True),
        "second rank without columns": Case(None, HARD | {"ce_weight": 0.3}, columns=20, bias=True, lora=True),
        "everything": Case(None, HARD | TWISTED | {"ce_weight": 0.3}, bias=True, lora=True, weights=True),
        "frozen": Case(None, {"tail": "renormalize"}, frozen=True, lora=True),
        "rows apart": Case(None, {"reduction": "none", "tail": "sampled"}),
        "compiled": Case(None, {"ce_weight": 0.3}, student="dtensor", bias=True, compiled=True),
        "compiled, own rows": Case(None, {"ce_weight": 0.3}, bias=True, compiled=True),
        "head module": Case(None, {"ce_weight": 0.3}, student="dtensor", bias=True, module=True),
    }.items()
}
CASES |= {
    f"mixture {name}": case._replace(mixture=True)
    for name, case in {
        "rows": Case(SEVERAL, teachers=TWO),
        "float32": Case(SEVERAL, dtype=torch.float32, teachers=TWO),
        "bfloat16": Case(SEVERAL, {"temperature": 2.0}, dtype=torch.bfloat16, teachers=TWO),
        "dtensors": Case(SEVERAL, {"temperature": 2.0}, "dtensor", ("dtensor", "dtensor", "dtensor"), bias=True),
        "cut inside the last shard": Case(SEVERAL, {}, "dtensor", ("dtensor", "dtensor"), columns=50, bias=True),
        "second rank without columns": Case(
            SEVERAL, HARD | {"temperature": 1.5}, teachers=TWO, columns=20, bias=True, lora=True
        ),
        "whole teachers": Case(SEVERAL, {}, "dtensor", ("whole", "dtensor", "whole"), bias=True),
        "whole student": Case(SEVERAL, {}, "whole", ("whole", "dtensor"), bias=True, lora=True),
        "everything": Case(SEVERAL, HARD | TWISTED, teachers=("rows",) * 3, bias=True, lora=True, weights=True),
        "frozen": Case(KL, frozen=True, lora=True, teachers=TWO),
        "rows apart": Case(KL, {"reduction": "none"}, teachers=TWO),
        "one that counts": Case(KL, teachers=("rows",)),
        "compiled": Case(SEVERAL, {}, "dtensor", ("whole", "dtensor", "whole"), bias=True, compiled=True),
        "compiled, own rows": Case(SEVERAL, {"temperature": 2.0}, bias=True, lora=True, compiled=True, teachers=TWO),
    }.items()
}
COMPILED = [name for name, case in CASES.items() if case.compiled]
FSDP_KINDS = ("tied", "untied", "teacher", "over tensor parallel")
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
    """Return the error messages for invalid heads, and the results for valid tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    t, (ids, logprobs), labels, _ = draw(Case(dtype=torch.float32), device)
    unnamed = init_device_mesh(device.type, (2,))

    def cut(tensor, dim=0, over=mesh):
        return distribute_tensor(tensor, over, [Shard(dim)])

    w, w0, x0 = cut(t["w"]), cut(t["w0"]), t["x0"]
    plain, mixture, tokens = FusedKLLoss(), FusedDistillationLoss(SEVERAL), FusedTopKKLLoss()
    good, other = TeacherHead(x0, w0), TeacherHead(t["x1"], cut(t["w1"]))
    many = torch.arange(40, device=device).expand(ROWS, 40)
    one_teacher = {
        "fsdp": (t["x"], cut(t["w"], over=unnamed), x0, t["w0"]),
        "fsdp teacher": (t["x"], t["w"], x0, cut(t["w0"], over=unnamed)),
        "fsdp beside tp": (t["x"], w, x0, cut(t["w0"], over=unnamed)),
        "by columns": (t["x"], cut(t["w"], 1), x0, t["w0"]),
        "hidden": (cut(t["x"]), w, x0, t["w0"]),
        "cut elsewhere": (t["x"], w, x0, cut(t["w0"][:52])),
        "widths": (t["x"], w, x0, t["w0"][:50]),
    }
    two_teachers = {
        "mixture fsdp": (w, {"weight": cut(t["w1"], over=unnamed)}),
        "mixture hidden": (w, {"hidden": cut(t["x1"])}),
        "mixture cut elsewhere": (w, {"weight": cut(t["w1"][:52])}),
        "mixture teachers apart": (t["w"], {"weight": cut(t["w1"][:52])}),
        "mixture widths": (w, {"weight": t["w1"][:50]}),
        "mixture share": (w, {"share": -1.0}),
        "mixture bias": (w, {"bias": t["bias"][:7]}),
    }
    tries = {
        name: lambda given=given, columns=50 if name == "cut elsewhere" else None: plain(
            *given, labels=labels, vocab_size=columns
        )
        for name, given in one_teacher.items()
    }
    tries |= {
        name: lambda weight=weight, wrong=wrong, columns=50 if "elsewhere" in name or "apart" in name else None: (
            mixture(t["x"], weight, labels=labels, teachers=[good, other._replace(**wrong)], vocab_size=columns)
        )
        for name, (weight, wrong) in two_teachers.items()
    }
    tries |= {
        "tokens fsdp": lambda: tokens(t["x"], cut(t["w"], over=unnamed), ids, logprobs),
        "tokens k": lambda: tokens(t["x"], w, many, -many.float(), vocab_size=35),
        "tokens of all ranks": lambda: tokens(t["x"], w, many, -many.float() - 2),
        "tokens sharded": lambda: tokens(t["x"], w, cut(ids), logprobs),
        "tokens vocab_size": lambda: tokens(t["x"], w, ids, logprobs, vocab_size=62),
    }
    return refusals(tries)


def run_all(folder, device):
    """Body of each of the two processes."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    data = init_device_mesh(device.type, (2,), mesh_dim_names=("data",))
    results = {name: outcome_of(case, device, mesh) for name, case in CASES.items() if not case.compiled}
    again = {name: outcome_of(CASES[name], device, mesh) for name in ("top-k bfloat16", "mixture bfloat16")}
    results["repeated"] = all(
        torch.equal(again[name][field], results[name][field]) for name in again for field in again[name]
    )
    results |= {f"fsdp {kind} {n}": fsdp_gradients(kind, n, device, data) for kind, n in FSDP_CASES}
    results |= {f"tied {n}": tied_tensor_parallel(n, device, mesh) for n in (1, 4)}
    results["mistakes"] = mistakes(device, mesh)
    leave_behind(results, folder)


def run_compiled(folder, device):
    """The same for the cases that are compiled, which takes longer than all others."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    leave_behind({name: outcome_of(CASES[name], device, mesh) for name in COMPILED}, folder)


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


@pytest.fixture(scope="module", params=DEVICES)
def two_compiled(request, tmp_path_factory):
    return start(tmp_path_factory.mktemp("two"), request.param, "compiled")


def test_row_counts_are_exchanged_again_for_a_new_group_of_the_same_name(hardware):
    asked, groups = [], ["the first", "the second"]

    class Ranks:
        def __init__(self, group):
            self.group = group

        def all_gather(self, own):
            asked.append(self.group)
            return torch.stack([own, own])

    hardware.setattr(sharded_heads, "Ranks", Ranks)
    hardware.setattr(sharded_heads, "process_group_by_name", lambda name: groups[0])
    weight = torch.ones(5, 2)
    assert [sharded_heads._row_counts(weight, "0") for _ in range(2)] == [[5, 5]] * 2 and asked == ["the first"]
    del groups[0]
    sharded_heads._row_counts(weight, "0")
    assert asked == ["the first", "the second"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in COMPILED])
def test_two_ranks_equal_one(two, name):
    device, ranks = two
    check_ranks(CASES[name], device, [rank[name] for rank in ranks])


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_two_compiled_ranks_equal_one(two_compiled, name):
    device, ranks = two_compiled
    check_ranks(CASES[name], device, [rank[name] for rank in ranks])


def test_sharded_loss_is_deterministic(two):
    assert all(rank["repeated"] for rank in two[1])


@pytest.mark.parametrize("kind, accumulation", FSDP_CASES)
def test_a_head_sharded_by_fsdp2(two, kind, accumulation):
    device, ranks = two
    for name, gradient in fsdp_gradients(kind, 1, device).items():
        got = ranks[0][f"fsdp {kind} {accumulation}"][name]
        assert_as_good_as_torch(got, gradient, gradient, torch.float64, name)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_tied_vocabulary_sharded_head(two, accumulation):
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
        ("mixture fsdp", r"teachers\[1\].weight.*head_loss"),
        ("mixture hidden", r"teachers\[1\].hidden.*Replicate"),
        ("mixture cut elsewhere", r"teachers\[1\].weight.*same columns as student_weight"),
        ("mixture teachers apart", r"teachers\[1\].weight.*same columns as teachers\[0\].weight"),
        ("mixture widths", r"teachers\[1\].weight.*61 rows"),
        ("mixture share", r"teachers\[1\].share"),
        ("mixture bias", r"teachers\[1\].*bias.*shape"),
        ("tokens fsdp", "student_weight.*head_loss"),
        ("tokens k", "teacher_ids: expected K of 1 to 35, got 40"),
        ("tokens sharded", "teacher_ids.*plain"),
        ("tokens vocab_size", "vocab_size: expected 1 to 61"),
    ],
)
def test_errors_name_the_invalid_argument(two, name, said):
    for rank in two[1]:
        assert re.search(said, rank["mistakes"][name])


def test_more_tokens_than_a_rank_has_columns_are_taken(two):
    assert all("tokens of all ranks" not in rank["mistakes"] for rank in two[1])


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
    (run_compiled if sys.argv[3:] else run_all)(Path(sys.argv[1]), kind)
