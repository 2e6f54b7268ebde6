"""`python -m scripts.study.served_file RECIPE`: a recipe from the large model to the file that is served, in llama.cpp.

    python -m scripts.engines install llama_cpp
    python -m scripts.study.served_file recipes/shrink-smollm2.yaml

Runs the recipe (`--run FOLDER` takes a finished run), exports its student as a GGUF file of the format that it was
trained in, and the teacher as q8_0, and measures both in llama.cpp on held-out rows: KL to the teacher in float32,
size, tokens a second of one sequence. The last line has both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distill.models.load.loading import load_teacher
from distill.models.precision.quantised_student import read_saved
from distill.recipe import load
from distill.reports.export import export
from distill.reports.gguf_file import FORMAT_OF, write_gguf
from distill.run import run
from distill.teachers.registry import source_of
from scripts.engines import llama_cpp

LONGEST = 256  # tokens of a row


def measured(recipe: Any, folder: Path, tokens: int) -> list[tuple[str, llama_cpp.FileMetrics]]:
    """Return the names and metrics of the student's and the teacher's file."""
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    rows: list[list[int]] = []
    for row in vocabulary.read(recipe.data, recipe.train.seed).validation:
        rows.append([int(token) for token in row["input_ids"]][:LONGEST])
        if sum(map(len, rows)) >= tokens:
            break
    teacher = load_teacher(recipe.teacher, dtype=torch.float32)
    with torch.no_grad():
        logits = [teacher(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    reference = torch.cat(logits).log_softmax(-1)
    saved = read_saved(folder / "student")
    form = "q8_0" if saved is None else next(type for type, form in FORMAT_OF.items() if form == saved.main)
    with tempfile.TemporaryDirectory() as place:
        written = export(folder, Path(place, "student"), gguf=form)["gguf"]
        whole = Path(place, "teacher")
        teacher.save_pretrained(whole)
        vocabulary.tokenizer.save_pretrained(whole)
        files = {form: Path(written.path), "q8_0": Path(write_gguf(whole, whole / "teacher.gguf", "q8_0").path)}
        names = (f"student {form}", "original q8_0")
        return [
            (name, llama_cpp.measure(path, rows, reference)) for name, path in zip(names, files.values(), strict=True)
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, export and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a finished run of the recipe")
    parser.add_argument("--tokens", type=int, default=512, help="held-out tokens to compare on")
    options = parser.parse_args(arguments)
    begun = time.perf_counter()
    recipe = load(options.recipe, options.overrides)
    folder = options.run or run(recipe).folder
    files = measured(recipe, folder, options.tokens)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    print("; ".join(f"{name}: {metrics}" for name, metrics in files) + " (llama.cpp)")


if __name__ == "__main__":
    main()
