"""Command `sample`: generate responses of a model to prompts, as training data."""

from __future__ import annotations

import os
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
    print_json,
)
from distill.core import console, launch, ranks
from distill.core.heartbeat import end_together
from distill.core.units import plural
from distill.recipe.compatibility import require_command


class Role(StrEnum):
    """Model that generates."""

    teacher = "teacher"
    student = "student"


class EngineName(StrEnum):
    """Generation engine."""

    distill = "distill"
    transformers = "transformers"
    vllm = "vllm"


@end_together(holds_store=True)
def sample(
    recipe: RecipeArgument,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts: .txt with one per line, or data with prompt or messages.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output .jsonl; existing responses are kept.")],
    who: Annotated[Role, typer.Option("--from", help="Model that generates.")],
    overrides: Overrides = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 1.0,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts per batch.")] = 32,
    top_k: Annotated[int, typer.Option(metavar="K", min=0, help="Top-k sampling; 0 to disable.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", min=1e-6, max=1.0, help="Top-p (nucleus) sampling; 1 to disable.")
    ] = 1.0,
    min_p: Annotated[float, typer.Option(metavar="P", min=0.0, max=1.0, help="Min-p sampling; 0 to disable.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop string; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Sampling seed.")] = 0,
    engine: Annotated[EngineName, typer.Option(help="Generation engine.")] = EngineName.distill,
    as_json: AsJson = False,
) -> None:
    """Generate training data: responses of a recipe's teacher or student to a file of prompts. Can be resumed.

    Uses one GPU, or all visible ones for a sharded teacher (parallel.teacher), which is slow.

    \b
    distill sample chat-8b-to-1b.yaml --from teacher \\
      --prompts questions.txt --out answers.jsonl
    distill sample my.yaml --from student student.model=runs/my/student \\
      --prompts chats.jsonl --out own.jsonl
    distill run my.yaml data.source=answers.jsonl
    """
    _, resolved = load_recipe(recipe, overrides)
    processes = launch.processes_to_start(os.environ, gpus=launch.visible_gpus(), device=resolved.train.device)
    if who is Role.teacher and processes > 1:
        require_command(resolved, "sample --from teacher")
        from distill.evaluation.sample import answers_in_shards

        if answers_in_shards(resolved, processes, batch_size, max_new_tokens):
            raise typer.Exit(launch.restart(processes))
    from distill.evaluation.sample import AnswerSettings
    from distill.evaluation.sample import sample as run
    from distill.generation.sampling import Sampling

    first = ranks.is_main_process()
    with console.spinner("generating responses"):
        sampling = Sampling(temperature, top_k, top_p, min_p)
        settings = AnswerSettings(engine.value, batch_size, max_new_tokens, sampling, seed, tuple(stop or ()))
        result = run(resolved, prompts, out, who.value, settings)
    if as_json and first:
        print_json(result)
    if as_json or not first:
        return
    for reason, count in (result.dropped or {}).items():
        console.print_lines(f"dropped {plural(count, 'prompt')}: {reason}")
    if result.found:
        console.print_lines(f"{plural(result.found, 'response')} already existed")
    if result.refused:
        console.print_lines(
            f"{plural(result.refused, 'response')} not written: the student reads other tokens, and the text does not "
            "give those that were sampled"
        )
    if result.made:
        speed = result.tokens / max(result.seconds, 1e-9)
        console.print_lines(
            f"{plural(result.made, 'response')}, {result.tokens / (result.made + result.refused):,.0f} tokens each, "
            f"{speed:,.0f} tokens/s, {result.truncated:,} truncated at {max_new_tokens:,} tokens"
        )
    console.print_lines(f"wrote {out}; train on it with data.source={out}")
