"""Served teachers for tests: tiny models behind HTTP on a port of loopback, in a thread of this process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import httpx2
import numpy as np
import torch
from tiny import save_models

from distill.models.head import last_hidden
from distill.recipe import parse
from distill.serving.app import RequestLimits, make_app
from distill.serving.connections import DEFAULT_TIMEOUTS
from distill.serving.open import open_engine, running
from distill.teachers.backends.served.protocol import TargetRequest
from distill.teachers.load_context import load_context
from distill.teachers.registry import source_of

HTTP = httpx2.Client(timeout=60, verify=False)


def post(url, query, path="/v1/targets", **options):
    return HTTP.post(url + path, content=query.body(), params=options)


def write_models(folder: Path, **of_teacher) -> Path:
    """A teacher, a student and some text."""
    lines = (f"The teacher explains line {n}; {'so ' * (n % 7)}and the student listens." for n in range(60))
    teacher = {"layers": 3, "hidden": 64, "seed": 1} | of_teacher
    save_models(folder, text="\n".join(lines), teacher=teacher, student={"seed": 2})
    return folder


def recipe_in(folder: Path, *overrides: str):
    """Return the recipe of a run with the teacher loaded; overrides make it a served one."""
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
def serving(engine, token: str | None = None, timeouts=DEFAULT_TIMEOUTS, tls=None, **limits):
    """The engine behind HTTP; yields the address."""
    app = make_app(engine, token, RequestLimits(**{"tokens": 4096, "budget": 2048, "waiting": 1 << 16} | limits))
    with running(app, timeouts=timeouts, tls=tls) as url:
        yield url


def opened(recipe):
    """The recipe's teacher, opened, and its vocabulary."""
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    return source.open(load_context(recipe), vocabulary), vocabulary


def question(seed=0, rows=2, length=20, packed=True):
    """Rows of two documents each, of which most is asked for."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(3, 250, (rows, length)).astype(np.int32)
    half = length // 2 if packed else length
    positions = np.tile(np.concatenate([np.arange(half), np.arange(length - half)]), (rows, 1)).astype(np.int32)
    learned = np.ones((rows, length), bool)
    learned[:, [half - 1, length - 1]] = False
    learned[:, seed % half] = False
    return TargetRequest(ids, positions if packed else None, np.flatnonzero(learned).astype(np.int32))


def expected_hidden(engine, query):
    batch = {"input_ids": torch.from_numpy(query.ids).long()}
    if query.positions is not None:
        batch["position_ids"] = torch.from_numpy(query.positions).long()
    return last_hidden(engine.model, batch).flatten(0, 1)[torch.from_numpy(query.rows).long()]


def from_server(*urls, **more):
    """Overrides that have a recipe ask servers."""
    settings = {"timeout": 20.0, **more}
    return ["teacher.type=server", f"teacher.url={json.dumps(list(urls))}"] + [
        f"teacher.{name}={json.dumps(value)}" for name, value in settings.items()
    ]
