"""Folders that version 0.1.0 stored, complete and begun: they are read, gone on with and closed.

`stored_by_0_1.tar.xz` holds what that version wrote: a teacher, its text, and for the recipe below the folders of
`distill cache --hidden`, of the same with half of its shards, of `distill cache --top-k 8`, and of runs with
`teacher.online_cache`, one of which was killed after its third step.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.recipe import parse
from distill.run import run
from distill.teachers.backends.stored.store import Store
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 24, cache: false, validation: {fraction: 0.2}}
train: {epochs: 1, batch_size: 2, tokens_per_step: 48, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: [Hello], max_new_tokens: 3}
"""
HIDDEN = [0.3547603487968445, 0.3334151804447174, 0.3219500780105591, 0.3176363408565521, 0.3123769462108612]
DRAWN = [3.637294292449951, 3.6123905181884766, 3.593228340148926, 3.605231761932373, 3.5719189643859863]


@pytest.fixture
def here(tmp_path, monkeypatch):
    with tarfile.open(Path(__file__).with_name("stored_by_0_1.tar.xz")) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 or later
        archive.extractall(tmp_path, **safe)
    tokenizer = tiny_tokenizer(chat_template=None)
    save_tiny(tmp_path / "student", tiny_model(tokenizer, layers=1, hidden=16, seed=2), tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses_of(*overrides, name):
    result = run(parse(RECIPE, overrides, name="tiny"), name=name)
    return [row["loss"] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    "teacher, losses",
    [
        ("teacher={type: cache, path: hidden}", HIDDEN),
        ("teacher={type: cache, path: top-k, model: teacher}", DRAWN),
        ("teacher.online_cache=kept", HIDDEN),
        ("teacher.online_cache=hidden", HIDDEN),
    ],
)
def test_a_complete_folder_is_read_as_it_was(here, unread, teacher, losses):
    unread("teacher")
    assert losses_of(teacher, name="read") == pytest.approx(losses, rel=1e-5)


def test_a_run_that_was_begun_is_gone_on_with(here, teacher_batches):
    assert losses_of("teacher.online_cache=kept-begun", name="gone-on") == pytest.approx(HIDDEN, rel=1e-5)
    some = len(teacher_batches)
    shutil.rmtree("kept-begun")
    losses_of("teacher.online_cache=kept-begun", name="anew")
    assert 0 < some < len(teacher_batches) - some
    assert Store("kept-begun").shards.positions == Store("kept").shards.positions


def documents(folder):
    """Stored hidden states of each document, by its key."""
    cache = Store(folder)
    return {
        shard["keys"][n].tobytes(): shard["hidden"][slice(*shard["offsets"][n : n + 2])]
        for shard in cache.shards.arrays
        for n in range(len(shard["keys"]))
    }


def test_a_cache_that_was_begun_is_finished(here, capsys):
    there = {path.name: path.read_bytes() for path in Path("hidden-begun").glob("shard-*")}
    assert len(there) == 3
    Path("tiny.yaml").write_text(RECIPE)
    assert run_command(["cache", "tiny.yaml", "--hidden", "--dtype", "float32", "--out", "hidden-begun", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache"]["positions"] == Store("hidden").shards.positions
    whole, finished = documents("hidden"), documents("hidden-begun")
    assert whole.keys() == finished.keys()
    for key, hidden in whole.items():
        np.testing.assert_allclose(finished[key], hidden, rtol=1e-4, atol=1e-6)
    now = {path.read_bytes() for path in Path("hidden-begun").glob("shard-*")}
    assert now > set(there.values()), "what was there stays as it was, under a number without a gap"
    assert run_command(["verify", "hidden-begun"]) == 0
