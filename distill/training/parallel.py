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

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from distill.recipe import Recipe

if TYPE_CHECKING:
    from distill.planning.memory import Shape
    from distill.training.arguments import Precision

Strategy = Literal["ddp", "fsdp"]
GIB = 2**30
SHARDED_FP8 = "an fp8 teacher cannot be sharded, and it does not fit whole"


class Sharing(NamedTuple):
    """What is done with the two models.

    Attributes:
        student: `ddp` copies it to every device, `fsdp` shards it.
        teacher_sharded: the teacher is sharded too.
        fits: whether the arithmetic says that this goes into the devices.
        why: the figures it was chosen by, for people.
    """

    student: Strategy
    teacher_sharded: bool
    fits: bool
    why: str = ""

    @property
    def student_sharded(self) -> bool:
        """Whether the student goes through FSDP2."""
        return self.student == "fsdp"

    @property
    def short(self) -> str:
        """In a word or two."""
        if self is ALONE:
            return "one device"
        return self.student + (", teacher sharded" if self.teacher_sharded else "")

    def __str__(self) -> str:
        student = "sharded (FSDP2)" if self.student_sharded else "copied (DDP)"
        return f"student {student}, teacher {'sharded (FSDP2)' if self.teacher_sharded else 'copied'}: {self.why}"


ALONE = Sharing("ddp", False, True, "one process")


def plan_sharing(recipe: Recipe, device: torch.device, world: int) -> Sharing:
    """What `parallel` comes to for this recipe on `world` devices such as `device`, and why.

    Sizes are counted on models without memory, so nothing has to be loaded for it. A CPU has no limit here: copies,
    unless shards are asked for. A teacher whose answers are read from disk takes no memory.

    Raises:
        ValueError: an fp8 teacher that would have to be sharded.
    """
    from distill.planning.memory import USABLE, shape_of
    from distill.planning.preflight import meta_models
    from distill.training.arguments import resolve_precision

    asked = recipe.parallel
    if world == 1:
        return ALONE
    if recipe.teacher.is_cached:
        return Sharing("fsdp" if asked.strategy == "fsdp" else "ddp", False, True, "no teacher is loaded")
    if device.type != "cuda":
        return Sharing("fsdp" if asked.strategy == "fsdp" else "ddp", asked.teacher == "sharded", True, "as asked for")
    teacher, student = (shape_of(model) for model in meta_models(recipe))
    precision, total = resolve_precision(recipe, device), torch.cuda.get_device_properties(device).total_memory
    chosen = sharing_of(recipe, teacher, student, precision, memory_bytes=total, usable=USABLE * total, world=world)
    if chosen.teacher_sharded and recipe.teacher.dtype == "fp8":
        raise ValueError(f"teacher.dtype: {SHARDED_FP8} ({chosen.why}); use bfloat16")
    return chosen


def sharing_of(
    recipe: Recipe,
    teacher: Shape,
    student: Shape,
    precision: Precision,
    *,
    memory_bytes: int,
    usable: float,
    world: int,
) -> Sharing:
    """What `parallel` comes to on `world` devices, by arithmetic alone.

    Args:
        recipe: What is asked for.
        teacher, student: Sizes, from `distill.planning.memory.shape_of`.
        precision: From `resolve_precision`.
        memory_bytes: Of one device.
        usable: Bytes of these that a run may take.
        world: Devices, more than one.
    """
    from distill.planning.memory import gathered_teacher, step_memory
    from distill.training.arguments import accumulation_steps

    ways = [
        step_memory(
            recipe, teacher, student, precision, memory_bytes=memory_bytes, world=world, sharded=sharded,
            accumulation=accumulation_steps(recipe.train, recipe.data, world),
        )
        for sharded in (False, True)
    ]  # fmt: skip
    held, gathered = ways[0].parts["teacher"], gathered_teacher(teacher, precision)
    copied, sharded = (way.peak - way.parts["teacher"] for way in ways)
    never_sharded = recipe.teacher.offload is not None or recipe.teacher.dtype == "int8"
    chosen = choose_sharing(
        recipe.parallel.strategy, teacher=held, gathered=gathered, copied=copied, sharded=sharded, usable=usable,
        world=world, teachers="copied" if never_sharded else recipe.parallel.teacher,
    )  # fmt: skip
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs the teacher takes {held / GIB:.1f} "
        f"({min(held, held / world + gathered) / GIB:.1f} in shards), the student's step {copied / GIB:.1f} "
        f"({sharded / GIB:.1f} in shards)"
    )
    return chosen._replace(why=why if chosen.fits else why + ", which is too much by this arithmetic")


def choose_sharing(
    asked: Literal["auto", "ddp", "fsdp"],
    *,
    teacher: float,
    gathered: float,
    copied: float,
    sharded: float,
    usable: float,
    world: int,
    teachers: Literal["auto", "copied", "sharded"] = "auto",
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
        teachers: `parallel.teacher`; what is asked for rules out the other ways.
    """
    if world == 1:
        return Sharing("ddp", False, teacher + copied <= usable)
    in_shards = min(teacher, teacher / world + gathered)
    ways: list[tuple[Strategy, bool, float]] = [("ddp", False, teacher + copied), ("fsdp", False, teacher + sharded)]
    ways += [("ddp", True, in_shards + copied), ("fsdp", True, in_shards + sharded)]
    wanted = [way for way in ways if asked in ("auto", way[0])]
    if teachers != "auto":
        wanted = [way for way in wanted if way[1] == (teachers == "sharded")]
    elif asked == "auto":  # a copied student beside a sharded teacher is for those who ask for it
        wanted.remove(ways[2])
    for student, teacher_sharded, needed in wanted:
        if needed <= usable:
            return Sharing(student, teacher_sharded, True)
    student, teacher_sharded, _ = wanted[-1]
    return Sharing(student, teacher_sharded, False)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether the parameters of `model` are shards."""
    from torch.distributed.tensor import DTensor

    return model is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters())


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


def use_fsdp2(accelerator: Any, settings: dict[str, Any]) -> None:
    """Have `accelerator` shard by FSDP2, on GPUs and CPUs alike, reducing gradients in float32.

    accelerate leaves a plugin unused where the processes have no GPUs and trains by DDP without a word, and its own
    mixed precision would reduce gradients in bfloat16.

    Args:
        accelerator: Of the trainer, before `prepare`.
        settings: `TrainingArguments.fsdp_plugin_args`.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state = accelerator.state
    if getattr(state, "fsdp_plugin", None) is None:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    computes = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=torch.float32)


def keeps_nothing(optimizer: Any) -> bool:
    """Whether an optimizer's steps follow from its settings alone: plain SGD, without momentum.

    torch cannot load the state of such a one into shards ("Expected device to be set": it takes the device from the
    state's tensors), and there is nothing to load.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner) is torch.optim.SGD and not any(group["momentum"] for group in inner.param_groups)


def whole_student(accelerator: Any, model: nn.Module) -> Any:
    """A sharded student as an ordinary model on the CPU, to save, merge or hand over; on the first process only.

    Args:
        accelerator: That sharded it.
        model: The student as it was trained, bare or inside PEFT; stays as it is. Every process must call this.

    Returns:
        The model; None on the other processes.
    """
    from distill.training.launch import is_first

    state = accelerator.get_state_dict(model)
    return _rebuilt(model, state) if is_first() else None


def _rebuilt(model: Any, state: dict[str, torch.Tensor]) -> Any:
    """A model of the same classes and settings as `model`, with the weights `state`."""
    import copy

    from torch.distributed.fsdp import FSDPModule

    from distill.models.head import bare, find_head

    inner: Any = bare(model)
    kind: Any = next(c for c in type(inner).__mro__ if not issubclass(c, FSDPModule))  # FSDP2 puts its own before it
    with torch.device("meta"):
        rebuilt = kind._from_config(copy.deepcopy(inner.config))
        tied = find_head(rebuilt).linear.weight is rebuilt.get_input_embeddings().weight
        if hasattr(model, "peft_config"):
            from peft import get_peft_model

            rebuilt = get_peft_model(rebuilt, model.peft_config[model.active_adapter])
    rebuilt.load_state_dict(state, assign=True)
    embedding: Any = bare(rebuilt).get_input_embeddings()  # type: ignore[operator]
    if tied:
        head: Any = find_head(rebuilt).linear
        head.weight = (embedding.get_base_layer() if hasattr(embedding, "lora_A") else embedding).weight
    bare(rebuilt).generation_config = copy.deepcopy(inner.generation_config)
    return rebuilt.eval()
