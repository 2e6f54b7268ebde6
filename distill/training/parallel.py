"""How several GPUs share a run: who is copied to each of them, and who is cut into shards.

The student is copied (DDP: fastest) where weights, gradients, optimizer states and activations fit beside the teacher,
and sharded (FSDP2) where they do not. The teacher is copied too, and sharded only if it does not fit even beside a
sharded student: every micro-step of a sharded teacher gathers all of its weights once. With U usable bytes of a
device, T of the teacher, S(w) of everything else in a step with the student over w devices:

    T + S(1) <= U           student copied,  teacher copied     ("ddp")
    T + S(world) <= U       student sharded, teacher copied     ("fsdp")
    T / world + G + S(world) <= U     both sharded, G the largest gathered unit: a layer and the next, or the head
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import nn

Strategy = Literal["ddp", "fsdp"]


class Sharing(NamedTuple):
    """What is done with the two models.

    Attributes:
        student: `ddp` copies it to every device, `fsdp` shards it.
        teacher_sharded: the teacher is sharded too.
        fits: whether the arithmetic says that this goes into the devices.
    """

    student: Strategy
    teacher_sharded: bool
    fits: bool


def choose_sharing(
    asked: Literal["auto", "ddp", "fsdp"],
    *,
    teacher: float,
    gathered: float,
    copied: float,
    sharded: float,
    usable: float,
    world: int,
) -> Sharing:
    """The first of the three ways above that fits; the last one asked for where none does.

    Args:
        asked: `parallel.strategy`.
        teacher: Bytes of the teacher's weights.
        gathered: Bytes of the teacher that are whole at any time when it is sharded.
        copied: Bytes a device of everything but the teacher, with a copied student.
        sharded: The same with a sharded student.
        usable: Bytes of one device.
        world: Devices.
    """
    if world == 1:
        return Sharing("ddp", False, teacher + copied <= usable)
    in_shards = min(teacher, teacher / world + gathered)
    ways: list[tuple[Strategy, bool, float]] = [("ddp", False, teacher + copied), ("fsdp", False, teacher + sharded)]
    ways += [("ddp", True, in_shards + copied), ("fsdp", True, in_shards + sharded)]
    wanted = [way for way in ways if asked in ("auto", way[0])]
    if asked == "auto":  # a copied student beside a sharded teacher is for those who ask for it
        wanted.remove(ways[2])
    for student, teacher_sharded, needed in wanted:
        if needed <= usable:
            return Sharing(student, teacher_sharded, True)
    student, teacher_sharded, _ = wanted[-1]
    return Sharing(student, teacher_sharded, False)


def shard_teacher(teacher: nn.Module) -> nn.Module:
    """Cut a teacher into shards over all processes, in place (FSDP2); each layer is gathered when it is called.

    The units are each layer, the embedding, the head (one unit with the embedding where they are tied), and the final
    norm with the rest of the decoder. Patch the teacher before. The objective gathers the head once a micro-step.

    Args:
        teacher: A causal language model, frozen, the same on every process, on its device or on `meta` (then
            `to_empty` and its weights come after).

    Returns:
        `teacher`, whose parameters are DTensors now.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from distill.models.head import decoder_of, find_head
    from distill.models.pruning import find_layers

    kind = "cuda" if dist.get_backend().endswith("nccl") or "cuda" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    teacher.eval().requires_grad_(False)
    decoder, head, embedding = decoder_of(teacher), find_head(teacher).module, teacher.get_input_embeddings()  # type: ignore[operator]
    _, layers = find_layers(teacher)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    if embedding.weight is find_head(teacher).linear.weight:
        fully_shard([embedding, head], mesh=mesh, reshard_after_forward=True)
    else:
        fully_shard(embedding, mesh=mesh, reshard_after_forward=True)
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
    return teacher
