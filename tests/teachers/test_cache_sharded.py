"""A teacher in shards over two processes is cached as the whole one is by one process: the same files, bit for bit.

The file is also the program of the two processes, which make all caches in one start.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from grids import chosen
from helpers import stored_documents
from test_parallel import gpu_of
from tiny import save_models
from two_ranks import run_as_two

from distill.cli import run_command
from distill.commands.cache_epoch import load, make_cache
from distill.core import ranks
from distill.planning.cache_memory import plan_caching, shards_for_queries
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.teachers.backends.stored import epoch
from distill.teachers.backends.stored import format as layout
from distill.teachers.backends.stored.maker import section_to_load
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Store

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 3, batch_size: 2, tokens_per_step: 64, learning_rate: 3e-3, warmup: 0, log_every: 1}
parallel: {teacher: sharded}
generate: {prompts: [The teacher], max_new_tokens: 5}
"""
ON = {
    "cpu": ["train.device=cpu"],
    "cuda": ["train.device=cuda", "train.precision=float32", "train.deterministic=true"],
}
FEW_ROWS = 1  # of a part, so that there are many
CASES = {
    "drawn": ["--top-k", "16"],
    "likeliest": ["--top-k", "24", "--tail", "bucket", "--batch-size", "3", "teacher.model=untied"],
    "soft-capped": ["--top-k", "8", "--tail", "renormalize", "teacher.model=capped"],
    "hidden": ["--hidden", "--dtype", "float32", "data.packing=false"],
}
REFUSED = {
    "cut": ["student={from_teacher: {layers: 2}}"],
    "fp8": ["teacher.dtype=fp8"],
    "full": ["--out", "student"],
}


def command(case, device, *more):
    return ["cache", "tiny.yaml", *CASES[case], *ON[device], "--json", *more]


def said_by(arguments):
    """The exit code of a command and what it printed, lines of JSON and errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run_command(arguments)
    return {"code": code, "out": out.getvalue(), "errors": errors.getvalue()}


def missing_some(source, folder, kept):
    """A cache that was begun: its plan and the shards whose numbers `kept` takes."""
    folder.mkdir()
    shutil.copy(source / layout.PLAN, folder)
    for number in range(len(layout.read_store_json(source / layout.MANIFEST)["shards"])):
        if kept(number):
            shutil.copy(layout.shard_path(source, number), folder)


def both(folder, device, *cases):
    """Body of each of the two processes."""
    os.chdir(folder)
    torch.set_num_threads(1)
    epoch.LEAST_ROWS = FEW_ROWS
    found = {case: said_by(command(case, device, "--out", f"two-{case}")) for case in cases}
    found |= {name: said_by(command("drawn", device, *more)) for name, more in REFUSED.items()}
    found["report"] = said_by(command("drawn", device, "--report"))
    found["resumed"] = said_by(command("drawn", device, "--out", "resumed"))
    found["again"] = said_by(command("drawn", device, "--out", "resumed"))

    from distill.recipe import parse

    told = []

    @contextlib.contextmanager
    def counts(total):
        yield told.append
        assert os.environ["RANK"] == "1" or sum(told) == total, "progress is exact"

    loaded = load(parse(RECIPE, ON[device], name="tiny"))
    assert loaded.backend.is_collective()
    plain, calls = loaded.backend.targets, []
    loaded.backend.targets = lambda batch: calls.append(len(batch["valid_rows"])) or plain(batch)
    made = CacheOptions(k=8, tail="bucket").checked()
    make_cache(loaded, Path("counted"), made, say=lambda line: None, progress=counts)
    found["calls"] = calls
    Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


def made_by_two(folder, device, cases):
    """The folder in which one process and two have made all caches."""
    save_models(
        folder,
        teacher={"layers": 3, "hidden": 48, "seed": 1},
        untied={"layers": 3, "seed": 3, "tie": False},
        capped={"layers": 3, "seed": 4, "kind": "gemma2"},
        student={"seed": 2},
    )
    (folder / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(80)))
    (folder / "tiny.yaml").write_text(RECIPE)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as limit:
        limit.chdir(folder)
        limit.setattr(epoch, "LEAST_ROWS", FEW_ROWS)
        limit.setattr(torch.cuda, "device_count", lambda: 1)
        if device == "cuda":
            limit.delenv("TRITON_INTERPRET", raising=False)
        torch.set_num_threads(1)
        try:
            alone = {case: said_by(command(case, device, "--out", f"one-{case}")) for case in cases}
            missing_some(folder / "one-drawn", folder / "resumed", lambda number: number in (0, 1, 4))
            run_as_two(__file__, folder, device, *cases, device=device, timeout=500)
            missing_some(folder / "two-drawn", folder / "finished-by-one", lambda number: number % 3 == 1)
            alone["finished-by-one"] = said_by(command("drawn", device, "--out", "finished-by-one"))
        finally:
            torch.set_num_threads(threads)
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    return folder, alone, found


@pytest.fixture(scope="module")
def made(tmp_path_factory, request):
    cases = dict.fromkeys(["drawn", *chosen(request, "case")])
    return made_by_two(tmp_path_factory.mktemp("sharded"), "cpu", cases)


@pytest.fixture(scope="module")
def made_on_gpus(tmp_path_factory):
    return made_by_two(tmp_path_factory.mktemp("sharded"), "cuda", CASES)


DEVICES = {"made": "cpu", "made_on_gpus": "cuda"}
PLACES = ["made", pytest.param("made_on_gpus", marks=pytest.mark.gpu)]


def hold_same(one, two, device):
    """Two caches hold the same documents; on GPUs to rounding, which may move a token at the edge of those kept."""
    first, second = (stored_documents(folder) for folder in (one, two))
    assert first.keys() == second.keys() and len(first) > 6
    manifests = [layout.read_store_json(folder / layout.MANIFEST) for folder in (one, two)]
    of_files = ("shards", "sums", "files")
    plain = [{name: value for name, value in made.items() if name not in of_files} for made in manifests]
    assert plain[0] == plain[1]
    if device == "cpu":
        assert first == second
        return
    caches = [Store(folder) for folder in (one, two)]
    for key in first:
        (shard, number), (other, its) = (cache.shards.find(key) for cache in caches)
        (a, b), (c, d) = caches[0].shards.verify(shard, number), caches[1].shards.verify(other, its)
        for name in first[key]:
            values, others = caches[0].shards.arrays[shard][name][a:b], caches[1].shards.arrays[other][name][c:d]
            near = torch.isclose(torch.from_numpy(values).float(), torch.from_numpy(others).float(), 1e-3, 2e-3)
            assert near.double().mean() > 0.99, name


def hold_same_errors(one, two, device):
    """Two tables of the measured error, on GPUs to rounding."""
    assert len(one) == len(two) and (device != "cpu" or one == two)
    for row, other in zip(one, two, strict=True):
        figures = {name: value for name, value in other.items() if isinstance(value, float)}
        assert {name: row[name] for name in figures} == pytest.approx(figures, rel=0.05, abs=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_shards_are_cached_as_the_whole_teacher_is(request, place, case):
    folder, alone, (first, second) = request.getfixturevalue(place)
    assert alone[case]["code"] == first[case]["code"] == second[case]["code"] == 0, (alone[case], first, second)
    hold_same(folder / f"one-{case}", folder / f"two-{case}", DEVICES[place])
    manifest = layout.read_store_json(folder / f"two-{case}" / layout.MANIFEST)
    assert len(manifest["shards"]) > 5 and manifest["teacher"]["files_sha256"]
    assert not second[case]["out"], "one process speaks"
    told = [json.loads(way["out"][way["out"].index("{") :]) for way in (alone[case], first[case])]
    positions = [one["cache"]["positions"] for one in told]
    assert positions[0] == positions[1] and bool(told[0]["errors"]) == (case != "hidden")
    hold_same_errors(*(way["errors"] for way in told), DEVICES[place])


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_all_processes_ask_a_sharded_teacher_as_often(request, place):
    folder, _, (first, second) = request.getfixturevalue(place)
    assert len(first["calls"]) == len(second["calls"])
    assert all(first["calls"])
    assert (
        sum(first["calls"]) + sum(second["calls"])
        == layout.read_store_json(folder / "counted/manifest.json")["positions"]
    )


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_cache_that_was_begun_is_finished_by_another_number_of_processes(request, place):
    folder, alone, (first, second) = request.getfixturevalue(place)
    for done in (alone["finished-by-one"], first["resumed"], second["resumed"], first["again"], second["again"]):
        assert done["code"] == 0, done
    for finished in ("resumed", "finished-by-one"):
        hold_same(folder / "one-drawn", folder / finished, DEVICES[place])


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_only_measured_in_shards(request, place):
    _, alone, (first, second) = request.getfixturevalue(place)
    assert first["report"]["code"] == second["report"]["code"] == 0 and not second["report"]["out"]
    report, cached = (json.loads(way["out"][way["out"].index("{") :]) for way in (first["report"], alone["drawn"]))
    assert report["cache"] is None
    hold_same_errors(report["errors"], cached["errors"], DEVICES[place])


@pytest.mark.full
@pytest.mark.parametrize(
    "name, expected",
    [
        ("cut", "student.from_teacher: layers cannot be cut from a sharded teacher"),
        ("fp8", "teacher.dtype: fp8 cannot be sharded (parallel.teacher); use bfloat16, or parallel.teacher: copied"),
        ("full", "--out: student is not empty and holds no cache; name another folder"),
    ],
)
def test_mistakes_are_one_line_on_every_process(made, name, expected):
    _, _, found = made
    for rank, each in enumerate(found):
        assert each[name]["code"] == 2
        prefix = "distill: " if rank == 0 else "distill (rank 1): "
        assert each[name]["errors"].startswith(prefix + expected) and each[name]["errors"].count("\n") == 1


@pytest.mark.full
def test_a_run_takes_it_as_the_teachers_own_words(made, monkeypatch):
    from distill.recipe import parse
    from distill.run import run

    folder, _, _ = made
    monkeypatch.chdir(folder)
    ends = []
    for place in ("one", "two"):
        teacher = f"teacher={{type: cache, path: {place}-drawn, model: teacher}}"
        ends.append(run(parse(RECIPE, [teacher, *ON["cpu"]], name="tiny"), name=place).after)
    assert ends[0] == ends[1] or repr(ends[0]) == repr(ends[1])  # NaN: what a drawn tail cannot tell


# ---------------------------------------------------------------- copies or shards


def of_70b(*overrides):
    from distill.recipe import load

    shapes = ["init: random, config: llama-3.1-70b", "student={init: random, config: llama-3.1-8b}"]
    cached = f"teacher={{type: cache, path: nowhere, {shapes[0]}}}"
    more = ["data.source=synthetic", "train.batch_size=1", "train.tokens_per_step=null"]
    return load(Path(__file__).parents[2] / "recipes/llama3-8b-to-1b.yaml", [cached, shapes[1], *more, *overrides])


@pytest.mark.parametrize(
    "gib, world, overrides, expected",
    [
        (80, 4, [], (True, True)),  # 131 GiB of weights
        (80, 2, [], (True, False)),
        (180, 4, [], (False, True)),
        (180, 4, ["parallel.teacher=sharded"], (True, True)),
        (80, 4, ["parallel.teacher=copied"], (False, False)),
        (80, 4, ["teacher.offload=cpu"], (False, True)),
        (180, 1, ["parallel.teacher=sharded"], (False, True)),
        (80, 4, ["train.batch_size=64"], (True, False)),
    ],
)
def test_a_teacher_that_fits_no_gpu_is_cached_in_shards(monkeypatch, gib, world, overrides, expected):
    gpu_of(monkeypatch, gib)
    teacher = [change for change in overrides if change.startswith("teacher")]
    rest = [change for change in overrides if change not in teacher]
    recipe = of_70b(*rest)
    section = section_to_load(recipe)
    if teacher:
        section = section.model_copy(update={"offload": "cpu"})
    recipe = recipe.model_copy(update={"teacher": section})
    found = plan_caching(recipe, torch.device("cuda", 0), world)
    assert (found.teacher_sharded, found.fits) == expected, str(found)
    if rest == ["train.batch_size=64"]:
        assert plan_caching(recipe, torch.device("cuda", 0), world, batch_size=1).fits


@pytest.mark.parametrize(
    "gib, more, expected",
    [
        (160, {"alone": True}, False),  # 131 GiB, and no student
        (160, {}, True),
        (160, {"alone": True, "cached_tokens": 32 * 4096}, True),  # keys and values of 40 GiB
        (200, {"alone": True, "cached_tokens": 32 * 4096}, False),
    ],
)
def test_sharding_for_queries_depends_on_what_else_is_in_memory(monkeypatch, gib, more, expected):
    gpu_of(monkeypatch, gib)
    assert shards_for_queries(of_70b(), torch.device("cuda", 0), 4, batch_size=1, **more) is expected
    assert not shards_for_queries(of_70b("parallel.teacher=copied"), torch.device("cuda", 0), 4, batch_size=1, **more)
    assert not shards_for_queries(of_70b(), torch.device("cuda", 0), 1, batch_size=1, **more)


def test_an_fp8_teacher_that_fits_no_gpu_is_refused(monkeypatch):
    gpu_of(monkeypatch, 40)
    recipe = of_70b()
    section = section_to_load(recipe).model_copy(update={"dtype": "fp8"})
    with pytest.raises(
        ValueError, match=r"teacher\.dtype: an fp8 teacher cannot be sharded, and it does not fit whole"
    ):
        plan_caching(recipe.model_copy(update={"teacher": section}), torch.device("cuda", 0), 4)


def test_check_prints_the_cost_of_caching():
    found = [check_run(of_70b(), find_device("H100"), gpus=gpus, read_data=False).teacher_text for gpus in (2, 4)]
    assert "GiB on each GPU while it is cached, the teacher sharded (FSDP2), more than its memory" in found[0]
    assert found[1].endswith("GiB on each GPU while it is cached, the teacher sharded (FSDP2)")


@pytest.mark.full
@pytest.mark.parametrize("how, started", [("sharded", 4), ("copied", 1)])
def test_measuring_alone_takes_several_gpus_only_in_shards(made, monkeypatch, torchrun, how, started):
    folder, _, _ = made
    monkeypatch.chdir(folder)
    gpu_of(monkeypatch, 80)
    starts = torchrun(gpus=4)
    arguments = ["cache", "tiny.yaml", f"parallel.teacher={how}", "--report", "--batch-size", "1"]
    assert run_command(arguments) == 0
    assert len(starts) == (started == 4)
    if starts:
        processes, again = starts[0]
        assert processes == 4 and {"--report", f"parallel.teacher={how}", "--batch-size"} <= set(again)


if __name__ == "__main__":
    both(*sys.argv[1:])
    torch.distributed.destroy_process_group()
    ranks.exit_process(0)
