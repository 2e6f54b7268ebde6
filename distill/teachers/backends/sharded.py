"""A sharded teacher: built on the meta device, sharded by FSDP2, then filled shard by shard.

Each process makes the model on the meta device, patches it, and shards it; only then do its shards get memory. The
first process alone reads the weights, whole, into host memory, and sends every other its part, parameter by parameter,
so that a device never holds more than its shards and one whole parameter, and whatever can be loaded (any checkpoint
format, GGUF, a merged adapter) can be sharded. Random weights are initialised in the shards.

Kernels are chosen by trying them on a model of the same configuration with two layers, since a module without weights
cannot be run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.core.ranks import run_on_rank0
from distill.models.loading import TEACHER_SEED, load_config, load_teacher, model_options, without_memory
from distill.models.patch.corrections import correct_forward
from distill.models.patch.patching import patch
from distill.models.patch.swaps import PatchReport
from distill.models.prune.pruning import cut_config
from distill.models.sharding import shard_teacher
from distill.recipe import LoadedTeacherConfig

log = logging.getLogger(__name__)


def load_sharded_teacher(
    section: LoadedTeacherConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: Callable[[nn.Module], str | None] | None = None,
) -> tuple[PreTrainedModel, PatchReport | None]:
    """Load the teacher sharded over all processes; every process must call this.

    Args:
        attention: Function that selects the attention implementation from a small model with the same heads on
            `device`, for patching; None leaves the model unpatched.

    Returns:
        The teacher, frozen and in eval mode, its parameters DTensors, and the report of what was patched.

    Raises:
        ValueError: naming the field, the same on every process.
    """
    config = load_config(section, "teacher")
    options = model_options(section, dtype)
    model = without_memory(config, options)
    correct_forward(model, section.attention, "teacher.attention")
    report = None
    devices = [device] if device.type == "cuda" else []
    if attention is not None:
        with torch.random.fork_rng(devices), device:
            # two layers are enough for every kind of module, in models that alternate two kinds of layers too
            two = range(min(2, config.get_text_config().num_hidden_layers))
            small = AutoModelForCausalLM.from_config(cut_config(config, two), **options).eval()
        backend = attention(small)
        report = patch(
            model, "teacher", attention=backend, judged=patch(small, "teacher", attention=backend).trial_results
        )
        del small
    buffers = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    shard_teacher(model)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
    if section.init == "random":
        with torch.random.fork_rng(devices):
            _draw(model, TEACHER_SEED)
    else:
        source = run_on_rank0(lambda: load_teacher(section, device="cpu", dtype=dtype))
        _fill(model, source, device)
    return model, report


def _draw(model: Any, seed: int) -> None:
    """Initialise the shards with random weights, as the architecture does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)


@torch.no_grad()
def _fill(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Send every process its part of the first one's weights."""
    weights = dict(source.named_parameters()) if source is not None else {}
    shapes = [{name: tuple(p.shape) for name, p in weights.items()}]
    dist.broadcast_object_list(shapes)
    own_shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wrong = sorted(own_shapes.items() ^ shapes[0].items())
    if wrong:
        raise ValueError(
            f"teacher.model: its weights are not those of its configuration, which a sharded teacher needs; {wrong[0]} "
            "is in one and not in the other. Save the merged model to a folder and name that"
        )
    for name, parameter in model.named_parameters():
        shard: Any = parameter
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=device)
        if source is not None:
            whole.copy_(weights[name])
        shard.to_local().copy_(distribute_tensor(whole, shard.device_mesh, shard.placements).to_local())
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in model.named_buffers():
        if source is not None:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    # the end of a response must be the same on all processes
    generation_config = [getattr(source, "generation_config", None)]
    dist.broadcast_object_list(generation_config)
    if generation_config[0] is not None:
        model.generation_config = generation_config[0]
