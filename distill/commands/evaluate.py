"""Commands after a run: `eval`, `compare`, `report`."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.arguments import (
    AsJson,
    RunArgument,
    TargetArgument,
    complete_run,
    print_json,
)
from distill.core import console, launch, ranks
from distill.core.errors import RecipeError
from distill.core.files import write_text
from distill.core.folders import check_output_file
from distill.core.heartbeat import end_together
from distill.core.units import plural

if TYPE_CHECKING:
    from distill.reports.report import ReportedRun


@end_together(holds_store=True)
def evaluate(
    target: TargetArgument,
    teacher: Annotated[
        str | None, typer.Option("--teacher", "--target", metavar="MODEL", help="The teacher; default: the run's.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="SOURCE", help="Data; default: the run's held-out rows.")] = None,
    before: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Student before training, for the KL reduction.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Maximum texts or chats of --data.", show_default="512")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens per row of --data.", show_default="1024")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows per forward pass.")] = 1,
    speculative: Annotated[
        bool, typer.Option("--speculative", help="Also measure acceptance as the teacher's draft model (16 responses).")
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Run tasks instead: the recipe's, or lm-evaluation-harness's (an extra)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Maximum examples per task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to tasks.")] = False,
    task_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of custom task YAML files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure KL, agreement and calibration of a student against its teacher on held-out text, with 95 % intervals.

    Uses one GPU, or all visible ones where the run's recipe shards the teacher over them (parallel.teacher).

    \b
    distill eval support-bot
    distill eval support-bot --data other-chats.jsonl
    distill eval ./student --teacher meta-llama/Llama-3.1-8B-Instruct \\
      --data python-stdlib --json
    distill eval support-bot --speculative --target meta-llama/Llama-3.1-8B
    distill eval support-bot --tasks hellaswag,arc_easy --limit 500
    """
    if tasks is None and (limit is not None or chat or task_folder is not None):
        raise ValueError("--limit, --chat and --task-folder: expected together with --tasks; got no --tasks")
    if data is None and (max_rows is not None or max_length is not None):
        raise ValueError("--max-rows and --max-length: expected together with --data; got no --data")
    if tasks is not None and data is not None:
        raise ValueError("--data: expected none with --tasks, which have their own data; run eval once for each")
    max_rows = max_rows or 512
    max_length = max_length or 1024
    if tasks is not None:
        _run_tasks(target, teacher, before, tasks, limit, batch_size, chat, task_folder, as_json)
        return
    import torch
    from accelerate import PartialState

    from distill.core.ranks import world_size
    from distill.evaluation import targets
    from distill.evaluation.evaluate_documents import evaluate_documents, evaluate_spans
    from distill.models.load.vocabulary import compare as compare_vocabularies
    from distill.models.loading import load_tokenizer
    from distill.models.patch.packed import isolates_documents
    from distill.objectives.measure import metric_text as format_figure
    from distill.teachers.rows.retokenised.vocabularies import compare_by_bytes, readers_of

    found = targets.find_target(target)
    processes = launch.processes_to_start(os.environ, gpus=launch.visible_gpus(), device="auto")
    # a teacher that does not fit one GPU: this command starts itself again, with a process for each GPU
    if processes > 1 and targets.needs_sharding(found, teacher, processes, batch_size):
        raise typer.Exit(launch.restart(processes))
    first = ranks.is_main_process()
    world = world_size()
    if world > 1:
        if not targets.needs_sharding(found, teacher, world, batch_size):
            raise ValueError(
                f"parallel.teacher: expected sharded in the run's recipe for an evaluation on {world} processes; start "
                "distill eval without a launcher"
            )
        PartialState(cpu=not torch.cuda.is_available())  # joins the process group; all ranks evaluate the same rows
    measure = targets.target_measure(found, teacher)
    by_spans = measure.unit != "token"
    with console.spinner("loading models and data"):
        large = targets.load_teacher_of(found, teacher, in_shards=world > 1)
        tokenizer = load_tokenizer(targets.tokenizer_section(found, teacher))
        student, own = targets.load_target(found)
        packing = all(isolates_documents(model) for model in (student, large))
        if by_spans:
            assert found.recipe is not None
            kwargs = targets.teacher_kwargs_of(found, teacher)
            readers = readers_of(own, tokenizer, found.recipe.data, kwargs)
            look = functools.partial(evaluate_spans, shared=compare_by_bytes(*readers).shared)
            rows = targets.held_out_rows(
                found, data, own, max_rows, max_length, tokenizer, teacher_kwargs=kwargs, packing=packing
            )
        else:
            heads = [model.get_output_embeddings().weight.shape[0] for model in (large, student)]
            columns = compare_vocabularies(tokenizer, own, *heads).require()
            look = functools.partial(evaluate_documents, vocab_size=columns, batch_size=batch_size)
            rows = targets.held_out_rows(found, data, tokenizer, max_rows, max_length, packing=packing)
    passes = len(rows) * (1 if before is None else 2)
    with console.spinner("comparing", passes):
        after = look(student, large, rows)
        closed = None
        if before is not None:
            earlier, _ = targets.load_target(targets.find_target(before))
            closed = after.kl_reduction(look(earlier, large, rows))
    # every rank has computed the same figures
    if not first:
        return
    figures: dict[str, Any] = measure.to_json(after.figures)
    figures |= {f"{who}_perplexity": after.perplexity(who) for who in ("student", "teacher")}
    if speculative and not by_spans:
        from distill.evaluation.speculative import measure_acceptance

        prompts = [row["input_ids"][: max(1, min(64, len(row["input_ids"]) // 2))] for row in rows][:16]
        figures |= measure_acceptance(student, large, prompts, count=64)
    if as_json:
        figures |= {} if closed is None else {"gap_closed": closed}
        errors = {"student": after.calibration_error, "teacher": after.teacher_calibration_error}
        record = {"measure": measure.name, "rows": after.rows, "figures": figures, "calibration_error": errors}
        print_json(measure.to_json({"tokens": after.tokens}) | record)
        return
    if closed is not None and closed.value >= 0:
        figures["relative_reduction"] = closed
    names = {f"{way}_{measure.key}": f"{way} {measure.name}" for way in ("forward", "reverse")}
    shown = [[names.get(name, name.replace("_", " ")), *map(format_figure, figure)] for name, figure in figures.items()]
    if not by_spans:
        shown.append(["student calibration error", f"{after.calibration_error:.4f}", "", ""])
        shown.append(["teacher calibration error", f"{after.teacher_calibration_error:.4f}", "", ""])
    console.show_table(["held out", "mean", "95 % from", "to"], shown, numbers=True)
    drawn = "rows" if by_spans else "documents"
    over = f"{plural(after.tokens, measure.unit)} in {plural(after.rows, 'row')}"
    console.print_lines(f"over {over}; intervals by resampling {drawn}")
    if closed is not None and closed.value < 0:
        console.print_lines(f"worse than before training: the {measure.name} to the teacher has increased")
    elif closed is not None and math.isnan(closed.value):
        console.print_lines(f"no reduction: before training the {measure.name} to the teacher was about 0")


def _run_tasks(
    target: str,
    teacher: str | None,
    before: str | None,
    tasks: str,
    limit: int | None,
    batch_size: int,
    chat: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    from distill.evaluation import targets
    from distill.evaluation.tasks import chat_variables, check_tasks, recipe_tasks, run_recipe_tasks, run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    found = targets.find_target(target)
    own_tasks = recipe_tasks(found.recipe, names, limit)
    names = [name for name in names if name not in {questions.name for questions in own_tasks}]
    missing = None if teacher is not None else targets.missing_teacher(found, "eval --tasks")
    if missing is not None and found.recipe is not None:
        console.print_error(f"without the teacher: {missing}")
    compares = missing is None
    if compares and targets.needs_sharding(found, teacher, launch.visible_gpus(), batch_size):
        raise ValueError(
            "parallel.teacher: expected an unsharded teacher for tasks, got a sharded one; if it fits one GPU, set "
            "CUDA_VISIBLE_DEVICES=0"
        )
    found_tasks = None if own_tasks and not names else check_tasks(names, folder)
    own = targets.tokenizer_of(found)
    tokenizers = {"student": own, "before": own}
    if compares:
        tokenizers["teacher"] = targets.teacher_tokenizer(found, teacher, own)
    if chat:
        chat_variables(tokenizers)  # refused before models are loaded
    with console.spinner("loading models"):
        models = {"student": targets.load_target(found)[0]}
        if before is not None:
            models["before"], _ = targets.load_target(targets.find_target(before))
        if compares:
            models["teacher"] = targets.load_teacher_of(found, teacher, command="eval --tasks")
    scores = run_recipe_tasks(models, tokenizers, own_tasks, batch_size=batch_size)
    if found_tasks is not None:
        scores += run_tasks(models, tokenizers, found_tasks, limit=limit, batch_size=batch_size, chat=chat)
    if as_json:
        print_json(scores)
        return
    rows = [
        [row.task, row.metric, *(f"{score.value:.4f} ± {score.error:.4f}" for score in row.of.values())]
        for row in scores
    ]
    console.show_table(["task", "metric", *models], rows)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs: folders or names under runs/.", autocompletion=complete_run),
    ],
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the runs' curves to this HTML page.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare runs with different teachers or held-out rows, with a warning.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="NAME",
            help="Compare each run with a row of the reference results instead; exit code 1 where one is outside.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs in one table; runs that differ only in their seed are one line, with the spread over seeds.

    \b
    distill compare kl kl-2 kl-3 jsd jsd-2 jsd-3
    distill compare runs/a runs/b --plot curves.html
    distill compare study --reference gsm8k-forward-kl
    """
    from distill.reports.compare_runs import (
        RunGroup,
        curves_page,
        describe_changes,
        evaluation_differences,
        group_runs,
        mean_and_spread,
    )
    from distill.reports.plots import HINT, matplotlib_is_installed
    from distill.reports.report import find_run, read_run

    if reference is not None and plot is not None:
        raise ValueError("--plot: expected none with --reference, whose rows have no curves")
    read = [read_run(find_run(run)) for run in runs]
    if reference is not None:
        _compare_with_reference(read, reference, anyway, as_json)
        return
    groups = group_runs(read)
    warnings = evaluation_differences(read)
    if warnings and not anyway:
        raise RecipeError([*warnings, "these metrics are not comparable; --anyway prints the table all the same"])
    if plot is not None:
        check_output_file(plot, "--plot")
        if plot.suffix not in (".html", ".htm"):
            raise ValueError(f"--plot: expected a file name that ends in .html, got {plot}")
        if not matplotlib_is_installed():
            raise ValueError(f"--plot: {HINT}")
        write_text(plot, curves_page(read))
    if as_json:
        for line in warnings:
            console.print_error(line)
        print_json([group.as_dict() for group in groups])
        return
    measures = {group.measure.name for group in groups}
    name = measures.pop() if len(measures) == 1 else ""  # of several measures, each line names its own

    def p_of(group: RunGroup) -> str:
        if group is groups[0] or group.measure != groups[0].measure:
            return "" if group is groups[0] else "another measure"
        return "one seed" if group.p_value is None else f"{group.p_value:.3f}"

    further = list(dict.fromkeys(figure for group in groups for figure in group.further))
    rows = [
        [
            group.name,
            str(len(group.runs)),
            *([] if name else [group.measure.name]),
            *map(mean_and_spread, (group.divergence, group.agreement)),
            "worse than before" if min(group.gap) < 0 else mean_and_spread(group.gap),
            p_of(group),
            *(mean_and_spread(group.further[figure]) if figure in group.further else "" for figure in further),
        ]
        for group in groups
    ]
    heading = [f"{name} to teacher"] if name else ["measure", "to teacher"]
    p = f"p ({name})" if name else "p"
    console.show_table(["run", "seeds", *heading, "agreement", "reduction", p, *further], rows, numbers=True)
    for group in groups[1:]:
        console.print_lines(f"{group.name} differs from {groups[0].name} in {describe_changes(group.differs)}")
    for line in warnings:
        console.print_lines(line)
    if plot is not None:
        console.print_lines(f"wrote {plot}")


def _compare_with_reference(runs: list[ReportedRun], name: str, anyway: bool, as_json: bool) -> None:
    """Print each run's figures beside the interval of a reference row.

    Raises:
        typer.Exit: A figure is outside (1).
    """
    from distill.reports import reference as references
    from distill.reports.compare_runs import describe_changes, require_results

    row = references.find_reference(name)
    require_results(runs)
    warnings = [line for run in runs for line in references.why_not_comparable(run, row)]
    if warnings and not anyway:
        raise RecipeError([*warnings, f"not comparable with {name}; --anyway prints the figures all the same"])
    found = {run.folder.name: references.compare_with_reference(run, row) for run in runs}
    changes = {
        run.folder.name: {setting: own for setting, (own, _) in references.differing_settings(run, row).items()}
        for run in runs
    }
    if as_json:
        for line in warnings:
            console.print_error(line)
        print_json(
            {
                "reference": name,
                "made_with": row.made_with,
                "runs": {
                    run: {"figures": [each.as_dict() for each in figures], "differs": changes[run]}
                    for run, figures in found.items()
                },
            }
        )
    else:
        cells = [
            [run, each.title, *map(each.shown, (each.value, each.mean)), each.interval, each.verdict]
            for run, figures in found.items()
            for each in figures
        ]
        console.show_table(["run", "held out", "this run", name, "19 of 20 seeds", ""], cells)
        for run in runs:
            differs = changes[run.folder.name]
            if differs:
                console.print_lines(f"{run.folder.name} differs from the reference in {describe_changes(differs)}")
            console.print_lines(f"{run.folder.name} {references.versions_line(run, row.made_with)}")
        for line in warnings:
            console.print_lines(line)
    if any(each.verdict != "inside" for figures in found.values() for each in figures):
        raise typer.Exit(1)


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file; default: RUN/report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML page about a run, finished or not: metrics, curves, samples, recipe.

    \b
    distill report quickstart
    distill report runs/support-bot -o support-bot.html
    distill report quickstart --json           # the figures of the page
    """
    from distill.reports.report import find_run, read_run, write_report

    folder = find_run(run)
    if as_json:
        found = read_run(folder)
        record = {when: found.measure.to_json(figures) for when, figures in found.held_out.items()}
        figures = {"measure": found.measure.name, "held_out": record, "result": found.result, "metrics": found.metrics}
        print_json({"run": str(folder), **figures})
        return
    if output is not None:
        check_output_file(output, "--output")
    console.print_lines(f"wrote {write_report(folder, output)}")
