"""On-policy distillation end to end: `distill run` beside TRL's DistillationTrainer with its transformers engine.

Random weights; prompts of random tokens, as long as GSM8K's questions in a chat template (mean 100 tokens). Students of
random weights hardly ever end an answer, so that all answers have their full length, here and there. The loss is the
reverse KL, student and states in bf16. Every candidate runs in a process of its own; time is that of the wall clock
over some steps after the first ones, energy NVML's counter over the same steps, tokens those that are learned.

    8b-to-1b   Llama-3.1-8B to 3.2-1B shapes, 64 prompts x 256 new tokens
    smollm2    SmolLM2-135M shapes for both, 64 prompts x 128 new tokens

    TRL, 16 x 4     generated at once, 4 micro-batches of 16; without gradient checkpointing, fused AdamW
    TRL, 64 x 1     one micro-batch
    TRL, ...        with Liger's layers; with a static cache
    ours            packed rows: about 64 prompts a step, in 3 micro-batches
    ours, ahead ... the answers of two steps, or of four, are drawn together
    ours, fp8 ...   with the teacher's linear layers in fp8, which none of TRL's ways has; with gradient checkpointing
    ours, offl...   with the teacher's layers in host memory, all prompts in one micro-batch, gradient checkpointing
    ours, ...       with the step launched, or from CUDA graphs

TRL's vLLM engine and its AsyncDistillationTrainer need vLLM and are not run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from scripts.bench.harness import Row
from scripts.bench.many_gpus import DRY, ROOT
from scripts.bench.small import Meter

PROMPTS = 64
LIMIT = 150  # seconds a candidate


class Pair(NamedTuple):
    """Shapes of a case: architectures, new tokens, and how rows of `length` tokens make a step of `rows` of them."""

    teacher: str
    student: str
    new: int
    length: int
    rows: int
    micro: int


PAIRS = {
    "8b-to-1b": Pair("llama-3.1-8b", "llama-3.2-1b", new=256, length=2000, rows=12, micro=4),
    "smollm2": Pair("smollm2-135m", "smollm2-135m", new=128, length=1248, rows=12, micro=12),
}
LARGE, SMALL = PAIRS
TRL: dict[str, dict[str, Any]] = {
    "TRL, 16 x 4": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
    "TRL, 64 x 1": {"per_device_train_batch_size": 64},
    "TRL, 16 x 4, liger": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "use_liger_kernel": True,
    },
    "TRL, 16 x 4, static cache": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "cache_implementation": "static",
    },
}
OURS = {
    "ours": ["train.cuda_graph=false"],
    "ours, ahead": ["train.cuda_graph=false", "data.on_policy.max_staleness=1"],
    "ours, ahead 3": ["train.cuda_graph=false", "data.on_policy.max_staleness=3"],
    "ours, fp8 teacher": ["train.cuda_graph=false", "teacher.dtype=fp8"],
    "ours, fp8 teacher, ahead": ["train.cuda_graph=false", "teacher.dtype=fp8", "data.on_policy.max_staleness=1"],
    "ours, fp8 teacher, checkpointed": [
        "train.cuda_graph=false",
        "teacher.dtype=fp8",
        "train.gradient_checkpointing=true",
    ],
    "ours, offloaded teacher, checkpointed": [
        "train.cuda_graph=false",
        "teacher.offload=cpu",
        "train.gradient_checkpointing=true",
        "train.batch_size=12",
    ],
    "ours, graphs": ["train.cuda_graph=true"],
    "ours, graphs, ahead": ["train.cuda_graph=true", "data.on_policy.max_staleness=1"],
}
QUICK = {LARGE: ("TRL, 16 x 4", "ours", "ours, ahead"), SMALL: ("ours", "ours, graphs")}
STEPS = {"TRL": (1, 3), LARGE: (8, 8), SMALL: (8, 16)}  # untimed (graphs are captured in them), timed


class Timed(TrainerCallback):
    """Measures a trainer's steps after the first `warm`, and the tokens that they learn.

    Attributes:
        learned: tokens of each step, as they were counted; numbers or tensors.
        phases: seconds a step of each phase, as a run logged them last.
    """

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps, self.learned, self.result = warm, steps, list[Any](), dict[str, float]()
        self.meter, self.phases = Meter() if torch.cuda.is_available() else None, dict[str, float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Keep what is said of phases."""
        said = {name: value for name, value in (logs or {}).items() if name.startswith("time_")}
        self.phases = said or self.phases

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin after the last untimed step, end after the last."""
        if self.meter is not None and state.global_step == self.warm:
            self.meter.start()
        if state.global_step == self.warm + self.steps:
            learned = sum(map(int, self.learned[self.warm : self.warm + self.steps]))
            figures = {"ms": float("nan"), "joules": float("nan"), "peak_mib": float("nan")}
            figures = figures if self.meter is None else self.meter.stop(self.steps)
            self.result = figures | {"learned": learned / self.steps}


def lengths(count: int) -> list[int]:
    """Tokens of `count` prompts: about those of GSM8K's questions behind a template of 36."""
    draw = random.Random(0)
    return [36 + min(250, max(15, round(draw.lognormvariate(4.1, 0.38)))) for _ in range(count)]


def prompts(count: int, vocabulary: int) -> list[str]:
    """Random words, each one token."""
    draw = random.Random(1)
    return [" ".join(f"t{draw.randrange(3, vocabulary)}" for _ in range(length)) for length in lengths(count)]


def tokenizer_of(vocabulary: int) -> Any:
    """One whose tokens are words: <end>, <pad>, t2, t3, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", "<pad>", *(f"t{number}" for number in range(2, vocabulary))]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="t2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=words[0], pad_token=words[1], padding_side="left"
    )


def trl(name: str, pair: Pair, warm: int, steps: int) -> dict[str, float]:
    """TRL's trainer on transformers' models."""
    import datasets
    from transformers import AutoConfig, AutoModelForCausalLM

    datasets.config.TORCHVISION_AVAILABLE = False  # newer ones lack what datasets imports of it
    from trl import DistillationConfig, DistillationTrainer

    cuda = torch.cuda.is_available()
    config: Any = AutoConfig.from_pretrained(_architecture(pair.student))
    loaded = []
    for seed, which in enumerate((pair.teacher, pair.student)):
        torch.manual_seed(seed)
        with torch.device("cuda" if cuda else "cpu"):
            own = AutoConfig.from_pretrained(_architecture(which))
            loaded.append(AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16 if cuda else torch.float32))
    teacher, student = loaded
    teacher.requires_grad_(False)
    timed = Timed(warm, steps)

    class Counting(DistillationTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            answers = super()._generate_single_turn(*args, **kwargs)
            timed.learned.append(sum(map(len, answers)))
            return answers

    with tempfile.TemporaryDirectory() as folder:
        arguments = DistillationConfig(
            output_dir=folder,
            max_steps=warm + steps,
            max_completion_length=pair.new,
            beta=1.0,
            temperature=1.0,
            gradient_checkpointing=False,
            bf16=cuda,
            report_to="none",
            save_strategy="no",
            logging_steps=steps,
            optim="adamw_torch_fused",
            **TRL[name],
        )
        rows = [{"prompt": text} for text in prompts(PROMPTS * (warm + steps), config.vocab_size)]
        Counting(
            student,
            teacher,
            arguments,
            train_dataset=rows,
            processing_class=tokenizer_of(config.vocab_size),
            callbacks=[timed],
        ).train()
    return timed.result


def ours(name: str, pair: Pair, warm: int, steps: int) -> dict[str, Any]:
    """A real run, of random weights, on a file of prompts."""
    import distill.run
    from distill.models.loading import load_config
    from distill.recipe import load
    from distill.training.trainer import DistillationTrainer

    timed = Timed(warm, steps)
    with tempfile.TemporaryDirectory() as folder:
        recipe = load(
            ROOT / "recipes/llama3-8b-to-1b-on-policy.yaml",
            [
                *(item for item in DRY if not item.startswith("data.source")),
                f"teacher.model={folder}",
                f"teacher.config={_architecture(pair.teacher)}",
                f"student.config={_architecture(pair.student)}",
                f"data.source={folder}/rows.jsonl",
                "data.subset=null",
                "data.format=prompt_completion",
                f"data.max_length={pair.length}",
                "data.max_rows=null",
                "data.cache=false",
                f"data.on_policy={{fraction: 1, max_new_tokens: {pair.new}, batch_size: {PROMPTS}}}",
                f"train.batch_size={pair.micro}",
                f"train.tokens_per_step={pair.rows * pair.length}",
                f"train.steps={warm + steps}",  # both even: steps whose answers are drawn together are timed together
                f"train.log_every={warm}",  # `steps` is a multiple: the last line is of timed ones
                "train.gradient_checkpointing=false",
                "train.eval_every=null",
                "train.save_every=null",
                *([] if torch.cuda.is_available() else ["student.dtype=float32"]),
                *OURS[name],
            ],
        )
        vocabulary = load_config(recipe.student, "student").vocab_size
        tokenizer_of(vocabulary).save_pretrained(folder)
        # answers a little longer than any that is drawn, so that what is drawn fits into the rows
        answer = " ".join(["t3"] * (pair.new + 4))
        rows = [
            {"prompt": text, "completion": answer} for text in prompts((PROMPTS + 8) * (warm + steps + 1), vocabulary)
        ]
        Path(folder, "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

        class Run(DistillationTrainer):
            def __init__(self, *args: Any, callbacks: Any = None, **more: Any) -> None:
                super().__init__(*args, callbacks=[*(callbacks or []), timed], **more)

            def get_batch_samples(self, *args: Any) -> Any:
                batches, count = super().get_batch_samples(*args)
                timed.learned.append(count)
                return batches, count

        distill.run.DistillationTrainer = Run  # type: ignore[misc]
        os.chdir(folder)
        distill.run.run(recipe)
        os.chdir(ROOT)
    return timed.result | {"phases": timed.phases}


def _architecture(name: str) -> str:
    return name if "/" in name else str(ROOT / "recipes/architectures" / name)


def rows_of(shape: str, pair: Pair, results: Sequence[tuple[str, dict[str, float], str]]) -> list[Row]:
    """Return the rows measured, each with its ratio to TRL's best so far where there is one."""
    speeds = {name: figures["learned"] / figures["ms"] * 1e3 for name, figures, _ in results}
    peaks = {name: figures["peak_mib"] for name, figures, _ in results}
    best = max((name for name in speeds if name in TRL), key=lambda name: speeds[name], default=None)
    made = []
    for name, figures, said in results:
        note = [f"{figures['learned']:,.0f} learned a step"]
        if best is not None and name not in TRL:
            note.append(f"{speeds[name] / speeds[best]:.2f} x, {peaks[name] / peaks[best]:.2f} of the memory of {best}")
        elif name not in TRL and "ours" in speeds:
            note.append(f"{speeds[name] / speeds['ours']:.2f} x ours")
        made.append(
            Row(
                case="on_policy",
                shape=f"{shape}, {PROMPTS} prompts x {pair.new} new tokens",
                candidate=name,
                ms=figures["ms"],
                peak_mib=figures["peak_mib"],
                tokens_per_s=speeds[name],
                joules=figures["joules"],
                note=", ".join([*note, *([said] if said else [])]),
            )
        )
    return made


def run(quick: bool, only: str) -> Iterator[Row]:
    """`quick` keeps to one of TRL's ways; `only`: pairs with candidates ("smollm2 ours; smollm2 ours, graphs"), or a
    part of their names."""
    everything = [f"{shape} {name}" for shape in PAIRS for name in (*TRL, *OURS)]
    entries = [entry.strip() for entry in only.split(";")]
    for shape, pair in PAIRS.items():
        results = []
        for name in (*TRL, *OURS):
            whole = f"{shape} {name}"
            asked = any(entry == whole or (entry not in everything and entry in whole) for entry in entries)
            if not asked or (quick and name not in QUICK[shape]):
                continue
            command = [sys.executable, "-m", "scripts.bench.on_policy", shape, name]
            try:
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
                figures = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
                trace = [] if isinstance(error, subprocess.TimeoutExpired) else done.stderr.splitlines()
                print(f"on_policy: {shape}, {name}: {chr(10).join(trace[-60:]) or error}", file=sys.stderr, flush=True)
                continue
            said = [f"{phase.removeprefix('time_')} {1e3 * s:.0f}" for phase, s in figures.pop("phases", {}).items()]
            said += [line.removeprefix("graphs").strip() for line in done.stdout.splitlines() if "graphs  " in line]
            results.append((name, figures, ", ".join(said)))
            print(f"{shape} {name}: {json.dumps(figures)}", flush=True)
            yield rows_of(shape, pair, results)[-1]


if __name__ == "__main__":
    _, which, candidate = sys.argv
    measure: Callable[..., dict[str, float]] = ours if candidate in OURS else trl
    print(json.dumps(measure(candidate, PAIRS[which], *STEPS[which if candidate in OURS else "TRL"])))
