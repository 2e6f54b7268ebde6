"""A teacher on disk: what is stored, found again and trained on equals what the loaded teacher says."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.recipe import parse
from distill.run import run
from distill.teachers.cache_make import load, make_cache
from distill.teachers.cache_settings import Settings

TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(80))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with teacher, student and data, made once."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = tiny_tokenizer()
    save_tiny(folder / "teacher", tiny_model(tokenizer, layers=4, seed=1), tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def recipe(*overrides):
    return parse(
        """
        teacher: {model: teacher}
        student: {model: student}
        data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
        train: {steps: 6, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 2}
        generate: {prompts: [Hello], max_new_tokens: 5}
        """,
        ["train.device=cpu", *overrides],
        name="tiny",
    )


@contextlib.contextmanager
def silent(total):
    yield lambda positions: None


def cache(folder, *overrides, **settings):
    """Make a cache; returns its manifest."""
    if not (Path(folder) / "manifest.json").exists():
        made = Settings(**settings).checked()
        make_cache(load(recipe(*overrides)), Path(folder), made, say=lambda line: None, progress=silent)
    return json.loads((Path(folder) / "manifest.json").read_text())


def cached(folder, *overrides):
    return recipe(f"teacher={{type: cache, path: {folder}}}", *overrides)


def test_a_run_from_a_cache(here, capsys):
    manifest = cache("plain", k=8)
    assert manifest["positions"] > 500
    result = run(cached("plain"), name="from-cache")
    assert result.after.forward_kl < result.before.forward_kl
    out = capsys.readouterr().out
    assert "8 likeliest of 259" in out
