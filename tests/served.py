"""Served teachers for tests: tiny models behind HTTP on a port of loopback, in a thread of this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.recipe import parse
from distill.serving.app import Limits, make_app
from distill.serving.open import open_engine, running
from distill.teachers.base import open_context
from distill.teachers.registry import source_of


def write_models(folder: Path, **of_teacher) -> Path:
    """A teacher, a student and some text."""
    tokenizer = tiny_tokenizer()
    of_teacher = {"layers": 3, "hidden": 64, "seed": 1} | of_teacher
    save_tiny(folder / "teacher", tiny_model(tokenizer, **of_teacher), tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    lines = (f"The teacher explains line {n}; {'so ' * (n % 7)}and the student listens." for n in range(60))
    (folder / "text.txt").write_text("\n".join(lines))
    return folder


def recipe_in(folder: Path, *overrides: str):
    """Of a run with the teacher loaded; overrides make it a served one."""
    return parse(
        f"""
        teacher: {{model: {folder}/teacher}}
        student: {{model: {folder}/student}}
        data: {{source: {folder}/text.txt, max_length: 48, cache: false, validation: {{fraction: 0.1}}}}
        train: {{steps: 6, batch_size: 2, device: cpu, log_every: 1}}
        generate: {{prompts: []}}
        output_dir: {folder}/runs
        """,
        overrides,
        name="served",
    )


def engine_in(folder: Path, *overrides: str, most_tokens: int = 4096):
    """The engine of the recipe's teacher."""
    return open_engine(recipe_in(folder, *overrides), most_tokens)


@contextlib.contextmanager
def serving(engine, token: str | None = None, **limits):
    """The engine behind HTTP; yields the address."""
    with running(
        make_app(engine, token, Limits(**{"tokens": 4096, "budget": 2048, "waiting": 1 << 16} | limits))
    ) as url:
        yield url


def opened(recipe):
    """The recipe's teacher, opened, and its vocabulary."""
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    return source.open(open_context(recipe), vocabulary), vocabulary
