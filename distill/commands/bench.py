"""`distill bench RECIPE`: time of the training step on this machine, ours and alternatives.

Every variant trains the same student from the same teacher on the same tokens; one step is the teacher's forward, the
student's forward and backward with the divergence, and AdamW. Variants run one after the other, each long enough to
reach sustained clocks, and the first is run again at the end to show drift. Phases are timed by CUDA events without
synchronising; energy is NVML's over two seconds of steps, since its counter is coarse.

    plain           transformers with sdpa attention, full logits, KL in fp32, torch's fused AdamW
    compile         the same, each decoder layer and the divergence under torch.compile
    liger           Liger Kernel's patches on both models and its fused linear JSD at beta = 0 (forward KL)
    distill         our patches, attention, loss and AdamW
    distill-graphs  the same with both decoders replayed from CUDA graphs, as `train.cuda_graph` does
    distill-all-rows distill, but the last layers also compute the rows whose outputs are masked
    distill-apart   distill without fused weights: gate and up not interleaved, no projections joined
    distill-fp8     the same with the teacher's linear layers (but not its head) in fp8
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from distill_kernels.matmul.fp8 import swap_linears_for_fp8
from distill_kernels.optim.adamw import FusedAdamW
from torch import nn
from torch.nn import functional as F

from distill.core.labels import shift_labels
from distill.models.flops import count_flops
from distill.models.gpu_specs import joins_on, peak_flops
from distill.models.graphs import DecoderGraphs
from distill.models.head import bare, decoder_of, find_head, read_head
from distill.models.layers import find_layers
from distill.models.output_rows import MARK
from distill.models.patch.attention import choose_attention
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch, unpatch
from distill.models.patch.teacher_layout import interleave
from distill.recipe.loss import Loss
from distill.teachers.objective import DistillationObjective
from distill.training.phases import PAUSED, Phases

log = logging.getLogger(__name__)

PHASES = ("teacher", "student", "loss", "backward", "optimizer")
# minimum duration of a variant's warm-up and of its timed steps
WARM_SECONDS = 1.5
TIMED_SECONDS = 2.2
Batch = dict[str, torch.Tensor]
Step = Callable[["Clock"], torch.Tensor]
# from teacher, student, batch and the student's optimizer
Rival = Callable[[nn.Module, nn.Module, Batch, torch.optim.Optimizer], Step]


@dataclass
class StepTime:
    """Training step of one variant: milliseconds, tokens per second, fraction of the GPU's bf16 peak, peak memory.

    Attributes:
        joules: Energy per step; NaN where NVML is not available.
        loss: Loss of the first step, equal for all variants up to rounding.
    """

    variant: str
    ms: float
    tokens_per_second: float
    mfu: float | None
    peak_gib: float
    phases: dict[str, float] = field(default_factory=dict)
    loss: float = float("nan")
    note: str = ""
    joules: float = float("nan")


def total_joules() -> float:
    """Return the first GPU's energy in joules since its driver was loaded, from NVML; NaN where it is not available."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1e3
    except Exception as error:  # the error classes exist only where nvidia-ml-py is installed
        log.info("bench: energy is not measured (%s)", error)
        return math.nan


class Clock(Phases):
    """Clock of a step's phases on the GPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"), PHASES)


def timed_steps(step: Step, steps: int) -> Callable[[], list[dict[str, float]]]:
    """Run `step` `steps` times without waiting; the returned function waits and returns the phases' seconds of each."""
    clocks = [Clock() for _ in range(steps)]
    for clock in clocks:
        clock.restart()
        step(clock)
        clock.enter(PAUSED)
    return lambda: [clock.seconds() for clock in clocks]


def make_batch(batch_size: int, length: int, vocab_size: int, seed: int = 0) -> Batch:
    """Return a batch of random tokens [batch_size, length] on the GPU, trained on at all but each row's last
    position.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (batch_size, length), generator=generator)
    keep = torch.ones(batch_size, length, dtype=torch.bool)
    keep[:, -1] = False
    rows = keep.flatten().nonzero().squeeze(1)
    return {name: tensor.cuda() for name, tensor in {"input_ids": ids, "labels": ids, "valid_rows": rows}.items()}


def measure(name: str, step: Step, tokens: int, flops: float, steps: int = 8) -> StepTime:
    """Run `step` and return medians over `steps` of them, or more where they take less than two seconds."""
    loss = float(step(Clock()))
    step(Clock())
    torch.cuda.synchronize()
    began = time.perf_counter()
    count = 0
    while count < 2 or time.perf_counter() - began < WARM_SECONDS:
        step(Clock())
        torch.cuda.synchronize()
        count += 1
    steps = max(steps, math.ceil(TIMED_SECONDS * count / (time.perf_counter() - began)))
    torch.cuda.reset_peak_memory_stats()
    joules = total_joules()
    timed = timed_steps(step, steps)
    torch.cuda.synchronize()
    joules = (total_joules() - joules) / steps
    phases = timed()
    ms = statistics.median(sum(p.values()) for p in phases) * 1e3
    split = {name: statistics.median(p[name] for p in phases) * 1e3 for name in PHASES if any(p[name] for p in phases)}
    peak = peak_flops(torch.device("cuda"))
    mfu = flops / (ms * 1e-3) / peak if peak else None
    memory = torch.cuda.max_memory_allocated() / 2**30
    return StepTime(name, ms, tokens / ms * 1e3, mfu, memory, split, loss, joules=joules)


def _optimize(loss: torch.Tensor, optimizer: torch.optim.Optimizer, clock: Clock) -> torch.Tensor:
    """Compute gradients and the optimizer's step, each a phase; returns the loss, a detached scalar."""
    clock.enter("backward")
    loss.backward()
    clock.enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def logits_step(
    ask: Callable[[], torch.Tensor],
    learn: Callable[[], torch.Tensor],
    divergence: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> Step:
    """Return a step over full logits: of the teacher by `ask`, of the student by `learn`, their loss by
    `divergence`.
    """

    def step(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = ask()
        clock.enter("student")
        student_logits = learn()
        clock.enter("loss")
        loss = divergence(student_logits, teacher_logits)
        del student_logits, teacher_logits
        return _optimize(loss, optimizer, clock)

    return step


def decoder_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a transformers model: the batch without labels."""
    return {name: value for name, value in batch.items() if name not in ("labels", "valid_rows")} | {"use_cache": False}


def plain_divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Return forward KL, fp32, over all positions but each row's last, from logits [B, T, V]."""
    shared = min(student_logits.shape[-1], teacher_logits.shape[-1])  # heads may be padded to different sizes
    log_p = student_logits[:, :-1, :shared].flatten(0, 1).float().log_softmax(-1)
    log_q = teacher_logits[:, :-1, :shared].flatten(0, 1).float().log_softmax(-1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="sum") / log_p.shape[0]


def plain_step(
    teacher: nn.Module, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, compiled: bool = False
) -> Step:
    inputs = decoder_inputs(batch)
    loss = torch.compile(plain_divergence) if compiled else plain_divergence
    return logits_step(lambda: teacher(**inputs).logits, lambda: student(**inputs).logits, loss, optimizer)


def compile_layers(model: nn.Module) -> None:
    """Have each decoder layer of a model compiled when it is first called: all layers share one graph."""
    for layer in find_layers(model)[1]:
        layer.compile()


def compiled_step(teacher: nn.Module, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Step:
    """Return the plain step with each decoder layer and the divergence compiled."""
    for model in (teacher, student):
        compile_layers(model)
    return plain_step(teacher, student, batch, optimizer, compiled=True)


def liger_loss(
    teacher: nn.Module, student: nn.Module, batch: Batch, rows: torch.Tensor | None = None
) -> Callable[[Clock], torch.Tensor]:
    """Return Liger's fused linear JSD at beta = 0 over hidden states; the models must carry Liger's patches.

    Args:
        rows: Flat positions of the loss, int64 [N]; None for all with a label.
    """
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss_fn = LigerFusedLinearJSD(jsd_beta=0.0)
    inputs = decoder_inputs(batch)
    shifted = shift_labels(batch["labels"]).flatten()
    shifted = shifted if rows is None else shifted[rows]

    def hidden_of(model: nn.Module) -> torch.Tensor:
        hidden: torch.Tensor = decoder_of(model)(**inputs).last_hidden_state.flatten(0, 1)
        return hidden if rows is None else hidden.index_select(0, rows)

    def loss_of(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_hidden = hidden_of(teacher)
        clock.enter("student")
        hidden = hidden_of(student)
        clock.enter("loss")
        weights = (find_head(model).linear.weight for model in (student, teacher))
        loss: torch.Tensor = loss_fn(hidden, next(weights), teacher_hidden, next(weights), shifted)
        return loss

    return loss_of


def liger_step(
    teacher: nn.Module,
    student: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor | None = None,
) -> Step:
    """Return the step with Liger's patches and loss; `rows` as in `liger_loss`."""
    apply_liger(teacher)
    apply_liger(student)
    loss_of = liger_loss(teacher, student, batch, rows)
    return lambda clock: _optimize(loss_of(clock), optimizer, clock)


RIVALS: dict[str, Rival] = {"plain": plain_step, "compile": compiled_step, "liger": liger_step}
VARIANTS = (*RIVALS, "distill", *(f"distill-{way}" for way in ("graphs", "all-rows", "apart", "fp8")))


def our_step(
    objective: DistillationObjective, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer
) -> Step:
    """Return the step of the objective as the trainer runs it; phase `student` includes the fused loss."""
    items = torch.tensor(batch["valid_rows"].numel(), device=batch["valid_rows"].device)

    def step(clock: Clock) -> torch.Tensor:
        inputs = objective.student_inputs(batch, items)
        clock.enter("student")
        loss = student(**inputs)["loss"]
        return _optimize(loss, optimizer, clock)

    return step


def bench_step(
    load: Callable[[], tuple[nn.Module, nn.Module]],
    make: Callable[[int], Batch],
    loss: Loss,
    *,
    variants: tuple[str, ...] = ("plain", "compile", "liger", "distill", "distill-fp8"),
    rivals: Mapping[str, Rival] = RIVALS,
    steps: int = 8,
) -> Iterator[StepTime]:
    """Time the training step of each variant.

    Args:
        load: Function that returns a new teacher and student on the GPU: Liger's patches cannot be removed.
        make: Function from a vocabulary size to a collated batch on the GPU.
        loss: The recipe's loss; "distill" uses it unchanged, the others run forward KL.
        variants: Variants to run, in this order; one whose library is missing is skipped with a log line.
        rivals: Steps of the variants that are not ours, by name.

    Yields:
        A row for each variant once it is timed, then "plain (again)" if plain ran first and others followed.
    """
    order = list(variants) + (["plain (again)"] if variants[0] == "plain" and len(variants) > 1 else [])
    order.sort(key=lambda name: name == "liger")  # its patches change the modelling file for the whole process
    for variant in order:
        if variant == "liger" and importlib.util.find_spec("liger_kernel") is None:
            log.warning("bench: liger-kernel is not installed; skipped")
            continue
        # a function of its own frees everything of a variant before the next one's peak memory is measured
        result = _bench_variant(variant, load(), make, loss, rivals, steps)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        log.info("bench: %s %.1f ms", variant, result.ms)
        yield result


def _bench_variant(
    variant: str,
    models: tuple[nn.Module, nn.Module],
    make: Callable[[int], Batch],
    loss: Loss,
    rivals: Mapping[str, Rival],
    steps: int,
) -> StepTime:
    teacher, student = models
    batch = make(min(read_head(find_head(model)).weight.shape[0] for model in models))
    tokens = batch["input_ids"].numel()
    rows, length = batch["input_ids"].shape
    positions = batch.get("position_ids")
    pairs = tokens * (length + 1) / 2 if positions is None else float((positions + 1).sum())
    student.train()
    note = ""
    ours = variant.startswith("distill")
    graphs = DecoderGraphs() if variant == "distill-graphs" else None
    if ours:
        chosen = [choose_attention(m, rows, length, backward=m is student)[0] for m in models]
        note = "attention " + (" / ".join(chosen) if positions is None else "of packed rows")
        patch(teacher, "teacher", attention=chosen[0])
        patch(student, "student", attention=chosen[1])
        if variant not in ("distill-fp8", "distill-apart"):
            interleave(teacher)
        for model in models if variant == "distill-all-rows" else ():
            decoder_of(model).__dict__.pop(MARK, None)
    work = [count_flops(teacher, trains=False), count_flops(student, trains=True)]
    flops = sum(w.total(tokens, batch["valid_rows"].numel(), pairs) for w in work if w is not None)
    if ours:
        objective = DistillationObjective(teacher, student, loss)
        if graphs is not None:
            for name, model in (("teacher", teacher), ("student", student)):
                graphs.add(name, decoder_of(model), trains=model is student)
            graphs.enabled = True
        if variant == "distill-fp8":
            swap_linears_for_fp8(teacher)
            gc.collect()
            torch.cuda.empty_cache()
        for model in models if variant != "distill-apart" and joins_on(batch["input_ids"].device) else ():
            join_projections(model, trains=True)
        step = our_step(objective, student, batch, FusedAdamW(student.parameters(), lr=1e-5))
    else:
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
        step = rivals[variant.removesuffix(" (again)")](teacher, student, batch, optimizer)
    result = measure(variant, step, tokens, flops, steps)
    if graphs is not None:
        for name, why in graphs.refused.items():
            note += f"; the {name} runs eagerly: {why}"
            log.warning("bench: %s: the %s runs eagerly: %s", variant, name, why)
        graphs.release()
    result.note = note
    unpatch(teacher)
    unpatch(student)
    return result


def apply_liger(model: Any) -> None:
    """Apply Liger Kernel's patches to a model, except to its cross-entropy."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=bare(model), fused_linear_cross_entropy=False, cross_entropy=False)
