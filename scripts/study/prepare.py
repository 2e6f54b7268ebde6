"""What runs of a plan read and a plan says how to make: rows of tasks, caches, trained, pruned and rounded models.

A maker gets the lab, the path that it writes, its options in the plan, and the names in the file's name.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill.core.files import write_text
from distill.models.dtypes import resolve_device
from distill.models.head import unwrap_peft
from distill.models.loading import load_student, load_teacher, load_tokenizer
from distill.models.precision.gptq import calibration_batches, round_weights
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.models.prune.importance import select_parts
from distill.models.prune.widths import widths_of
from distill.recipe import FromTeacher, Importance, LocalTeacherConfig, Student
from distill.recipe.quantise import Quantise
from distill.run import run as distill_run
from distill.teachers.registry import source_of
from scripts.study import judges, sums
from scripts.study.tasks import TASKS, rows_of

if TYPE_CHECKING:
    from scripts.study.runner import Lab

Names = Mapping[str, str]


# ---------------------------------------------------------------- rows


def _write(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def questions(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Write rows of a task, or of several with `+` between them."""
    held_out = options["split"] == "held-out"
    most = lab.plan.fields.get("questions")  # of each task; fewer for a first try
    _write(path, [row for task in options["task"].split("+") for row in rows_of(task)[held_out][:most]])


def taught(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Write a task's rows with the answers of the teacher, which reads the examples before each question."""
    task = options["task"]
    source = lab.work / f"{task}-train.jsonl"
    lab.make([str(source)])
    rows = judges.read(source)
    section = lab.recipe_with([]).student
    device = resolve_device(lab.recipe_with([]).train)
    model = load_student(section, device=device, dtype=torch.float32).eval()
    informed = [f"{row['shots']}\n\n{row['prompt']}" for row in rows]
    said = judges.greedy(model, load_tokenizer(section), informed, TASKS[task].longest)
    first_lines = [text.strip().partition("\n")[0] for text in said]
    _write(path, [row | {"completion": f" {line}"} for row, line in zip(rows, first_lines, strict=True) if line])


def sums_rows(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Write the sums to learn, or those that are held out."""
    learned, held_out = sums.rows_of()
    _write(path, learned if options["split"] == "train" else held_out)


# ---------------------------------------------------------------- teachers' outputs and models


def cached(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Write a teacher's top K, as `distill cache` does."""
    settings = [*options["settings"], *lab.more]
    how = ["--out", str(path), "--top-k", str(options["top_k"]), "--tail", options["tail"]]
    subprocess.run([sys.executable, "-m", "distill", "cache", str(lab.plan.recipe_file), *settings, *how], check=True)


def trained(lab: Lab, path: Path, settings: Sequence[str], names: Names) -> None:
    """Train a student by settings over the plan's recipe, as `distill run` does, and keep it."""
    lab.make(settings)
    runs = lab.work / "runs"
    shutil.rmtree(runs / path.name, ignore_errors=True)
    result = distill_run(lab.recipe_with([*settings, f"output_dir={runs}"]), name=path.name)
    (result.folder / "student").rename(path)


def rounded(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Round a model's linear layers to a format without training: to the nearest values, by importance, by GPTQ."""
    lab.make([options["model"]])
    run = next(run for run in lab.plan.runs if all(str(run.names[axis]) == name for axis, name in names.items()))
    section = Student(model=options["model"])
    recipe = lab.recipe(run)
    device = resolve_device(recipe.train)
    student = load_student(section, device=device, dtype=torch.float32)
    formats = formats_of(student, Quantise(format=options["format"], embeddings="keep", head="keep"))
    if options["method"] == "nearest":
        quantise_student(student, formats)
    else:
        rows = source_of(recipe).vocabulary().read(recipe.data, recipe.train.seed).train
        batches = calibration_batches(rows, Quantise(format=options["format"]).calibration_tokens, device)
        round_weights(student, formats.by_name, batches, options["method"])
    student.save_pretrained(path)
    load_tokenizer(section).save_pretrained(path)


def random_cut(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Cut a student of a shape from the teacher with parts drawn at random, without factors of norms."""
    seed = int(names["seed"])

    def draw(selection: Any, teacher: Any) -> Any:
        full = widths_of(unwrap_peft(teacher).config)
        other = drawn(selection, full, seed)
        if selection.layers is None:
            return other
        total = teacher.config.get_text_config().num_hidden_layers
        kept = sorted(random.Random(seed).sample(range(total), len(selection.layers)))
        return on_layers(other, selection.layers, kept)

    _cut(lab, path, options, draw)


def cut_without_norms(lab: Lab, path: Path, options: Mapping[str, Any], names: Names) -> None:
    """Cut a student by importance, with the norms as they are."""
    _cut(lab, path, options, lambda selection, teacher: selection._replace(norms={}))


def _cut(lab: Lab, path: Path, shape: Mapping[str, Any], change: Callable[[Any, Any], Any]) -> None:
    recipe = lab.recipe_with([f"data.source={lab.data}", "data.fields={prompt: question, completion: answer}"])
    assert isinstance(recipe.teacher, LocalTeacherConfig)
    importance = Importance(rows=24, layer_rows=4)
    cut = FromTeacher(**shape, importance=importance)
    device = resolve_device(recipe.train)
    teacher = load_teacher(recipe.teacher, device=device, dtype=torch.float32)
    train = source_of(recipe).vocabulary().read(recipe.data, recipe.train.seed).train
    rows = [dict(train[number]) for number in range(min(importance.rows, len(train)))]
    selection = change(select_parts(teacher, cut, rows), teacher)
    section = Student(from_teacher=cut)
    student = load_student(section, teacher=teacher, selection=selection, device=device, dtype=torch.float32)
    student.save_pretrained(path)
    load_tokenizer(recipe.teacher).save_pretrained(path)


def drawn(selection: Any, full: Any, seed: int) -> Any:
    """Return a selection of a dense model's parts, drawn at random in the same shape, without factors of norms."""
    draw = random.Random(seed)

    def some(kept: Any, total: int) -> list[int]:
        return sorted(draw.sample(range(total), len(kept)))

    hidden = None if selection.hidden is None else some(selection.hidden, full.hidden)
    columns = {name: [some(kept, full.intermediate) for kept in of] for name, of in selection.columns.items()}
    parts: dict[str, dict[int, list[int]]] = {}
    for layer, kept in selection.parts.get("kv_heads", {}).items():
        group = len(selection.parts["heads"][layer]) // len(kept)
        pairs = some(kept, full.kv_heads)
        parts.setdefault("kv_heads", {})[layer] = pairs
        heads = [pair * full.group + n for pair in pairs for n in sorted(draw.sample(range(full.group), group))]
        parts.setdefault("heads", {})[layer] = heads
    return selection._replace(hidden=hidden, parts=parts, columns=columns, norms={})


def on_layers(selection: Any, before: Any, layers: list[int]) -> Any:
    """Return a selection with its layers' parts given to other layers."""
    names = dict(zip(before, layers, strict=True))
    parts = {axis: {names[layer]: kept for layer, kept in of.items()} for axis, of in selection.parts.items()}
    columns = {
        re.sub(r"\.(\d+)\.", lambda number: f".{names[int(number[1])]}.", module, count=1): kept
        for module, kept in selection.columns.items()
    }
    return selection._replace(layers=layers, parts=parts, columns=columns)


MAKERS: dict[str, Callable[[Lab, Path, Any, Names], None]] = {
    "questions": questions,
    "taught": taught,
    "sums": sums_rows,
    "cached": cached,
    "trained": trained,
    "rounded": rounded,
    "random_cut": random_cut,
    "cut_without_norms": cut_without_norms,
}
