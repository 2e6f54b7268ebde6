"""Small models, where the host sets the pace: `distill run` launched and from CUDA graphs, beside what else there is.

Random weights and tokens, every one learned, gradients clipped to 1. Every candidate runs in a process of its own,
since one that captures may leave a process unable to capture again; all in one call, one after the other. Time is that
of the wall clock over a pair's `timed` steps after `warm` launched or compiled ones, energy NVML's counter over them.

    bare products                 every product with a weight matrix, once for the teacher, thrice for the student, as
                                  one CUDA graph: what nothing avoids
    plain                         transformers' layers, sdpa, logits in full, KL in fp32, fused AdamW
    compile: MODE                 the same, both whole models and the divergence under torch.compile
    compile: layers[, MODE]       the same, each layer and the divergence under torch.compile
    ..., in one graph             the whole step captured by hand
    ..., LoRA                     PEFT's adapters of rank 16 on every linear layer of the student
    liger                         Liger Kernel's patches and its fused linear JSD at beta = 0
    ours, ...                     `distill run` as it is; `launched` and `graphed` set train.cuda_graph
    ours, ..., joined             with models/patch/joined_projections.py, which no family of GPUs uses by default

Rivals make no masks: transformers asks a batch whether documents are packed in it, but not while it is compiled or
captured, and then attends by a mask of [T, T] in place of `is_causal`. Layers compiled before had no mask, so that a
capture compiled them once more, which ended it. `torch.compiler.nested_compile_region`, which would compile a whole
model as fast as one layer, is left out: its gradients are wrong (torch 2.13, three Llama layers on a CPU).

`--only "smollm2 plain; smollm2 ours; qwen2.5"` runs these candidates of these pairs, exactly. A candidate has
BENCH_LIMIT seconds (90; a whole model takes minutes to compile), a call BENCH_SECONDS (none): what no longer fits is a
row without a time. Compiled kernels and tuned choices are kept in one folder, so that a candidate that was stopped
compiles less the next time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from scripts.bench.harness import Row, graphed
from scripts.bench.many_gpus import DRY, ROOT

GAP = 5e-6  # seconds between two kernels for which nobody waits for the host
TRACED = 4  # steps after those that are timed
RESULT = "result "  # begins a candidate's lines for the process that started it
COMPILER = {
    "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/distill-bench-inductor",
    "TORCHINDUCTOR_COMPILE_THREADS": str(min(os.cpu_count() or 1, 16)),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
}


@dataclass(frozen=True)
class Pair:
    """Two shipped architectures, the tokens of a step, and its steps before and while it is timed."""

    teacher: str
    student: str
    batch: int = 8
    length: int = 1024
    warm: int = 40
    timed: int = 60


PAIRS = {
    "smollm2": Pair("smollm2-135m", "smollm2-135m"),
    "smollm2-360m": Pair("smollm2-360m", "smollm2-135m"),
    "qwen2.5": Pair("qwen2.5-1.5b", "qwen2.5-0.5b"),
    "flagship": Pair("llama-3.1-8b", "llama-3.2-1b", 2, 4096, 12, 24),
}
TUNED = "max-autotune-no-cudagraphs"
MODES = ("default", "reduce-overhead", TUNED, "max-autotune")  # each finds kernels of those before it
LAYERS = (
    "layers",
    f"layers, {TUNED}",
    "layers, reduce-overhead",
    "layers, max-autotune",
    "layers, in one graph",
    f"layers, {TUNED}, in one graph",
    "layers, LoRA",
)
RIVALS = ("plain", "liger", *(f"compile: {what}" for what in (*LAYERS, *MODES, "default, in one graph")))
FP32, LORA = "student.dtype=float32", "student.lora={r: 16}"
LAUNCHED = "train.cuda_graph=false"
OURS = {
    "ours": [],
    "ours, launched": [LAUNCHED],
    "ours, graphed": ["train.cuda_graph=true"],
    "ours, packed, fp32 weights": [FP32],
    "ours, packed, fp32 weights, launched": [FP32, LAUNCHED],
    "ours, LoRA": [LORA],
    "ours, LoRA, launched": [LORA, LAUNCHED],
}
PRODUCTS = "bare products"
CANDIDATES = (PRODUCTS, *OURS, *RIVALS)


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


def products(pair: Pair) -> dict[str, Any]:
    """The step's products with weight matrices and nothing else, from a CUDA graph."""
    from scripts.bench.step import random_model

    rows, buffers = pair.batch * pair.length, dict[Any, torch.Tensor]()

    def buffer(*key: Any) -> torch.Tensor:
        if key not in buffers:
            buffers[key] = torch.randn(key[-2:], device="cuda", dtype=torch.bfloat16)
        return buffers[key]

    @torch.no_grad()
    def step() -> None:
        for model, trains in models:
            for weight in (module.weight for module in model.modules() if isinstance(module, nn.Linear)):
                before, after = buffer("x", rows, weight.shape[1]), buffer("y", rows, weight.shape[0])
                torch.mm(before, weight.T, out=after)
                if trains:
                    torch.mm(after, weight, out=buffer("dx", rows, weight.shape[1]))
                    torch.mm(after.T, before, out=buffer("dw", *weight.shape))

    models = [(random_model(name, 0), trains) for name, trains in ((pair.teacher, False), (pair.student, True))]
    replay, meter = graphed(step, calls=1), Meter()
    for _ in range(pair.warm):
        replay()
    meter.start()
    for _ in range(pair.timed):
        replay()
    return meter.stop(pair.timed)


def rival(name: str, pair: Pair) -> dict[str, Any]:
    """A training loop of few lines on transformers' models."""
    from distill.commands.bench import Clock, make_batch, plain_divergence
    from distill.models.head import decoder_of
    from scripts.bench.step import random_model
    from scripts.bench.step_variants import apply_liger, liger_loss

    kind, _, how = name.partition(": ")
    what, *more = how.split(", ")
    in_graph = "in one graph" in more
    if in_graph:  # all on one stream from the first call: a gradient's sum runs on the stream that its weight met first
        torch.cuda.set_stream(torch.cuda.Stream())
    teacher, student = random_model(pair.teacher, 0), random_model(pair.student, 1)
    teacher.requires_grad_(False)
    student.train()
    for model in (teacher, student):
        sys.modules[type(model).__module__].__dict__["create_causal_mask"] = lambda *_, **__: None
    if "LoRA" in more:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        student = get_peft_model(student, adapters, autocast_adapter_dtype=False)
    trained = [p for p in student.parameters() if p.requires_grad]
    batch = make_batch(pair.batch, pair.length, min(model.config.vocab_size for model in (teacher, student)))
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True, capturable=in_graph)

    divergence: Callable[..., Any] = plain_divergence
    ask: Callable[..., Any] = teacher
    learn: Callable[..., Any] = student
    if kind == "compile":
        divergence = torch.compile(divergence)
        mode = next((mode for mode in MODES if mode in (what, *more)), "default")
        if what == "layers":
            for model in (teacher, student):
                for layer in decoder_of(model).layers:  # type: ignore[union-attr]
                    layer.compile(mode=mode, dynamic=False)
        else:
            ask, learn = (torch.compile(model, mode=mode, dynamic=False) for model in (teacher, student))
    if kind == "liger":
        apply_liger(teacher)
        apply_liger(student)
        loss_of = liger_loss(teacher, student, batch)

    def step() -> None:
        if not in_graph:
            torch.compiler.cudagraph_mark_step_begin()
        if kind == "liger":
            loss = loss_of(Clock())
        else:
            with torch.no_grad():
                logits = ask(input_ids=batch["input_ids"], use_cache=False).logits
            loss = divergence(learn(input_ids=batch["input_ids"], use_cache=False).logits, logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    began = time.perf_counter()
    step()
    step()
    torch.cuda.synchronize()
    first, run = time.perf_counter() - began, step
    for _ in range(pair.warm // 2):
        step()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
            step()
        run = graph.replay
    before = [p.detach().clone() for p in trained[:8]]
    meter = Meter()
    meter.start()
    for _ in range(pair.timed):
        run()
    result = meter.stop(pair.timed)
    if all(torch.equal(old, new) for old, new in zip(before, trained, strict=False)):
        raise RuntimeError("nothing was learned: no weight has changed")
    return {**result, "note": f"first two steps {first:.0f} s"}


class Timed(TrainerCallback):
    """Measures the steps from `warm` to `warm + timed` of a run."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.meter, self.result = pair, Meter(), dict[str, Any]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where all is captured."""
        if state.global_step == self.pair.warm:
            self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last one; told at once, whatever becomes of the trace."""
        if state.global_step == self.pair.warm + self.pair.timed:
            self.result = self.meter.stop(self.pair.timed)
            tell(self.result)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The share of the phase `data` in the last interval that is timed."""
        logs = kwargs["logs"]
        times = [value for key, value in logs.items() if key.startswith("time_")]
        if times and state.global_step == self.pair.warm + self.pair.timed:
            self.result["note"] = f"data {logs['time_data'] / sum(times):.1%}"


def busy_share(spans: Iterable[tuple[float, float]], bridged: float = 0.0) -> tuple[float, float]:
    """Share of the time that any of `spans` (start, end) covers, and that time, from the first start to the last end.

    Gaps of at most `bridged` seconds count as covered: what a GPU takes from one kernel of a graph to the next.

    Raises:
        ValueError: no spans.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("small: expected traced kernels, found none")
    covered = 0.0
    reached = ordered[0][0]
    for start, end in ordered:
        begun = reached if start - reached <= bridged else start
        covered += max(end - max(begun, reached), 0.0)
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return covered / whole, whole


class Trace(TrainerCallback):
    """Traces the steps after `first`, up to and with `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start and stop."""
        if state.global_step == self.first:
            torch.cuda.synchronize()
            self.profiler.start()
        elif state.global_step == self.last:
            torch.cuda.synchronize()
            self.profiler.stop()

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of all that ran on the GPU, seconds."""
        events: Any = self.profiler.events()
        on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return [(event.time_range.start * 1e-6, event.time_range.end * 1e-6) for event in on_gpu]


def ours(name: str, pair: Pair) -> dict[str, Any]:
    """A real run, of random weights and tokens."""
    import distill.run
    from distill.recipe import load
    from distill.training.trainer import DistillationTrainer

    steps = pair.warm + pair.timed
    timed, trace = Timed(pair), Trace(steps + 1, steps + 1 + TRACED)
    recipe = load(
        ROOT / "recipes/llama3-8b-to-1b.yaml",
        [
            *DRY,
            f"teacher.config={pair.teacher}",
            f"student.config={pair.student}",
            f"train.batch_size={pair.batch}",
            f"data.max_length={pair.length}",
            f"data.max_rows={2 * pair.batch * steps}",
            f"train.steps={trace.last + 1}",
            "train.log_every=20",
            "data.workers=1",
            "data.cache=false",
            *OURS[name],
        ],
    )

    class Run(DistillationTrainer):
        def __init__(self, *args: Any, callbacks: Any = None, train_dataset: Any = None, **more: Any) -> None:
            if "packed" in name:
                train_dataset = train_dataset.map(two_documents, with_indices=True)
            given = [*(callbacks or []), timed, trace]
            super().__init__(*args, callbacks=given, train_dataset=train_dataset, **more)

    distill.run.DistillationTrainer = Run  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        distill.run.run(recipe)
        os.chdir(ROOT)
    spans = trace.spans()
    shares = f"GPU busy {busy_share(spans)[0]:.1%}, {busy_share(spans, GAP)[0]:.1%} with gaps below {GAP * 1e6:.0f} us"
    return {**timed.result, "note": f"{shares}, {timed.result.get('note', '')}"}


def two_documents(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The row as two packed documents, which meet elsewhere in each."""
    length = len(row["input_ids"])
    cut = length // 5 + number * 37 % (length // 2)
    return {"position_ids": [*range(cut), *range(length - cut)]}


def chosen(quick: bool, only: str) -> list[tuple[str, str]]:
    """Pairs and candidates to run; `only` lists some by `PAIR`, `CANDIDATE` or `PAIR CANDIDATE`, divided by `;`.

    Raises:
        ValueError: an entry that names nothing.
    """
    everything = [(pair, name) for pair in PAIRS for name in CANDIDATES]
    entries = [entry.strip() for entry in only.split(";") if entry.strip()]
    for entry in entries:
        if not any(entry in (pair, name, f"{pair} {name}") for pair, name in everything):
            raise ValueError(
                f"--only: expected {', '.join(PAIRS)}, one of {'; '.join(CANDIDATES)}, or both; got {entry}"
            )
    if entries:
        return [(p, n) for p, n in everything if any(entry in (p, n, f"{p} {n}") for entry in entries)]
    return [(p, n) for p, n in everything if not quick or (p == "smollm2" and n not in RIVALS[2 + len(LAYERS) :])]


def tell(result: dict[str, Any]) -> None:
    """Hand `result` to the process that started this one."""
    print(RESULT + json.dumps(result), flush=True)


def candidate(program: str, *arguments: str, limit: float) -> dict[str, Any]:
    """Return the row that `python -m program *arguments` prints within `limit` seconds; after a failure `note` has the
    reason and `ms` is missing."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:  # a pipe's other end may live on
        process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            cwd=ROOT,
            env=COMPILER | os.environ,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code, why = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            code, why = 0, f"not done after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what compiles for it as well
            process.wait()
        out.seek(0)
        errors.seek(0)
        said, raised = out.read().splitlines(), errors.read().splitlines()
    if code:  # the first is what the others followed from
        raised = [line for line in raised if re.match(r"[\w.]*(Error|Exception)\b", line)]
        why = (*raised, f"ended with {code}")[0][:200]
    results = [json.loads(line.removeprefix(RESULT)) for line in said if line.startswith(RESULT)]
    result = results[-1] if results else {}
    graphs = [line.removeprefix("graphs").strip() for line in said if line.startswith("graphs  ")]
    return {**result, "note": ", ".join(part for part in (result.get("note"), *graphs, why) if part)}


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out all but SmolLM2 and what compiles for minutes; for `only` see `chosen`."""
    limit, ends = float(os.environ.get("BENCH_LIMIT", 90)), float(os.environ.get("BENCH_SECONDS", "inf"))
    ends += time.monotonic()
    for name, candidate_name in chosen(quick, only):
        pair, began = PAIRS[name], time.monotonic()
        seconds = max(min(limit, ends - began), 0.1)
        found = candidate("scripts.bench.small", name, candidate_name, limit=seconds)
        ms = found.get("ms", math.nan)
        took, joules = time.monotonic() - began, found.get("joules", math.nan)
        times = f"{ms:8.2f} ms {joules:6.1f} J  {took:4.0f} s"
        print(f"{name:<14}{candidate_name:<40}{times}  {found['note']}", flush=True)
        yield Row(
            case="small",
            shape=f"{pair.teacher} to {pair.student}, {pair.batch} x {pair.length} tokens",
            candidate=candidate_name,
            ms=ms,
            peak_mib=found.get("peak_mib"),
            tokens_per_s=pair.batch * pair.length / ms * 1e3 if "ms" in found else None,
            joules=found.get("joules"),
            note=found["note"],
        )


if __name__ == "__main__":
    _, which, wanted = sys.argv
    measure = rival if wanted in RIVALS else ours
    tell(products(PAIRS[which]) if wanted == PRODUCTS else measure(wanted, PAIRS[which]))
