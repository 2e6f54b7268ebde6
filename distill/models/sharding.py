"""Placement of models over several processes: replicated, or sharded (FSDP2)."""

from __future__ import annotations

import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distill.core.ranks import is_main_process
from distill.models.dtypes import QUANTISED, quantised_weights
from distill.models.head import decoder_of, find_head, unwrap_peft
from distill.models.layers import find_layers

Strategy = Literal["ddp", "fsdp"]


class Placement(NamedTuple):
    """Placement of student and teacher over the processes.

    Attributes:
        student: `ddp` copies it to every device, `fsdp` shards it.
        teacher_sharded: the teacher is sharded too.
        fits: Whether the estimate fits the devices.
        why: the figures it was chosen by, for people.
    """

    student: Strategy
    teacher_sharded: bool
    fits: bool
    why: str = ""

    @property
    def student_sharded(self) -> bool:
        return self.student == "fsdp"

    @property
    def short(self) -> str:
        if self is SINGLE_PROCESS:
            return "one device"
        return ", teacher ".join([self.student, *["sharded"] * self.teacher_sharded])

    @property
    def teacher_text(self) -> str:
        return "teacher sharded (FSDP2)" if self.teacher_sharded else "teacher copied"

    def __str__(self) -> str:
        student = "sharded (FSDP2)" if self.student_sharded else "copied (DDP)"
        return f"student {student}, {self.teacher_text}: {self.why}"


SINGLE_PROCESS = Placement("ddp", False, True, "one process")


def is_sharded(model: nn.Module | None) -> bool:
    return model is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters())


def own_rows(count: int) -> slice:
    """Return the rows of a parameter with `count` of them that FSDP2 gives this process, as `torch.chunk` cuts them."""
    import torch.distributed as dist

    each = -(-count // dist.get_world_size())
    rank = dist.get_rank()
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor in this process, without a graph: its own rows of a sharded one."""
    held = tensor.data
    return held.to_local() if isinstance(held, DTensor) else held


def gather_rows(rows: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each process holds the rows that it holds of a parameter; every process calls it.

    Args:
        rows: This process's rows, [n, ...].
        parameter: The parameter, [N, K]; where it is not sharded, `rows` are all.
    """
    if not isinstance(parameter, DTensor):
        assert len(rows) == len(parameter), "the parameter is not sharded yet"
        return rows
    whole = torch.empty(len(parameter), *rows.shape[1:], device="meta")
    mesh = parameter.device_mesh
    placements = parameter.placements
    sharded = DTensor.from_local(rows, mesh, placements, shape=whole.shape, stride=whole.stride())
    gathered: torch.Tensor = sharded.full_tensor()
    return gathered


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

    kind = "cuda" if dist.get_backend().endswith("nccl") or "cuda" in dist.get_backend() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    teacher.eval().requires_grad_(False)
    decoder = decoder_of(teacher)
    head = find_head(teacher).module
    embedding = teacher.get_input_embeddings()  # type: ignore[operator]
    tied = embedding.weight is find_head(teacher).linear.weight
    units = [*find_layers(teacher)[1], *([[embedding, head]] if tied else [embedding, head]), decoder]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return teacher


def use_fsdp2(accelerator: Any, settings: dict[str, Any]) -> None:
    """Have `accelerator` shard by FSDP2, on GPUs and CPUs alike, reducing gradients in float32.

    accelerate leaves a plugin unused where the processes have no GPUs and trains by DDP without a word, and its own
    mixed precision would reduce gradients in bfloat16.

    Args:
        accelerator: Accelerator of the trainer, before `prepare`.
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


def has_no_state(optimizer: Any) -> bool:
    """Return whether an optimizer has no state: plain SGD without momentum.

    torch cannot load the state of such a one into shards ("Expected device to be set": it takes the device from the
    state's tensors), and there is nothing to load.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner) is torch.optim.SGD and not any(group["momentum"] for group in inner.param_groups)


def whole_student(accelerator: Any, model: nn.Module) -> Any:
    """A sharded student as an ordinary model on the CPU, to save, merge or hand over; on the first process only.

    Args:
        model: The student as it was trained, bare or inside PEFT; stays as it is. Every process must call this.

    Returns:
        The model; None on the other processes. That of a quantised one has the blocks that it is saved with.
    """
    state = accelerator.get_state_dict(model)
    weights = quantised_weights(model)
    blocks = None if weights is None else weights.saved()
    if not is_main_process():
        return None
    rebuilt = _rebuilt(model, state)
    unwrap_peft(rebuilt).__dict__[QUANTISED] = blocks
    return rebuilt


def _rebuilt(model: Any, state: dict[str, torch.Tensor]) -> Any:
    """A model of the same classes and settings as `model`, with the weights `state`."""
    from torch.distributed.fsdp import FSDPModule

    inner: Any = unwrap_peft(model)
    kind: Any = next(c for c in type(inner).__mro__ if not issubclass(c, FSDPModule))  # FSDP2 puts its own before it
    with torch.device("meta"):
        rebuilt = kind._from_config(copy.deepcopy(inner.config))
        tied = find_head(rebuilt).linear.weight is rebuilt.get_input_embeddings().weight
        if hasattr(model, "peft_config"):
            from peft import get_peft_model

            rebuilt = get_peft_model(rebuilt, model.peft_config[model.active_adapter])
    rebuilt.load_state_dict(state, assign=True)
    embedding: Any = unwrap_peft(rebuilt).get_input_embeddings()  # type: ignore[operator]
    if tied:
        head: Any = find_head(rebuilt).linear
        head.weight = (embedding.get_base_layer() if hasattr(embedding, "lora_A") else embedding).weight
    unwrap_peft(rebuilt).generation_config = copy.deepcopy(inner.generation_config)
    return rebuilt.eval()
