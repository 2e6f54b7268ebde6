"""Several runs that begin, fill, read and complete one store at once, and runs that are killed while they do.

Each document is a row of its own, so that its outputs do not depend on which run computed them: every student must be,
to the bit, that of the same run alone. DISTILL_STORE_ROUNDS sets another number of rounds of the slow test.
"""

import collections
import json
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, clean_environment
from safetensors.torch import load_file
from tiny import save_models

from distill.cli import run_command
from distill.core.tensor_files import write_tensors
from distill.models.precision.host_copy import HostCopy
from distill.teachers.backends.stored.contents import Piece, write_part
from distill.teachers.backends.stored.format import KEY_BYTES, PART, PLAN, StoreKey, read_store_json, shard_path
from distill.teachers.backends.stored.store import Fills, Store

RECIPE = """
teacher: {model: teacher, online_cache: kept}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, packing: false, validation: {fraction: 0.1}}
train: {epochs: 2, batch_size: 1, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 4,
        device: cpu}
generate: {prompts: []}
"""
SEEDS = (1, 2, 3)
QUANTISED = "student.quantise={format: q4_0}"  # of the run with the last seed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    lines = (f"{n * 7919 % 997} {'so ' * (n % 4)}the teacher explains {n * 31337 % 9973}" for n in range(40))
    save_models(folder, text="\n".join(lines), teacher={"layers": 4, "seed": 1, "hidden": 64}, student={"hidden": 64})
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


def start(place, seed, *arguments):
    settings = [f"train.seed={seed}"]
    command = ["-m", "distill", "run", "tiny.yaml", "--name", f"seed-{seed}", *settings, *arguments]
    command += [QUANTISED] if seed == SEEDS[-1] else []
    out = (place / f"out-{seed}.txt").open("a")
    return Forked(command, cwd=place, env=clean_environment(), stdout=out, stderr=subprocess.STDOUT)


def output(place, seed):
    return (place / f"out-{seed}.txt").read_text()[-4000:]


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """The students of the runs, each with a store of its own."""
    place = tmp_path_factory.mktemp("alone")
    shutil.copytree(models, place, dirs_exist_ok=True)
    for seed in SEEDS:
        assert start(place, seed, f"teacher.online_cache=kept-{seed}").wait(timeout=300) == 0, output(place, seed)
    return {seed: load_file(place / f"runs/seed-{seed}/student/model.safetensors") for seed in SEEDS}


def assert_as_alone(place, alone, seed):
    ours = load_file(place / f"runs/seed-{seed}/student/model.safetensors")
    assert ours.keys() == alone[seed].keys()
    assert all(torch.equal(ours[name], value) for name, value in alone[seed].items()), f"seed {seed}"


@pytest.mark.full
def test_three_runs_that_begin_one_store_at_once_end_as_each_alone(models, alone, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    started = {seed: start(tmp_path, seed) for seed in SEEDS}
    for seed, process in started.items():
        assert process.wait(timeout=300) == 0, output(tmp_path, seed)
        assert_as_alone(tmp_path, alone, seed)
    monkeypatch.chdir(tmp_path)
    assert run_command(["verify", "kept"]) == 0
    assert not list(Path("kept").rglob(".tmp*")) and not list(Path("kept").rglob("*.unfinished"))


@pytest.mark.slow
def test_runs_that_share_a_store_and_are_killed_end_as_each_alone(models, alone, tmp_path, monkeypatch):
    """Two runs at once, one or both killed at a random moment and resumed, until both have ended; then a bit flips."""
    draw, done, rounds = random.Random(51), collections.Counter(), int(os.environ.get("DISTILL_STORE_ROUNDS", "12"))
    for number in range(rounds):
        place = tmp_path / str(number)
        shutil.copytree(models, place)
        seeds = draw.sample(SEEDS, 2)
        running = {seed: start(place, seed) for seed in seeds}
        done["two-process starts"] += 1
        kills = 3
        while running:
            time.sleep(draw.uniform(0.5, 5.0))
            for seed, process in list(running.items()):
                if process.poll() is not None:
                    assert process.poll() == 0, output(place, seed)
                    del running[seed]
                elif kills and draw.random() < 0.6:
                    kills -= 1
                    process.kill()
                    process.wait()
                    done["kills"] += 1
                    begun = (place / f"runs/seed-{seed}/recipe.yaml").exists()
                    running[seed] = start(place, seed, *(["--resume"] if begun else []))
        for seed in seeds:
            assert_as_alone(place, alone, seed)
        monkeypatch.chdir(place)
        assert run_command(["verify", "kept"]) == 0
        files = sorted(path for path in Path().glob("kept/**/*") if path.is_file() and path.stat().st_size)
        files += sorted(path for path in Path().glob("runs/*/student/*.safetensors"))
        for path in draw.sample([path for path in files if not path.name.startswith(".")], 4):
            whole = path.read_bytes()
            content = bytearray(whole)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            assert run_command(["verify", "kept" if path.parts[0] == "kept" else path.parts[1]]) == 1, path
            path.write_bytes(whole)
            done["flips"] += 1
        shutil.rmtree(place)
    print(json.dumps(done))
    assert done["kills"] >= rounds


# ------------------------------------------------------------------ a reader while a writer renames


@pytest.fixture
def store(models, tmp_path, monkeypatch):
    """A folder with a store's plan and its shards."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert start(tmp_path, 1).wait(timeout=300) == 0, output(tmp_path, 1)
    return tmp_path / "kept"


@pytest.mark.full
def test_a_store_is_read_while_another_process_renames_its_parts(store):
    """Parts become shards and shards parts, over and over: every document is found, with the bits that were stored."""
    plan = read_store_json(store / PLAN)
    whole = load_file(shard_path(store, 0))
    keys = [bytes(key) for key in whole["keys"].numpy()]
    half = len(keys) // 2
    names = [store / f"{PART}0000-{n:05d}.safetensors" for n in range(2)]
    for name, documents in zip(names, (slice(0, half), slice(half, len(keys))), strict=True):
        begin, end, _ = documents.indices(len(keys))
        offsets = whole["offsets"][begin : end + 1]
        part = {n: t[offsets[0] : offsets[-1]] for n, t in whole.items() if n not in ("keys", "offsets", "sums")}
        part |= {"keys": whole["keys"][documents], "sums": whole["sums"][documents], "offsets": offsets - offsets[0]}
        write_tensors(name, part)
    shard_path(store, 0).unlink()
    ended = threading.Event()

    def rename():
        while not ended.is_set():
            for pairs in (enumerate(names), reversed(list(enumerate(names)))):
                for number, name in pairs:
                    a, b = name, shard_path(store, number)
                    os.replace(*((a, b) if a.exists() else (b, a)))

    writer = threading.Thread(target=rename)
    writer.start()
    try:
        found = Store(store, Fills(plan, all_parts=True))
        for _ in range(60):
            found.shards.map()
            for shard, number in filter(None, map(found.shards.find, keys)):
                found.shards.verify(shard, number)
    finally:
        ended.set()
        writer.join()
    found.shards.map()
    assert all(found.has(key) for key in keys)


def test_a_document_that_is_read_ahead_stays_that_document_when_shards_are_mapped_anew(tmp_path):
    """A part of a lower rank comes before those that were there, and all numbers of shards change."""
    plan = {"kind": "hidden", "dtype": "float32", "hidden": 2}
    first, second = (StoreKey(bytes([n]) * KEY_BYTES, 0, 4, np.arange(3)) for n in (1, 2))
    outputs = {document.key: torch.randn(3, 2) for document in (first, second)}

    def write(rank, document):
        piece = Piece(HostCopy({"hidden": outputs[document.key]}), 0, 3)
        write_part(tmp_path / f"{PART}{rank:04d}-00000.safetensors", [document.key], [piece])

    write(1, first)
    store = Store(tmp_path, Fills(plan, all_parts=True))
    read = store.gather([[first]])
    write(0, second)
    store.shards.map()
    assert torch.equal(read()["cached_hidden"], outputs[first.key])
    assert torch.equal(store.gather([[second]])()["cached_hidden"], outputs[second.key])
