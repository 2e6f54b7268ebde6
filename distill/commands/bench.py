"""The training step on this machine, ours beside what else a person could run: `distill bench RECIPE`.

Every variant trains the same student from the same teacher on the same tokens; one step is the teacher's forward, the
student's forward and backward with the divergence, and AdamW. Variants run one after the other, each long enough to
reach its own sustained clocks, and the first is run again at the end so that drift shows. Phases are timed by CUDA
events without stopping the device.

    plain           transformers with sdpa attention, logits in full, KL in fp32, torch's fused AdamW
    compile         the same, each decoder layer and the divergence under torch.compile
    liger           Liger Kernel's patches on both models and its fused linear JSD at beta = 0 (forward KL)
    distill         our patches, attention, loss and AdamW
    distill-graphs  the same with both decoders replayed from CUDA graphs, as `train.cuda_graph` does
    distill-fp8     the same with the teacher's linear layers (but not its head) in fp8
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from distill_kernels.matmul.fp8 import swap_linears_for_fp8
from distill_kernels.optim.adamw import FusedAdamW
from torch import nn
from torch.nn import functional as F

from distill.core.labels import shift_labels
from distill.models.attention import choose_attention
from distill.models.cards import peak_flops
from distill.models.graphs import DecoderGraphs
from distill.models.head import bare, decoder_of, find_head, read_head
from distill.models.patching import patch, unpatch
from distill.models.work import work_of
from distill.recipe.loss import Loss
from distill.teachers.objective import DistillationObjective

log = logging.getLogger(__name__)

PHASES = ("teacher", "student", "loss", "backward", "optimizer")
Batch = dict[str, torch.Tensor]
Step = Callable[["Clock"], torch.Tensor]


@dataclass
class StepTime:
    """One variant's training step: milliseconds, tokens a second, share of the GPU's bf16 peak, peak memory."""

    variant: str
    ms: float
    tokens_per_second: float
    mfu: float | None
    peak_gib: float
    phases: dict[str, float] = field(default_factory=dict)
    loss: float = float("nan")
    note: str = ""


class Clock:
    """CUDA events at the ends of a step's phases."""

    def __init__(self) -> None:
        self.events: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """End of `phase` (and start of the next)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((phase, event))

    def milliseconds(self) -> dict[str, float]:
        """Time between consecutive marks, by the name of the later one; call it after a synchronisation."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return {phase: start.elapsed_time(end) for (_, start), (phase, end) in pairs}


def make_batch(batch_size: int, length: int, vocab_size: int, seed: int = 0) -> Batch:
    """Random tokens, every position learned but the last of a row, as a collator would hand them over."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (batch_size, length), generator=generator)
    keep = torch.ones(batch_size, length, dtype=torch.bool)
    keep[:, -1] = False
    rows = keep.flatten().nonzero().squeeze(1)
    return {name: tensor.cuda() for name, tensor in {"input_ids": ids, "labels": ids, "valid_rows": rows}.items()}


def measure(name: str, step: Step, tokens: int, flops: float, steps: int = 8, warmup: int = 4) -> StepTime:
    """Run `step` and report medians over `steps` of them."""
    for _ in range(warmup):
        step(Clock())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    clocks, totals = [], []
    loss = torch.zeros(())
    for _ in range(steps):
        clock = Clock()
        clock.mark("start")
        loss = step(clock)
        clocks.append(clock)
    torch.cuda.synchronize()
    for clock in clocks:
        totals.append(clock.events[0][1].elapsed_time(clock.events[-1][1]))
    ms = statistics.median(totals)
    phases = [clock.milliseconds() for clock in clocks]
    split = {name: statistics.median(p[name] for p in phases) for name in PHASES if name in phases[0]}
    peak = peak_flops(torch.device("cuda"))
    mfu = flops / (ms * 1e-3) / peak if peak else None
    memory = torch.cuda.max_memory_allocated() / 2**30
    return StepTime(name, ms, tokens / ms * 1e3, mfu, memory, split, float(loss))


def _learn(loss: torch.Tensor, optimizer: torch.optim.Optimizer, clock: Clock) -> torch.Tensor:
    """Gradients and the optimizer's step, each a phase; returns the loss, a scalar without its graph."""
    loss.backward()
    clock.mark("backward")
    optimizer.step()
    optimizer.zero_grad()
    clock.mark("optimizer")
    return loss.detach()


def plain_step(teacher: nn.Module, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, compiled: bool):
    """Logits of both models in full, forward KL over fp32 log-probabilities."""

    def divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        student_logits, teacher_logits = (z[:, :-1].flatten(0, 1).float() for z in (student_logits, teacher_logits))
        log_p, log_q = F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1)
        return F.kl_div(log_p, log_q, log_target=True, reduction="sum") / log_p.shape[0]

    divergence_of = torch.compile(divergence) if compiled else divergence

    def step(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = teacher(input_ids=batch["input_ids"], use_cache=False).logits
        clock.mark("teacher")
        student_logits = student(input_ids=batch["input_ids"], use_cache=False).logits
        clock.mark("student")
        loss = divergence_of(student_logits, teacher_logits)
        del student_logits, teacher_logits
        clock.mark("loss")
        return _learn(loss, optimizer, clock)

    return step


def liger_loss(teacher: nn.Module, student: nn.Module, batch: Batch) -> Callable[[Clock], torch.Tensor]:
    """Liger's fused linear JSD at beta = 0 on the hidden states; the models must carry Liger's patches."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    loss_fn = LigerFusedLinearJSD(jsd_beta=0.0)
    shifted = shift_labels(batch["labels"]).flatten()

    def loss_of(clock: Clock) -> torch.Tensor:
        with torch.no_grad():
            teacher_hidden = decoder_of(teacher)(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        clock.mark("teacher")
        hidden = decoder_of(student)(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
        clock.mark("student")
        loss = loss_fn(
            hidden.flatten(0, 1), find_head(student).linear.weight,
            teacher_hidden.flatten(0, 1), find_head(teacher).linear.weight, shifted,
        )  # fmt: skip
        clock.mark("loss")
        return loss

    return loss_of


def our_step(objective: DistillationObjective, student: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer):
    """The objective as the trainer runs it; `student` covers its forward and the fused loss with its gradient."""
    items = torch.tensor(batch["valid_rows"].numel(), device="cuda")

    def step(clock: Clock) -> torch.Tensor:
        inputs = objective.compare(batch, items)
        clock.mark("teacher")
        loss = student(**inputs)["loss"]
        clock.mark("student")
        return _learn(loss, optimizer, clock)

    return step


def bench_step(
    load: Callable[[], tuple[nn.Module, nn.Module]],
    batch_size: int,
    length: int,
    loss: Loss,
    *,
    variants: tuple[str, ...] = ("plain", "compile", "liger", "distill", "distill-fp8"),
    steps: int = 8,
    seed: int = 0,
) -> list[StepTime]:
    """Time the training step under each variant.

    Args:
        load: Returns teacher and student on the GPU, freshly made: Liger's patches cannot be taken off again.
        loss: The recipe's loss; "distill" uses it as it is, the others run forward KL.
        variants: Which to run, in this order; one whose library is missing is skipped with a log line.

    Returns:
        A row for each variant, then "plain (again)" if plain ran first and others followed.
    """
    results: list[StepTime] = []
    order = list(variants) + (["plain (again)"] if variants[0] == "plain" and len(variants) > 1 else [])
    order.sort(key=lambda name: name == "liger")  # its patches change the modelling file for the whole process
    for variant in order:
        if variant == "liger" and importlib.util.find_spec("liger_kernel") is None:
            log.warning("bench: liger-kernel is not installed; skipped")
            continue
        # in a function of its own, so that nothing of one variant is still in memory when the next one's peak is taken
        results.append(_bench_variant(variant, load, batch_size, length, loss, steps, seed))
        gc.collect()
        torch.cuda.empty_cache()
        log.info("bench: %s %.1f ms", variant, results[-1].ms)
    return results


def _bench_variant(
    variant: str,
    load: Callable[[], tuple[nn.Module, nn.Module]],
    batch_size: int,
    length: int,
    loss: Loss,
    steps: int,
    seed: int,
) -> StepTime:
    teacher, student = load()
    vocabulary = min(read_head(find_head(model)).weight.shape[0] for model in (teacher, student))
    batch = make_batch(batch_size, length, vocabulary, seed)
    work, tokens = [work_of(teacher, trains=False), work_of(student, trains=True)], batch_size * length
    learned, pairs = batch["valid_rows"].numel(), tokens * (length + 1) / 2
    flops = sum(w.of(tokens, learned, pairs) for w in work if w is not None)
    student.train()
    note, graphs = "", DecoderGraphs() if variant == "distill-graphs" else None
    if variant.startswith("distill"):
        chosen = [choose_attention(m, batch_size, length, backward=m is student)[0] for m in (teacher, student)]
        note = "attention " + " / ".join(chosen)
        patch(teacher, "teacher", attention=chosen[0])
        patch(student, "student", attention=chosen[1])
        objective = DistillationObjective(teacher, student, loss)
        if graphs is not None:
            for name, model in (("teacher", teacher), ("student", student)):
                graphs.add(name, decoder_of(model), trains=model is student)
            graphs.enabled = True
        if variant == "distill-fp8":
            swap_linears_for_fp8(teacher)
            gc.collect()
            torch.cuda.empty_cache()
        step = our_step(objective, student, batch, FusedAdamW(student.parameters(), lr=1e-5))
    else:
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
        if variant == "liger":
            apply_liger(teacher)
            apply_liger(student)
            loss_of = liger_loss(teacher, student, batch)
            step = lambda clock: _learn(loss_of(clock), optimizer, clock)  # noqa: E731
        else:
            if variant == "compile":
                for model in (teacher, student):
                    for layer in decoder_of(model).layers:  # type: ignore[union-attr]
                        layer.compile()
            step = plain_step(teacher, student, batch, optimizer, variant == "compile")
    result = measure(variant, step, tokens, flops, steps)
    if graphs is not None:
        for name, why in graphs.refused.items():
            note += f"; the {name} is launched: {why}"
            log.warning("bench: %s: the %s is launched: %s", variant, name, why)
        graphs.release()
    result.note = note
    unpatch(teacher)
    unpatch(student)
    return result


def apply_liger(model: Any) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=bare(model), fused_linear_cross_entropy=False, cross_entropy=False)
