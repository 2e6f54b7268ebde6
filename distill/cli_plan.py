"""Commands before a run: `check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill import console
from distill.cli_arguments import AsJson, Overrides, RecipeArgument, load_recipe, plain, say_json

if TYPE_CHECKING:
    from distill.preflight import Preflight

GIB = 2**30


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command()(check)


def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plan for this GPU (H100, RTX 4090, 24GB, cpu), not for mine.")
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="How many of them.")] = 1,
    data: Annotated[bool, typer.Option("--data/--no-data", help="Read data that are on this machine.")] = True,
    probe: Annotated[bool, typer.Option("--probe", help="Run two real steps here; predicted beside measured.")] = False,
    as_json: AsJson = False,
) -> None:
    """Will it fit, how long will it take, can it work? Downloads no weights; exit code 1 if it cannot run.

    \b
    distill check chat-8b-to-1b.yaml
    distill check llama3-8b-to-1b --gpu H100 --gpus 8
    distill check my.yaml --gpu 24GB student.lora.r=16 --json
    distill check llama3-8b-to-1b --probe teacher.init=random student.init=random
    """
    _, resolved = load_recipe(recipe, overrides)
    from distill.preflight import check as look
    from distill.preflight import find_device

    device = find_device(gpu)
    with console.working("looking at models and data"):
        report = look(resolved, device, gpus=gpus, look_at_data=data)
    measured = None
    if probe:
        from distill.preflight_probe import probe as measure

        measured = measure(resolved)
    if as_json:
        say_json(_as_dict(report, measured))
    else:
        _print(report, measured)
    if not report.ok:
        raise typer.Exit(1)


def _as_dict(report: Preflight, measured: Any) -> dict[str, Any]:
    found = plain(report)
    found["memory"]["peak"] = report.memory.peak
    found["advice"] = [{"change": c, "saves_gib": round(g, 3), "then_fits": f} for c, g, f in report.advice]
    found |= {"seconds": report.seconds, "ok": report.ok}
    if measured is not None:
        found["measured"] = plain(measured) | {"predicted_over_measured": report.memory.peak / measured.peak}
    return found


def _print(report: Preflight, measured: Any) -> None:
    device, memory = report.device, report.memory
    where = f"{report.gpus} x {device.name}" if report.gpus > 1 else device.name
    lines = [
        f"teacher     {report.teacher.parameters / 1e6:,.2f} M parameters",
        f"student     {report.student.parameters / 1e6:,.2f} M parameters, "
        f"{report.student.trained / 1e6:,.2f} M trained",
        f"vocabulary  {report.vocabulary}",
        *([f"data        {report.data}".replace("\n", "\n" + " " * 12)] if report.data else []),
        f"plan        {where}, {report.strategy}; a step is {report.tokens_per_step:,} tokens in "
        f"{report.accumulation} micro-batches a device",
    ]
    console.say("\n".join(lines) + "\n")
    rows = [[name, f"{value / GIB:.2f}"] for name, value in memory.parts.items() if value >= 0.005 * GIB]
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    rows += [
        [f"peak, in the {moment}", f"{memory.peak / GIB:.2f}"],
        ["the device has", f"{device.memory_bytes / GIB:.2f}"],
    ]
    title = "memory of each GPU" if device.cuda else "memory (arithmetic of the GPU path; a CPU takes more)"
    console.show_table([title, "GiB"], rows, numbers=True)
    console.say(f"not all at once; full logits of both models would take {memory.logits_avoided / GIB:.1f} GiB more")
    if measured is not None:
        console.say("")
        console.show_table(
            ["one step here", "predicted", "measured"],
            [
                ["peak GiB", f"{memory.peak / GIB:.2f}", f"{measured.peak / GIB:.2f}"],
                ["seconds", _number(report.seconds_per_step), f"{measured.seconds:.2f}"],
            ],
            numbers=True,
        )
    console.say("")
    if report.flops_per_step is not None:
        console.say(f"arithmetic  {report.flops_per_step / 1e12:,.1f} TFLOP a step")
    if report.seconds_per_step is not None:
        rest = f", {_duration(report.seconds)} for {report.steps:,} steps" if report.seconds is not None else ""
        console.say(f"time        {report.seconds_per_step:.2f} s a step{rest} (assuming half of the GPU's bf16 peak)")
    console.say(f"disk        {report.disk / GIB:.1f} GiB of {report.disk_free / GIB:.1f} GiB free")
    if report.advice:
        title = "to save memory" if report.fits else "to make it fit"
        rows = [[c, f"{g:.1f}", "yes" if f else "no"] for c, g, f in report.advice]
        console.say("")
        console.show_table([title, "GiB saved", "then fits"], rows)
    console.say("")
    for problem in report.problems:
        console.say(f"PROBLEM     {problem}")
    if report.ok:
        console.say("verdict     it fits and can run")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
