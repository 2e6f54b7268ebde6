"""The command `distill`: run and validate recipes, list and copy the shipped ones; other commands are in `commands`.

Exit codes: 0 success; 1 a failed check, a machine or numerical error, or an unexpected exception (one line; the
traceback goes to a file); 2 invalid user input (one line per error); 130 Ctrl-C. torch and transformers are imported
only when a command needs them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distill import __version__
from distill.commands import (
    cache,
    chat,
    doctor,
    evaluate,
    init,
    plan,
    prune,
    quantise,
    sample,
    serve,
    settings,
    share,
    validate,
    verify,
)
from distill.commands.arguments import (
    AsJson,
    Overrides,
    RecipeArgument,
    complete_recipe,
    load_recipe,
    plugin_override,
    print_json,
    rename_options,
)
from distill.core import console, launch, ranks
from distill.core.errors import RunError, disk_line
from distill.core.folders import RECIPE_FILE, RESULT_FILE, has_begun, run_folder, runs_folder
from distill.core.heartbeat import announced_refusal
from distill.core.interrupts import RunStopped
from distill.core.run_lock import RunLock
from distill.core.startup import paused_collection, silence_libraries
from distill.recipe.shipped import copy_recipe, shipped_architectures, shipped_recipes

UsageError: Any = typer.BadParameter.__base__  # click's own class; typer carries a copy of click in newer releases

COMMANDS: dict[str, Callable[..., object]] = {
    "init": init.init,
    "check": plan.check,
    "inspect": plan.inspect,
    "bench": plan.bench,
    "prune": prune.prune,
    "cache": cache.cache,
    "doctor": doctor.doctor,
    "eval": evaluate.evaluate,
    "compare": evaluate.compare,
    "report": evaluate.report,
    "generate": share.generate,
    "export": share.export,
    "quantise": quantise.quantise,
    "chat": chat.chat,
    "sample": sample.sample,
    "serve": serve.serve,
    "verify": verify.verify,
    "settings": settings.settings,
    "schema": settings.schema,
    "validate": validate.validate,
}

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train a small language model to match a large one.

    \b
    distill recipes                            list the shipped recipes
    distill recipes copy chat-8b-to-1b         copy one to edit
    distill init my.yaml                       write one from five answers
    distill settings train                     explain a recipe's settings
    distill validate chat-8b-to-1b.yaml        check it and print every setting
    distill check chat-8b-to-1b.yaml           estimate memory and time
    distill inspect chat-8b-to-1b.yaml         show the trained tokens of a batch
    distill prune my.yaml --to 0.5             propose shapes of a pruned teacher
    distill cache chat-8b-to-1b.yaml           write teacher outputs to disk
    distill serve chat-8b-to-1b.yaml           start a teacher server
    distill sample my.yaml --prompts q.txt ... generate training data
    distill run chat-8b-to-1b.yaml             train the student
    distill run quickstart train.steps=20      the same with one setting changed
    distill report quickstart                  write an HTML report of a run
    distill eval quickstart                    held-out metrics with intervals
    distill compare quickstart quickstart-2    compare runs
    distill generate quickstart -p "Hello"     generate with the student
    distill chat quickstart                    chat with the student
    distill export quickstart -o student       export the student
    distill quantise quickstart -o control     quantise it after training
    distill verify quickstart                  verify checksums of all files
    """,
)
recipes_app = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="List the recipes that ship, or copy one."
)
app.add_typer(recipes_app, name="recipes")
for command_name, command in COMMANDS.items():
    app.command(command_name)(command)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print_lines(f"distill {__version__}")
    elif context.invoked_subcommand is None:
        console.print_lines(context.get_help())


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run; default: the recipe's name, with -2, -3, ... if taken."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of all runs; default: the recipe's output_dir.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the last checkpoint of --name; default: of the recipe's last run."
        ),
    ] = False,
    resume_if_any: Annotated[
        bool, typer.Option("--resume-if-any", help="Resume the run of --name if it exists; else start it.")
    ] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Let --resume load a checkpoint without checksums (manifest.json).")
    ] = False,
    lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Refuse to run if anything differs from this lock.yaml.")
    ] = None,
    plugin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py",
            help="Python file with custom loss terms (TERMS), a reward or an environment; its code is run.",
        ),
    ] = None,
) -> None:
    """Run a recipe: load teacher and student, train, evaluate, save the student.

    \b
    distill run recipes/quickstart.yaml
    distill run quickstart train.steps=20 loss.terms.0.type=reverse_kl
    distill run chat-8b-to-1b.yaml data.source=chats.jsonl --name support-bot
    distill run chat-8b-to-1b.yaml --name support-bot --resume
    distill run chat-8b-to-1b.yaml --output-dir /scratch/$USER/runs
    distill run chat-8b-to-1b.yaml --lock runs/support-bot/lock.yaml

    All visible GPUs are used, through torchrun. To start the processes yourself, e.g. on several nodes:

    \b
    torchrun --nproc-per-node 8 -m distill run chat-8b-to-1b.yaml
    torchrun --nproc-per-node 8 --max-restarts 3 -m distill \\
      run chat-8b-to-1b.yaml --name chat --resume-if-any
    accelerate launch --num_processes 8 -m distill run chat-8b-to-1b.yaml

    Without access to the hub, a shipped recipe runs on random weights and tokens, unless its header says otherwise:

    \b
    distill run llama3-8b-to-1b teacher.init=random student.init=random \\
      data.source=synthetic
    """
    overrides = [*(overrides or ()), *([f"output_dir={json.dumps(str(output_dir))}"] if output_dir else [])]
    with announced_refusal():
        _, resolved = load_recipe(recipe, [*overrides, *plugin_override(plugin)])
        runs = runs_folder(resolved.output_dir)
        if resume_if_any:
            if name is None:
                raise ValueError("--resume-if-any: expected --name, which names the run to resume; got none")
            resume = resume or has_begun(runs / name)
        elif unverified and not resume:
            raise ValueError("--unverified: expected together with --resume; got no --resume")
        # rank 0 alone decides: another process may have made the folder already
        folder = run_folder(resolved.name, name=name, resume=resume, runs=runs) if ranks.is_main_process() else None
    with console.spinner("importing torch"), paused_collection():
        gpus = launch.visible_gpus()
    processes = launch.processes_to_start(os.environ, gpus=gpus, device=resolved.train.device)
    if processes > 1:
        from distill.planning.steps import accumulation_steps
        from distill.planning.teacher_server import assign_gpus

        given = resolved
        processes, resolved = assign_gpus(given, processes, folder / RECIPE_FILE if resume and folder else None)
        accumulation_steps(resolved.train, resolved.data, processes)  # raises where so many processes do not fit
        if processes > 1:
            chosen = resolved.parallel
            more = [f"parallel.teacher={chosen.teacher}", f"parallel.teacher_gpus={chosen.teacher_gpus}"]
            raise typer.Exit(launch.restart(processes, more if resolved is not given else []))
    with console.spinner("importing transformers"), paused_collection():
        from distill.run import run as run_recipe

    try:
        run_recipe(
            resolved, name=name, resume="unverified" if resume and unverified else resume, lock=lock, plugin=plugin
        )
    except (KeyboardInterrupt, RunStopped) as stop:
        if folder is not None:
            how = "stopped" if isinstance(stop, RunStopped) else "interrupted"
            _print_resume_command(how, folder, recipe, overrides, plugin)
        if isinstance(stop, RunStopped):
            raise
        raise typer.Exit(130) from None


@recipes_app.callback()
def list_recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes that ship, or copy one."""
    if context.invoked_subcommand is not None:
        return
    recipes = shipped_recipes()
    if as_json:
        listing = {
            "recipes": [{"name": recipe.name, "title": recipe.title, "path": str(recipe.path)} for recipe in recipes],
            "architectures": shipped_architectures(),
        }
        print_json(listing)
        return
    console.show_table(["recipe", "what it does"], [[recipe.name, recipe.title] for recipe in recipes])
    console.print_lines(f"\nshapes for dry runs (config:)  {', '.join(shipped_architectures())}")
    console.print_lines("distill recipes copy NAME [FILE] copies one to edit; distill run NAME runs it unchanged")


@recipes_app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.", autocompletion=complete_recipe)],
    destination: Annotated[
        Path | None, typer.Argument(help="Target file or folder; default: the working directory.")
    ] = None,
) -> None:
    """Copy a shipped recipe to edit it; overwrites nothing.

    \b
    distill recipes copy chat-8b-to-1b
    distill recipes copy chat-8b-to-1b support-bot.yaml
    """
    target = copy_recipe(name, destination)
    console.print_lines(f"wrote {target}; run it with: distill run {shlex.quote(str(target))}")


def _print_resume_command(how: str, folder: Path, recipe: str, overrides: Sequence[str], plugin: Path | None) -> None:
    # a finished run, or stage, is continued too: by what comes after its training
    if any(folder.rglob("checkpoint-*")) or any(folder.rglob(RESULT_FILE)):
        own = ["--plugin", str(plugin)] if plugin else []
        command = shlex.join(["distill", "run", recipe, *overrides, *own, "--name", folder.name, "--resume"])
        console.print_error(f"{how}; continue with: {command}")
    else:
        console.print_error(f"{how} before the first checkpoint (train.save_every): nothing to resume")


@functools.cache
def _command() -> Callable[..., Any]:
    """Return the command with all of its commands; typer reads every signature and hint for it, 50 ms."""
    return typer.main.get_command(app)


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run `distill` with these arguments (`sys.argv` otherwise) and return its exit code.

    A `ValueError` is invalid user input: its message is printed, one line per error, and the code is 2. A `RunError`
    or an error of the disk prints one line; the code is 1. Any other exception prints one line that names a file with
    the traceback; the code is 1. With DISTILL_TRACE=1 in the environment exceptions are raised instead.
    """
    launch.command_line[:] = rename_options(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _command()(args=launch.command_line, prog_name="distill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "distill"
        console.print_error(f"{error.format_message()} (see {command} --help)")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        console.print_error("interrupted")
        return 130
    except Exception as error:
        if os.environ.get("DISTILL_TRACE") == "1":
            raise
        if isinstance(error, RunError | ValueError):
            console.print_error(str(error))
            return 1 if isinstance(error, RunError) else 2
        console.print_error(disk_line(error) or _unexpected_error_line(error))
        return 1


def _unexpected_error_line(error: Exception) -> str:
    """Return a line for an unexpected exception; its traceback goes to a file in the run's folder or /tmp."""
    text = "".join(traceback.format_exception(error))
    text = f"distill {shlex.join(launch.command_line)}\n\n{text}\n"
    with contextlib.suppress(Exception):
        from distill.core.environment import environment

        text += "".join(f"{name} {value}\n" for name, value in environment().items())
    first = (str(error).strip().splitlines() or [""])[0]
    line = f"unexpected error: {type(error).__name__}: {first:.200}"
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (RunLock.latest, Path(tempfile.gettempdir())):
        if folder is None or not folder.is_dir():
            continue
        try:
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        except OSError:
            continue
        return f"{line}; traceback in {folder / name} (DISTILL_TRACE=1 prints it)"
    return f"{line} (DISTILL_TRACE=1 prints the traceback)"


def main() -> None:
    # OpenMP threads that wait for work sleep: as fast on an idle machine, 1.5 times as fast on a busy one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):  # generated text may hold characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    silence_libraries()
    launch.end_with_launcher()
    launch.end_with_owner()
    code = run_command()
    if ranks.is_launched_process():
        ranks.exit_process(code)
    sys.exit(code)
