"""Console summaries: the setup before a run, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distill.core import console
from distill.core.files import write_text
from distill.core.units import GIB, plural
from distill.evaluation.evaluate import HeldOut, describe_reduction
from distill.models.flops import count_text, parameters_of
from distill.models.head import unwrap_peft
from distill.models.layers import offloading_of
from distill.models.prune.widths import widths_of
from distill.models.quantised_checkpoints import quantised_by
from distill.objectives.measure import KL, DivergenceUnit
from distill.planning.steps import small_data_warnings
from distill.recipe.loss import clip_text
from distill.recipe.quantise import GGUF_FILES
from distill.reports.gguf_file import gguf_faults
from distill.teachers.identity import model_name

if TYPE_CHECKING:
    from distill.data.report import DataReport
    from distill.planning.run_plan import RunPlan
    from distill.recipe.loss import Schedule
    from distill.teachers.base import TeacherPlan
    from distill.teachers.objective import DistillationObjective
    from distill.teachers.opening import ModelPair

TITLES = {"teacher": "teacher", "before": "student before", "after": "student after"}


def run_summary(
    source: TeacherPlan,
    pair: ModelPair,
    objective: DistillationObjective,
    *,
    plan: RunPlan,
    data: DataReport,
    device: str,
) -> list[str]:
    """Return the lines that describe a run before it starts."""
    recipe = source.recipe
    total, trained = parameters_of(pair.student)
    name = model_name(recipe.student)
    if pair.layer_indices is not None:
        name += f", layers {_ranges(pair.layer_indices)}"
    if recipe.student.is_cut and recipe.student.from_teacher is not None and recipe.student.from_teacher.cuts_widths:
        config: Any = unwrap_peft(pair.student).config
        widths = widths_of(config)
        name += f", hidden {widths.hidden}, heads {widths.heads} ({widths.kv_heads} of keys and values)"
        name += f", MLP columns {widths.intermediate}" if widths.intermediate else ""
        name += f", experts {widths.experts}" if widths.experts else ""
        name += f" of {widths.moe_intermediate} columns" if widths.experts and widths.moe_intermediate else ""
    avoided = 2 * plan.tokens_per_step // plan.world // plan.accumulation * objective.columns * 4 / GIB
    terms = " + ".join(f"{term.weight:g} {term.type}{clip_text(term)}" for term in objective.terms if term.weight > 0)
    # a step cannot hold more tokens than the data
    whole = plan.tokens_per_step <= data.rows * data.max_length
    step = f"{plan.tokens_per_step:,} tokens" if whole else f"all {plural(data.tokens, 'token')}"
    lines = {
        "teacher": f"{source.title()}, {pair.teacher.size_text()}",
        "student": f"{name}, {count_text(total)} parameters, {count_text(trained)} trained ({trained / total:.0%})",
        "loss": f"{terms}, temperature {recipe.loss.temperature_text}"
        + "".join(map(_line_of, recipe.loss.schedule))
        + ("" if recipe.loss.token_weights is None else f"; token weights: {recipe.loss.token_weights}"),
        "vocabulary": pair.vocabulary_note,
        "data": str(data).replace("\n", "\n" + " " * 12),
        "steps": f"{plan.steps:,} of {step}, "
        f"{plural(plan.accumulation, 'micro-batch')} per step on {plan.world} x {device}",
        "workspace": f"logits are computed in chunks; in full they would take {avoided:,.1f} GiB per micro-batch",
    }
    if plan.world > 1:
        lines["devices"] = str(plan.placement)
    if pair.sharing:
        lines["weights"] = pair.sharing
    quantised: dict[str, list[str]] = {}
    for field, model in pair.models():
        offloaded = offloading_of(model)
        if offloaded:
            lines["offload"] = offloaded
        method = quantised_by(model)
        if method:
            quantised.setdefault(method, []).append(f"the {field}")
    for method, fields in quantised.items():
        heads = "its head" if len(fields) == 1 else "their heads"
        note = f"linear layers of {' and '.join(fields)} by {method}, except {heads}; the error is not measured"
        lines["quantised"] = note if "quantised" not in lines else f"{lines['quantised']}\n{' ' * 12}{note}"
    for note in small_data_warnings(recipe, data, plan.accumulation, plan.world):
        lines["few data"] = note if "few data" not in lines else f"{lines['few data']}\n{' ' * 12}{note}"
    quantise = recipe.student.quantise
    is_gguf = quantise is not None and quantise.format in GGUF_FILES
    faults = gguf_faults(unwrap_peft(pair.student).config, pair.tokenizer) if is_gguf else []
    if faults:
        lines["file"] = f"distill export cannot write it: {'; '.join(faults)}"
    caveat = pair.teacher.format.properties.caveat
    if caveat:
        lines["metrics"] = caveat
    return [f"{key:<12}{value}" for key, value in lines.items()]


def _line_of(schedule: Schedule) -> str:
    """Return a scheduled setting as `; terms.0.weight 1 at step 0, 0.5 at step 100`."""
    points = zip(schedule.values, schedule.steps, strict=True)
    return f"; {schedule.setting} " + ", ".join(f"{value:g} at step {step}" for value, step in points)


def result_table(
    before: HeldOut,
    after: HeldOut,
    measure: DivergenceUnit = KL,
    sets: Mapping[str, tuple[HeldOut, HeldOut]] = MappingProxyType({}),
) -> tuple[list[str], list[list[str]], str]:
    """Return heading, rows and closing line of the table of held-out metrics.

    Args:
        sets: Metrics before and after training of named held-out sets.
    """
    heading = ["held out", f"{measure.name} to teacher", "agreement", "perplexity"]
    rows = [["teacher", f"{0:.4f}", "100.0%", f"{after.teacher_perplexity:,.2f}"]]
    measured = {"student before": before, "student after": after}
    for name, (was, now) in sets.items():
        measured |= {f"{name}: before": was, f"{name}: after": now}
    for title, row in measured.items():
        rows.append([title, f"{row.forward_kl:.4f}", f"{row.agreement:.1%}", f"{row.student_perplexity:,.2f}"])
    tokens = plural(after.tokens, f"held-out {measure.unit}")
    reduction = describe_reduction(before, after)
    of = ", by the" if reduction.startswith("none") else " of the"
    return heading, rows, f"reduction   {reduction}{of} {measure.name}, over {tokens}"


def show_samples(prompts: Sequence[str], answers: Mapping[str, Sequence[str]]) -> None:
    for number, prompt in enumerate(prompts):
        console.print_lines(f"\nprompt: {prompt}")
        for name, texts in answers.items():
            console.print_lines(f"  {TITLES.get(name, name) + ':':<16}{' '.join(texts[number].split()) or '(nothing)'}")


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: `0-9, 20-29`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def samples_text(prompts: Sequence[str], answers: Mapping[str, Sequence[str]]) -> str:
    """Return one greedy response per prompt of teacher and student as Markdown, responses as indented code blocks."""
    blocks = []
    for number, prompt in enumerate(prompts):
        blocks.append(f"## Prompt {number + 1}\n\n{_indented(prompt)}")
        blocks += [f"{TITLES.get(name, name)}:\n\n{_indented(texts[number])}" for name, texts in answers.items()]
    return "# Samples\n\nGreedy responses.\n\n" + "\n\n".join(blocks) + "\n"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in (text or "(nothing)").splitlines())


def write_samples(path: Path, prompts: Sequence[str], answers: Mapping[str, Sequence[str]]) -> None:
    """Write the samples to `path`; does nothing without prompts."""
    if prompts:
        write_text(path, samples_text(prompts, answers))
