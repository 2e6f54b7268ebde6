"""The command `sample`: a model's answers to a file of prompts, as data for a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.arguments import (
    AsJson,
    MaxNewTokens,
    Overrides,
    RecipeArgument,
    Temperature,
    load_recipe,
    say_json,
    without_bars,
)
from distill.core import console, launch, ranks
from distill.core.units import counted
from distill.recipe.compatibility import require_command


class Who(StrEnum):
    """Whose answers."""

    teacher = "teacher"
    student = "student"


class EngineName(StrEnum):
    """What generates."""

    distill = "distill"
    transformers = "transformers"
    vllm = "vllm"


def sample(
    recipe: RecipeArgument,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts: .txt with one a line, or data with prompt or messages.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Answers go to this .jsonl; what is there is kept.")],
    who: Annotated[Who, typer.Option("--from", help="Whose answers.")],
    overrides: Overrides = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 1.0,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts answered at once.")] = 32,
    top_k: Annotated[int, typer.Option(metavar="K", min=0, help="Draw from the K likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", min=1e-6, max=1.0, help="Draw from the likeliest tokens of P together.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="P", min=0.0, max=1.0, help="Draw from tokens of P times the likeliest's or more.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End an answer that contains it; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    engine: Annotated[EngineName, typer.Option(help="What generates.")] = EngineName.distill,
    as_json: AsJson = False,
) -> None:
    """Let a recipe's teacher or student answer a file of prompts: data to train on. Goes on where it broke off.

    One GPU answers; all visible ones do where they hold the teacher in shards (parallel.teacher), which is slow.

    \b
    distill sample chat-8b-to-1b.yaml --from teacher \\
      --prompts questions.txt --out answers.jsonl
    distill sample my.yaml --from student student.model=runs/my/student \\
      --prompts chats.jsonl --out own.jsonl
    distill run my.yaml data.source=answers.jsonl
    """
    _, resolved = load_recipe(recipe, overrides)
    processes = launch.processes_to_start(os.environ, gpus=launch.visible_gpus(), device=resolved.train.device)
    if who is Who.teacher and processes > 1:
        require_command(resolved, "sample --from teacher")
        from distill.caching.sample import answers_in_shards

        if answers_in_shards(resolved, processes, batch_size, max_new_tokens):
            raise typer.Exit(launch.restart(processes))
    from distill.caching.sample import AnswerSettings
    from distill.caching.sample import sample as run
    from distill.generation.sampling import Sampling

    without_bars()
    first = ranks.is_first()
    with _progress() if first else contextlib.nullcontext(lambda done, total: None) as progress:
        sampling = Sampling(temperature, top_k, top_p, min_p)
        settings = AnswerSettings(engine.value, batch_size, max_new_tokens, sampling, seed, tuple(stop or ()))
        result = run(resolved, prompts, out, who.value, settings, progress)
    if as_json and first:
        say_json(result)
    if as_json or not first:
        return
    for reason, count in (result.dropped or {}).items():
        console.say(f"dropped {counted(count, 'prompt')}: {reason}")
    if result.found:
        console.say(f"{counted(result.found, 'answer')} {'was' if result.found == 1 else 'were'} there already")
    if result.made:
        speed = result.tokens / max(result.seconds, 1e-9)
        console.say(
            f"{counted(result.made, 'answer')}, {result.tokens / result.made:,.0f} tokens each, {speed:,.0f} tokens/s, "
            f"{result.truncated:,} cut off at {max_new_tokens:,} tokens"
        )
    console.say(f"wrote {out}; learn from it with data.source={out}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line at every tenth of the way, both on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen, tenth = Console(stderr=True), -1
    columns = (TextColumn("prompts"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, expand=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("prompts", total=None)

        def show(done: int, total: int) -> None:
            nonlocal tenth
            bar.update(task, completed=done, total=total)
            if bar.disable and done * 10 // total > tenth:
                tenth = done * 10 // total
                print(f"{done:,} of {total:,} prompts", file=sys.stderr, flush=True)

        yield show
