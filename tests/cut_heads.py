"""What a rank is given of a head that is cut over the vocabulary, and its gradients as one process would have them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


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
