"""`distill bench RECIPE`: time of the training step on this machine, ours and that of plain transformers.

Every variant trains the same student from the same teacher on the same tokens; one step is the teacher's forward, the
student's forward and backward with the divergence, and AdamW. Variants run one after the other, each long enough to
reach sustained clocks, and the first is run again at the end to show drift. Phases are timed by CUDA events without
synchronising; energy is NVML's over two seconds of steps, since its counter is coarse.

    plain           transformers with sdpa attention, full logits, KL in fp32, torch's fused AdamW
    distill         our patches, attention, loss and AdamW
    distill-graphs  the same with both decoders replayed from CUDA graphs, as `train.cuda_graph` does

`python -m scripts.bench step` times torch.compile, Liger and other variants of our step beside them.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from distill_kernels.optim.adamw import FusedAdamW
from torch import nn
from torch.nn import functional as F

from distill.models.flops import count_flops
from distill.models.gpu_specs import joins_on, peak_flops
from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of, find_head, read_head
from distill.models.patch.attention import choose_attention
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch, unpatch
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
# from teacher, student, batch and the recipe's loss
Variant = Callable[[nn.Module, nn.Module, Batch, Loss], "PreparedStep"]


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
    """Return random tokens [batch_size, length] on the GPU, trained on at all but each row's last position."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (batch_size, length), generator=generator)
    keep = torch.ones(batch_size, length, dtype=torch.bool)
    keep[:, -1] = False
    rows = keep.flatten().nonzero().squeeze(1)
    return {name: tensor.cuda() for name, tensor in {"input_ids": ids, "labels": ids, "valid_rows": rows}.items()}


def time_step(name: str, step: Step, tokens: int, flops: float, steps: int = 8) -> StepTime:
    """Run `step` and return medians over `steps` of them, or more where they take less than two seconds."""
    # the first steps compile and make the optimizer's states; more of them warm the GPU up, and tell how long one takes
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
    # no wait in between: the GPU's queue stays full, as in training
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


def optimize(loss: torch.Tensor, optimizer: torch.optim.Optimizer, clock: Clock) -> torch.Tensor:
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
    """Return a step over full logits: the teacher's by `ask`, the student's by `learn`."""

    def step(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = ask()
        clock.enter("student")
        student_logits = learn()
        clock.enter("loss")
        loss = divergence(student_logits, teacher_logits)
        # only what autograd needs is held through the backward pass
        del student_logits, teacher_logits
        return optimize(loss, optimizer, clock)

    return step


def decoder_inputs(batch: Batch) -> dict[str, Any]:
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


def our_step(
    objective: DistillationObjective, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer
) -> Step:
    """Return the step of the objective as the trainer runs it; phase `student` includes the fused loss."""
    items = torch.tensor(batch["valid_rows"].numel(), device=batch["valid_rows"].device)

    def step(clock: Clock) -> torch.Tensor:
        inputs = objective.student_inputs(batch, items)
        clock.enter("student")
        loss = student(**inputs)["loss"]
        return optimize(loss, optimizer, clock)

    return step


class PreparedStep(NamedTuple):
    """Step of a variant, ready to run, with a note for its row.

    Attributes:
        graphs: CUDA graphs that the step is replayed from; None where it is launched.
    """

    step: Step
    note: str = ""
    graphs: DecoderGraphs | None = None


def rival(step: Rival) -> Variant:
    def prepare(teacher: nn.Module, student: nn.Module, batch: Batch, loss: Loss) -> PreparedStep:
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
        return PreparedStep(step(teacher, student, batch, optimizer))

    return prepare


def patch_both(teacher: nn.Module, student: nn.Module, batch: Batch) -> str:
    """Put our layers and the fastest attention into both models; returns a note on the attention."""
    rows, length = batch["input_ids"].shape
    teacher_attention = choose_attention(teacher, rows, length, backward=False)[0]
    student_attention = choose_attention(student, rows, length, backward=True)[0]
    patch(teacher, "teacher", attention=teacher_attention)
    patch(student, "student", attention=student_attention)
    if "position_ids" in batch:
        return "attention of packed rows"
    return f"attention {teacher_attention} / {student_attention}"


def join_both(teacher: nn.Module, student: nn.Module, device: torch.device) -> None:
    if joins_on(device):
        join_projections(teacher, trains=True)
        join_projections(student, trains=True)


def prepare_models(teacher: nn.Module, student: nn.Module, batch: Batch) -> str:
    """Prepare both models as `distill run` does; returns a note for the row."""
    note = patch_both(teacher, student, batch)
    join_both(teacher, student, batch["input_ids"].device)
    return note


def ours(
    teacher: nn.Module,
    student: nn.Module,
    batch: Batch,
    loss: Loss,
    *,
    prepare: Callable[[nn.Module, nn.Module, Batch], str] = prepare_models,
    from_graphs: bool = False,
) -> PreparedStep:
    """Prepare our step; `from_graphs` replays both decoders from CUDA graphs, as `train.cuda_graph` does."""
    note = prepare(teacher, student, batch)
    objective = DistillationObjective(teacher, student, loss.unweighted)
    graphs = None
    if from_graphs:
        graphs = DecoderGraphs()
        graphs.add("teacher", decoder_of(teacher), trains=False)
        graphs.add("student", decoder_of(student), trains=True)
        graphs.enabled = True
    step = our_step(objective, student, batch, FusedAdamW(student.parameters(), lr=1e-5))
    return PreparedStep(step, note, graphs)


VARIANTS: dict[str, Variant] = {
    "plain": rival(plain_step),
    "distill": ours,
    "distill-graphs": functools.partial(ours, from_graphs=True),
}


def bench_step(
    load: Callable[[], tuple[nn.Module, nn.Module]],
    make: Callable[[int], Batch],
    loss: Loss,
    *,
    variants: Mapping[str, Variant] = VARIANTS,
    steps: int = 8,
) -> Iterator[StepTime]:
    """Time the training step of each variant.

    Args:
        load: Function that returns a new teacher and student on the GPU: not every patch can be removed.
        make: Function from a vocabulary size to a collated batch on the GPU.
        loss: The recipe's loss, which our step uses unchanged; the others run forward KL.
        variants: Variants to run, in this order.

    Yields:
        A row for each variant once it is timed, then "plain (again)" if plain ran first and others followed.
    """
    order = dict(variants)
    if next(iter(order)) == "plain" and len(order) > 1:
        order["plain (again)"] = order["plain"]
    for name, variant in order.items():
        # a function of its own frees everything of a variant before the next one's peak memory is measured
        result = _bench_variant(name, variant, load(), make, loss, steps)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        log.info("bench: %s %.1f ms", name, result.ms)
        yield result


def _bench_variant(
    name: str,
    variant: Variant,
    models: tuple[nn.Module, nn.Module],
    make: Callable[[int], Batch],
    loss: Loss,
    steps: int,
) -> StepTime:
    teacher, student = models
    batch = make(min(read_head(find_head(model)).weight.shape[0] for model in models))
    tokens = batch["input_ids"].numel()
    positions = batch.get("position_ids")
    pairs = tokens * (batch["input_ids"].shape[1] + 1) / 2 if positions is None else float((positions + 1).sum())
    student.train()
    work = [count_flops(teacher, trains=False), count_flops(student, trains=True)]
    flops = sum(w.total(tokens, batch["valid_rows"].numel(), pairs) for w in work if w is not None)
    prepared = variant(teacher, student, batch, loss)
    result = time_step(name, prepared.step, tokens, flops, steps)
    result.note = prepared.note
    if prepared.graphs is not None:
        for model, why in prepared.graphs.refused.items():
            result.note += f"; the {model} runs eagerly: {why}"
            log.warning("bench: %s: the %s runs eagerly: %s", name, model, why)
        prepared.graphs.release()
    unpatch(teacher)
    unpatch(student)
    return result
