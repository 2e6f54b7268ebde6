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
from typing import Any, NamedTuple

import torch

from distill_kernels.launch import cdiv, device_facts, runs_on_triton, tl, triton

logger = logging.getLogger(__name__)

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COLUMNS = 8
"""int64 columns of the table: address of parameter, first moment, second moment, master; elements; number; 2 unused."""


class BucketKey(NamedTuple):
    """What tensors must share to be updated by one launch."""

    device: torch.device
    parameter: torch.dtype
    gradient: torch.dtype
    state: torch.dtype
    has_master: bool
    aligned: bool
    mesh: Any
    on_triton: bool


class Member:
    """One parameter with its gradient and state, as this rank holds them.

    Keeps addresses rather than tensors, so that a gradient set to None or a state moved elsewhere is freed.
    """

    def __init__(self, number: int, owner: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        self.number, self.owner, self.state = number, owner, state
        self.addresses = self.present_addresses()
        assert owner.grad is not None
        self.gradient_address = local(owner.grad).data_ptr()

    def present_addresses(self) -> tuple[int, ...]:
        """Of the parameter, then of the state's tensors."""
        return (local(self.owner).data_ptr(), *[local(tensor).data_ptr() for tensor in self.state.values()])

    def gradient(self) -> torch.Tensor:
        assert self.owner.grad is not None
        return local(self.owner.grad)

    def gradient_moved(self) -> bool:
        """True where the gradient's address differs from the one noted, which is then noted."""
        before, self.gradient_address = self.gradient_address, self.gradient().data_ptr()
        return self.gradient_address != before

    def gradient_fits(self, key: BucketKey) -> bool:
        """True where the present gradient could have led to `key`."""
        gradient = self.gradient()
        if gradient.dtype != key.gradient or (key.aligned and self.gradient_address % 16):
            return False
        return not key.on_triton or gradient.stride() == local(self.owner).stride()

    def tensor(self, name: str) -> torch.Tensor:
        return local(self.state[name])

    def key(self) -> BucketKey:
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
    """The members of one launch and, for a Triton launch, their tables on the device."""

    def __init__(self, key: BucketKey, members: list[Member], block: int) -> None:
        self.key, self.members, self.block = key, members, block
        steps = [member.state["step"].to(device=key.device, dtype=torch.float32) for member in members]
        self.steps = torch.stack(steps)  # fp32 [tensors]: steps taken so far; each member's "step" is a view of it
        self.scalars = torch.empty(len(members), 8, device=key.device)  # this step's factors, written on the device
        for member, step in zip(members, self.steps.unbind(), strict=True):
            member.state["step"] = step
            member.addresses = member.present_addresses()
        self._pinned: dict[str, torch.Tensor] = {}
        if key.on_triton:
            sizes = [local(member.owner).numel() for member in members]
            self.table = self._upload("table", torch.tensor([self._row(member) for member in members]))
            self.blocks = self._upload("blocks", block_map(sizes, block))  # int32 [programs, 2]
            self.point_to_gradients()

    def _row(self, member: Member) -> list[int]:
        names = ("exp_avg", "exp_avg_sq", "master")
        states = [member.tensor(name).data_ptr() if name in member.state else 0 for name in names]
        parameter = local(member.owner)
        return [parameter.data_ptr(), *states, parameter.numel(), member.number, 0, 0]

    def _upload(self, name: str, host: torch.Tensor) -> torch.Tensor:
        """`host` on the bucket's device, without a host sync; the pinned copy is kept, for a CUDA graph reads it."""
        if self.key.device.type != "cuda":
            return host
        self._pinned[name] = host.pin_memory()
        return self._pinned[name].to(self.key.device, non_blocking=True)

    def point_to_gradients(self) -> None:
        """Take the addresses of the members' present gradients."""
        addresses = torch.tensor([member.gradient_address for member in self.members], dtype=torch.int64)
        self.gradients = self._upload("gradients", addresses)  # int64 [tensors]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself. (`DTensor.to_local` costs 20 microseconds a call.)"""
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
    """int32 [programs, 2] on the CPU: which tensor, and which of its blocks, each program works on."""
    counts = torch.tensor([cdiv(size, block) for size in sizes], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, torch.arange(tensor.numel()) - first), dim=1).to(torch.int32)


def reference_sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all squared elements, fp32 scalar; not finite where any element is not."""
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()


@triton.jit(do_not_specialize=["count", "programs"])
def sum_of_squares_kernel(
    table_ptr,  # int64 [tensors, 8]
    gradients_ptr,  # int64 [tensors]
    blocks_ptr,  # int32 [count, 2]
    partials_ptr,  # fp32 [programs]
    count,
    programs,
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
            gradient_ptr, size = tl.multiple_of(gradient_ptr, 16), tl.multiple_of(size, 16)
        gradient = tl.load(gradient_ptr + first + offsets, mask=offsets < size - first, other=0.0).to(tl.float32)
        total += gradient * gradient
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total))


def sum_of_squares(bucket: Bucket) -> torch.Tensor:
    """Sum of the squared elements of the bucket's gradients on this rank, fp32 scalar on their device."""
    if not bucket.key.on_triton:
        return reference_sum_of_squares([member.gradient() for member in bucket.members])
    count = len(bucket.blocks)
    programs = min(count, 8 * device_facts(bucket.key.device).multiprocessors)
    partials = torch.empty(max(programs, 1), dtype=torch.float32, device=bucket.key.device)
    if programs == 0:
        return partials.zero_().sum()
    sum_of_squares_kernel[(programs,)](
        bucket.table,
        bucket.gradients,
        bucket.blocks,
        partials,
        count,
        programs,
        GRADIENT=TRITON_DTYPES[bucket.key.gradient],
        ALIGNED=bucket.key.aligned,
        BLOCK=bucket.block,
        num_warps=8,
    )
    return partials.sum()


class Plan:
    """Buckets of one group's parameters, valid while no address but those of gradients changes."""

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

    def holds(self, params: Sequence[torch.Tensor], state: dict[torch.Tensor, Any]) -> bool:
        """True while the plan fits `params`; takes up the addresses of gradients that have moved."""
        present = [p for p in params if p.grad is not None]
        if len(present) != len(self.members):
            return False
        moved = False
        for p, member in zip(present, self.members, strict=True):
            if p is not member.owner or state.get(p) is not member.state:
                return False
            if member.present_addresses() != member.addresses:
                return False
            moved |= member.gradient_moved()
        for bucket in self.buckets if moved else ():
            if not all(member.gradient_fits(bucket.key) for member in bucket.members):
                return False
            if bucket.key.on_triton:
                bucket.point_to_gradients()
        return True


def squares_over_ranks(buckets: list[Bucket], meshes: Iterable[Any]) -> torch.Tensor | None:
    """Sum of the squares of all gradients, each counted once, over the ranks that hold shards of them."""
    totals = []
    for mesh in meshes:
        mine = [sum_of_squares(bucket) for bucket in buckets if bucket.key.mesh == mesh]
        total = torch.stack([part.to(mine[0].device) for part in mine]).sum()
        if mesh is not None:
            device_mesh, sharded = mesh
            for dimension in sharded:
                torch.distributed.all_reduce(total, group=device_mesh.get_group(dimension))
        totals.append(total)
    return torch.stack([total.to(totals[0].device) for total in totals]).sum() if totals else None
