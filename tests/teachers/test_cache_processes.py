"""A teacher on disk with real processes: two that share the work, and one that is killed."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked import PIPE, Forked, clean_environment, stand_ins
from helpers import stored_documents
from two_ranks import run_as_two

from distill.evaluation.evaluate import HeldOut
from distill.teachers.backends.stored.begin import StoreFolder
from distill.teachers.backends.stored.format import PLAN, write_signed

RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.2}}
train: {steps: 3, batch_size: 2, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: []}
"""
ALONE = ["-m", "distill"]
TWO = ["-c", "import sys; from distill.core.launch import start; sys.exit(start(2, sys.argv[1:]))"]
# parts so small that there are many
SMALL_PARTS = "from distill.teachers.backends.stored import epoch; epoch.LEAST_ROWS = 1"
MANY_PARTS = ["-c", f"{SMALL_PARTS}; from distill.cli import main; main()"]


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {i} once more." for i in range(80)),
    files={"tiny.yaml": RECIPE},
    teacher={"layers": 3, "seed": 1},
)


def start(workplace, code, *arguments, **more):
    return Forked([*code, *arguments], cwd=workplace, env=clean_environment(**more), stdout=PIPE, stderr=PIPE)


def test_a_process_that_is_early_waits_until_the_first_has_begun(tmp_path, monkeypatch, limit):
    cache, plan = StoreFolder(tmp_path / "cache", "teacher.online_cache", of_command=False), {"kind": "top_k", "k": 8}

    def begin():
        cache.path.mkdir()
        write_signed(cache.path / PLAN, plan)
        return plan

    monkeypatch.setenv("RANK", "1")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(cache.begin_apart, begin, plan)
        time.sleep(0.3)
        assert not early.done() and not cache.path.exists()
        with monkeypatch.context() as first:
            first.setenv("RANK", "0")
            assert cache.begin_apart(begin, plan) == plan
        assert early.result(timeout=20) == plan
    with pytest.raises(ValueError, match="k was 8, now 9"):
        cache.begin_apart(begin, plan | {"k": 9})
    limit.setattr("distill.teachers.backends.stored.begin.BEGINS_WITHIN_S", 0.2)
    cache = cache._replace(path=tmp_path / "of another machine")
    with pytest.raises(ValueError, match="a folder that all machines share"):
        cache.begin_apart(begin, plan)


def program(workplace, code, *arguments, **more):
    process = start(workplace, code, *arguments, **more)
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    return out


@pytest.mark.full
def test_two_processes_cache_and_train_as_one(workplace):
    environment = stand_ins(workplace)  # torchrun's Pythons
    out = program(workplace, TWO, "cache", "tiny.yaml", "--top-k", "16", "--out", "two", "--json", **environment)
    assert json.loads(out[out.index("{") :])["cache"]["positions"] > 500
    program(workplace, ALONE, "cache", "tiny.yaml", "--top-k", "16", "--out", "one", "--json")
    assert stored_documents(workplace / "one") == stored_documents(workplace / "two")
    program(workplace, ALONE, "run", "tiny.yaml", "teacher={type: cache, path: two}", "--name", "one")
    run_as_two(*ALONE, "run", "tiny.yaml", "teacher={type: cache, path: one}", "--name", "two", cwd=workplace)
    results = [json.loads((workplace / "runs" / name / "result.json").read_text()) for name in ("one", "two")]
    one, two = ({name: value for name, value in result["after"].items() if value is not None} for result in results)
    assert two == pytest.approx(one, rel=1e-5)
    assert set(HeldOut._fields) - set(one) == {"reverse_kl"}  # a drawn tail cannot tell it
    assert results[0]["gap_closed"] > 0


@pytest.mark.slow
def test_killed_at_any_point_and_finished(workplace):
    command = ("cache", "tiny.yaml", "--top-k", "16", "--json")
    program(workplace, MANY_PARTS, *command, "--out", "whole")
    whole, parts = stored_documents(workplace / "whole"), len(list((workplace / "whole").glob("shard-*")))
    assert parts > 5
    for wanted in (1, 3, parts - 1):
        folder = workplace / f"killed-{wanted}"
        process = start(workplace, MANY_PARTS, *command, "--out", folder.name)
        while len(list(folder.glob("shard-*.safetensors"))) < wanted and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert stored_documents(folder).items() <= whole.items()
        assert not (folder / "manifest.json").exists()
        program(workplace, MANY_PARTS, *command, "--out", folder.name)
        assert stored_documents(folder) == whole
