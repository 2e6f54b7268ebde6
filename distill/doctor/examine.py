"""`distill doctor`: checks of the machine, and of the training invariants on a recipe's models and data.

lines = environment_lines()              # versions, GPUs, Triton, memory, disk, each with advice
for finding in examine(recipe): print(finding)
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.core.environment import environment
from distill.core.units import GIB
from distill.doctor.check_result import CheckLine, CheckResult
from distill.doctor.check_setup import CheckSetup
from distill.doctor.invariants import CHECKS
from distill.doctor.invariants_rollouts import ROLLOUT_CHECKS
from distill.doctor.invariants_runs import RUN_CHECKS
from distill.doctor.rollouts import StudentRollouts, prompts_of
from distill.doctor.rows import first_trained, join_rows, last_tokens, packing_fault, shortened_rows
from distill.generation.from_recipe import require_prompts
from distill.models.adapters import add_lora
from distill.models.dtypes import Precision, resolve_device
from distill.models.load.save_check import end_ids, turn_end_problem
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.quantised_checkpoints import quantised_by_transformers
from distill.models.sharding import SINGLE_PROCESS
from distill.recipe import Recipe
from distill.recipe.teachers import describe_teacher
from distill.teachers.backends.local import truncated
from distill.teachers.base import Teacher
from distill.teachers.load_context import LoadContext, calibration_of
from distill.teachers.opening import ModelPair, opened_pair
from distill.teachers.registry import source_of
from distill.training.quantise import quantise_at_once

ROWS = 6
TOKENS = 64
LARGE = 3_000_000_000  # parameters of both models, above which truncated copies are checked
WIDE = Precision(torch.float32, torch.float32, torch.float32)


def environment_lines(folder: Path = Path()) -> list[CheckLine]:
    """Return lines on versions, GPUs, Triton, memory and disk."""
    facts = environment()
    names = ("distill", "python", "system", "torch", "transformers", "datasets", "accelerate", "peft")
    lines = [CheckLine(name, True, facts[name]) for name in names if name in facts]
    lines += [*_gpus(facts), _triton(), _memory(), _disk(folder), _hub()]
    return lines


def _gpus(facts: dict[str, str]) -> list[CheckLine]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and finds no GPU: see nvidia-smi" if built else "torch is a CPU build"
        return [CheckLine("GPU", True, f"none ({why}); everything runs on the CPU")]
    lines = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        advice = "; another program uses it: see nvidia-smi" if busy else ""
        name = torch.cuda.get_device_name(index)
        lines.append(
            CheckLine(f"GPU {index}", not busy, f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free{advice}")
        )
    lines.append(CheckLine("driver", True, f"{facts.get('driver', 'unknown')}, CUDA {facts.get('cuda')}"))
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    lines.append(CheckLine("bf16", bf16, "native" if bf16 else "emulated: set train.precision to float16 or float32"))
    return lines


def _triton() -> CheckLine:
    """Check Triton by running a kernel on the GPU: it needs a working compiler and driver, not just the package."""
    from distill_kernels.launch import HAS_TRITON

    if not HAS_TRITON:
        return CheckLine(
            "triton", not torch.cuda.is_available(), "not installed, so kernels cannot run: pip install triton"
        )
    version = importlib.metadata.version("triton")
    if not torch.cuda.is_available():
        return CheckLine("triton", True, f"{version}, not used on a CPU")
    from distill_kernels.layers.rms_norm import rms_norm

    x = torch.randn(4, 256, device="cuda")
    weight = torch.ones(256, device="cuda")
    try:
        off = (rms_norm(x, weight, 1e-6) - torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)).abs().max().item()
    except Exception as error:  # a broken compiler or driver may raise anything
        return CheckLine(
            "triton", False, f"{version} cannot run a kernel: {str(error).splitlines()[0]}; reinstall torch"
        )
    return CheckLine("triton", off < 1e-5, f"{version}, a kernel ran with an error of {off:.0e}")


def _memory() -> CheckLine:
    import psutil  # comes with accelerate

    free = psutil.virtual_memory().available / GIB
    return CheckLine("memory", free >= 4, f"{free:.0f} GiB free" + ("" if free >= 4 else "; close other programs"))


def _disk(folder: Path) -> CheckLine:
    free = shutil.disk_usage(folder).free / GIB
    writable = os.access(folder, os.W_OK)
    detail = f"{free:.0f} GiB free in {folder.absolute()}"
    if not writable:
        return CheckLine(
            "disk", False, f"{folder.absolute()} is read-only: runs/ cannot be made here; use another folder"
        )
    return CheckLine("disk", free >= 10, detail + ("" if free >= 10 else "; checkpoints are large: make room"))


def _hub() -> CheckLine:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return CheckLine(
        "hub",
        True,
        "offline (HF_HUB_OFFLINE): only models and data that are on this machine"
        if offline
        else "used where a recipe names a hub model or data set",
    )


# ------------------------------------------------------------------ a recipe


def examine(recipe: Recipe, *, small: bool | None = None) -> Iterator[CheckResult]:
    """Run every invariant on the recipe's models and data, yielding one result at a time.

    The models are loaded in float32 whatever the recipe's dtypes, so that rounding hides no fault; with `small`
    (default: if both together have more than 3 billion parameters) only two layers of each are used.

    Raises:
        ValueError: The recipe cannot be used; the message is that of `distill run`.
    """
    with contextlib.ExitStack() as opened:
        with _silenced():
            subject = prepare(recipe, opened, small=small)
        for check in (*CHECKS, *(ROLLOUT_CHECKS if subject.rollouts else ()), *RUN_CHECKS):
            with _silenced():
                begun = time.perf_counter()
                try:
                    finding = check(subject)
                except Exception as error:  # a check that cannot run has failed, and the others still run
                    first = (str(error).splitlines() or [""])[0]
                    finding = CheckResult(check.__name__.split("_")[0], False, f"{type(error).__name__}: {first}")
            yield finding._replace(seconds=time.perf_counter() - begun)


def prepare(recipe: Recipe, opened: contextlib.ExitStack | None = None, *, small: bool | None = None) -> CheckSetup:
    """Load the models and data for `examine`; the teacher is closed with `opened`, if given."""
    opened = opened or contextlib.ExitStack()
    torch.manual_seed(recipe.train.seed)
    plain = _in_float32(recipe)
    source = source_of(plain, stores="unsaved")
    vocabulary = source.vocabulary()
    splits = vocabulary.read(plain.data, plain.train.seed)
    alone = vocabulary.read(plain.data.model_copy(update={"packing": False}), plain.train.seed)
    chosen_by = calibration_of(plain, splits)
    context = LoadContext(resolve_device(plain.train), WIDE, SINGLE_PROCESS, AttentionChoices(plain), chosen_by)
    pair = opened.enter_context(opened_pair(source, vocabulary, context))
    student = pair.student
    teacher = pair.teacher
    for field, model in teacher.models.items():
        if quantised_by_transformers(model):
            raise ValueError(
                f"{field}.model: expected a model in floating point, since doctor truncates and copies models in "
                f"float32; {source.sections[field].model} is quantised"
            )
    if small is None:
        small = sum(p.numel() for _, model in pair.models() for p in model.parameters()) > LARGE
    # different layers for each: a student cut from the teacher must not become equal to it
    layers = [model.config.get_text_config().num_hidden_layers for model in teacher.models.values()][:1]  # type: ignore[union-attr,operator]
    ends = pair.layer_indices == [0, *(count - 1 for count in layers)]
    small_student = truncated(student, [0, 1])
    small_teacher = teacher.truncated_copy([0, 1 if ends else -1])
    if small:
        student = copy.deepcopy(small_student)
        teacher = small_teacher
    if recipe.student.lora is not None:
        teacher.add_adapters(recipe.student.lora, recipe.train.seed)
        if teacher is not small_teacher:
            small_teacher.add_adapters(recipe.student.lora, recipe.train.seed)

    loss = recipe.loss.with_automatic_layers() if small else recipe.loss.with_kept_layers(pair.layer_indices)

    def copies() -> tuple[nn.Module, Teacher]:
        return _adapted(copy.deepcopy(small_student), recipe), copy.deepcopy(small_teacher)

    # Without the loss schedule, which only the trainer applies: weights are at their largest. Without token weights, by
    # which the loss is a mean of what is checked.
    subject = CheckSetup(
        _adapted(student, recipe),
        teacher,
        [],
        # without the routers' losses: they depend on which rows share a micro-batch, which the invariants vary
        loss.unweighted.model_copy(update={"schedule": [], "router": "none"}),
        pair.vocab_size,
        describe_teacher(recipe).weights,
        vocabulary.tokenizers(),
        copies,
        packs=recipe.data.packing,
    )
    subject.packing_fault = packing_fault(splits.train, alone.train)
    subject.data_fault = next(iter(source.data_problems(splits)), None)
    template = vocabulary.template
    if template is not None and "chat" in splits.report.format:
        end_tokens = end_ids(getattr(pair.student.generation_config, "eos_token_id", None))
        subject.turn_end_problem = turn_end_problem(end_tokens, pair.tokenizer, template.closings())
    subject.last_tokens = last_tokens(splits.train, recipe.data.max_length)
    subject.rows = shortened_rows(splits.train, whole=teacher.rows.whole_documents, count=ROWS, tokens=TOKENS)
    return _with_rollouts(subject, recipe, pair, splits.report.format)


def _in_float32(recipe: Recipe) -> Recipe:
    """Return the recipe over at most 512 rows, in float32, without adapters, which are added to truncated copies
    later.
    """

    def wide(section: Any) -> Any:
        return section.model_copy(update={"dtype": "auto"})

    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"max_rows": min(recipe.data.max_rows or 512, 512)}),
            "teacher": wide(recipe.teacher),
            "teachers": list(map(wide, recipe.teachers)),
            "student": wide(recipe.student).model_copy(update={"lora": None}),
        }
    )


def _with_rollouts(subject: CheckSetup, recipe: Recipe, pair: ModelPair, format: str) -> CheckSetup:
    """Return the subject with the student's rollouts as rows, where the recipe trains on-policy."""
    if recipe.data.active_on_policy is None:
        return subject
    require_prompts(recipe, pair.tokenizer, format)
    objective = subject.objective()
    objective.detach()
    rollouts = StudentRollouts.of_recipe(recipe, subject.student, pair.tokenizer, objective.columns)
    documents = subject.documents()
    readers = pair.vocabulary.answer_readers()
    batch = subject.batch(documents)
    answers = rollouts.with_responses(subject.student, [batch], readers)
    learned = [each for each in zip(answers, prompts_of(batch), strict=True) if first_trained(each[0]) is not None]
    if len(learned) < 2:
        raise ValueError(f"data.on_policy: expected at least 2 rollouts to train on, got {len(learned)}")
    rows: list[Any] = [row for row, _ in learned]
    packed = [join_rows(rows[at : at + 2]) for at in range(0, len(rows) - 2, 2)]
    packed.append(join_rows(rows[2 * len(packed) :]))
    rows = packed if len(packed) > 1 and recipe.data.packing else rows
    return replace(subject, rows=rows, rollouts=rollouts, readers=readers, prompts=[prompt for _, prompt in learned])


def _adapted(student: Any, recipe: Recipe) -> nn.Module:
    """Return a student with the adapters and the rounded weights that the run's has."""
    student = student if recipe.student.lora is None else add_lora(student, recipe.student.lora)
    if recipe.student.quantise is not None:
        quantise_at_once(student, recipe.student.quantise)
    return student


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress output and log lines of libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        sys.stdout.flush()
