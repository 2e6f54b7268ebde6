"""FusedAdamW over DTensor parameters: two processes that share every parameter equal one that holds them whole."""

from pathlib import Path

import pytest
import torch
from two_ranks import run_as_two

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from distill_kernels.optim.adamw import FusedAdamW

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
values = [torch.randn(5, 8), torch.randn(1, 8), torch.randn(7)]  # the second leaves rank 1 with nothing
placements = [[Shard(0)], [Shard(0)], [Replicate()]]
whole = [torch.nn.Parameter(value.clone()) for value in values]
parts = [torch.nn.Parameter(distribute_tensor(value, mesh, place)) for value, place in zip(values, placements)]
one, two = FusedAdamW(whole, lr=0.1, max_grad_norm=0.5), FusedAdamW(parts, lr=0.1, max_grad_norm=0.5)
for step in range(3):
    for p, q, place in zip(whole, parts, placements):
        p.grad = torch.randn_like(p)
        q.grad = distribute_tensor(p.grad, mesh, place)
    one.step()
    two.step()
    torch.testing.assert_close(one.grad_norm, two.grad_norm)
for p, q in zip(whole, parts):
    torch.testing.assert_close(q.full_tensor(), p.detach())
state = two.state[parts[0]]
assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == parts[0].placements

module = torch.nn.ParameterList(parts)
saved = get_optimizer_state_dict(module, two)
fresh = FusedAdamW(module.parameters(), lr=0.1, max_grad_norm=0.5)
set_optimizer_state_dict(module, fresh, saved)
for p, q, place in zip(whole, parts, placements):
    p.grad = torch.randn_like(p)
    q.grad = distribute_tensor(p.grad, mesh, place)
one.step()
fresh.step()
for p, q in zip(whole, parts):
    torch.testing.assert_close(q.full_tensor(), p.detach())
dist.destroy_process_group()
print("equal", flush=True)
os._exit(0)  # a thread of gloo may still run, and the interpreter's own end would then abort
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_equal_one():
    assert run_as_two("-c", WORKER).split() == ["equal"] * 2
