"""Command `cache`: store the teacher's outputs over a recipe's data."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.commands.arguments import AsJson, Overrides, RecipeArgument, load_recipe, print_json
from distill.core import console, launch, ranks
from distill.core.folders import check_folder
from distill.core.heartbeat import end_together
from distill.core.units import plural
from distill.recipe import Recipe, StoredTeacherConfig

CACHES = Path("caches")


@end_together(holds_store=True)
def cache(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=1, help="Tokens stored per distribution.")] = 64,
    hidden: Annotated[bool, typer.Option("--hidden", help="Store the last hidden states, not top K.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the cache; default: teacher.path, or caches/<recipe>."),
    ] = None,
    tail: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="sampled (unbiased; forward KL only), bucket or renormalize; default: by the loss."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="float16 or float32; with --hidden bfloat16, float32 or fp8."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows per forward pass; default: train.batch_size.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Only measure the error of top K; writes nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Store the teacher's outputs over a recipe's data, to train without the teacher in memory.

    If killed, it continues from its last complete part. All visible GPUs are used; a teacher that does not fit on one
    is sharded over them (parallel.teacher: sharded shards it in any case). A run then reads the cache with
    `teacher.type: cache`; a recipe with `teacher: {type: cache, path: ..., model: ...}` is cached and run unchanged:

    \b
    distill cache chat-8b-to-1b.yaml --report
    distill cache chat-8b-to-1b.yaml --top-k 64 --out caches/chat
    distill run chat-8b-to-1b.yaml "teacher={type: cache, path: caches/chat}"
    distill cache llama3-8b-to-1b-cached && distill run llama3-8b-to-1b-cached
    """
    from distill.teachers.backends.stored.settings import CacheOptions, default_tail

    _, resolved = load_recipe(recipe, overrides)
    teacher = resolved.teacher
    stored = teacher.path if isinstance(teacher, StoredTeacherConfig) else None
    folder = out or (CACHES / resolved.name if stored is None else Path(stored).expanduser())
    check_folder(folder, "--out" if out else "teacher")
    settings = CacheOptions(top_k, hidden, tail or default_tail(resolved.loss), dtype, batch_size).checked()
    processes = launch.processes_to_start(os.environ, gpus=launch.visible_gpus(), device=resolved.train.device)
    # every GPU helps to write a cache; to measure one takes several only where the teacher does not fit one
    if processes > 1 and (not report or _in_shards(resolved, processes, batch_size)):
        raise typer.Exit(launch.restart(processes))
    from distill.commands.cache_epoch import load, make_cache, ready

    first = ranks.is_main_process()
    quiet = as_json or not first
    with contextlib.nullcontext() if quiet else console.spinner("loading teacher, student and data"):
        loaded = load(resolved, batch_size)
    manifest = None
    if not report:
        manifest = make_cache(
            loaded,
            folder,
            settings,
            say=(lambda line: None) if as_json else console.print_lines,
            progress=_progress,
        )
    else:
        ready(loaded)
    # the ranks of a sharded teacher compute together; any other teacher is measured on rank 0 alone
    if not (first or loaded.backend.is_collective()):
        return
    table: Sequence[Any] = []
    rounded = None
    wanted = report or not settings.is_lossless
    if wanted and not loaded.measures:
        if not quiet:
            console.print_lines(
                "the error of what is stored is not measured: it takes hidden states of the student's tokenizer"
            )
    elif wanted:
        from distill.evaluation.cache_error import KS, measure, rounding

        with contextlib.nullcontext() if quiet else console.spinner("measuring the error of top-K targets"):
            sample = loaded.sample()  # a sharded teacher needs all ranks
            del loaded  # both models leave the device
            gc.collect()
            if first and hidden:
                rounded = rounding(sample, settings.dtype or "bfloat16")
            if first and (report or not hidden):
                ks = sorted({*KS, top_k})
                table = measure(sample, temperature=resolved.loss.temperatures.teacher, ks=ks, seed=resolved.train.seed)
    if not first:
        return
    if as_json:
        print_json({"cache": manifest, "errors": table} | ({} if rounded is None else {"kl": rounded}))
        return
    if rounded is not None:
        console.print_lines(
            f"hidden states in {settings.dtype}: KL(teacher, stored) {rounded:.2g} nats per position, over "
            f"{plural(len(sample.labels), 'held-out position')}"
        )
    if table:
        _show(table, len(sample.labels), resolved.loss.temperatures.teacher, (top_k, settings.tail))
    if manifest is not None:
        options = [one for one in overrides or () if not one.startswith("teacher")]  # the cache replaces the teacher
        if stored is not None and folder == Path(stored):
            options = [*(overrides or ())]
        else:
            own = resolved.teacher.model_dump(include={"context", "chat_template_kwargs"}, exclude_none=True)
            prompt = "".join(f", {name}: {json.dumps(value)}" for name, value in own.items())
            options.append(f"teacher={{type: cache, path: {folder}{prompt}}}")
        console.print_verbatim(f"train from it:  distill run {shlex.join([recipe, *options])}")


def _in_shards(recipe: Recipe, processes: int, batch_size: int | None) -> bool:
    """Return whether the teacher has to be sharded over the GPUs, even if it is only measured."""
    import torch

    from distill.commands.cache_epoch import recipe_to_store
    from distill.planning.cache_memory import plan_caching

    return plan_caching(recipe_to_store(recipe), torch.device("cuda", 0), processes, batch_size).teacher_sharded


def _verdict(table: Sequence[Any], chosen: tuple[int, str]) -> str:
    row = next(row for row in table if (row.k, row.tail) == chosen)
    better = [r.k for r in table if r.tail == row.tail and r.k > row.k and r.gradient <= row.gradient / 2]
    advice = f"; --top-k {better[0]} halves the former" if better else ""
    return (
        f"verdict: --top-k {row.k} --tail {row.tail} keeps {row.kept:.1%} of the teacher's probability; the gradient "
        f"error is {row.gradient:.1%} for hidden states and {row.head:.1%} for the head{advice}"
    )


def _show(table: Sequence[Any], positions: int, temperature: float, chosen: tuple[int, str]) -> None:
    rows = [
        [
            str(row.k),
            row.tail,
            f"{row.kept:.4f}",
            f"{row.kl:.4f}",
            f"{row.seen:.3f}",
            f"{row.gradient:.3f}",
            f"{row.head:.3f}",
        ]
        for row in table
    ]
    console.show_table(["K", "tail", "kept", "KL", "seen", "gradient error", "head's"], rows, numbers=True)
    lines = (
        _verdict(table, chosen),
        f"{plural(positions, 'held-out position')}, temperature {temperature:g}",
        "kept: the teacher's probability mass on the K tokens. KL: KL(teacher, stored distribution) in nats; inf where "
        "the latter is 0 somewhere",
        "seen: ratio of the reported divergence, teacher to student, to the full one",
        "gradient error: relative to the gradient of the full forward KL, for each position's hidden state; head's: "
        "for the head's weight, where noise averages out and bias does not",
    )
    console.print_lines("\n".join(lines))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    with console.spinner("caching positions", total):
        yield console.advance
