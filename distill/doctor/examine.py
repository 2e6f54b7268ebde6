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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from distill.core.environment import environment
from distill.doctor.invariants import CHECKS, Finding
from distill.doctor.own_words import OwnWords, prompts_of
from distill.doctor.subject import Row, Subject, first_learned
from distill.doctor.subject_cached import CachedTeacher, nearest
from distill.doctor.subject_cross import AcrossTokenizers
from distill.doctor.subject_several import SeveralTeachers
from distill.models.adapters import add_lora
from distill.models.load import load_tokenizer
from distill.models.precision import Precision, resolve_device
from distill.models.quantised import quantised_by_transformers
from distill.recipe import Recipe
from distill.teachers.mixture import TeacherGroup

if TYPE_CHECKING:
    from distill.teachers.opening import Models

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
    from distill.doctor.invariants_runs import RUN_CHECKS

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
    from distill.teachers.opening import load_models, read_data, read_tokenizer

    device = resolve_device(recipe.train)
    torch.manual_seed(recipe.train.seed)
    plain = _in_float32(recipe)
    tokenizer = read_tokenizer(plain)
    splits = read_data(plain, tokenizer)
    models = load_models(plain, tokenizer, device, Precision(torch.float32, torch.float32, torch.float32))
    student, teacher = models.student, models.teacher
    if quantised_by_transformers(teacher):
        raise ValueError(
            f"teacher.model: {recipe.teacher.model} is quantised, and the doctor cuts and copies models in float32; "
            "examine the recipe with the model in floating point"
        )
    if small is None:
        small = sum(p.numel() for model in (teacher, student) if model is not None for p in model.parameters()) > LARGE
    # other layers of each: a student cut from the teacher must not become its equal, with nothing left to learn
    short = [_two_layers(student, 1), _shortened_teacher(teacher, 1 if _is_its_ends(models) else -1)]
    if small:
        student, teacher = short[0], short[1]

    def copies() -> tuple[nn.Module, Any]:
        return _adapted(copy.deepcopy(short[0]), recipe), copy.deepcopy(short[1])

    kind, more = _kind_of(recipe, models)
    student = _adapted(copy.deepcopy(student) if small else student, recipe)
    subject = kind(
        student, teacher, some_rows(splits.train, kind=kind), recipe.loss, vocab_size=models.vocab_size,
        tokenizers=_tokenizers(recipe, models), small=copies, packs=recipe.data.packing, **more,
    )  # fmt: skip
    return _with_own_words(subject, recipe, models, splits.report.format)


def _in_float32(recipe: Recipe) -> Recipe:
    """The recipe over some of its rows, weights in float32, without adapters: those are added to shrunken copies."""

    def wide(section: Any) -> Any:
        return section.model_copy(update={"dtype": "auto"})

    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"max_rows": min(recipe.data.max_rows or 512, 512)}),
            "teacher": wide(recipe.teacher),
            "teachers": [wide(section) for section in recipe.teachers],
            "student": wide(recipe.student).model_copy(update={"lora": None}),
        }
    )


def _kind_of(recipe: Recipe, models: Models) -> tuple[type[Subject], dict[str, Any]]:
    """What examines this kind of teacher, and what it must know."""
    if recipe.teachers:
        return SeveralTeachers, {"weights": [section.weight for section in recipe.teachers]}
    if recipe.student.vocabulary == "cross":
        from distill.teachers.cross.objective import compare_by_bytes, readers_of

        readers = readers_of(models.tokenizer, models.teacher_tokenizer, recipe.data.chat_template)
        return AcrossTokenizers, {"shared": compare_by_bytes(*readers).shared, "readers": readers}
    if models.cache is not None:
        return CachedTeacher, {"cache": models.cache}
    return Subject, {}


def _tokenizers(recipe: Recipe, models: Models) -> tuple[Any, ...] | None:
    """Of every teacher and, last, of the student; None for random tokens, and where each has its own."""
    section = recipe.student
    if models.tokenizer is None or section.vocabulary == "cross":
        return None
    own = section.init == "pretrained" and section.from_teacher is None and section.vocabulary == "keep"
    several = [load_tokenizer(teacher, f"teachers.{number}") for number, teacher in enumerate(recipe.teachers)]
    return (*(several or [models.tokenizer]), load_tokenizer(section, "student") if own else models.tokenizer)


def _with_own_words(subject: Subject, recipe: Recipe, models: Models, format: str) -> Subject:
    """The subject with the student's own answers for rows, where the recipe trains on such."""
    from distill.generation.on_policy import on_policy_of

    section = recipe.data.on_policy
    if section is None or section.fraction == 0:
        return subject
    # shrunken copies are not worth vLLM's start, and the answers are examined, not the engine
    asked = section.model_copy(update={"engine": "distill"}) if section.engine == "vllm" else section
    asking = recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_policy": asked})})
    objective = subject.objective()
    columns = objective.columns
    objective.detach()
    on_policy_of(
        asking, subject.student, models.tokenizer, format=format, vocab_size=columns
    )  # refuses what run refuses
    words = OwnWords.asked(asking, subject.student, models.tokenizer, columns)
    documents = [document for row in subject.rows for document in subject.documents(row)]
    answers = zip(words.answered(subject.student, documents, len(documents)), prompts_of(documents), strict=True)
    kept = [(row, prompt) for row, prompt in answers if first_learned(row) is not None]
    if len(kept) < 2:
        raise ValueError(f"data.on_policy: expected at least 2 answers of the student's, found {len(kept)}")
    rows = [row for row, _ in kept]
    packed = [subject.joined(rows[at : at + 2]) for at in range(0, len(rows) - 2, 2)]
    packed.append(subject.joined(rows[2 * len(packed) :]))
    rows = packed if len(packed) > 1 and recipe.data.packing else rows
    return replace(subject, rows=rows, own_words=words, prompts=[prompt for _, prompt in kept])


def _adapted(student: Any, recipe: Recipe) -> nn.Module:
    return student if recipe.student.lora is None else add_lora(student, recipe.student.lora)


def _is_its_ends(models: Models) -> bool:
    """Whether the student is the teacher's first and last layer, which cannot be cut to other ones."""
    return models.teacher is not None and models.kept == [0, _layers(models.teacher) - 1]


def _shortened_teacher(teacher: Any, second: int) -> Any:
    """The first layer of the teacher and another one, or of each of several; None where it is a cache."""
    if teacher is None:
        return None
    if isinstance(teacher, TeacherGroup):
        return TeacherGroup([_two_layers(model, second) for model in teacher.members], teacher.shares)
    return _two_layers(teacher, second)


def _layers(model: Any) -> int:
    first: Any = model.members[0] if isinstance(model, TeacherGroup) else model
    return int(first.config.get_text_config().num_hidden_layers)


def _two_layers(model: Any, second: int) -> Any:
    from distill.models.pruning import cut_layers

    total = _layers(model)
    with _hushed():
        return cut_layers(model, [0, second % total] if total > 2 else range(total)).to(model.device)


def some_rows(
    rows: Sequence[Any], count: int = ROWS, tokens: int = TOKENS, *, kind: type[Subject] = Subject
) -> list[Row]:
    """Rows cut short around what is learned: at most two documents each, `tokens` long or little more. Of a cached
    teacher, whose documents stay whole, those whose length is the nearest to `tokens`."""
    made: list[Row] = []
    if issubclass(kind, CachedTeacher):
        whole = [part for row in rows for document in kind.documents(row) if (part := kind.shortened(document, tokens))]
        chosen = nearest(whole, 2 * count, tokens)
        made = [kind.joined(chosen[at : at + 2]) for at in range(0, len(chosen), 2)]
    else:
        for row in rows:
            parts = [part for document in kind.documents(row) if (part := kind.shortened(document, tokens))]
            if parts:
                made.append(kind.joined(parts[:2]))
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
