"""Command `prune`: shapes to cut the teacher to, each with its parameters and its divergence before training."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.arguments import AsJson, Overrides, RecipeArgument, load_recipe, print_json
from distill.core import console
from distill.core.files import write_text
from distill.core.folders import check_output_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.models.prune_candidates import Candidate, Cost
    from distill.recipe import FromTeacher


def prune(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    to: Annotated[
        float, typer.Option("--to", metavar="FRACTION", help="Fraction of the teacher's cost to keep.")
    ] = 0.5,
    latency: Annotated[
        bool, typer.Option("--latency", help="Cost is the time of a forward pass on this machine, not parameters.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the recipe with the best shape to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Propose shapes to prune the teacher to, and measure each student before training.

    The recipe's student is replaced by `student.from_teacher` with the shape whose divergence on held-out rows is
    smallest. Parts are chosen by the recipe's `student.from_teacher.importance`, or its defaults.

    \b
    distill prune quickstart --to 0.6
    distill prune my.yaml --to 0.5 --output half.yaml
    distill prune my.yaml --to 0.5 --latency
    """
    if output is not None:
        check_output_file(output, "--output")
        if output.exists():
            raise ValueError(f"--output: {output} exists; name another file")
    _, resolved = load_recipe(recipe, overrides)
    from distill.recipe import Student, dump
    from distill.teachers.pruned import measure_candidates

    rows: list[list[str]] = []
    found = []
    with console.spinner("loading the teacher and measuring the shapes"):
        for candidate, divergence in measure_candidates(resolved, to, cost=forward_time_share if latency else None):
            found.append((candidate, divergence))
            rows.append(_row(candidate, divergence, latency))
    best, divergence = min(found, key=lambda each: each[1])
    if as_json:
        print_json(
            [
                {
                    "name": c.name,
                    "from_teacher": c.cut.model_dump(exclude_none=True),
                    "parameters": c.parameters,
                    "share": c.cost,
                    "kl": kl,
                    "best": c is best,
                }
                for c, kl in found
            ]
        )
    else:
        share = "of its time" if latency else "of its parameters"
        console.show_table(["shape", "student.from_teacher", "parameters", share, "KL before training"], rows)
        console.print_lines(f"best: {best.name}, KL {divergence:.4f} before training")
    if output is not None:
        kept = {"lora": resolved.student.lora, "quantise": resolved.student.quantise, "dtype": resolved.student.dtype}
        student = Student(from_teacher=best.cut, **kept)  # type: ignore[arg-type]
        write_text(output, dump(resolved.model_copy(update={"student": student})))
        if not as_json:
            console.print_lines(f"wrote {output}: distill run {output}")


def _row(candidate: Candidate, divergence: float, latency: bool) -> list[str]:
    shape = candidate.cut.model_dump(exclude_none=True, exclude={"importance"})
    text = ", ".join(f"{name}: {value}" for name, value in shape.items())
    millions = f"{candidate.parameters / 1e6:,.1f} M"
    return [candidate.name, f"{{{text}}}", millions, f"{candidate.cost:.0%}", f"{divergence:.4f}"]


def forward_time_share(teacher: PreTrainedModel, row_length: int) -> Cost:
    """Return the cost that is the share of the teacher's time of a forward over one row, measured here.

    Students have random weights: the time is the same.
    """
    import torch

    from distill.models.layers import layer_count, layer_indices
    from distill.models.prune.pruning import student_config, trial_ids
    from distill.models.prune.widths import target_widths

    device = teacher.device
    config = teacher.config
    ids = trial_ids(config, row_length).to(device)

    def seconds(model: PreTrainedModel) -> float:
        times = []
        with torch.inference_mode():
            for _ in range(6):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                begun = time.perf_counter()
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - begun)
        # the first run, which also compiles and allocates, does not count
        return statistics.median(times[1:])

    def cost(cut: FromTeacher) -> float:
        shape = student_config(config, layer_indices(cut, layer_count(config)), target_widths(cut, config))
        with device:
            student: Any = type(teacher)(shape)
        return seconds(student.to(teacher.dtype).eval()) / whole

    whole = seconds(teacher)
    return cost
