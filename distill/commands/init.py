"""Command `init`: five questions, and a recipe that fits the answers and the memory of the GPU."""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from distill.commands.validate import path_errors
from distill.core import console
from distill.core.errors import RecipeError
from distill.recipe import Recipe
from distill.recipe.schema import parse
from distill.recipe.shipped import shipped_architectures
from distill.recipe.yaml_text import merge

QUESTIONS = {
    "teacher": "teacher: a hub id, a folder, or the URL of a server",
    "student": "student: a hub id, a folder, or how many of the teacher's layers it keeps",
    "data": "data: a .jsonl, .parquet or .csv file, a folder, or a hub data set",
    "learn": "learn from the answers in the data (data), or from the student's own (on-policy)",
    "gpu": "GPU: a name (h100, 4090), a size (24GB), or cpu",
}
HERE = "this machine"
# What makes a run smaller, in the order in which it is tried: each beside those before it. The first two change no
# number but by rounding, a LoRA trains less of the student.
SMALLER: tuple[dict[str, Any], ...] = (
    {},
    {"train": {"batch_size": 1}},
    {"train": {"gradient_checkpointing": True}},
    {"student": {"dtype": "bfloat16", "lora": {"r": 16}}, "train": {"learning_rate": 2e-4}},
    {"data": {"max_length": 1024}},
    {"teacher": {"offload": "cpu"}},
)


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.")] = Path("recipe.yaml"),
    teacher: Annotated[str | None, typer.Option(metavar="MODEL", help="Hub id, folder, or a server's URL.")] = None,
    student: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id or folder, or a number of the teacher's layers.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="SOURCE", help="File, folder or hub data set.")] = None,
    learn: Annotated[
        str | None, typer.Option(metavar="data|on-policy", help="Whose answers are trained on; default: data.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU to fit: h100, 24GB, cpu; default: this machine's.")
    ] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing that has a default.")] = False,
) -> None:
    """Write a recipe from the answers to five questions; overwrites nothing.

    Answers that are given as options are not asked for. Where the models' configurations can be read, the recipe is
    one that fits the GPU: with smaller micro-batches, checkpointing or LoRA if it must.

    \b
    distill init
    distill init my.yaml --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B \\
      --data chats.jsonl --gpu 24GB --defaults
    distill init cut.yaml --teacher ./my-model --student 12 --data chats.jsonl
    """
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError([f"{file}: expected a file that ends in .yaml"])
    if file.exists():
        raise RecipeError([f"{file}: exists already; name another file: distill init my.yaml"])
    given = {"teacher": teacher, "student": student, "data": data, "learn": learn, "gpu": gpu}
    preset = {"learn": "data", "gpu": HERE}
    answers = {name: given[name] or _ask(name, preset.get(name), quiet=defaults) for name in QUESTIONS}
    if answers["learn"] not in ("data", "on-policy"):
        raise ValueError(f"--learn: expected data or on-policy, got {answers['learn']}")
    device = None if answers["gpu"] == HERE else answers["gpu"]
    recipe, report = _fitting(first_recipe(answers, is_cpu(device)), device)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_text(recipe, answers))
    except OSError as error:
        raise RecipeError([f"{file}: cannot be written: {error.strerror}"]) from None
    console.print_lines(f"wrote {file}")
    for line in report:
        console.print_lines(line)
    name = shlex.quote(str(file))
    option = f" --gpu {shlex.quote(device)}" if device else ""
    console.print_lines(f"next: distill check {name}{option}; then distill run {name}")


def _ask(name: str, preset: str | None, *, quiet: bool) -> str:
    if preset is not None and (quiet or not sys.stdin.isatty()):
        return preset
    if not sys.stdin.isatty():
        raise ValueError(f"--{name}: expected an answer, since standard input is no terminal; got none")
    return str(typer.prompt(QUESTIONS[name], default=preset)).strip()


def is_cpu(device: str | None) -> bool:
    if device is not None:
        return device.lower() == "cpu"
    import torch  # a second, and only where this machine's device is asked for

    return not torch.cuda.is_available()


def first_recipe(answers: Mapping[str, str], cpu: bool) -> dict[str, Any]:
    """Return a recipe's tree for the answers, as large as a GPU of 80 GB holds with models of 8B and 1B."""
    teacher: dict[str, Any] = {"model": answers["teacher"], "dtype": "float32" if cpu else "bfloat16"}
    if answers["teacher"].startswith(("http://", "https://")):
        teacher = {"type": "server", "url": answers["teacher"]}
    student: dict[str, Any] = {"model": answers["student"]}
    if answers["student"].isdigit():
        student = {"from_teacher": {"layers": int(answers["student"])}}
    source: dict[str, Any] = {
        "source": answers["data"],
        "max_length": 512 if cpu else 2048,
        "validation": {"fraction": 0.02, "max_rows": 256},
    }
    terms = [{"type": "forward_kl"}]
    train: dict[str, Any] = {
        "epochs": 2,
        "tokens_per_step": 2048 if cpu else 65536,
        "batch_size": 2 if cpu else 4,
        "learning_rate": 2e-5,
        "warmup": 0.03,
        "save_every": 200,
        "eval_every": 200,
    }
    if "from_teacher" in student:
        train["learning_rate"] = 2e-4  # what was cut has to be learned anew
    if answers["learn"] == "on-policy":
        # rollouts are the student's own, so the loss is over what it says: reverse KL, and a smaller step
        source["on_policy"] = {"fraction": 0.5, "max_new_tokens": 256}
        terms = [{"type": "reverse_kl"}]
        train["learning_rate"] /= 4
    for section in (teacher, student):
        shape = _shipped_shape(section.get("model", ""))
        if shape is not None:
            section["config"] = shape  # what it is planned by before anything is downloaded
    return {
        "teacher": teacher,
        "student": student | {"dtype": "float32"},
        "data": source,
        "loss": {"terms": terms},
        "train": train,
    }


def _shipped_shape(model: str) -> str | None:
    """Return the shipped architecture whose name a hub id has, as llama-3.1-8b for meta-llama/Llama-3.1-8B-Instruct."""
    name = model.rpartition("/")[2].lower()
    if Path(model).expanduser().exists():
        return None
    return next((shape for shape in shipped_architectures() if name == shape or name.startswith(f"{shape}-")), None)


def smaller_recipes(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the recipe, then with each of `SMALLER` beside those before it."""
    longest = tree["data"]["max_length"]
    made = copy.deepcopy(dict(tree))
    for change in SMALLER:
        # a student that is cut has too much to learn for adapters
        if "lora" in change.get("student", {}) and "from_teacher" in tree["student"]:
            continue
        if "offload" in change.get("teacher", {}) and "model" not in tree["teacher"]:
            continue  # a server's
        merge(made, change)
        made["data"]["max_length"] = min(made["data"]["max_length"], longest)
        yield copy.deepcopy(made)


def _fitting(tree: dict[str, Any], device: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the first of `smaller_recipes` that fits the device, and lines on it.

    Where models or data are not to be had here, that is the first of all, unplanned.
    """
    faults = path_errors(_parsed(tree))
    if faults:
        raise RecipeError(faults)
    if "url" in tree["teacher"]:
        return tree, ["not planned: distill check asks the server for its model"]
    with console.spinner("reading configurations and data"):
        from distill.models.meta_models import meta_config  # these import torch and transformers: seconds
        from distill.planning.device_plan import device_plan
        from distill.planning.devices import find_device
        from distill.planning.preflight import check_run
        from distill.teachers.opening import longest_sequence

        place = find_device(device)
        try:
            plan = device_plan(_parsed(tree), place, 1)
            configs = (meta_config(plan.source.config_section(), "teacher"), plan.student.config)
            longest = min(longest_sequence(config) or tree["data"]["max_length"] for config in configs)
            tree["data"]["max_length"] = min(tree["data"]["max_length"], longest)
            for number, candidate in enumerate(smaller_recipes(tree)):
                report = check_run(_parsed(candidate), place, read_data=number == 0)
                if number == 0:
                    first = report
                if report.fits:
                    break
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            return tree, [
                f"not planned: {reason}",
                "it is written for a GPU of 80 GB; distill check tells what to change",
            ]
    size = f"{report.memory.peak / 2**30:.1f} of {place.memory_bytes / 2**30:.1f} GiB of {place.name}"
    lines = [f"memory      {size}" if report.fits else f"memory      {size}: it does not fit, whatever is tried"]
    if first.data:
        lines += [f"data        {first.data.splitlines()[0]}"]
    # of what the answers name; the room for it is found by `check` where the run will be
    named = tuple(f"{section}." for section in tree)
    lines += [f"to mend     {problem}" for problem in first.problems if problem.startswith(named)]
    return candidate, lines


def _parsed(tree: Mapping[str, Any]) -> Recipe:
    return parse(yaml.safe_dump(dict(tree)))


def _text(recipe: Mapping[str, Any], answers: Mapping[str, str]) -> str:
    given = [word for name, answer in answers.items() if answer != HERE for word in (f"--{name}", answer)]
    command = shlex.join(["distill", "init", *given])
    head = f"# {command}\n# Settings that are not listed have their defaults: distill settings\n\n"
    sections = (
        yaml.safe_dump({section: content}, sort_keys=False, default_flow_style=False, width=100)
        for section, content in recipe.items()
    )
    return head + "\n".join(sections)
