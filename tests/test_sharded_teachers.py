"""Teachers of K tokens, and several teachers, over heads that two processes share, against one that has everything.

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
from distill_kernels import FusedDistillationLoss, FusedTopKKLLoss, LossTerm, TeacherHead, TokenStats, head_loss
from helpers import assert_as_good_as_torch, realistic_heads
from torch import nn
from two_ranks import run_as_two

from distill.core.ranks import leave

V, H, ROWS, K = 61, 16, 14, 6  # 61: the ranks hold 31 and 30 columns
WIDTHS = (24, 20, 16)  # of three teachers
HARD = {"label_smoothing": 0.1, "z_loss": 1e-3}
KL = [LossTerm("forward_kl", 1.0)]
MIXED = [LossTerm("jsd", 0.5, beta=0.3), LossTerm("reverse_kl", 0.7), LossTerm("cross_entropy", 0.3)]
TWISTED = {"temperature": 2.0, "student_logit_scale": 0.6, "student_softcap": 8.0}


class Case(NamedTuple):
    """One loss and how its heads reach the ranks."""

    terms: list | None = None  # of a mixture; None: a teacher of K tokens
    settings: MappingProxyType = MappingProxyType({})
    student: str = "rows"  # own rows as plain tensors; "dtensor": cut DTensors on a mesh named tp; "whole": plain
    teachers: tuple = ("rows", "rows")
    columns: int | None = None
    bias: bool = False
    lora: bool = False
    weights: bool = False
    frozen: bool = False
    compiled: bool = False
    module: bool = False  # the student's head is a module, called by head_loss
    dtype: torch.dtype = torch.float64

    @property
    def group(self):
        return "dtensor" not in (self.student, *(() if self.terms is None else self.teachers))


READINGS = [("forward", "bucket"), ("reverse", "bucket"), ("forward", "renormalize"), ("reverse", "renormalize"),
            ("forward", "sampled")]  # fmt: skip
CASES = {f"{direction} {tail}": Case(None, {"direction": direction, "tail": tail}) for direction, tail in READINGS}
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
    f"mixture {name}": case
    for name, case in {
        "rows": Case(MIXED),
        "float32": Case(MIXED, dtype=torch.float32),
        "bfloat16": Case(MIXED, {"temperature": 2.0}, dtype=torch.bfloat16),
        "dtensors": Case(MIXED, {"temperature": 2.0}, "dtensor", ("dtensor", "dtensor", "dtensor"), bias=True),
        "cut inside the last shard": Case(MIXED, {}, "dtensor", ("dtensor", "dtensor"), columns=50, bias=True),
        "second rank without columns": Case(MIXED, HARD | {"temperature": 1.5}, columns=20, bias=True, lora=True),
        "whole teachers": Case(MIXED, {}, "dtensor", ("whole", "dtensor", "whole"), bias=True),
        "whole student": Case(MIXED, {}, "whole", ("whole", "dtensor"), bias=True, lora=True),
        "everything": Case(MIXED, HARD | TWISTED, teachers=("rows",) * 3, bias=True, lora=True, weights=True),
        "frozen": Case(KL, frozen=True, lora=True),
        "rows apart": Case(KL, {"reduction": "none"}),
        "one that counts": Case(KL, teachers=("rows",)),
        "compiled": Case(MIXED, {}, "dtensor", ("whole", "dtensor", "whole"), bias=True, compiled=True),
        "compiled, own rows": Case(MIXED, {"temperature": 2.0}, bias=True, lora=True, compiled=True),
    }.items()
}


def draw(case, device):
    """All tensors whole, labels and token weights."""
    x, w, *_ = realistic_heads(ROWS, V, H, WIDTHS[0], dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, case.columns or V, (ROWS,), generator=generator)
    labels[[2, 9]] = -100
    extra = {"bias": (V,), "a": (3, H), "b": (V, 3)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in extra.items()} | {"x": x, "w": w}
    for number, width in enumerate(WIDTHS):
        _, _, hidden, weight = realistic_heads(ROWS, V, H, width, dtype=torch.float32, seed=number)
        bias = torch.randn(V, generator=generator)
        named |= {f"x{number}": hidden, f"w{number}": weight, f"bias{number}": bias}
    made = {name: tensor.to(device, case.dtype) for name, tensor in named.items()}
    said = (named["x0"].double() @ named["w0"][: case.columns].double().T).log_softmax(-1).topk(K, -1)
    top = said.indices.to(device), said.values.to(device, torch.float32)
    return made, top, labels.to(device), torch.rand(ROWS, generator=generator).to(device)


def outcome_of(case, device, mesh=None):
    """Loss, statistics and all gradients of the whole tensors; with `mesh` from this rank's part of them."""
    t, top, labels, weights = draw(case, device)

    give = functools.partial(given_to_rank, t, mesh)
    leaves = {"x": t["x"].clone().requires_grad_(), "w": give("w", case.student).requires_grad_(not case.frozen)}
    named = {"token_weights": weights if case.weights else None, "vocab_size": case.columns}
    if case.bias:
        leaves["bias"] = named["student_bias"] = give("bias", case.student).requires_grad_()
    if case.lora:
        leaves |= {"a": t["a"].clone().requires_grad_(), "b": give("b", case.student).requires_grad_()}
        named["student_lora"] = (leaves["a"], leaves["b"], 0.5)
    if mesh is not None and case.group:
        named["tp_group"] = mesh.get_group()
    if case.terms is None:
        module, teacher = FusedTopKKLLoss(**case.settings), {"teacher_ids": top[0], "teacher_logprobs": top[1]}
    else:
        module, shares = FusedDistillationLoss(case.terms, **case.settings), (0.5, 0.3, 0.2)
        several = [
            TeacherHead(
                t[f"x{number}"], give(f"w{number}", how), shares[number],
                give(f"bias{number}", how) if case.bias else None, 1.0 + 0.2 * number, 20.0 if number else None,
            )
            for number, how in enumerate(case.teachers)
        ]  # fmt: skip
        if len(several) == 1:
            several.append(several[0]._replace(share=0.0))
        teacher = {"teachers": several}
    if case.compiled:
        module = torch.compile(module, fullgraph=True, backend="aot_eager")
    named |= teacher | {"labels": labels, "return_stats": True}
    if case.module:
        head = nn.Linear(H, V, device=device)
        head.weight, head.bias = (nn.Parameter(leaves.pop(name).detach()) for name in ("w", "bias"))
        leaves |= {"w": head.weight, "bias": head.bias}
        del named["student_bias"]
        loss, stats = head_loss(head, module, leaves["x"], **named)
    else:
        loss, stats = module(leaves["x"], leaves["w"], **named)
    (loss * torch.linspace(1, 2, loss.numel(), device=device).view(loss.shape)).sum().backward()
    return {"loss": loss.detach(), **whole_gradients(leaves, case.student, mesh), **stats._asdict()}


def mistakes(device, mesh):
    """What is said of heads that cannot be taken."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    case = Case(MIXED, dtype=torch.float32)
    t, (ids, logprobs), labels, _ = draw(case, device)
    unnamed = init_device_mesh(device.type, (2,))
    cut = {name: distribute_tensor(t[name], mesh, [Shard(0)]) for name in ("w", "w0", "w1")}
    good = TeacherHead(t["x0"], cut["w0"])
    other = TeacherHead(t["x1"], cut["w1"])
    mixture, tokens = FusedDistillationLoss(MIXED), FusedTopKKLLoss()
    many = torch.arange(40, device=device).expand(ROWS, 40)
    narrow = other._replace(weight=t["w1"][:50])
    tries = {
        "fsdp": lambda: mixture(
            t["x"], cut["w"], labels=labels,
            teachers=[good, other._replace(weight=distribute_tensor(t["w1"], unnamed, [Shard(0)]))],
        ),
        "hidden": lambda: mixture(
            t["x"], cut["w"], labels=labels,
            teachers=[good, other._replace(hidden=distribute_tensor(t["x1"], mesh, [Shard(0)]))],
        ),
        "cut elsewhere": lambda: mixture(
            t["x"], cut["w"], labels=labels, vocab_size=50,
            teachers=[good, other._replace(weight=distribute_tensor(t["w1"][:52], mesh, [Shard(0)]))],
        ),
        "teachers apart": lambda: mixture(
            t["x"], t["w"], labels=labels, vocab_size=50,
            teachers=[good, other._replace(weight=distribute_tensor(t["w1"][:52], mesh, [Shard(0)]))],
        ),
        "widths": lambda: mixture(t["x"], cut["w"], labels=labels, teachers=[good, narrow]),
        "share": lambda: mixture(t["x"], cut["w"], labels=labels, teachers=[good, other._replace(share=-1.0)]),
        "bias": lambda: mixture(t["x"], cut["w"], labels=labels, teachers=[good, other._replace(bias=t["bias"][:7])]),
        "tokens fsdp": lambda: tokens(t["x"], distribute_tensor(t["w"], unnamed, [Shard(0)]), ids, logprobs),
        "tokens k": lambda: tokens(t["x"], cut["w"], many, -many.float(), vocab_size=35),
        "tokens of all ranks": lambda: tokens(t["x"], cut["w"], many, -many.float() - 2),
        "tokens sharded": lambda: tokens(t["x"], cut["w"], distribute_tensor(ids, mesh, [Shard(0)]), logprobs),
        "vocab_size": lambda: tokens(t["x"], cut["w"], ids, logprobs, vocab_size=62),
    }  # fmt: skip
    said = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def run_all(folder, device):
    """What each of the two processes does."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    results = {name: outcome_of(case, device, mesh) for name, case in CASES.items()}
    again = {name: outcome_of(CASES[name], device, mesh) for name in ("top-k bfloat16", "mixture bfloat16")}
    results["repeated"] = all(
        torch.equal(again[name][field], results[name][field]) for name in again for field in again[name]
    )
    results["mistakes"] = mistakes(device, mesh)
    torch.save(results, folder / f"results{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two(request, tmp_path_factory):
    """The device, and what the two processes got on it."""
    folder = tmp_path_factory.mktemp("two")
    run_as_two(__file__, folder, request.param, device=request.param)
    results = [torch.load(folder / f"results{rank}.pt", weights_only=True, map_location="cpu") for rank in range(2)]
    return torch.device(request.param), results


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(two, name):
    device, ranks = two
    case = CASES[name]
    alone, exact = (outcome_of(case._replace(dtype=dtype), device) for dtype in (case.dtype, torch.float64))
    assert ranks[0][name].keys() == alone.keys() and alone["dx"].any()
    for field, right in exact.items():
        dtype = torch.float32 if field in TokenStats._fields and case.dtype == torch.float64 else case.dtype
        for rank in ranks:
            if right is None:
                assert rank[name][field] is None, field
            else:
                assert_as_good_as_torch(rank[name][field], alone[field], right, dtype, field)
        if field in ("loss", "dx", "da", *TokenStats._fields) and right is not None:
            assert torch.equal(ranks[0][name][field], ranks[1][name][field]), f"{field} differs between the ranks"


def test_runs_repeat_bitwise(two):
    assert all(rank["repeated"] for rank in two[1])


@pytest.mark.parametrize(
    "name, said",
    [
        ("fsdp", r"teachers\[1\].weight.*head_loss"),
        ("hidden", r"teachers\[1\].hidden.*Replicate"),
        ("cut elsewhere", r"teachers\[1\].weight.*same columns as student_weight"),
        ("teachers apart", r"teachers\[1\].weight.*same columns as teachers\[0\].weight"),
        ("widths", r"teachers\[1\].weight.*61 rows"),
        ("share", r"teachers\[1\].share"),
        ("bias", r"teachers\[1\].*bias.*shape"),
        ("tokens fsdp", "student_weight.*head_loss"),
        ("tokens k", "teacher_ids: expected K of 1 to 35, got 40"),
        ("tokens sharded", "teacher_ids.*plain"),
        ("vocab_size", "vocab_size: expected 1 to 61"),
    ],
)
def test_mistakes_are_named(two, name, said):
    for rank in two[1]:
        assert re.search(said, rank["mistakes"][name])


def test_more_tokens_than_a_rank_has_columns_are_taken(two):
    assert all("tokens of all ranks" not in rank["mistakes"] for rank in two[1])


if __name__ == "__main__":
    kind = torch.device(sys.argv[2])
    if kind.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    run_all(Path(sys.argv[1]), kind)
