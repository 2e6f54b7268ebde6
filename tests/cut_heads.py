"""Losses over heads that two processes share: what a rank is given, what it gets, and what one process gets."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from distill_kernels import FusedDistillationLoss, FusedTopKKLLoss, TeacherHead, TokenStats, head_loss
from helpers import assert_as_good_as_torch, realistic_heads
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

V, H, ROWS, K = 61, 16, 14, 6  # 61: the ranks hold 31 and 30 columns
WIDTHS = (24, 20, 16)  # of the teachers


class Case(NamedTuple):
    """One loss and how its heads reach the ranks."""

    terms: list | None = None  # None: a teacher of K tokens
    settings: MappingProxyType = MappingProxyType({})
    student: str = "rows"  # own rows as plain tensors; "dtensor": cut DTensors on a mesh named tp; "whole": plain
    teachers: tuple = ("rows",)  # of several, or of one that counts, a mixture is made where `mixture` is set
    mixture: bool = False
    columns: int | None = None
    bias: bool = False
    lora: bool = False
    weights: bool = False
    frozen: bool = False
    compiled: bool = False
    module: bool = False  # the student's head is a module, called by head_loss
    nothing: bool = False  # every label is ignored
    dtype: torch.dtype = torch.float64

    @property
    def group(self):
        return "dtensor" not in (self.student, *(() if self.terms is None else self.teachers))


def draw(case, device):
    """All tensors whole, what the first teacher says of K tokens, labels and token weights."""
    x, w, *_ = realistic_heads(ROWS, V, H, WIDTHS[0], dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, case.columns or V, (ROWS,), generator=generator)
    labels[slice(None) if case.nothing else [2, 9]] = -100
    extra = {"bias": (V,), "a": (3, H), "b": (V, 3)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in extra.items()} | {"x": x, "w": w}
    for number, width in enumerate(WIDTHS):
        _, _, hidden, weight = realistic_heads(ROWS, V, H, width, dtype=torch.float32, seed=number)
        named |= {f"x{number}": hidden, f"w{number}": weight, f"bias{number}": torch.randn(V, generator=generator)}
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
    loss = (
        FusedTopKKLLoss(**case.settings) if case.terms is None else FusedDistillationLoss(case.terms, **case.settings)
    )
    if case.terms is None:
        named |= {"teacher_ids": top[0], "teacher_logprobs": top[1]}
    elif case.mixture:
        several = [
            TeacherHead(
                t[f"x{number}"],
                give(f"w{number}", how),
                (0.5, 0.3, 0.2)[number],
                give(f"bias{number}", how) if case.bias else None,
                1.0 + 0.2 * number,
                20.0 if number else None,
            )
            for number, how in enumerate(case.teachers)
        ]
        named["teachers"] = several if len(several) > 1 else [*several, several[0]._replace(share=0.0)]
    else:
        (how,) = case.teachers
        named |= {"teacher_hidden": t["x0"], "teacher_weight": give("w0", how)}
        named |= {"teacher_bias": give("bias0", how)} if case.bias else {}
    if case.compiled:
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    named |= {"labels": labels, "return_stats": True}
    if case.module:
        head = nn.Linear(H, V, device=device)
        head.weight, head.bias = (nn.Parameter(leaves.pop(name).detach()) for name in ("w", "bias"))
        leaves |= {"w": head.weight, "bias": head.bias}
        del named["student_bias"]
        value, stats = head_loss(head, loss, leaves["x"], **named)
    else:
        value, stats = loss(leaves["x"], leaves["w"], **named)
    (value * torch.linspace(1, 2, value.numel(), device=device).view(value.shape)).sum().backward()
    return {"loss": value.detach(), **whole_gradients(leaves, case.student, mesh), **stats._asdict()}


def check_ranks(case, device, ranks):
    """Check both ranks' results against one process's, and that values which all ranks hold are equal."""
    alone, exact = (
        outcome_of(case._replace(dtype=dtype, compiled=False), device) for dtype in (case.dtype, torch.float64)
    )
    assert ranks[0].keys() == alone.keys() and (case.nothing or alone["dx"].any())
    for field, right in exact.items():
        dtype = torch.float32 if field in TokenStats._fields and case.dtype == torch.float64 else case.dtype
        for rank in ranks:
            if right is None:
                assert rank[field] is None, field
            else:
                assert_as_good_as_torch(rank[field], alone[field], right, dtype, field)
        if field in ("loss", "dx", "da", *TokenStats._fields) and right is not None:
            assert torch.equal(ranks[0][field], ranks[1][field]), f"{field} differs between the ranks"


def refusals(tries):
    """Return the error message of each invalid call."""
    said = {}
    for name, call in tries.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def given_to_rank(tensors, mesh, name, how):
    """`tensors[name]`, whole; with `mesh` this rank's half of its "rows", or a "dtensor" cut over it."""
    if mesh is not None and how == "rows":
        return tensors[name].chunk(2)[mesh.get_local_rank()].clone()
    if mesh is not None and how == "dtensor":
        return distribute_tensor(tensors[name], mesh, [Shard(0)])
    return tensors[name].clone()


def whole_gradients(leaves, how, mesh):
    """The gradients of `leaves` under "d" and their names; but for x and A they came `how` `given_to_rank` says."""
    return {
        f"d{name}": _whole(leaf.grad, "whole" if name in ("x", "a") else how, mesh) for name, leaf in leaves.items()
    }


def _whole(gradient, how, mesh):
    if gradient is None or mesh is None or how == "whole":
        return gradient
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    parts = [None, None]
    dist.all_gather_object(parts, gradient.cpu())
    return torch.cat(parts)
