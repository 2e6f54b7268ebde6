"""One line in a training script: `AutoFusedModelForCausalLM` beside Liger's `AutoLigerKernelForCausalLM` and neither.

A step is forward with labels, backward and torch's fused AdamW, in bf16, on rows of random tokens that are padded on
the right (half to all of their length). Each candidate runs in a process of its own, since Liger's line changes
transformers for all that follow. Memory is of the whole process: peak allocated (`peak_mib`) and reserved (in the
note); tokens a second count padding, which all compute alike. The gate: the first loss within 2 % of transformers'.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
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


def measure(candidate: str, folder: str, batches: list[int], length: int, device: str) -> list[dict[str, Any]]:
    """Milliseconds a step (median of `STEPS`), peaks in MiB and the first loss, for each number of rows."""
    model = load(candidate, folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    found: list[dict[str, Any]] = []
    for batch in batches:
        inputs = padded_batch(batch, length, model.config.vocab_size, device)
        try:
            found.append({"batch": batch, **_steps(model, optimizer, inputs, device)})
        except torch.OutOfMemoryError:
            found.append({"batch": batch, "failed": "out of memory"})
            break
    return found


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
        milliseconds += [(time.perf_counter() - start) * 1e3] * (step >= 3)
        losses.append(loss.item())
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return {"ms": statistics.median(milliseconds), "loss": losses[0], "allocated": peaks[0] / 2**20,
            "reserved": peaks[1] / 2**20}  # fmt: skip


def rows_of(name: str, length: int, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """One row a candidate and number of rows; what a wrong or failed candidate did is not timed."""
    right = {one["batch"]: one["loss"] for one in found.get("transformers", []) if "loss" in one}
    rows = []
    for candidate, measured in found.items():
        for one in measured:
            shape = f"{name}, {one['batch']} x {length} tokens, bf16"
            if "failed" in one:
                rows.append(Row("adoption", shape, candidate, math.nan, note=one["failed"]))
                continue
            error = {}
            if one["batch"] in right:
                error = {"loss": abs(one["loss"] / right[one["batch"]] - 1)}
                if error["loss"] > GATE:
                    rows.append(Row("adoption", shape, candidate, math.nan, error=error, note="wrong, not timed"))
                    continue
            rows.append(
                Row("adoption", shape, candidate, one["ms"], peak_mib=one["allocated"], error=error,
                    tokens_per_s=one["batch"] * length / one["ms"] * 1e3, note=f"reserved {one['reserved']:.0f} MiB")
            )  # fmt: skip
    return rows


def run(quick: bool, only: str) -> list[Row]:
    """`quick`: the small model, up to 8 rows. Beyond transformers' last number of rows there is nothing to hold to."""
    rows = []
    for name in MODELS[:1] if quick else MODELS:
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(f"{ARCHITECTURES}/{name}")
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            found = {one: _in_its_own_process(one, folder, BATCHES[:4] if quick else BATCHES) for one in CANDIDATES}
        rows += rows_of(name, LENGTH, found)
    return rows


def _in_its_own_process(candidate: str, folder: str, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "scripts.bench.adoption", candidate, folder, ",".join(map(str, batches))]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["?"]
        return [{"batch": batches[0], "failed": f"failed: {lines[-1]}"}]
    return list(json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    given = [int(batch) for batch in sys.argv[3].split(",")]
    print(json.dumps(measure(sys.argv[1], sys.argv[2], given, LENGTH, "cuda")))
