"""The command `distill`: run and validate recipes, list and copy those that ship; the rest is in `commands`.

Exit codes: 0 done; 1 a check failed, or the machine or the numbers did, or something broke (one line, the trace in a
file); 2 the user's input (one line a fault); 130 for Ctrl-C. Nothing heavy is imported before a run
starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distill import __version__
from distill.commands import cache, chat, doctor, judge, plan, sample, serve, settings, share, verify
from distill.commands.arguments import (
    AsJson,
    Overrides,
    RecipeArgument,
    complete_recipe,
    load_recipe,
    plugin_override,
    say_json,
)
from distill.commands.paths import path_faults, path_notes
from distill.core import console, launch, ranks
from distill.core.faults import RunError, disk_line
from distill.core.folders import RECIPE_FILE, run_folder, runs_folder
from distill.core.quiet import quieten
from distill.core.run_lock import RunLock
from distill.recipe import dump
from distill.recipe.shipped import copy_recipe, shipped_architectures, shipped_recipes
from distill.recipe.usual import unusual

UsageError: Any = typer.BadParameter.__base__  # click's own class; typer carries a copy of click in newer releases

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train a small language model to match a large one.

    \b
    distill recipes                            what ships
    distill recipes copy chat-8b-to-1b         a recipe of your own to edit
    distill settings train                     what a recipe can say
    distill validate chat-8b-to-1b.yaml        is it right? prints every setting
    distill check chat-8b-to-1b.yaml           will it fit, how long will it take?
    distill inspect chat-8b-to-1b.yaml         what is learned, token by token
    distill cache chat-8b-to-1b.yaml           the teacher once, onto the disk
    distill serve chat-8b-to-1b.yaml           the teacher for trainers elsewhere
    distill sample my.yaml --prompts q.txt ... answers of either model, as data
    distill run chat-8b-to-1b.yaml             teach
    distill run quickstart train.steps=20      a shipped one, a setting changed
    distill report quickstart                  a page about the run
    distill eval quickstart                    held-out figures with intervals
    distill compare quickstart quickstart-2    runs beside each other
    distill generate quickstart -p "Hello"     let the student answer
    distill chat quickstart --beside-teacher   talk with it
    distill export quickstart -o student       a folder to hand over
    distill verify quickstart                  is every file as it was written?
    """,
)
recipes_app = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="List the recipes that ship, or copy one."
)
app.add_typer(recipes_app, name="recipes")
for command in (
    plan.check, plan.inspect, plan.bench, cache.cache, doctor.doctor, judge.evaluate, judge.compare, judge.report,
    share.generate, share.export, chat.chat, sample.sample, serve.serve, verify.verify, settings.settings,
    settings.schema,
):  # fmt: skip
    app.command("eval" if command is judge.evaluate else None)(command)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.say(f"distill {__version__}")
    elif context.invoked_subcommand is None:
        console.say(context.get_help())


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Call the run so, not as the recipe (or -2, -3, ...)."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder of all runs, in place of the recipe's (runs).")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last checkpoint of --name, else of the recipe's last run."),
    ] = False,
    resume_if_any: Annotated[
        bool, typer.Option("--resume-if-any", help="The same where the run of --name has begun; else start it.")
    ] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Let --resume take a checkpoint that has no manifest.json, unchecked.")
    ] = False,
    lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Refuse to run unless all is as in this lock.yaml of a run.")
    ] = None,
    plugin: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Run this Python file: its TERMS become types of loss.terms."),
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

    Several visible GPUs are all used, through torchrun. To start the processes yourself, on several nodes say:

    \b
    torchrun --nproc-per-node 8 -m distill run chat-8b-to-1b.yaml
    torchrun --nproc-per-node 8 --max-restarts 3 -m distill \\
      run chat-8b-to-1b.yaml --name chat --resume-if-any
    accelerate launch --num_processes 8 -m distill run chat-8b-to-1b.yaml

    Without a hub, a shipped recipe runs on random weights and random tokens, unless its header says that it cannot:

    \b
    distill run llama3-8b-to-1b teacher.init=random student.init=random \\
      data.source=synthetic
    """
    overrides = [*(overrides or ()), *([f"output_dir={json.dumps(str(output_dir))}"] if output_dir else [])]
    _, resolved = load_recipe(recipe, [*overrides, *plugin_override(plugin)])
    runs = runs_folder(resolved.output_dir)
    if resume_if_any:
        if name is None:
            raise ValueError("--resume-if-any: needs --name, which says which run it may be")
        resume = resume or (runs / name / RECIPE_FILE).is_file()
    elif unverified and not resume:
        raise ValueError("--unverified: belongs to --resume, which was not given")
    # of several processes, one may have made the folder already
    folder = run_folder(resolved.name, name=name, resume=resume, runs=runs) if ranks.is_first() else None
    processes = launch.processes_to_start(os.environ, gpus=launch.visible_gpus(), device=resolved.train.device)
    if processes > 1:
        from distill.planning.served import share_out
        from distill.planning.steps import accumulation_steps

        given = resolved
        processes, resolved = share_out(given, processes, folder / RECIPE_FILE if resume and folder else None)
        accumulation_steps(resolved.train, resolved.data, processes)  # what their number makes impossible
        if processes > 1:
            chosen = resolved.parallel
            more = [f"parallel.teacher={chosen.teacher}", f"parallel.teacher_gpus={chosen.teacher_gpus}"]
            raise typer.Exit(launch.restart(processes, more if resolved is not given else []))
    from distill.run import run as run_recipe

    try:
        run_recipe(
            resolved, name=name, resume="unverified" if resume and unverified else resume, lock=lock, plugin=plugin
        )
    except KeyboardInterrupt:
        if folder is not None:
            _say_how_to_resume(folder, recipe, overrides, plugin)
        raise typer.Exit(130) from None


@app.command()
def validate(recipe: RecipeArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it with every setting filled in; loads no model.

    Exit code 1, and a line for each, where files that it names are not here.

    \b
    distill validate chat-8b-to-1b.yaml
    distill validate quickstart train.steps=20 --json
    """
    _, resolved = load_recipe(recipe, overrides)
    if faults := path_faults(resolved):
        raise RunError("\n".join(faults))
    lora = resolved.student.lora
    if lora is not None and lora.targets not in ("all-linear", ["all-linear"]):
        from distill.models.meta import check_targets

        check_targets(resolved.student, resolved.teacher)
    if as_json:
        say_json(resolved.model_dump(mode="json"))
    else:
        print(dump(resolved).rstrip())  # as YAML, whose lines a terminal may break
    for note in [*path_notes(resolved), *unusual(resolved)]:
        console.complain(note)


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
        say_json(listing)
        return
    console.show_table(["recipe", "what it does"], [[recipe.name, recipe.title] for recipe in recipes])
    console.say(f"\nshapes for dry runs (config:)  {', '.join(shipped_architectures())}")
    console.say("distill recipes copy NAME [FILE] gives you one to edit; distill run NAME runs it as it is")


@recipes_app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="A recipe that ships.", autocompletion=complete_recipe)],
    destination: Annotated[Path | None, typer.Argument(help="A file or folder; else the working directory.")] = None,
) -> None:
    """Copy a shipped recipe, to edit it; overwrites nothing.

    \b
    distill recipes copy chat-8b-to-1b
    distill recipes copy chat-8b-to-1b support-bot.yaml
    """
    target = copy_recipe(name, destination)
    console.say(f"wrote {target}; run it with: distill run {shlex.quote(str(target))}")


def _say_how_to_resume(folder: Path, recipe: str, overrides: Sequence[str], plugin: Path | None) -> None:
    if any(folder.rglob("checkpoint-*")):
        own = ["--plugin", str(plugin)] if plugin else []
        command = shlex.join(["distill", "run", recipe, *overrides, *own, "--name", folder.name, "--resume"])
        console.complain(f"interrupted; continue with: {command}")
    else:
        console.complain("interrupted before the first checkpoint (train.save_every), so there is nothing to resume")


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run `distill` with these arguments (`sys.argv` otherwise) and return its exit code.

    A `ValueError` is the user's input: its message is printed, one line a fault, and the code is 2. A `RunError`, and
    what a disk refuses, is one line and 1. Of anything else the line names a file with the trace. With DISTILL_TRACE=1
    in the environment all of them are raised instead.
    """
    launch.command_line[:] = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=launch.command_line, prog_name="distill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "distill"
        console.complain(f"{error.format_message()} ({command} --help says more)")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        console.complain("interrupted")
        return 130
    except Exception as error:
        if os.environ.get("DISTILL_TRACE") == "1":
            raise
        if isinstance(error, RunError | ValueError):
            console.complain(str(error))
            return 1 if isinstance(error, RunError) else 2
        console.complain(disk_line(error) or _last_resort(error))
        return 1


def _last_resort(error: Exception) -> str:
    """A line for a fault that nobody has thought of; its trace goes to a file in the run's folder."""
    text = "".join(traceback.format_exception(error))
    text = f"distill {shlex.join(launch.command_line)}\n\n{text}\n"
    with contextlib.suppress(Exception):
        from distill.core.environment import environment

        text += "".join(f"{name} {value}\n" for name, value in environment().items())
    first = (str(error).strip().splitlines() or [""])[0]
    line = f"something broke: {type(error).__name__}: {first:.200}"
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (RunLock.latest, Path(tempfile.gettempdir())):
        if folder is None or not folder.is_dir():
            continue
        try:
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        except OSError:
            continue
        return f"{line}; the trace is in {folder / name} (DISTILL_TRACE=1 shows it here)"
    return f"{line} (DISTILL_TRACE=1 shows the trace)"


def main() -> None:
    """The console script."""
    # threads that wait for others sleep: as fast on an idle machine, half as fast again on a busy one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):  # a model says what a terminal may have no letters for
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    quieten()
    launch.end_with_launcher()
    launch.end_with_owner()
    code = run_command()
    if ranks.is_one_of_several():
        ranks.leave(code)
    sys.exit(code)
