"""A teacher on disk: what is stored, found again and compared with equals what the loaded teacher says."""

import contextlib
import copy
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from distill_kernels import FusedTopKKLLoss
from helpers import assert_as_good_as_torch, stored_documents
from tiny import save_models
from torch.nn import functional as F

from distill.commands.cache_epoch import load, make_cache
from distill.core.manifest import SUM, with_checksum
from distill.data.collator import Collator
from distill.evaluation.cache_error import measure
from distill.evaluation.evaluate import evaluate
from distill.recipe import Loss, parse
from distill.teachers.backends.stored import format as layout
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.objective import DistillationObjective

TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))
SMALL_SHARD = 8192
MIXED = Loss.model_validate(
    {"temperature": 2.0, "terms": [{"type": "forward_kl", "weight": 0.7}, {"type": "cross_entropy", "weight": 0.5}]}
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Teacher, student and data of a recipe, loaded once; the working directory is theirs."""
    folder = tmp_path_factory.mktemp("place")
    save_models(folder, text=TEXT, teacher={"layers": 4, "seed": 1}, student={"seed": 2})
    recipe = parse(
        """
        teacher: {model: teacher}
        student: {model: student}
        data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
        train: {steps: 6, batch_size: 2, device: cpu}
        loss: {temperature: 2.0}
        generate: {prompts: [Hello], max_new_tokens: 5}
        """,
        name="tiny",
    )
    with contextlib.chdir(folder):
        yield load(recipe)


@contextlib.contextmanager
def silent(total):
    yield lambda positions: None


def write(loaded, folder, progress=silent, **settings):
    made = CacheOptions(**settings).checked()
    make_cache(loaded, Path(folder), made, say=lambda line: None, progress=progress)
    return Store(folder)


@pytest.fixture(scope="module")
def exact(loaded):
    """Every token's log-probability in float32."""
    return write(loaded, "exact", k=259, dtype="float32", shard_bytes=1 << 20)


@pytest.fixture(scope="module")
def bucket(loaded):
    """Eight tokens in float16, in many small shards."""
    return write(loaded, "bucket", k=8, shard_bytes=SMALL_SHARD)


def online(loaded, loss, dtype=torch.float32):
    student, teacher = (copy.deepcopy(m).to(dtype) for m in (loaded.pair.student, teacher_of(loaded)))
    return DistillationObjective(teacher, student, loss)


def teacher_of(loaded):
    return loaded.pair.teacher.models["teacher"]


def cached(loaded, cache, loss, dtype=torch.float32):
    return DistillationObjective(StoredTeacher(cache), copy.deepcopy(loaded.pair.student).to(dtype), loss)


def differentiate(objective, rows, **collator):
    """Loss and gradients of rows as one batch, the sum over its tokens."""
    batch = Collator(0, columns=objective.teacher.columns, **collator)(rows)
    student = objective.student.eval()
    student.zero_grad()
    output = student(**objective.student_inputs(batch, num_items=1))
    output["loss"].backward()
    return [output["loss"].detach(), *(p.grad.clone() for p in student.parameters())], output["statistics"]


def some(loaded, count=6):
    return [loaded.splits.train[number] for number in range(count)]


def test_size_is_as_promised(bucket):
    assert layout.bytes_a_token({"kind": "top_k", "dtype": "float16", "k": 64, "vocabulary": 49_152}) == 262
    assert layout.bytes_a_token({"kind": "top_k", "dtype": "float16", "k": 64, "vocabulary": 128_256}) == 270
    assert layout.bytes_a_token({"kind": "top_k", "dtype": "float16", "k": 64, "vocabulary": 151_936}) == 278
    payload = 0
    for number in range(len(bucket.manifest["shards"])):
        arrays = layout.map_tensors(layout.shard_path(bucket.folder, number))
        payload += sum(a.nbytes for name, a in arrays.items() if name not in layout.DOCUMENTS)
    assert payload == bucket.shards.positions * layout.bytes_a_token(bucket.manifest)
    assert len(bucket.manifest["shards"]) > 3


# ------------------------------------------------------------------ the loss


@pytest.mark.plain("every token")
@pytest.mark.parametrize("kind", ["every token", "hidden states"])
def test_equals_the_loaded_teacher(loaded, exact, tmp_path, kind):
    cache = exact if kind == "every token" else write(loaded, tmp_path / "cache", hidden=True, dtype="float32")
    loss = MIXED if kind == "every token" else Loss.model_validate(MIXED.model_dump() | {"temperature": 1.5})
    rows = some(loaded)
    wanted, figures = differentiate(online(loaded, loss, torch.float64), rows)
    eager, _ = differentiate(online(loaded, loss), rows)
    ours, ours_figures = differentiate(cached(loaded, cache, loss), rows)
    for number, results in enumerate(zip(ours, eager, wanted, strict=True)):
        assert_as_good_as_torch(*results, torch.float32, f"result {number}")
    first = 1 if kind == "every token" else 0  # the divergence is that of the loss's temperature there
    torch.testing.assert_close(ours_figures[first:].double(), figures[first:].double(), rtol=1e-5, atol=1e-4)


def test_bucket_equals_the_loss_by_hand(loaded, bucket):
    rows = some(loaded)
    batch = Collator(0)(rows)
    results = []
    for dtype in (torch.float64, torch.float32):
        student, teacher = (copy.deepcopy(m).to(dtype).eval() for m in (loaded.pair.student, teacher_of(loaded)))
        body = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        with torch.no_grad():
            top, ids = F.log_softmax(teacher(**body).logits / 2, -1).topk(8)
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        loss = FusedTopKKLLoss("forward", "bucket", 2.0, divergence_weight=0.7, ce_weight=0.5)
        hidden = student.model(**body).last_hidden_state
        value = loss(hidden, student.lm_head.weight, ids, top, labels, num_items=1)
        value.backward()
        results.append([value.detach(), *(p.grad for p in student.parameters())])
    ours, figures = differentiate(cached(loaded, bucket, MIXED), rows)
    for a, b in zip(ours, results[0], strict=True):
        assert (a - b).norm() <= 2e-3 * b.norm()  # float16 on disk
    stored = write(loaded, "bucket-float32", k=8, dtype="float32")
    ours, _ = differentiate(cached(loaded, stored, MIXED), rows)
    for number, parts in enumerate(zip(ours, results[1], results[0], strict=True)):
        assert_as_good_as_torch(*parts, torch.float32, f"result {number}")
    _, online_figures = differentiate(online(loaded, MIXED), rows)
    # agreement, entropies and label log-probabilities do not depend on K
    torch.testing.assert_close(figures[1:], online_figures[1:], rtol=2e-3, atol=0.5)


def test_equal_models_have_no_loss(loaded, bucket, exact):
    for cache in (bucket, exact):
        student = copy.deepcopy(teacher_of(loaded)).requires_grad_()
        objective = DistillationObjective(StoredTeacher(cache), student, Loss(temperature=2.0))
        batch = Collator(0, columns=objective.teacher.columns)(some(loaded))
        with torch.no_grad():
            found = objective.student(**objective.student_inputs(batch))["loss"]
        assert found.abs() < 1e-6


@pytest.mark.full
def test_held_out_figures_from_sampled_tokens_are_those_of_the_loaded_teacher(loaded, bucket, tmp_path):
    cache = write(loaded, tmp_path / "sampled", k=64, tail="sampled")
    student, rows = copy.deepcopy(loaded.pair.student), loaded.splits.train
    wanted = evaluate(student, teacher_of(loaded), rows)
    found = {}
    for name, stored in (("sampled", cache), ("bucket", bucket)):
        teacher = StoredTeacher(stored)
        objective = DistillationObjective(teacher, student, Loss(temperature=2.0))
        found[name] = evaluate(student, teacher, rows, objective=objective)
        same = ("tokens", "student_cross_entropy", "teacher_cross_entropy", "teacher_entropy", "student_entropy")
        for figure in same:
            assert getattr(found[name], figure) == pytest.approx(getattr(wanted, figure), rel=1e-3), figure
    at_two = evaluate_at(loaded, student, rows, temperature=2.0)
    assert found["sampled"].forward_kl == pytest.approx(at_two, rel=0.05)
    assert found["bucket"].forward_kl < 0.8 * at_two
    assert found["bucket"].agreement == pytest.approx(wanted.agreement, abs=1e-9)


def evaluate_at(loaded, student, rows, temperature):
    """Full forward KL a token at a temperature, from logits."""
    total = count = 0.0
    for row in rows:
        batch = Collator(0)([row])
        body = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        with torch.no_grad():
            t, s = (
                F.log_softmax(model.eval()(**body).logits[0].double() / temperature, -1)
                for model in (teacher_of(loaded), student)
            )
        kl = (t.exp() * (t - s)).sum(-1)[batch["valid_rows"]]
        total, count = total + kl.sum(), count + len(kl)
    return float(total / count)


# ------------------------------------------------------------------ nothing can misalign it


def test_order_packing_and_padding_change_nothing(loaded, bucket):
    rows = some(loaded, 8)
    whole, figures = differentiate(cached(loaded, bucket, MIXED), rows)
    documents = [
        {name: np.asarray(row[name])[d.start : d.stop] for name in row}
        for row in rows
        for d in layout.stored_documents(row)
    ]
    apart = [dict(d, position_ids=np.arange(len(d["input_ids"]))) for d in documents]
    for arranged, collator in (
        (rows[::-1], {}),
        (apart, {}),
        (apart[::2] + apart[1::2], {"padding_side": "left", "pad_to_multiple_of": 64}),
        (apart, {"omit_plain_positions": True}),
    ):
        again, again_figures = differentiate(cached(loaded, bucket, MIXED), arranged, **collator)
        for a, b in zip(again, whole, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
        torch.testing.assert_close(again_figures, figures, rtol=1e-5, atol=1e-3)


def test_what_is_not_learned_needs_no_teacher(loaded, bucket):
    rows = some(loaded, 2)
    unknown = {"input_ids": [5] * 9, "labels": [-100] * 9, "position_ids": list(range(9))}
    assert not list(layout.stored_documents(unknown))
    whole, _ = differentiate(cached(loaded, bucket, MIXED), rows)
    packed = {name: [*rows[0][name], *unknown[name]] for name in unknown}
    packed["labels"][0] = packed["labels"][len(rows[0]["labels"])] = 5  # documents' first tokens count for nothing
    for arranged in ([*rows, unknown], [packed, rows[1]]):
        again, _ = differentiate(cached(loaded, bucket, MIXED), arranged)
        for a, b in zip(again, whole, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
    objective = cached(loaded, bucket, MIXED)
    batch = Collator(0, columns=objective.teacher.columns)([unknown])
    assert objective.student(**objective.student_inputs(batch, num_items=1))["loss"] == 0


def test_accumulation_over_a_cache_changes_nothing(loaded, bucket):
    rows = some(loaded, 8)
    whole, _ = differentiate(cached(loaded, bucket, MIXED), rows)
    objective = cached(loaded, bucket, MIXED)
    parts = [differentiate(objective, rows[start : start + 2])[0] for start in range(0, 8, 2)]
    for a, b in zip(map(sum, zip(*parts, strict=True)), whole, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6


def test_a_document_that_is_not_there_is_named(loaded, bucket):
    row = {name: list(values) for name, values in loaded.splits.train[0].items()}
    objective = cached(loaded, bucket, MIXED)

    def read(rows):
        return objective.student_inputs(Collator(0, columns=objective.teacher.columns)(rows))

    for name, value in (("input_ids", 77), ("labels", -100)):
        other = {key: list(values) for key, values in row.items()}
        other[name][5] = value if row[name][5] != value else 78
        with pytest.raises(ValueError, match=r"teacher\.path: .* row 1 of the batch, tokens 0 to"):
            read([row, other])
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 documents of the data, the first in row 1, tokens 0 to"):
        bucket.require([row, other], "data")
    crossing = row | {"position_ids": [*range(9), *range(len(row["position_ids"]) - 9)]}
    with pytest.raises(ValueError, match=r"teacher\.path: .* row 0 of the batch, tokens 0 to 9"):
        read([crossing])


def test_a_batch_of_another_collator_is_refused(loaded, bucket):
    objective = cached(loaded, bucket, MIXED)
    with pytest.raises(ValueError, match=r"columns=teacher\.columns"):
        objective.student_inputs(Collator(0)(some(loaded, 1)))


# ------------------------------------------------------------------ writing


def test_killed_and_resumed_equals_undisturbed(loaded, bucket, tmp_path):
    @contextlib.contextmanager
    def dies(total):
        told = []

        def advance(positions):
            told.append(positions)
            if sum(told) > total / 2:
                raise KeyboardInterrupt

        yield advance

    folder = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        write(loaded, folder, progress=dies, k=8, shard_bytes=SMALL_SHARD)
    with pytest.raises(ValueError, match="unfinished"):
        Store(folder)
    kept = stored_documents(folder)
    assert 0 < len(kept) < bucket.manifest["documents"]
    with pytest.raises(ValueError, match=r"--out: .* k was 8, now 9"):
        write(loaded, folder, k=9, shard_bytes=SMALL_SHARD)
    write(loaded, folder, k=8, shard_bytes=SMALL_SHARD)
    assert stored_documents(folder).items() >= kept.items() and stored_documents(folder) == stored_documents(
        bucket.folder
    )


@pytest.mark.full
def test_two_processes_write_what_one_does(loaded, bucket, tmp_path, monkeypatch):
    made, told, folder = CacheOptions(k=8, shard_bytes=SMALL_SHARD).checked(), [], tmp_path / "cache"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    folder.mkdir()
    shutil.copy(bucket.folder / layout.PLAN, folder)  # as if the first had begun
    assert make_cache(loaded, folder, made, say=print, progress=silent) is None  # nor does it wait for more
    (folder / layout.PLAN).unlink()
    written = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".lock"]
    assert written and all(name.startswith("shard-part-0001-") for name in written)
    assert 0 < len(stored_documents(folder)) < bucket.manifest["documents"]
    folder.rename(tmp_path / "second")

    @contextlib.contextmanager
    def counts(total):
        yield told.append
        assert sum(told) == total, "progress is exact"

    def arrive():
        for path in (tmp_path / "second").iterdir():
            path.rename(folder / path.name)

    monkeypatch.setenv("RANK", "0")
    second = threading.Timer(0.5, arrive)
    second.start()
    manifest = make_cache(loaded, folder, made, say=lambda line: None, progress=counts)
    second.join()
    assert (
        stored_documents(folder) == stored_documents(bucket.folder) and manifest["positions"] == bucket.shards.positions
    )


def test_a_small_disk_is_refused_before_anything_is_written(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ValueError, match=r"--out: .* GiB more are stored \(262 bytes per trained token\)"):
        write(loaded, tmp_path / "cache", k=64)


def test_other_mistakes_are_named(loaded, bucket, tmp_path):
    for settings_, message in (
        ({"k": 300}, "--top-k: expected at most 259"),
        ({"k": 512}, "--top-k: expected 1 to 511, got 512"),
        ({"tail": "top"}, "--tail: expected bucket"),
        ({"dtype": "bfloat16"}, "--dtype: expected float16 or float32"),
    ):
        with pytest.raises(ValueError, match=message):
            write(loaded, tmp_path / "cache", **settings_)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("x")
    with pytest.raises(ValueError, match="holds no cache"):
        write(loaded, tmp_path / "full")
    with pytest.raises(ValueError, match=r"teacher\.path: no cache"):
        Store(tmp_path / "full")
    for terms, message in (
        ([{"type": "jsd"}], "got 1 jsd; a cache made with --hidden"),
        ([{"type": "forward_kl"}, {"type": "reverse_kl"}], "got 1 forward_kl"),
    ):
        with pytest.raises(ValueError, match=message):
            cached(loaded, bucket, Loss.model_validate({"temperature": 2.0, "terms": terms}))
    with pytest.raises(ValueError, match="at temperature 2, the recipe's loss is at 1"):
        cached(loaded, bucket, Loss())


def test_damaged_caches_are_detected(bucket, tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(bucket.folder, folder)
    shard = layout.shard_path(folder, 1)
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match="is damaged"):
        Store(folder)
    shard.unlink()
    with pytest.raises(ValueError, match="is missing"):
        Store(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[SUM]
    (folder / "manifest.json").write_text(json.dumps(with_checksum(manifest | {"version": 99})))
    with pytest.raises(ValueError, match="expected a cache of version 1, got 99"):
        Store(folder)


def test_reported_errors_fall_with_k(loaded):
    sample = loaded.sample(64)
    assert len(sample.labels) == 64
    rows = measure(sample, temperature=1.0, ks=(8, 64, 256), dtype=torch.float32)
    assert [(row.k, row.tail) for row in rows][:3] == [(8, "bucket"), (8, "renormalize"), (8, "sampled")]
    found = {(row.k, row.tail): row for row in rows}
    for tail in ("bucket", "renormalize", "sampled"):
        errors = [found[k, tail].gradient for k in (8, 64, 256)]
        assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 2, tail
    assert found[8, "bucket"].kl > found[64, "bucket"].kl > found[256, "bucket"].kl >= 0
    assert found[8, "bucket"].seen < 1 and abs(found[256, "bucket"].seen - 1) < 0.01
    assert found[8, "renormalize"].kl == float("inf")
    assert found[8, "sampled"].head < found[8, "sampled"].gradient, "noise averages out over positions"
