"""Command `doctor`: checks of the machine and of a recipe's training invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from distill.commands.arguments import AsJson, Overrides, complete_recipe, load_recipe, print_json
from distill.core import console
from distill.core.startup import paused_collection
from distill.core.units import plural

if TYPE_CHECKING:
    from distill.doctor.check_result import CheckResult


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check this recipe.", autocompletion=complete_recipe)
    ] = None,
    overrides: Overrides = None,
    small: Annotated[
        bool | None, typer.Option("--small/--whole", help="Two layers of each model, or all; default: by size.")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Test each kernel and measure this machine; attach it to bug reports.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and the training invariants of a recipe. Exit code 1 if a check fails.

    \b
    distill doctor
    distill doctor --machine --json
    distill doctor recipes/quickstart.yaml
    distill doctor my.yaml student.lora.head=true --small
    """
    resolved = None if recipe is None else load_recipe(recipe, overrides)[1]
    with paused_collection():
        from distill.doctor.examine import environment_lines, examine

    lines = environment_lines()
    if machine:
        from distill.doctor.machine import check_machine, machine_lines

        lines += machine_lines()
    say: Callable[[str], None] = (lambda line: None) if as_json else console.print_lines
    say("\n".join(map(str, lines)))

    kernels: list[CheckResult] = []
    findings: list[CheckResult] = []
    if machine:
        with console.spinner("testing the kernels; compiling them takes minutes the first time"):
            for finding in check_machine():
                kernels.append(finding)
                say(str(finding))
    for finding in () if resolved is None else examine(resolved, small=small):
        findings.append(finding)
        say(str(finding))
    if as_json:
        print_json({"environment": lines, **({"kernels": kernels} if machine else {}), "recipe": findings})
    for what, group in (("check", kernels), ("invariant", findings)):
        if group:
            say(_summary([finding.passed for finding in group], what))
    if any(finding.passed is False for finding in [*kernels, *findings]) or not all(line.fine for line in lines):
        raise typer.Exit(1)


def _summary(passed: list[bool | None], what: str) -> str:
    failed = passed.count(False)
    skipped = passed.count(None)
    verdict = f"{failed} FAILED" if failed else f"{passed.count(True)} passed" if skipped else "all passed"
    return f"{plural(len(passed), what)}, {verdict}" + (f", {skipped} skipped" if skipped else "")
