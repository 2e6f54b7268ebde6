"""Online caching: a teacher computes each document once; later epochs, evaluations and runs read its outputs."""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from forked import PIPE, Forked, clean_environment
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM
from two_ranks import run_as_two

from distill.cli import run_command
from distill.core.errors import RunError
from distill.recipe import parse
from distill.run import run
from distill.teachers.backends import local as model
from distill.teachers.backends.stored import store as store
from distill.teachers.backends.stored.store import Store
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher, online_cache: kept}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {epochs: 2, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: [Hello], max_new_tokens: 5}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    save_tiny(place / "teacher", tiny_model(tokenizer, layers=4, seed=1), tokenizer)
    save_tiny(place / "other", tiny_model(tokenizer, layers=4, seed=3), tokenizer)
    save_tiny(place / "student", tiny_model(tokenizer, seed=2), tokenizer)
    # rows of no two documents alike: one that comes twice is read the second time
    lines = (f"{n * 7919 % 997} {'so ' * (n % 4)}the teacher explains {n * 31337 % 9973}" for n in range(40))
    (place / "text.txt").write_text("\n".join(lines))
    (place / "tiny.yaml").write_text(RECIPE)
    return place


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    """Models and data, in the working directory."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(watch):
    """Rows that the teacher was asked for, call by call."""
    calls, last_hidden = [], model.last_hidden

    def counted(asked, batch):
        calls.append(len(batch["input_ids"]))
        return last_hidden(asked, batch)

    watch.setattr(model, "last_hidden", counted)
    return calls


@pytest.fixture
def unloaded(unread):
    """Make every later attempt to load a teacher fail."""
    return lambda: unread("teacher")


def recipe(*overrides):
    return parse(RECIPE, overrides, name="tiny")


def weights(result):
    return AutoModelForCausalLM.from_pretrained(result.folder / "student").state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(result):
    return [row["loss"] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]


def test_the_second_epoch_is_read_a_micro_batch_ahead(here, watch):
    """Reading happens in a thread, and every micro-batch is read ahead."""
    where, gather = [], store.Store.gather

    def seen(self, documents):
        read = gather(self, documents)

        def reads():
            where.append(threading.current_thread() is threading.main_thread())
            return read()

        return reads

    watch.setattr(store.Store, "gather", seen)
    run(recipe("train.batch_size=4"))
    assert where == [False] * 11, "ten of the second epoch, and the evaluation after training"


@pytest.mark.gpu
def test_cached_outputs_read_on_a_gpu_are_bit_identical(here, asked):
    """Outputs in bf16, over pinned memory and asynchronous copies: computed and stored, computed, then read.

    Then two epochs of which the second reads, and two that both do.
    """
    on_gpu = ["train.device=cuda", "train.precision=bfloat16", "train.deterministic=true", "generate.prompts=[]"]
    once = [*on_gpu, "train.epochs=1"]
    first, plain, again = (
        run(recipe(*once, f"teacher.online_cache={keep}"), name=name)
        for name, keep in (("first", "kept"), ("plain", "null"), ("again", "kept"))
    )
    for other in (plain, again):
        assert losses(other) == losses(first) and same(weights(other), weights(first)) and other.after == first.after
    before = len(asked)
    twice = run(recipe(*on_gpu, "teacher.online_cache=kept-too"), name="twice")
    assert 0 < len(asked) - before <= before  # as often as in the first epoch alone, and evaluations of that
    asked.clear()
    read = run(recipe(*on_gpu, "teacher.online_cache=kept-too"), name="read")
    assert not asked and losses(read) == losses(twice) and same(weights(read), weights(twice))


@pytest.mark.full
def test_the_first_epoch_is_a_run_without_and_the_second_asks_nothing(here, asked):
    plain = run(recipe("train.epochs=1", "teacher.online_cache=null"), name="plain")
    without = len(asked)
    kept = run(recipe("train.epochs=1"), name="kept")
    assert losses(kept) == losses(plain) and same(weights(kept), weights(plain))
    assert (kept.before, kept.after) == (plain.before, plain.after)
    first = len(asked) - without
    shutil.rmtree("kept")
    twice = run(recipe(), name="twice")
    assert len(asked) == without + 2 * first and len(losses(twice)) == 2 * len(losses(kept))
    rows = sum(asked[without + first :])
    manifest = json.loads(Path("kept/manifest.json").read_text())
    assert rows <= manifest["documents"], "each row was asked for once, in training and evaluations"
    assert manifest["dtype"] == "float32" and len(manifest["shards"]) == 2, "held-out rows, and an epoch"
    assert not [path.name for path in Path("kept").iterdir() if "part" in path.name or path.name == "settled.json"]


@pytest.mark.full
def test_a_full_folder_is_a_cache_that_needs_no_weights(here, asked, unloaded, capsys):
    first = run(recipe(), name="first")
    count, answers = len(asked), json.loads((first.folder / "result.json").read_text())["answers"]
    unloaded()
    again = run(recipe(), name="again")
    capsys.readouterr()
    assert len(asked) == count and again.before == first.before
    assert json.loads((again.folder / "result.json").read_text())["answers"]["teacher"] == answers["teacher"]
    cached = run(recipe("teacher={type: cache, path: kept}"), name="cached")
    assert losses(cached) == losses(again) and same(weights(cached), weights(again))
    # the first epoch's numbers are the loaded teacher's, the second's were read
    assert losses(first) == losses(again) and same(weights(first), weights(again))
    other = [
        "loss={temperature: 2.0, terms: [{type: jsd, beta: 0.3}, {type: cross_entropy, weight: 0.2}]}",
        "student={init: random, config: student}",
        "train.epochs=1",
        "train.seed=7",
    ]
    result = run(recipe(*other), name="other")
    assert result.after.forward_kl < result.before.forward_kl
    assert run_command(["verify", "kept"]) == 0 and "DAMAGED" not in capsys.readouterr().out
    assert run_command(["check", "tiny.yaml"]) == 0
    assert "100% of them stored already: it is not loaded" in capsys.readouterr().out


@pytest.mark.full
def test_check_counts_no_weights_where_all_is_stored(here, capsys):
    def memory(*more):
        assert run_command(["check", "tiny.yaml", "--json", *more]) == 0
        report = json.loads(capsys.readouterr().out)
        return report["memory"], report["advice"]

    loaded, _ = memory()
    run(recipe("train.epochs=1"), name="fills")
    capsys.readouterr()
    stored, advice = memory()
    assert (stored, advice) == memory("teacher={type: cache, path: kept}")
    assert stored["parts"]["teacher"] < loaded["parts"]["teacher"]
    other, _ = memory("data.max_length=16")
    assert other["parts"]["teacher"] == loaded["parts"]["teacher"], "other documents, of which nothing is stored"


@pytest.mark.full
def test_check_prints_the_bytes_first(here, capsys):
    assert run_command(["check", "tiny.yaml"]) == 0
    said = re.search(
        r"online_cache: kept, (\d+) bytes per trained token, (\S+) GiB for the ([\d,]+) of", capsys.readouterr().out
    )
    assert int(said[1]) == 4 * 32 and not Path("kept").exists()
    run(recipe("train.epochs=1"), name="one")
    manifest = json.loads(Path("kept/manifest.json").read_text())
    assert manifest["positions"] == int(said[3].replace(",", ""))
    more = [
        "teacher={init: random, config: llama-3.1-8b, online_cache: kept, dtype: bfloat16}",
        "student={init: random, config: llama-3.2-1b}",
        "data.source=nothing-here",
    ]
    run_command(["check", "tiny.yaml", *more])
    assert "8,192 bytes per trained token, 763 GiB for each 100 M" in capsys.readouterr().out
    run_command(["check", "tiny.yaml", *more, "teacher.online_cache_format=hidden_fp8"])
    assert "4,100 bytes per trained token" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("step, shard_bytes", [(4, 256 << 20), (8, 4096)])
def test_a_run_that_is_killed_and_resumed_is_the_whole_one(here, limit, interrupted, shard_bytes, step):
    """Outputs cached since the checkpoint are lost, or partly on disk; some documents occur twice."""
    limit.setattr(store, "SHARD_BYTES", shard_bytes)
    Path("text.txt").write_text("\n".join([*Path("text.txt").read_text().splitlines()[:20]] * 2))
    more = ["train.save_every=3", "data.packing=false"]
    whole = run(recipe(*more, "teacher.online_cache=whole"), name="whole")
    interrupted(lambda: run(recipe(*more), name="parts"), step, micro_batches=1)
    assert not list(Path("kept").glob(".*unfinished"))
    parts = run(recipe(*more), name="parts", resume=True)
    assert parts.after == whole.after and same(weights(parts), weights(whole))
    assert losses(parts)[-5:] == losses(whole)[-5:]
    assert run_command(["verify", "kept"]) == 0


@pytest.mark.full
def test_stored_outputs_are_used(here, asked, unloaded):
    run(recipe("train={steps: 4, batch_size: 2, device: cpu}"), name="some")
    assert not Path("kept/manifest.json").exists()
    there, some = list(Path("kept").glob("shard-part-*")), sum(asked)
    assert there
    run(recipe("train.seed=9"), name="rest")
    everything = sum(asked)
    # rows that learn: each was asked for once in both runs together
    shutil.rmtree("kept")
    run(recipe("train.seed=9"), name="alone")
    assert sum(asked) - everything == everything and some > 0
    # a cache of other data is gone on with, and stays a cache of them meanwhile
    Path("half.txt").write_text("\n".join(Path("text.txt").read_text().splitlines()[:20]))
    half = ["data.source=half.txt", "--hidden", "--dtype", "float32", "--out", "half"]
    assert run_command(["cache", "tiny.yaml", *half]) == 0
    before = Store("half").shards.positions
    count = sum(asked)
    run(recipe("teacher.online_cache=half"), name="extended")
    assert 0 < sum(asked) - count < everything and Store("half").shards.positions > before
    assert run_command(["verify", "half"]) == 0
    unloaded()
    run(recipe("teacher.online_cache=half", "train.epochs=1"), name="read")


@pytest.mark.full
def test_a_damaged_shard_is_refused_and_computed_again(here, asked):
    short = "train={steps: 4, batch_size: 2, device: cpu}"
    run(recipe(short), name="some")
    whole, count = run(recipe(short, "teacher.online_cache=null"), name="whole"), len(asked)
    part = sorted(Path("kept").glob("shard-part-*"))[-1]
    content = bytearray(part.read_bytes())
    content[-200] ^= 1
    part.write_bytes(content)
    # a held-out document, which is read once training is over
    with pytest.raises(RunError, match=r"shard-part-\S+ is damaged.*delete the file, and manifest\.json where"):
        run(recipe(short), name="damaged")
    part.write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"shard-part-\S+ is damaged"):
        run(recipe(short), name="cut")
    part.unlink()
    again = run(recipe(short), name="again")
    assert len(asked) > count and losses(again) == losses(whole)


@pytest.mark.full
@pytest.mark.parametrize("name, dtype", [("hidden_fp8", "fp8"), ("top_k", "float16")])
def test_less_may_be_stored(here, asked, capsys, name, dtype):
    stored = [f"teacher.online_cache_format={name}", *(["teacher.top_k=40"] if name == "top_k" else [])]
    first = run(recipe(*stored), name="first")
    out, count = capsys.readouterr().out, len(asked)
    if name == "hidden_fp8":
        kl = float(re.search(r"keep +hidden states in fp8: on one batch KL\(teacher, what is stored\) (\S+)", out)[1])
        assert 0 < kl < 1e-2
    else:
        assert "estimated KL" in out, "drawn tokens stand for the forward KL"
    assert json.loads(Path("kept/manifest.json").read_text())["dtype"] == dtype
    again = run(recipe(*stored), name="again")
    cached = run(recipe("teacher={type: cache, path: kept}"), name="cached")
    assert len(asked) == count
    # what is trained on is what is stored, in the first epoch too
    assert losses(first) == losses(again) == losses(cached) and same(weights(first), weights(again))
    assert first.after.forward_kl < first.before.forward_kl


@pytest.mark.full
def test_a_student_that_is_cut_is_stored_and_another_one_is_cut_from_the_weights(here, unloaded):
    cut = "student={from_teacher: {layers: 2}}"
    first, longer = run(recipe(cut), name="first"), run(recipe("student={from_teacher: {layers: 3}}"), name="longer")
    assert AutoModelForCausalLM.from_pretrained(longer.folder / "student").config.num_hidden_layers == 3
    unloaded()
    again = run(recipe(cut), name="again")
    assert same(weights(first), weights(again))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["teacher.model=other"], r"teacher\.model: the model's files differ: the cache kept was made by"),
        (
            ["teacher.online_cache_format=top_k"],
            r"kept was begun with other settings: kind was 'hidden', now 'top_k'",
        ),
        (
            ["teacher.online_cache_format=hidden_fp8"],
            r"kept was begun with other settings: dtype was 'float32', now 'fp8'",
        ),
        (["teacher.dtype=bfloat16"], r"kept was begun with other settings: dtype was 'float32', now 'bfloat16'"),
        (["teacher.online_cache=student"], r"teacher\.online_cache: student is not empty and holds no cache"),
    ],
)
def test_outputs_of_another_teacher_are_not_mixed_in(here, models, tmp_path_factory, overrides, message):
    stored = models / "begun"
    if not stored.exists():
        run(recipe("train={steps: 2, batch_size: 2, device: cpu}"), name="begun")
        shutil.copytree("kept", stored)
    shutil.rmtree("kept", ignore_errors=True)
    shutil.copytree(stored, "kept")
    before = {path: path.stat().st_mtime_ns for path in Path("kept").iterdir()}
    with pytest.raises(ValueError, match=message) as error:
        run(recipe(*overrides), name="refused")
    assert len(str(error.value).splitlines()) == 1 and not Path("runs/refused").exists()
    assert {path: path.stat().st_mtime_ns for path in Path("kept").iterdir() if path in before} == before


# ------------------------------------------------------------------ processes


@pytest.mark.full  # two processes fill a cache in test_cache_sharded.py
def test_two_processes_store_for_each_other(here, asked, unloaded):
    more = ["tiny.yaml", "train.tokens_per_step=256"]
    run_as_two("-m", "distill", "run", *more, "teacher.online_cache=null", "--name", "plain", cwd=here)
    run_as_two("-m", "distill", "run", *more, "--name", "two", cwd=here)
    plain, two = (read_metrics(Path(f"runs/{name}/metrics.jsonl")) for name in ("plain", "two"))
    epoch = [row["loss"] for row in plain if "loss" in row], [row["loss"] for row in two if "loss" in row]
    half = len(epoch[0]) // 2
    assert epoch[0][:half] == epoch[1][:half] and epoch[0] == pytest.approx(epoch[1], rel=1e-5)
    cache = Store("kept")
    assert len(cache.shards.arrays) >= 3 and run_command(["verify", "kept"]) == 0
    unloaded()
    run(recipe("train.tokens_per_step=256"), name="alone")
    assert losses(type("R", (), {"folder": Path("runs/alone")})) == pytest.approx(epoch[1], rel=1e-5)


@pytest.mark.full
def test_two_processes_with_a_teacher_in_shards(here):
    """One process has all of its rows stored, the other has not: both call the teacher, or it would wait for ever."""
    Path("more.txt").write_text(Path("text.txt").read_text() + "\nAnd one line more than there was.\nAnd another one.")
    sharded = ["parallel={strategy: fsdp, teacher: sharded}", "train.tokens_per_step=256", "generate.prompts=[]"]
    run_as_two("-m", "distill", "run", "tiny.yaml", *sharded, "--name", "two", cwd=here)
    before = Store("kept").shards.positions
    run_as_two("-m", "distill", "run", "tiny.yaml", *sharded, "data.source=more.txt", "--name", "more", cwd=here)
    assert Store("kept").shards.positions > before and run_command(["verify", "kept"]) == 0


@pytest.mark.full
def test_a_second_run_reads_while_the_first_stores(here, asked):
    holder = Forked(
        [
            "-c",
            "import sys, time; from pathlib import Path; from distill.core.files import try_lock; "
            "Path('kept').mkdir(exist_ok=True); f = open('kept/.keep-0000.lock', 'w'); assert try_lock(f.fileno()); "
            "print('held', flush=True); time.sleep(300)",
        ],
        cwd=here,
        env=clean_environment(),
        stdout=PIPE,
        stderr=PIPE,
    )
    run(recipe("train={steps: 3, batch_size: 2, device: cpu}", "teacher.online_cache=begun"), name="first")
    shutil.copytree("begun", "kept", dirs_exist_ok=True)
    try:
        assert b"held" in holder.stdout.readline().encode()
        before, count = sorted(path.name for path in Path("kept").glob("shard-*")), sum(asked)
        second = run(recipe("train.epochs=1"), name="second")
    finally:
        holder.kill()
        holder.communicate()
    assert sorted(path.name for path in Path("kept").glob("shard-*")) == before
    assert second.after.forward_kl < second.before.forward_kl and sum(asked) > count


@pytest.mark.full
def test_the_teachers_of_a_full_and_of_a_half_full_folder_have_one_fingerprint(here):
    first = run(recipe(), name="first")
    again = run(recipe(), name="again")
    hashes = [re.search(r"kept_sha256: (\w+)", (r.folder / "lock.yaml").read_text())[1] for r in (first, again)]
    assert hashes[0] == hashes[1]
