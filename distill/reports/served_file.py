"""The file that a run's student is served from: the setting `export`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from distill.core import console
from distill.core.folders import RECIPE_FILE
from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.core.units import plural
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.loading import load_teacher
from distill.models.meta_models import meta_config, pruned_config
from distill.recipe import Recipe, load
from distill.reports import llama_cpp
from distill.reports.export import export
from distill.reports.gguf_file import check_supported, write_gguf
from distill.reports.llama_cpp import FileMetrics, HeldOutTokens
from distill.reports.run_manifest import EXPORT_FOLDER, record_export
from distill.teachers.registry import source_of


def check_export(stages: Sequence[tuple[Path, Recipe]]) -> None:
    """Refuse an `export` of a student, or of a teacher to measure it beside, that a GGUF file cannot hold.

    Args:
        stages: Folder and recipe of each stage, of which none need have been trained.
    """
    settings = stages[-1][1].export
    assert settings is not None
    made_here = {str(folder / "student") for folder, _ in stages}
    config = None
    first = stages[0][1]
    for _, stage in stages:
        section = stage.student
        if section.model not in made_here:
            first = stage
            config = meta_config(stage.teacher, "teacher") if section.is_cut else None
        elif section.cut is None:
            continue
        config = pruned_config(section.model_copy(update={"model": None}) if config is not None else section, config)
    tokenizer = source_of(first).vocabulary().tokenizer
    check_supported(config, tokenizer)
    if settings.tokens and llama_cpp.llama_cpp_is_installed():
        check_supported(meta_config(stages[-1][1].teacher, "teacher"), tokenizer)


def export_problems(recipe: Recipe) -> list[str]:
    """Return why a run of a recipe would refuse its `export`, a line each."""
    try:
        check_export(list(recipe.stage_runs(Path(recipe.output_dir, recipe.name))))
    except ValueError as error:
        return str(error).splitlines()
    return []


def export_run(folder: Path) -> None:
    """Write the file that a finished run's `export` names, and print its metrics in llama.cpp beside the teacher's."""
    recipe = load(folder / RECIPE_FILE)
    settings = recipe.export
    assert settings is not None
    with console.announced("exporting", "the student's file"):
        written = export(folder, folder / EXPORT_FOLDER, gguf=settings.gguf)["gguf"]
        record_export(folder)
    console.print_lines(f"file        {written.path}")
    if not settings.tokens:
        return
    if not llama_cpp.llama_cpp_is_installed():
        command = llama_cpp.install_command()
        console.print_lines(f"llama.cpp   not found, so the file is not measured; to install it: {command}")
        return
    with console.announced("measuring", "the file in llama.cpp, beside the teacher's q8_0"):
        tokens, student, teacher = _measured(recipe, Path(written.path), settings.tokens)
    console.print_lines(
        f"llama.cpp   student {settings.gguf}: {student}; teacher q8_0: {teacher}; "
        f"over {plural(tokens, 'held-out token')}"
    )


def _measured(recipe: Recipe, file: Path, least: int) -> tuple[int, FileMetrics, FileMetrics]:
    """Return the number of tokens, and the metrics of the student's file and of the teacher's."""
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    (section,) = source.sections.values()
    precision = resolve_precision(recipe, resolve_device(recipe.train))
    teacher = load_teacher(section, dtype=precision.teacher)
    documents: list[list[int]] = []
    positions: list[list[int]] = []
    logits: list[torch.Tensor] = []
    for row in vocabulary.read(recipe.data, recipe.train.seed).validation:
        for ids, places in _documents(row):
            with torch.inference_mode():
                found = teacher(input_ids=torch.tensor([ids]), use_cache=False).logits[0, places]
            documents.append(ids)
            positions.append(places)
            logits.append(found.float().log_softmax(-1))
        if sum(map(len, positions)) >= least:
            break
    held_out = HeldOutTokens(documents, positions, torch.cat(logits))
    with tempfile.TemporaryDirectory() as place:
        teacher.save_pretrained(place)
        vocabulary.tokenizer.save_pretrained(place)
        whole = Path(write_gguf(Path(place), Path(place, "teacher.gguf"), "q8_0").path)
        found_of = [llama_cpp.measure_with_llama_cpp(path, held_out) for path in (file, whole)]
    return len(held_out.log_probs), found_of[0], found_of[1]


def _documents(row: Mapping[str, Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield token ids of each document of a row, and the positions in it whose next token counts."""
    for start, end in document_bounds(row["position_ids"]):
        labels = row["labels"][start:end]
        places = [at for at in range(len(labels) - 1) if labels[at + 1] != IGNORE_INDEX]
        if places:
            yield list(row["input_ids"][start:end]), places
