"""Commands before a run: `check_run`, `inspect`, `bench`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.arguments import AsJson, Overrides, RecipeArgument, load_recipe, print_json
from distill.core import console
from distill.core.folders import RECIPE_FILE
from distill.core.units import GIB, plural
from distill.recipe import LoadedTeacherConfig, load
from distill.recipe.compatibility import require_command

if TYPE_CHECKING:
    from distill.planning.inspect_batches import Token
    from distill.planning.preflight import Preflight
    from distill.teachers.backends.fp8 import Offer

SHOWN = 8  # largest number of module names in a printed setting


def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU to plan for (4090, a100-40, H100, 24GB, cpu); default: this machine's."),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="Number of GPUs.")] = 1,
    data: Annotated[bool, typer.Option("--data/--no-data", help="Read data that are on this machine.")] = True,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also run two real steps; measure an fp8 teacher's error by layer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate a run's memory and time, and check that it can work. Downloads no weights; exit code 1 if it cannot run.

    Of a recipe with stages every stage is planned, and each has to fit and to work.

    \b
    distill check chat-8b-to-1b.yaml
    distill check llama3-8b-to-1b --gpu H100 --gpus 8
    distill check my.yaml --gpu 4090 student.lora.r=16 --json
    distill check llama3-8b-to-1b --probe teacher.init=random student.init=random
    """
    _, resolved = load_recipe(recipe, overrides)
    from distill.planning.devices import find_device
    from distill.planning.preflight import check_run as look
    from distill.planning.preflight import check_stages

    device = find_device(gpu)
    with console.spinner("reading configurations and data"):
        if resolved.stages:
            stages = check_stages(resolved, device, gpus=gpus, read_data=data)
        else:
            stages = [("", resolved, look(resolved, device, gpus=gpus, read_data=data))]
        if resolved.export is not None:
            from distill.reports.served_file import export_problems

            stages[-1][2].problems += export_problems(resolved)
    _, first, report = stages[0]
    measured = None
    offers = []
    if probe:
        from distill.commands.probe import probe as measure
        from distill.commands.probe import probe_available, probe_fp8

        # of stages the first: the students that the others start from do not exist yet
        offers = probe_fp8(first)
        measured = measure(first) if probe_available(first) or not offers else None
    longer = _longer(report, offers, first.train.batch_size * first.data.max_length)
    ok = all(each.ok for _, _, each in stages)
    if as_json:
        choices = [
            console.fields_to_jsonable(offer) | {"longer_ms": ms} for offer, ms in zip(offers, longer, strict=True)
        ]
        found = _as_dict(report, measured) | ({"fp8": choices} if offers else {})
        if resolved.stages:
            dicts = [found, *(_as_dict(each, None) for _, _, each in stages[1:])]
            named = [{"name": name} | each for (name, _, _), each in zip(stages, dicts, strict=True)]
            found = {"ok": ok, "stages": named}
        print_json(found)
    else:
        for number, (name, _, each) in enumerate(stages):
            if resolved.stages:
                console.print_lines(f"{'' if number == 0 else chr(10)}=== stage {number + 1} of {len(stages)}: {name}")
            _print(each, measured if number == 0 else None)
            if number == 0:
                _print_offers(offers, longer)
    if not ok:
        raise typer.Exit(1)


def _as_dict(report: Preflight, measured: Any) -> dict[str, Any]:
    found = console.fields_to_jsonable(report)
    found["memory"] = console.fields_to_jsonable(report.memory) | {"peak": report.memory.peak}
    found["advice"] = [{"change": c, "saves_gib": round(g, 3), "then_fits": f} for c, g, f in report.advice]
    found |= {"kernels": report.device.path, "seconds": report.seconds, "ok": report.ok}
    if measured is not None:
        over = report.memory.peak / measured.peak
        found["measured"] = console.fields_to_jsonable(measured) | {"predicted_over_measured": over}
    return found


def _data_lines(report: str) -> str:
    return f"data        {report}".replace("\n", "\n" + " " * 12)


def _print(report: Preflight, measured: Any) -> None:
    from distill_kernels.launch import FAMILIES

    from distill.models.shape import parameters_text

    device = report.device
    memory = report.memory
    where = f"{report.gpus} x {device.name}" if report.gpus > 1 else device.name
    lines = [
        f"teacher     {report.teacher_text}",
        f"student     {parameters_text([report.student])}, {report.student.trained / 1e6:,.2f} M trained",
        f"vocabulary  {report.vocabulary}",
        *([_data_lines(report.data)] if report.data else []),
        f"plan        {where}, {report.strategy}; a step is {report.tokens_per_step:,} tokens in "
        f"{plural(report.accumulation, 'micro-batch')} per device",
        *([f"kernels     {device.path}"] if device.path else []),
    ]
    console.print_lines("\n".join(lines) + "\n")
    rows = [[name, f"{value / GIB:.2f}"] for name, value in memory.parts.items() if value >= 0.005 * GIB]
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    rows.append([f"peak, in the {moment}", f"{memory.peak / GIB:.2f}"])
    rows.append(["memory of the device", f"{device.memory_bytes / GIB:.2f}"])
    if report.teacher_server_bytes:
        rows.append(["each GPU of the teacher server", f"{report.teacher_server_bytes / GIB:.2f}"])
    ours = device.family is None or device.family in FAMILIES
    title = "memory of each GPU" if device.cuda and ours else "memory (for our kernels; PyTorch takes more)"
    console.show_table([title, "GiB"], rows, numbers=True)
    console.print_lines(
        f"parts are not held all at once; full logits would take {memory.logits_avoided / GIB:.1f} GiB more"
    )
    if measured is not None:
        console.print_lines("")
        peaks = ["peak GiB", f"{memory.peak / GIB:.2f}", f"{measured.peak / GIB:.2f}"]
        seconds = ["seconds", _number(report.seconds_per_step), f"{measured.seconds:.2f}"]
        console.show_table(["one step here", "predicted", "measured"], [peaks, seconds], numbers=True)
    console.print_lines("")
    if report.flops_per_step is not None:
        console.print_lines(f"arithmetic  {report.flops_per_step / 1e12:,.1f} TFLOP a step")
    if report.seconds_per_step is not None:
        whole = report.seconds
        rest = "" if whole is None else f", {_duration(whole)} for {plural(report.steps or 0, 'step')}"
        bus = ", 80 % of its PCIe bandwidth for offloaded layers" if report.moved else ""
        assumed = f"(assuming 72 % of the GPU's peak in GEMMs, 40 % in attention, 88 % of its bandwidth{bus})"
        console.print_lines(f"time        {report.seconds_per_step:.2f} s a step{rest} {assumed}")
    own = report.rollouts
    if own is not None:
        took = "time unknown" if own.seconds is None else f"{own.seconds:.2f} s of it if all are that long"
        console.print_lines(f"rollouts    {own.number:,.0f} per step of at most {plural(own.tokens, 'token')}: {took}")
    if report.host:
        held = f"{report.host / GIB:.1f} GiB"
        moved = f"{report.moved / GIB:.1f} GiB"
        layers = f"{held} of host memory for the teacher's layers"
        console.print_lines(f"offload     {layers}; {moved} per step over the bus to each GPU")
    console.print_lines(f"disk        {report.disk / GIB:.1f} GiB of {report.disk_free / GIB:.1f} GiB free")
    if report.advice:
        title = "to save memory" if report.fits else "to make it fit"
        rows = [[c, f"{g:.1f}", "yes" if f else "no"] for c, g, f in report.advice]
        console.print_lines("")
        console.show_table([title, "GiB saved", "then fits"], rows)
    console.print_lines("")
    for note in report.notes:
        console.print_lines(f"note        {note}")
    for problem in report.problems:
        console.print_lines(f"PROBLEM     {problem}")
    if report.ok:
        console.print_lines("verdict     fits and can run")


def _longer(report: Preflight, offers: list[Offer], tokens: int) -> list[float | None]:
    """Return the extra milliseconds of each offer's forward over all layers in fp8: measured, else estimated."""
    from distill.planning.step_time import extra_seconds_in_bf16

    if offers and offers[0].ms is not None:
        return [offer.ms - offers[0].ms for offer in offers if offer.ms is not None]
    seconds = [extra_seconds_in_bf16(report.device, offer.weights, tokens) for offer in offers]
    return [None if each is None else 1e3 * each for each in seconds]


def _print_offers(offers: list[Offer], longer: list[float | None]) -> None:
    if not offers:
        return
    console.print_lines("")
    rows = []
    for offer, ms in zip(offers, longer, strict=True):
        share = offer.weights / offers[-1].weights
        later = "unknown" if ms is None else f"{ms:+.2f}"
        rows.append([str(len(offer.skip)), f"{share:.1%}", f"{offer.kl:.4f}", later])
    how = "ms per micro-batch" + (" (estimated)" if offers[0].ms is None else "")
    console.show_table(["fp8 teacher: modules kept in bf16", "of its weights", "KL", how], rows, numbers=True)
    best = [(offer, ms) for offer, ms in zip(offers, longer, strict=True) if 0 < len(offer.skip) <= SHOWN]
    for offer, ms in best:
        price = "" if ms is None else f" for {ms:.2f} ms"
        console.print_lines(
            f"KL {offers[0].kl:.4f} to {offer.kl:.4f}{price}: teacher.fp8_skip=[{','.join(offer.skip)}]"
        )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def inspect(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Packed rows to show.")] = 2,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show held-out rows, not training rows.")] = False,
    shade: Annotated[
        str | None, typer.Option(metavar="BY", help="Colour tokens by the teacher's entropy, or by divergence (KL).")
    ] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Show the latest stored rollouts of a RUN, coloured by divergence.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show training rows: tokens that are trained on or masked, and where documents begin.

    In a terminal trained tokens are green and masked ones dim; elsewhere masked text is in «», and --shade's value
    follows each token in brackets, in nats.

    \b
    distill inspect chat-8b-to-1b.yaml
    distill inspect quickstart --rows 1 --shade entropy
    distill inspect runs/on-policy --rollouts
    """
    if rollouts:
        _show(*_stored_rollouts(recipe, rows), as_json)
        return
    _, resolved = load_recipe(recipe, overrides)
    if shade not in (None, "entropy", "divergence"):
        raise ValueError(f"--shade: expected entropy or divergence, got {shade!r}")
    if shade is not None:
        require_command(resolved, "inspect --shade")
    from distill.planning.inspect_batches import token_metrics, tokens_of
    from distill.teachers.load_context import load_context
    from distill.teachers.opening import opened_pair
    from distill.teachers.registry import source_of

    with console.spinner("reading data"):
        source = source_of(resolved)
        vocabulary = source.vocabulary()
        splits = vocabulary.read(resolved.data, resolved.train.seed)
        split = splits.validation if held_out else splits.train
        chosen = [split[number] for number in range(min(rows, len(split)))]
        values = None
        if shade is not None:
            with opened_pair(source, vocabulary, load_context(resolved, splits)) as pair:
                pair.student.eval()
                (teacher,) = pair.teacher.models.values()
                values = token_metrics(chosen, shade, teacher, pair.student)
    made = [
        tokens_of(row, vocabulary.tokenizer, values[number] if values else None) for number, row in enumerate(chosen)
    ]
    if not as_json:
        console.print_lines(_data_lines(str(splits.report)) + "\n")
    _show(made, [f"row {number + 1}" for number in range(len(made))], {"report": splits.report.as_dict()}, as_json)


def _stored_rollouts(name: str, rows: int) -> tuple[list[list[Token]], list[str], dict[str, object]]:
    """Return a run's latest stored rollouts, a title for each, and the file they are from."""
    from distill.core.labels import IGNORE_INDEX
    from distill.planning.inspect_batches import tokens_of
    from distill.reports.report import find_run
    from distill.teachers.registry import source_of
    from distill.training.rollout_files import divergences_of, files, read

    run = find_run(name)
    stored = files(run)
    if not stored:
        raise ValueError(
            f"--rollouts: expected a run of a recipe with data.on_policy.store_every; {run} has no rollouts"
        )
    answers = read(stored[-1])
    tokenizer = source_of(load(run / RECIPE_FILE)).vocabulary().tokenizer
    made = []
    titles = []
    for number, row in enumerate(answers[:rows], 1):
        prompt = row["prompt_ids"]
        answer = row["answer_ids"]
        ids = [*prompt, *answer]
        values = [*[None] * len(prompt), *divergences_of(row)]
        labels = [IGNORE_INDEX if value is None else token for token, value in zip(ids, values, strict=True)]
        made.append(tokens_of({"input_ids": ids, "labels": labels, "position_ids": range(len(ids))}, tokenizer, values))
        more = [row["route"]] if row["route"] else []
        more += [f"reward {row['reward']:g}"] if row.get("reward") is not None else []
        titles.append(", ".join([f"rollout {number} of {len(answers)}", f"step {row['step']}", *more]))
    return made, titles, {"file": str(stored[-1])}


def _show(made: list[list[Token]], titles: list[str], report: dict[str, object], as_json: bool) -> None:
    from rich.console import Console

    from distill.planning.inspect_batches import plain_text, rich_text

    if as_json:
        print_json({**report, "rows": made})
        return
    out = Console()
    for title, tokens in zip(titles, made, strict=True):
        learned = sum(token.state == "trained" for token in tokens)
        console.print_lines(f"=== {title}: {plural(len(tokens), 'token')}, {learned:,} trained on")
        if out.is_terminal:
            out.print(rich_text(tokens))
        else:
            console.print_verbatim(plain_text(tokens))


def bench(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Timed steps per variant.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Time the recipe's training step on this GPU: ours, launched and from CUDA graphs, and plain transformers.

    Random tokens, one micro-batch, a bfloat16 student.

    \b
    distill bench llama3-8b-to-1b teacher.init=random student.init=random
    distill bench my.yaml --steps 20 --json
    """
    _, resolved = load_recipe(recipe, overrides)
    require_command(resolved, "bench")
    section = resolved.teacher
    assert isinstance(section, LoadedTeacherConfig)
    import torch

    from distill.commands.bench import bench_step, make_batch

    if not torch.cuda.is_available():
        raise ValueError("bench: expected a CUDA device in this machine, got none")
    from distill.models.loading import load_student, load_teacher

    def models() -> tuple[Any, Any]:
        teacher = load_teacher(section, device="cuda", dtype=torch.bfloat16)
        return teacher, load_student(resolved.student, teacher=teacher, device="cuda", dtype=torch.bfloat16)

    with console.spinner("timing"):
        size = resolved.train.batch_size
        length = resolved.data.max_length
        make = functools.partial(make_batch, size, length)
        found = list(bench_step(models, make, resolved.loss, steps=steps))
    if as_json:
        print_json(found)
        return
    rows = [
        [
            row.variant,
            f"{row.ms:.1f}",
            f"{row.tokens_per_second:,.0f}",
            "unknown" if row.mfu is None else f"{row.mfu:.0%}",
            f"{row.peak_gib:.1f}",
            f"{row.joules:.1f}",
            " / ".join(f"{name} {ms:.0f}" for name, ms in row.phases.items()),
        ]
        for row in found
    ]
    console.show_table(["variant", "ms", "tokens/s", "MFU", "peak GiB", "joules", "ms by phase"], rows)
