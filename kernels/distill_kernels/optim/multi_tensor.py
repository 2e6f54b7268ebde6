"""Many tensors in one launch: a table of their addresses, and a map from program to tensor and block.

Program `b` of a launch reads `blocks[b] = (tensor, block)`, then row `tensor` of the table, and works on elements
`block * BLOCK` onwards of that tensor. Tables are uploaded from pinned memory without a host sync, and only when an
address has changed: gradients, which are reallocated every step, have a column of their own. A launch over 1.24 B
elements carries 4.8 MB of map beside 17 GB of data.

Tensors share a launch when they share device, dtypes and alignment: see `BucketKey`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch

from distill_kernels.launch import CachedLauncher, cdiv, device_facts, runs_on_triton, tl, triton

logger = logging.getLogger(__name__)

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class BucketKey(NamedTuple):
    """Properties that tensors updated by one launch have in common."""

    device: torch.device
    parameter: torch.dtype
    gradient: torch.dtype
    state: torch.dtype
    has_master: bool
    aligned: bool
    mesh: Any
    on_triton: bool


class Member:
    """One parameter with its gradient and state, as this rank holds them."""

    def __init__(self, number: int, owner: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        self.number = number
        self.owner = owner
        self.state = state

    def gradient(self) -> torch.Tensor:
        """Return this rank's part of the gradient."""
        assert self.owner.grad is not None
        return local(self.owner.grad)

    def tensor(self, name: str) -> torch.Tensor:
        """Return this rank's part of the state tensor `name`."""
        return local(self.state[name])

    def key(self) -> BucketKey:
        """Return the properties by which members are grouped into buckets."""
        parameter = local(self.owner)
        tensors = [parameter, self.gradient(), *[local(value) for name, value in self.state.items() if name != "step"]]
        dtypes = (parameter.dtype, tensors[1].dtype, tensors[2].dtype)
        on_triton = (
            runs_on_triton(parameter)
            and all(dtype in TRITON_DTYPES for dtype in dtypes)
            and all(is_dense(tensor) and tensor.stride() == parameter.stride() for tensor in tensors)
        )
        aligned = on_triton and parameter.numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        has_master = "master" in self.state
        return BucketKey(parameter.device, *dtypes, has_master, aligned, mesh_of(self.owner), on_triton)


class Bucket:
    """The members of one launch and, for a Triton launch, their tables on the device.

    `table` is int64 [tensors, 8]: the addresses of parameter, first moment, second moment and master (0 without one),
    elements, the parameter's number, its programs, and a column that fills the row up to 64 bytes. `gradients` are
    addresses too, int64 [tensors], `blocks` the map of the module's docstring.

    `rows` is fp32 [tensors, 8]: steps taken (each member's "step" is a view of it); then what the kernel leaves for its
    next launch: the step and the log2 of both betas that the bias corrections in the next two columns are for; in the
    last but one, as int32, how many programs of a launch have finished: 0 between launches.
    """

    def __init__(self, key: BucketKey, members: list[Member], block: int) -> None:
        self.key = key
        self.members = members
        self.block = block
        steps = [member.state["step"].to(device=key.device, dtype=torch.float32) for member in members]
        self.rows = torch.zeros(len(members), 8, device=key.device)
        self.rows[:, 0] = torch.stack(steps)
        for member, step in zip(members, self.rows[:, 0].unbind(), strict=True):
            member.state["step"] = step
        self._pinned: dict[str, torch.Tensor] = {}
        self.update = CachedLauncher()
        self.count = CachedLauncher()
        self.square = CachedLauncher()
        # of the update, by what `CachedLauncher` calls `specialization`
        self.constants: dict[Any, tuple[Any, ...]] = {}
        if key.on_triton:
            sizes = [local(member.owner).numel() for member in members]
            self.table = self._upload("table", torch.tensor([self._row(member) for member in members]))
            self.blocks = self._upload("blocks", block_map(sizes, block))  # int32 [programs, 2]
            self.point_to_gradients([member.gradient().data_ptr() for member in members])

    def _row(self, member: Member) -> list[int]:
        names = ("exp_avg", "exp_avg_sq", "master")
        states = [member.tensor(name).data_ptr() if name in member.state else 0 for name in names]
        parameter = local(member.owner)
        size = parameter.numel()
        return [parameter.data_ptr(), *states, size, member.number, max(cdiv(size, self.block), 1), 0]

    def _upload(self, name: str, host: torch.Tensor) -> torch.Tensor:
        """`host` on the bucket's device, without a host sync; the pinned copy is kept, for a CUDA graph reads it."""
        if self.key.device.type != "cuda":
            return host
        self._pinned[name] = host.pin_memory()
        return self._pinned[name].to(self.key.device, non_blocking=True)

    def point_to_gradients(self, addresses: list[int]) -> None:
        """Take the addresses of the members' present gradients."""
        self.gradients = self._upload("gradients", torch.tensor(addresses, dtype=torch.int64))  # int64 [tensors]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself; `DTensor.to_local` costs 20 microseconds."""
    return getattr(tensor, "_local_tensor", tensor)


def mesh_of(tensor: torch.Tensor) -> Any:
    """Hashable (mesh, dimensions it is sharded over) of a DTensor, None of any other tensor."""
    if local(tensor) is tensor:
        return None
    placements = tensor.placements  # type: ignore[attr-defined]
    return tensor.device_mesh, tuple(i for i, placement in enumerate(placements) if placement.is_shard())  # type: ignore[attr-defined]


def is_dense(tensor: torch.Tensor) -> bool:
    """True where the tensor's elements fill its span of memory, in any order of dimensions."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != span:
            return False
        span *= size
    return True


def block_map(sizes: Sequence[int], block: int) -> torch.Tensor:
    """int32 [programs, 2] on the CPU: which tensor, and which of its blocks, each program works on.

    A tensor without elements has one program, which counts its steps.
    """
    counts = torch.tensor([max(cdiv(size, block), 1) for size in sizes], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, torch.arange(tensor.numel()) - first), dim=1).to(torch.int32)


def reference_sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all squared elements, fp32 scalar; not finite where any element is not."""
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()


@triton.jit(do_not_specialize=["count", "programs"])
def sum_of_squares_kernel(
    table_ptr,
    gradients_ptr,
    blocks_ptr,
    partials_ptr,
    count,
    programs,  # partials: fp32 [programs]
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program sums the squares of every `programs`-th block: the order of summation never changes."""
    total = tl.zeros((BLOCK,), tl.float32)
    offsets = tl.arange(0, BLOCK)
    for b in range(tl.program_id(0), count, programs):
        tensor = tl.load(blocks_ptr + 2 * b)
        first = tl.load(blocks_ptr + 2 * b + 1).to(tl.int64) * BLOCK
        size = tl.load(table_ptr + tensor * 8 + 4)
        gradient_ptr = tl.load(gradients_ptr + tensor).to(tl.pointer_type(GRADIENT))
        if ALIGNED:
            gradient_ptr = tl.multiple_of(gradient_ptr, 16)
            size = tl.multiple_of(size, 16)
        gradient = tl.load(gradient_ptr + first + offsets, mask=offsets < size - first, other=0.0).to(tl.float32)
        total += gradient * gradient
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total))


def sum_of_squares(bucket: Bucket) -> torch.Tensor:
    """Sum of the squared elements of the bucket's gradients on this rank, fp32 scalar on their device."""
    if not bucket.key.on_triton:
        return reference_sum_of_squares([member.gradient() for member in bucket.members])
    count = len(bucket.blocks)
    programs = min(count, 8 * device_facts(bucket.key.device).multiprocessors)
    partials = torch.empty(programs, dtype=torch.float32, device=bucket.key.device)
    bucket.square(
        sum_of_squares_kernel,
        programs,
        None,
        [bucket.table, bucket.gradients, bucket.blocks, partials],
        (count, programs, TRITON_DTYPES[bucket.key.gradient], bucket.key.aligned, bucket.block),
        num_warps=8,
    )
    return partials.sum()


class UpdatePlan:
    """Buckets of one group's parameters, valid while no address but those of gradients changes.

    Keeps addresses of gradients and states rather than the tensors, so that one set to None or put elsewhere is freed.
    """

    def __init__(self, members: list[Member], block: int) -> None:
        self.members = members
        sorted_in: dict[BucketKey, list[Member]] = {}
        for member in members:
            sorted_in.setdefault(member.key(), []).append(member)
        self.meshes = dict.fromkeys(mesh_of(member.owner) for member in members)
        self.buckets = [Bucket(key, found, block) for key, found in sorted_in.items()]
        slow = [key for key in sorted_in if key.device.type == "cuda" and not key.on_triton]
        if slow:
            logger.warning(
                "AdamW: %d kinds of tensors go to the PyTorch reference, not the kernel: %s", len(slow), slow
            )
        self._owners = [member.owner for member in members]
        self._states = [member.state for member in members]
        self._places = {id(member): place for place, member in enumerate(members)}
        tensors = chain(self._owners, *[state.values() for state in self._states])
        # asking each for the part that a DTensor would have costs more than its address
        self._plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
        self._addresses = self._present_addresses()
        self._gradients = self._layouts([member.owner.grad for member in members])

    def _present_addresses(self) -> list[int]:
        """Return the addresses of the parameters and of all tensors of their states."""
        tensors = chain(self._owners, *[state.values() for state in self._states])
        return list(map(torch.Tensor.data_ptr, tensors if self._plain else map(local, tensors)))

    def _layouts(self, gradients: Sequence[Any]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Addresses and strides."""
        if not self._plain:
            gradients = [local(gradient) for gradient in gradients]
        return list(map(torch.Tensor.data_ptr, gradients)), list(map(torch.Tensor.stride, gradients))

    def holds(self, params: Sequence[torch.Tensor], state: dict[torch.Tensor, Any]) -> bool:
        """True while the plan fits `params`; takes up the addresses of gradients that have moved."""
        gradients = [p.grad for p in params]
        if any(map(is_, gradients, repeat(None))):
            params = [p for p in params if p.grad is not None]
            gradients = [p.grad for p in params]
        if len(params) != len(self._owners) or not all(map(is_, params, self._owners)):
            return False
        if not all(map(is_, map(state.get, params), self._states)) or self._present_addresses() != self._addresses:
            return False
        addresses, strides = self._layouts(gradients)
        if strides != self._gradients[1]:
            return False
        return addresses == self._gradients[0] or self._follow(addresses, strides)

    def _follow(self, addresses: list[int], strides: list[tuple[int, ...]]) -> bool:
        """Take up new addresses of the gradients; False where one could not have led to its bucket's key."""
        for bucket in self.buckets:
            present = [addresses[self._places[id(member)]] for member in bucket.members]
            if bucket.key.aligned and any(address % 16 for address in present):
                return False
            if any(member.gradient().dtype != bucket.key.gradient for member in bucket.members):
                return False
            if bucket.key.on_triton:
                bucket.point_to_gradients(present)
        self._gradients = (addresses, strides)
        return True


@torch.no_grad()
def squares_over_ranks(buckets: list[Bucket], meshes: Iterable[Any]) -> torch.Tensor | None:
    """Sum of the squares of all gradients, each counted once, over the ranks that hold shards of them."""
    totals = []
    for mesh in meshes:
        total = _added([sum_of_squares(bucket) for bucket in buckets if bucket.key.mesh == mesh])
        if mesh is not None:
            device_mesh, sharded = mesh
            for dimension in sharded:
                torch.distributed.all_reduce(total, group=device_mesh.get_group(dimension))
        totals.append(total)
    return _added(totals) if totals else None


def _added(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, on the first one's device."""
    if len(scalars) == 1:
        return scalars[0]
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).sum()
