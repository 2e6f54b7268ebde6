"""Resolution of vocabulary-sharded heads: each rank's own rows, and which rank holds which columns.

Heads come as plain tensors beside `tp_group=`, or as DTensors. A DTensor that is sharded over its rows may be tensor
parallel (same tokens on every rank) or FSDP2's (other tokens on every rank), and the tensor itself does not say which:

    tp_group given                      its ranks share the vocabulary; a plain tensor is its rank's own rows
    a 1-D mesh whose dimension is "tp"  the same without `tp_group`; a plain tensor beside it is whole
    any other DTensor                   refused: FSDP2 gathers a head in its module's own call, see `head_loss`

Several teachers' heads are taken like one's. A replicated DTensor, or a plain whole tensor beside a "tp" DTensor, is
cut like another head: each rank computes its own columns only, and the student's gradient is put together again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from distill_kernels.launch import constant_in_graphs
from distill_kernels.losses.arguments import WHOLE_TENSOR
from distill_kernels.losses.mixture import TeacherHead
from distill_kernels.losses.shards import Ranks, VocabShard, process_group_by_name

Spans = tuple[tuple[int, int], ...]


class Heads(NamedTuple):
    """Both models' tensors, as in `FusedDistillationLoss.forward`."""

    student_hidden: torch.Tensor
    student_weight: torch.Tensor
    student_bias: torch.Tensor | None
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    teacher_hidden: torch.Tensor | None
    teacher_weight: torch.Tensor | None
    teacher_bias: torch.Tensor | None


VOCAB_SHARDED = ("weight", "bias", "lora_b")  # last parts of names of tensors with a vocabulary dimension


def local_heads(
    heads: Heads, tp_group: Any, vocab_size: int | None, teachers: Sequence[TeacherHead] = ()
) -> tuple[Heads, tuple[TeacherHead, ...], VocabShard | None]:
    """Return this rank's rows of all heads, and the columns of every rank (None where each rank has whole heads).

    Args:
        heads: plain tensors or DTensors.
        tp_group: a process group, a 1-D DeviceMesh, or None.
        vocab_size: columns that count, of the whole vocabulary.
        teachers: several teachers' heads, as well.

    Raises:
        ValueError: naming the tensor that is sharded in another way, heads cut at different columns, or widths that
            do not fit.
    """
    given: dict[str, Any] = heads._asdict()
    for number, teacher in enumerate(teachers):
        given |= {f"teachers[{number}].{name}": getattr(teacher, name) for name in ("hidden", "weight", "bias")}
    if tp_group is None and not any(_is_dtensor(tensor) for tensor in given.values()):
        return heads, tuple(teachers), None
    ranks = Ranks(_group_of(given, tp_group))
    local: dict[str, Any] = {name: _local(name, tensor) for name, tensor in given.items()}
    plain_is_sharded = tp_group is not None
    widths: dict[str, int] = {}
    cuts: dict[str, Spans] = {}  # rows of each rank, padding included
    for model in ("student_", "teacher_", *(f"teachers[{number}]." for number in range(len(teachers)))):
        weight = given[f"{model}weight"]
        if weight is not None and _is_vocab_sharded(weight, plain_is_sharded=plain_is_sharded):
            cuts[model] = _spans(weight, ranks)
            widths[model] = cuts[model][-1][1]
        elif weight is not None:
            widths[model] = weight.shape[0]
    vocab = _checked_vocab(widths, vocab_size)
    shard = None
    if cuts:
        clipped = {
            model: tuple((min(start, vocab), min(stop, vocab)) for start, stop in spans)
            for model, spans in cuts.items()
        }
        first, spans = next(iter(clipped.items()))
        for model, other in clipped.items():
            if other != spans:
                raise ValueError(
                    f"{model}weight: expected to be cut at the same columns as {first}weight, {spans}, got {other}; "
                    f"pad the smaller head before it is sharded, or pass one of them replicated"
                )
        for name, tensor in local.items():
            if (
                tensor is None
                or not name.endswith(VOCAB_SHARDED)
                or _is_vocab_sharded(given[name], plain_is_sharded=plain_is_sharded)
            ):
                continue
            model = next((model for model in widths if name.startswith(model)), "student_")  # whose lora_b has no name
            local[name] = _LocalRows.apply(tensor, ranks, cuts.get(model, spans))
        shard = VocabShard(ranks, spans)
    several = tuple(
        teacher._replace(**{name: local[f"teachers[{number}].{name}"] for name in ("hidden", "weight", "bias")})
        for number, teacher in enumerate(teachers)
    )
    return Heads(**{name: local[name] for name in Heads._fields}), several, shard


class _LocalRows(torch.autograd.Function):
    """This rank's rows of a whole tensor; backward gathers the gradient of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks, spans: Spans) -> torch.Tensor:
        ctx.shape = whole.shape
        ctx.ranks = ranks
        ctx.spans = spans
        return whole[slice(*spans[ranks.index])]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = gradient.new_zeros(ctx.shape)
        whole[slice(*ctx.spans[ctx.ranks.index])] = gradient
        return ctx.ranks.broadcast_rows_(whole, ctx.spans), None, None


def _is_dtensor(tensor: object) -> bool:
    return type(tensor).__name__ == "DTensor"  # where it is one, its module is loaded


def _is_vocab_sharded(tensor: Any, *, plain_is_sharded: bool) -> bool:
    """Return whether `tensor` holds its rank's rows only."""
    return tensor.placements[0].is_shard() if _is_dtensor(tensor) else plain_is_sharded


def _group_of(given: dict[str, Any], tp_group: Any) -> Any:
    """Return the process group over which the vocabulary is cut."""
    import torch.distributed as dist

    by_name = tp_group is None
    if type(tp_group).__name__ == "DeviceMesh":
        if tp_group.ndim != 1:
            raise ValueError(
                f"tp_group: expected a process group or a 1-D mesh, got a mesh of {tp_group.ndim} dimensions"
            )
        tp_group = tp_group.get_group()
    for name, tensor in given.items():
        if not _is_dtensor(tensor):
            continue
        mesh = tensor.device_mesh
        if by_name and mesh.mesh_dim_names != ("tp",):
            raise ValueError(f"{name}: expected {WHOLE_TENSOR}, got a DTensor on {mesh}")
        group = mesh.get_group() if mesh.ndim == 1 else None
        if group is None or (
            tp_group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(tp_group)
        ):
            raise ValueError(f"{name}: expected a DTensor on a 1-D mesh of tp_group's ranks, got one on {mesh}")
        tp_group = group
    return tp_group


def _local(name: str, tensor: Any) -> torch.Tensor | None:
    """Return the plain tensor of this rank."""
    if not _is_dtensor(tensor):
        return tensor
    (placement,) = tensor.placements
    if not (placement.is_replicate() or (name.endswith(VOCAB_SHARDED) and placement.is_shard(0))):
        allowed = "Shard(0) or Replicate()" if name.endswith(VOCAB_SHARDED) else "Replicate()"
        raise ValueError(f"{name}: expected a DTensor of placement {allowed}, got {placement}")
    return tensor.to_local()


def _spans(weight: Any, ranks: Ranks) -> Spans:
    """Return the row range of each rank of a sharded head."""
    if _is_dtensor(weight):
        size = -(-weight.shape[0] // ranks.size)  # as torch.chunk cuts
        stops = [min((rank + 1) * size, weight.shape[0]) for rank in range(ranks.size)]
    else:
        stops = list(itertools.accumulate(_row_counts(weight, ranks.group.group_name)))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


_counts: Any = WeakTensorKeyDictionary()


@constant_in_graphs
def _row_counts(weight: torch.Tensor, group_name: str) -> list[int]:
    """Return every rank's number of rows of a plain head: exchanged once for each tensor object, with a host sync.

    Under torch.compile the exchange happens while tracing, which all ranks do at the same call.
    """
    group = process_group_by_name(group_name)
    known = _counts.get(weight)
    if known is None or known[0] is not group:  # a later group may have an earlier one's name
        own = torch.tensor([weight.shape[0]], device=weight.device)
        known = _counts[weight] = group, Ranks(group).all_gather(own).flatten().tolist()
    return known[1]


def _checked_vocab(widths: dict[str, int], vocab_size: int | None) -> int:
    """Return the number of columns that count, given the widths of whole heads."""
    for model, width in widths.items():
        if vocab_size is not None and not 0 < vocab_size <= width:
            raise ValueError(f"vocab_size: expected 1 to {width}, the rows of {model}weight, got {vocab_size}")
        if vocab_size is None and width != widths["student_"]:
            raise ValueError(
                f"{model}weight: expected {widths['student_']} rows over all ranks as student_weight (or pass "
                f"vocab_size, the shared columns), got {width}"
            )
    return widths["student_"] if vocab_size is None else int(vocab_size)
