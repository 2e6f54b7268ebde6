"""One line in a training script: `AutoFusedModelForCausalLM` beside Liger's `AutoLigerKernelForCausalLM` and neither.

A step is forward with labels, backward and torch's fused AdamW, in bf16, on rows of random tokens that are padded on
the right (half to all of their length). Each candidate runs in a process of its own, since Liger's line changes
transformers for all that follow, for `LIMIT` seconds at most: what it has measured by then counts. Memory is of the
whole process: peak allocated (`peak_mib`) and reserved (in the note); tokens a second count padding, which all
compute alike. The gate: the first loss within 2 % of transformers'.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench.harness import Row
from scripts.bench.step import ARCHITECTURES

MODELS = ("smollm2-135m", "llama-3.2-1b")
CANDIDATES = ("transformers", "Liger", "ours", "ours, keep_logits")
BATCHES, LENGTH, STEPS = (1, 2, 4, 8, 16, 32), 2048, 8
GATE = 0.02
LIMIT = 60  # seconds a candidate
PROGRAM = ["-m", "scripts.bench.adoption"]
RESULT = "result "  # begins a line for the process that started a candidate


def load(candidate: str, folder: str, device: str) -> Any:
    """A candidate's one line, then train mode; weights in the dtype of the folder."""
    settings: dict[str, Any] = {"dtype": "auto", "device_map": {"": device}} if device == "cuda" else {"dtype": "auto"}
    if candidate == "Liger":
        from liger_kernel.transformers import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM.from_pretrained(folder, **settings).train()
    if candidate.startswith("ours"):
        from distill import AutoFusedModelForCausalLM

        keep = candidate.endswith("keep_logits")
        return AutoFusedModelForCausalLM.from_pretrained(folder, keep_logits=keep, **settings).train()
    return AutoModelForCausalLM.from_pretrained(folder, **settings).train()


def padded_batch(batch: int, length: int, vocab: int, device: str) -> dict[str, torch.Tensor]:
    """Random tokens in rows of half to all of `length`."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, vocab, (batch, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def measure(candidate: str, folder: str, batches: list[int], length: int, device: str) -> Iterator[dict[str, Any]]:
    """Milliseconds a step (median of `STEPS`), peaks in MiB and the first loss, for each number of rows."""
    model = load(candidate, folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for batch in batches:
        inputs = padded_batch(batch, length, model.config.vocab_size, device)
        try:
            yield {"batch": batch, **_steps(model, optimizer, inputs, device)}
        except torch.OutOfMemoryError:
            yield {"batch": batch, "failed": "out of memory"}
            return


def _steps(
    model: Any, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor], device: str
) -> dict[str, Any]:
    cuda = device == "cuda"
    if cuda:
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    milliseconds, losses = [], []
    for step in range(STEPS + 3):
        start = time.perf_counter()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if step >= 3:
            milliseconds.append((time.perf_counter() - start) * 1e3)
        losses.append(loss.item())
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return {
        "ms": statistics.median(milliseconds),
        "loss": losses[0],
        "allocated": peaks[0] / 2**20,
        "reserved": peaks[1] / 2**20,
    }


def rows_of(
    name: str, length: int, candidate: str, measured: list[dict[str, Any]], right: dict[int, float]
) -> Iterator[Row]:
    """A row for each number of rows; what is wrong, by the losses that are `right`, or failed has no time."""
    for one in measured:
        row = Row("adoption", f"{name}, {one['batch']} x {length} tokens, bf16", candidate, math.nan)
        if "failed" in one:
            row.note = one["failed"]
            yield row
            continue
        if one["batch"] in right:
            row.error = {"loss": abs(one["loss"] / right[one["batch"]] - 1)}
        if row.error.get("loss", 0.0) > GATE:
            row.note = "wrong, not timed"
        else:
            row.ms, row.peak_mib, row.note = one["ms"], one["allocated"], f"reserved {one['reserved']:.0f} MiB"
            row.tokens_per_s = one["batch"] * length / one["ms"] * 1e3
        yield row


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick`: the small model, up to 8 rows. Beyond transformers' last number of rows there is nothing to hold to."""
    for name in MODELS[:1] if quick else MODELS:
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(f"{ARCHITECTURES}/{name}")
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            right: dict[int, float] = {}
            for candidate in CANDIDATES:
                measured = _in_its_own_process(candidate, folder, BATCHES[:4] if quick else BATCHES)
                right = right or {one["batch"]: one["loss"] for one in measured if "loss" in one}
                yield from rows_of(name, LENGTH, candidate, measured, right)


def _in_its_own_process(candidate: str, folder: str, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, *PROGRAM, candidate, folder, ",".join(map(str, batches))]
    root = Path(__file__).resolve().parents[2]
    try:
        ended = subprocess.run(command, capture_output=True, cwd=root, timeout=LIMIT)
        said, why = ended.stdout, (ended.stderr.decode().strip().splitlines() or ["?"])[-1] if ended.returncode else ""
    except subprocess.TimeoutExpired as late:
        said, why = late.stdout or b"", f"not done after {LIMIT} s"
    found = [json.loads(line.removeprefix(RESULT)) for line in said.decode().splitlines() if line.startswith(RESULT)]
    return found + ([{"batch": batches[min(len(found), len(batches) - 1)], "failed": why}] if why else [])


if __name__ == "__main__":
    given = [int(batch) for batch in sys.argv[3].split(",")]
    for result in measure(sys.argv[1], sys.argv[2], given, LENGTH, "cuda"):
        print(RESULT + json.dumps(result), flush=True)
