"""`distill doctor`: is this machine fit to train, and does what training relies on hold for this recipe?

lines = environment_lines()              # versions, GPUs, Triton, memory, disk, each with what to do
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.contract.invariants import CHECKS, Finding, Row, Subject, documents
from distill.environment import environment
from distill.models.adapters import add_lora
from distill.recipe import Recipe
from distill.training.arguments import resolve_device

ROWS, TOKENS = 6, 64
LARGE = 3_000_000_000  # parameters of both models, from which on shrunken copies are examined
GIB = 2**30


class Line(NamedTuple):
    """One thing about this machine: its name, whether it will do, what was found, and what to do about it."""

    name: str
    fine: bool
    found: str

    def __str__(self) -> str:
        return f"{'fine' if self.fine else 'LOOK'}  {self.name}: {self.found}"


def environment_lines(folder: Path = Path()) -> list[Line]:
    """Versions, GPUs, Triton, memory and disk."""
    facts = environment()
    lines = [
        Line(name, True, facts.get(name, ""))
        for name in ("distill", "python", "system", "torch", "transformers", "datasets", "accelerate", "peft")
        if name in facts
    ]
    lines += [*_gpus(facts), _triton(), _memory(), _disk(folder), _hub()]
    return lines


def _gpus(facts: dict[str, str]) -> list[Line]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and finds none: check nvidia-smi" if built else "torch is a CPU build"
        return [Line("GPU", True, f"none ({why}); everything runs on the CPU, at its speed")]
    lines = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        advice = "; something else uses it: see nvidia-smi" if busy else ""
        name = torch.cuda.get_device_name(index)
        lines.append(Line(f"GPU {index}", not busy, f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free{advice}"))
    lines.append(Line("driver", True, f"{facts.get('driver', 'unknown')}, CUDA {facts.get('cuda')}"))
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    lines.append(Line("bf16", bf16, "native" if bf16 else "emulated: set train.precision to float16 or float32"))
    return lines


def _triton() -> Line:
    """A real kernel on the GPU: compiling needs a working compiler and driver, not just the package."""
    from distill_kernels.launch import HAS_TRITON

    if not HAS_TRITON:
        return Line("triton", not torch.cuda.is_available(), "absent: pip install triton, or the kernels cannot run")
    version = importlib.metadata.version("triton")
    if not torch.cuda.is_available():
        return Line("triton", True, f"{version}, not used on a CPU")
    from distill_kernels.layers.rms_norm import rms_norm

    x, weight = torch.randn(4, 256, device="cuda"), torch.ones(256, device="cuda")
    try:
        off = (rms_norm(x, weight, 1e-6) - torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)).abs().max().item()
    except Exception as error:  # whatever a broken compiler or driver raises is the finding
        return Line("triton", False, f"{version} cannot run a kernel: {str(error).splitlines()[0]}; reinstall torch")
    return Line("triton", off < 1e-5, f"{version}, a kernel ran and is off by {off:.0e}")


def _memory() -> Line:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    with contextlib.suppress(OSError):  # the kernel's own estimate counts caches that it can give up
        found = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
        free = int(found[0].split()[1]) * 1024 / GIB if found else free
    return Line("memory", free >= 4, f"{free:.0f} GiB free" + ("" if free >= 4 else "; close what you do not need"))


def _disk(folder: Path) -> Line:
    free = shutil.disk_usage(folder).free / GIB
    writable = os.access(folder, os.W_OK)
    found = f"{free:.0f} GiB free in {folder.absolute()}"
    if not writable:
        return Line("disk", False, f"{folder.absolute()} is read-only: runs/ cannot be made here; go to another folder")
    return Line("disk", free >= 10, found + ("" if free >= 10 else "; checkpoints are large: make room"))


def _hub() -> Line:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    return Line("hub", True, "offline (HF_HUB_OFFLINE): only models and data that are on this machine" if offline
                else "used where a recipe names a hub model or data set")  # fmt: skip


# ------------------------------------------------------------------ a recipe


def examine(recipe: Recipe, *, small: bool | None = None) -> Iterator[Finding]:
    """Run every invariant on the recipe's models and data, one finding at a time.

    The models are loaded in float32 whatever the recipe says, so that rounding hides no fault; with `small` (by
    default where both together have more than 3 billion parameters) two layers of each are examined.

    Raises:
        ValueError: the recipe cannot be used, as `distill run` would say.
    """
    from distill.contract.invariants_runs import RUN_CHECKS

    with _hushed():
        subject = prepare(recipe, small=small)
    checks: tuple[Callable[[Subject], Finding], ...] = (*CHECKS, *RUN_CHECKS)
    for check in checks:
        with _hushed():
            begun = time.perf_counter()
            try:
                finding = check(subject)
            except Exception as error:  # a check that cannot run is a finding, and the others still run
                first = (str(error).splitlines() or [""])[0]
                finding = Finding(check.__name__.split("_")[0], False, f"{type(error).__name__}: {first}")
        yield finding._replace(seconds=time.perf_counter() - begun)


def prepare(recipe: Recipe, *, small: bool | None = None) -> Subject:
    """Load what `examine` looks at."""
    from distill.data.load import load_data
    from distill.loading import read_tokenizer, synthetic_size
    from distill.models.load import load_student, load_teacher, load_tokenizer
    from distill.models.vocabulary import compare, extend_student

    for field, wanted in (
        ("teachers", bool(recipe.teachers)),
        ("student.vocabulary", recipe.student.vocabulary == "cross"),
    ):
        if wanted:
            raise ValueError(
                f"{field}: distill doctor examines one teacher over one vocabulary, which this recipe does not have; "
                "examine it with one of its teachers, and a student of that family"
            )
    device = resolve_device(recipe.train)
    torch.manual_seed(recipe.train.seed)
    tokenizer = read_tokenizer(recipe)
    data = recipe.data.model_copy(update={"max_rows": min(recipe.data.max_rows or 512, 512)})
    splits = load_data(data, tokenizer, seed=recipe.train.seed, vocab_size=synthetic_size(recipe, tokenizer))
    section = recipe.student
    own = section.init == "pretrained" and section.from_teacher is None and tokenizer is not None
    student_tokenizer = load_tokenizer(section, "student") if own else tokenizer
    teacher = load_teacher(recipe.teacher, device=device, dtype=torch.float32)
    student = load_student(
        section.model_copy(update={"lora": None}), teacher=teacher, device=device, dtype=torch.float32
    )
    if own and section.vocabulary == "extend":
        extend_student(student, student_tokenizer, tokenizer)
        student_tokenizer = tokenizer
    elif tokenizer is not None:
        compare(tokenizer, student_tokenizer).require()
    if small is None:
        small = sum(p.numel() for model in (teacher, student) for p in model.parameters()) > LARGE
    # other layers of each: a student cut from the teacher must not become its equal, with nothing left to learn
    short = [_two_layers(student, 1), _two_layers(teacher, -1)]
    if small:
        student, teacher = short[0], short[1]

    def copies() -> tuple[nn.Module, nn.Module]:
        return _adapted(copy.deepcopy(short[0]), recipe), copy.deepcopy(short[1])

    return Subject(
        _adapted(copy.deepcopy(student) if small else student, recipe),
        teacher,
        some_rows(splits.train),
        recipe.loss,
        tokenizers=None if tokenizer is None else (tokenizer, student_tokenizer),
        small=copies,
    )


def _adapted(student: Any, recipe: Recipe) -> nn.Module:
    return student if recipe.student.lora is None else add_lora(student, recipe.student.lora)


def _two_layers(model: Any, second: int) -> Any:
    from distill.models.pruning import cut_layers

    total = model.config.get_text_config().num_hidden_layers
    with _hushed():
        return cut_layers(model, [0, second % total] if total > 2 else range(total)).to(model.device)


def some_rows(rows: Sequence[Any], count: int = ROWS, tokens: int = TOKENS) -> list[Row]:
    """Rows cut short around what is learned: at most two documents each, `tokens` long or little more."""
    made: list[Row] = []
    for index in range(len(rows)):
        parts = []
        for part in documents(rows[index]):
            first = next((at for at, label in enumerate(part["labels"]) if label != -100), None)
            if first is not None:
                end = max(tokens // 2, min(first + tokens // 4, 8 * tokens))
                parts.append({name: values[:end] for name, values in part.items()})
        if parts:
            made.append({name: [item for part in parts[:2] for item in part[name]] for name in parts[0]})
        if len(made) == count:
            break
    if len(made) < 2:
        raise ValueError(f"data.source: expected at least 2 rows with something to learn, found {len(made)}")
    return made


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep what libraries print and log out of the findings."""
    from transformers.utils import logging as theirs

    before, shown = logging.root.manager.disable, theirs.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    theirs.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
        if shown:
            theirs.enable_progress_bar()
        sys.stdout.flush()
