"""The input pipeline alone, with no step behind it: tokens a second of `distill run`'s loader.

Packed rows of 1,024 tokens, two documents each, 8 a batch, read from their Arrow file, collated in the recipe's workers
and, where there is a GPU, pinned and copied to it: the loader that the trainer makes, iterated once or for `SECONDS`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench.harness import Row
from scripts.bench.many_gpus import DRY, ROOT
from scripts.bench.small import two_documents

NEEDS_CUDA = False
BATCH, LENGTH, ROWS, SECONDS = 8, 1024, 4096, 3.0


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` leaves out all but one worker; `only` names a part of the candidates' names."""
    from distill.data.load import load_data
    from distill.models.dtypes import resolve_device, resolve_precision
    from distill.planning.run_plan import plan_steps
    from distill.recipe import load
    from distill.training.arguments import training_arguments
    from distill.training.trainer import DistillationTrainer

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    for workers in (1,) if quick else (0, 1, 2):
        name = f"{workers} {'worker' if workers == 1 else 'workers'}"
        if only not in name:
            continue
        recipe = load(
            ROOT / "recipes/llama3-8b-to-1b.yaml",
            [
                *DRY,
                f"data.max_length={LENGTH}",
                f"data.max_rows={ROWS}",
                f"train.batch_size={BATCH}",
                f"data.workers={workers}",
                "data.cache=false",
                "train.eval_every=null",
                "train.save_every=null",
            ],
        )
        device = resolve_device(recipe.train)
        data = load_data(recipe.data, None, seed=0, vocab_size=256).train.map(two_documents, with_indices=True)
        with tempfile.TemporaryDirectory() as folder:
            arguments = training_arguments(
                recipe,
                Path(folder),
                plan_steps(recipe, len(data)),
                device=device,
                precision=resolve_precision(recipe, device),
            )
            student, teacher = LlamaForCausalLM(config), LlamaForCausalLM(config)
            loader = DistillationTrainer(student, teacher, arguments, train_dataset=data).get_train_dataloader()
            tokens, began = 0, time.perf_counter()
            for number, batch in enumerate(loader):
                tokens += batch["input_ids"].numel()
                if number == 4:  # the workers are there
                    tokens, began = 0, time.perf_counter()
                elif time.perf_counter() - began > SECONDS:
                    break
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        yield Row(
            case="input",
            shape=f"packed rows, {BATCH} x {LENGTH} tokens, to {device.type}",
            candidate=name,
            ms=seconds / tokens * BATCH * LENGTH * 1e3,
            tokens_per_s=tokens / seconds,
        )
