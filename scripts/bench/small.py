"""Small models, where the host sets the pace: `distill run` launched and from CUDA graphs, beside what else there is.

SmolLM2-135M shapes for teacher and student (or Qwen2.5-1.5B for both), 8 x 1,024 random tokens, every one learned,
gradients clipped to 1. Every candidate runs in a process of its own, since one that captures may leave a process unable
to capture again; all in one call, one after the other. Time is that of the wall clock over `TIMED` steps after `WARM`
launched or compiled ones, energy NVML's counter over the same steps.

    plain                     transformers' layers, sdpa, logits in full, KL in fp32, fused AdamW
    compile: layers           the same, each layer and the divergence under torch.compile
    compile: MODE             the same, both whole models under torch.compile in that mode
    liger                     Liger Kernel's patches and its fused linear JSD at beta = 0
    ours, launched            `distill run` with train.cuda_graph=false
    ours                      `distill run` as it is
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from scripts.bench.harness import Row
from scripts.bench.many_gpus import DRY, ROOT

BATCH, LENGTH = 8, 1024
WARM, TIMED = 40, 60
LIMIT = 240  # seconds a candidate
PAIRS = {"smollm2": ("smollm2-135m", "smollm2-135m"), "qwen2.5": ("qwen2.5-1.5b", "qwen2.5-1.5b")}
MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
RIVALS = ("plain", "compile: layers", *(f"compile: {mode}" for mode in MODES), "liger")
OURS = {
    "ours, launched": ["train.cuda_graph=false"],
    "ours": [],
    "ours, compiled layers": ["train.compile=true"],
    "ours, packed, fp32 weights": ["student.dtype=float32"],
    "ours, packed, fp32 weights, launched": ["student.dtype=float32", "train.cuda_graph=false"],
    "ours, LoRA": ["student.lora={r: 16}"],
    "ours, LoRA, launched": ["student.lora={r: 16}", "train.cuda_graph=false"],
}


class Meter:
    """Wall time and joules of the steps between two calls; waits for the GPU at both."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES is not looked at: one GPU is what this case is for
        self.energy = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3

    def start(self) -> None:
        """Begin."""
        torch.cuda.synchronize()
        self.began, self.joules = time.perf_counter(), self.energy()

    def stop(self, steps: int) -> dict[str, float]:
        """Milliseconds and joules a step, and the process's peak MiB."""
        torch.cuda.synchronize()
        seconds, joules = time.perf_counter() - self.began, self.energy() - self.joules
        peak = torch.cuda.max_memory_allocated() / 2**20
        return {"ms": seconds / steps * 1e3, "joules": joules / steps, "peak_mib": peak}


def rival(name: str, pair: str) -> dict[str, float]:
    """A training loop of few lines on transformers' models."""
    from torch.nn import functional as F

    from distill.commands.bench import Clock, apply_liger, liger_loss, make_batch
    from distill.models.head import decoder_of
    from scripts.bench.step import random_model

    teacher, student = (random_model(which, seed) for seed, which in enumerate(PAIRS[pair]))
    teacher.requires_grad_(False)
    student.train()
    batch = make_batch(BATCH, LENGTH, student.config.vocab_size)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)

    def divergence(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        student_logits, teacher_logits = (z[:, :-1].flatten(0, 1).float() for z in (student_logits, teacher_logits))
        log_p, log_q = F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1)
        return F.kl_div(log_p, log_q, log_target=True, reduction="sum") / log_p.shape[0]

    kind, _, mode = name.partition(": ")
    ask: Callable[..., Any] = teacher
    learn: Callable[..., Any] = student
    if kind == "compile":
        divergence = torch.compile(divergence)
        if mode == "layers":
            for model in (teacher, student):
                for layer in decoder_of(model).layers:  # type: ignore[union-attr]
                    layer.compile()
        else:
            ask, learn = torch.compile(teacher, mode=mode), torch.compile(student, mode=mode)
    if kind == "liger":
        apply_liger(teacher)
        apply_liger(student)
        loss_of = liger_loss(teacher, student, batch)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        if kind == "liger":
            loss = loss_of(Clock())
        else:
            with torch.no_grad():
                logits = ask(input_ids=batch["input_ids"], use_cache=False).logits
            loss = divergence(learn(input_ids=batch["input_ids"], use_cache=False).logits, logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM // 2):
        step()
    meter = Meter()
    meter.start()
    for _ in range(TIMED):
        step()
    return meter.stop(TIMED)


class Timed(TrainerCallback):
    """Measures the steps from `WARM` to `WARM + TIMED` of a run."""

    def __init__(self) -> None:
        self.meter, self.result = Meter(), dict[str, float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where all is captured."""
        if state.global_step == WARM:
            self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last one."""
        if state.global_step == WARM + TIMED:
            self.result = self.meter.stop(TIMED)


def ours(name: str, pair: str) -> dict[str, float]:
    """A real run, of random weights and tokens."""
    import distill.run
    from distill.recipe import load
    from distill.training.trainer import DistillationTrainer

    teacher, student = PAIRS[pair]
    timed = Timed()
    recipe = load(ROOT / "recipes/llama3-8b-to-1b.yaml", [
        *DRY, f"teacher.config={teacher}", f"student.config={student}", f"train.batch_size={BATCH}",
        f"data.max_length={LENGTH}", f"data.max_rows={2 * BATCH * (WARM + TIMED)}", f"train.steps={WARM + TIMED}",
        "train.log_every=20", "data.workers=1", "data.cache=false", *OURS[name],
    ])  # fmt: skip

    class Run(DistillationTrainer):
        def __init__(self, *args: Any, callbacks: Any = None, train_dataset: Any = None, **more: Any) -> None:
            if "packed" in name:
                train_dataset = train_dataset.map(two_documents, with_indices=True)
            super().__init__(*args, callbacks=[*(callbacks or []), timed], train_dataset=train_dataset, **more)

    distill.run.DistillationTrainer = Run  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        distill.run.run(recipe)
        os.chdir(ROOT)
    return timed.result


def two_documents(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The row as two packed documents, which meet elsewhere in each."""
    length = len(row["input_ids"])
    cut = length // 5 + number * 37 % (length // 2)
    return {"position_ids": [*range(cut), *range(length - cut)]}


def run(quick: bool, only: str) -> list[Row]:
    """`quick` leaves out what compiles for minutes; `only` names a part of the pair's and the candidate's name."""
    rows = []
    for pair, (teacher, student) in PAIRS.items():
        for name in (*RIVALS, *OURS):
            if only not in f"{pair} {name}" or (quick and ("autotune" in name or pair != "smollm2")):
                continue
            command = [sys.executable, "-m", "scripts.bench.small", pair, name]
            try:
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
                result = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
                trace = [] if isinstance(error, subprocess.TimeoutExpired) else done.stderr.splitlines()
                print(f"small: {pair}, {name}: {trace[-1] if trace else error}", file=sys.stderr)
                continue
            said = [line.removeprefix("graphs").strip() for line in done.stdout.splitlines() if "graphs  " in line]
            rows.append(
                Row(
                    case="small",
                    shape=f"{teacher} to {student}, {BATCH} x {LENGTH} tokens",
                    candidate=name,
                    ms=result["ms"],
                    peak_mib=result["peak_mib"],
                    tokens_per_s=BATCH * LENGTH / result["ms"] * 1e3,
                    note=", ".join([f"{result['joules']:.1f} J", *said]),
                )
            )  # fmt: skip
            print(f"{pair:<10}{name:<40}{result['ms']:8.2f} ms  {rows[-1].note}", flush=True)
    return rows


if __name__ == "__main__":
    _, which, candidate = sys.argv
    print(json.dumps((ours if candidate in OURS else rival)(candidate, which)))
