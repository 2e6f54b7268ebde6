"""Commands after a run: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill import console
from distill.cli_arguments import AsJson, complete_run, say_json

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", autocompletion=complete_run)
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command()(report)


def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to RUN/report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about a run, finished or not: figures, curves, samples, recipe. It loads nothing.

    \b
    distill report quickstart
    distill report runs/support-bot -o support-bot.html
    distill report quickstart --json           the figures of the page
    """
    from distill.report import find_run, read_run, write_report

    folder = find_run(run)
    if as_json:
        found = read_run(folder)
        say_json({"run": str(folder), "held_out": found.held_out, "result": found.result, "metrics": found.metrics})
        return
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output: the folder {output.parent} does not exist")
    console.say(f"wrote {write_report(folder, output)}")
