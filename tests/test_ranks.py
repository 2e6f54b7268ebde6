"""A teacher on ranks of its own (`parallel.teacher: ranks`) teaches to the bit what it does in the process.

One training rank and one of the teacher's, two and one, one and two with copies and with shards, over gloo; a rank that
is killed. The file is also the program of the processes, which make several runs in one start.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from two_ranks import codes_of, ending, run_as_two, started_on_gpu

from distill.core import worlds
from distill.core.ranks import leave
from distill.core.worlds import Worlds
from distill.teachers.server.wire import TargetRequest

RECIPE = """
name: tiny
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss: {terms: [{type: jsd}, {type: cross_entropy, weight: 0.5}]}
train: {steps: 5, batch_size: 1, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 2}
generate: {prompts: [], max_new_tokens: 4}
"""
OWN = ["data.source=chat.jsonl", "data.max_length=96", "loss.terms=[{type: reverse_kl}]", "train.steps=3",
       "train.tokens_per_step=192", "data.on_policy={fraction: 0.5, max_new_tokens: 6, ahead: 1}"]  # fmt: skip
CASES = {
    "plain": ["train.eval_every=2"],
    "own words": OWN,
    "cut": ["student={from_teacher: {layers: 2}}", "train.steps=2"],
    "hard labels": ["loss.terms=[{type: cross_entropy}]", "train.steps=2"],
}
ON = {"cpu": ["train.device=cpu"], "cuda": ["train.device=cuda", "train.precision=float32", "train.deterministic=true"]}


def ranks(count, layout="auto"):
    return ["parallel.teacher=ranks", f"parallel.teacher_ranks={count}", f"parallel.teacher_layout={layout}"]


def recipe(*overrides):
    from distill.recipe import parse

    return parse(RECIPE, overrides)


def make_run(name, *overrides, resume=False):
    """One run of a launch of several processes; what it leaves behind in the process is taken away."""
    from accelerate.state import AcceleratorState, PartialState

    from distill.run import run

    try:
        run(recipe(*overrides), name=name, resume=resume)
    except SystemExit as ended:
        assert ended.code == 0, ended.code
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state()
    PartialState._shared_state.clear()


def two(device):
    """What each of two processes does."""
    first = os.environ["RANK"] == "0"
    make_run("two-copies", *CASES["plain"], *ON[device])
    for name, overrides in CASES.items():
        make_run(f"{name} 1-1".replace(" ", "-"), *overrides, *ranks(1), *ON[device])
    if first:  # as if it had ended after step 2
        folder = Path(shutil.copytree("runs/plain-1-1", "runs/again"))
        shutil.rmtree(folder / "student")
        shutil.rmtree(folder / "checkpoint-4")
        shutil.rmtree(folder / "checkpoint-5", ignore_errors=True)
        (folder / "result.json").unlink()
    make_run("again", *CASES["plain"], *ranks(1), *ON[device], resume=True)


def three(device):
    make_run("plain-2-1", *CASES["plain"], *ranks(1), *ON[device])
    make_run("plain-1-2", *CASES["plain"], *ranks(2, "copied"), *ON[device])
    make_run("plain-1-2-sharded", *CASES["plain"], *ranks(2, "sharded"), *ON[device])


def killed(device):
    """The teacher's rank is killed while the third step is made, of whose micro-batches it has said all."""
    _at_an_answer(lambda: os.kill(os.getpid(), signal.SIGKILL))
    _as_command("killed", *CASES["plain"], *ranks(1), *ON[device])


def silent(device):
    """It stands still there, seemingly on another host, as one does that has lost its network."""

    def stop():
        time.sleep(1.0)  # what it has sent arrives: gloo waits half an hour for a transfer that stands still midway
        subprocess.Popen(["sh", "-c", f"sleep 30; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    rank = os.environ["RANK"]  # of the launch
    socket.gethostname = lambda: f"host-{rank}"
    worlds.SILENT_S = 4.0
    _at_an_answer(stop)
    _as_command("silent", *CASES["plain"], *ranks(1), *ON[device])


def _at_an_answer(act):
    from distill.teachers.ranks.link import TeacherLink

    answer, count = TeacherLink.answer, [0]

    def counted(self, pair, values):
        count[0] += 1
        if count[0] == 38:
            act()
        answer(self, pair, values)

    TeacherLink.answer = counted


def student_killed(device):
    """The training rank is killed in its third step."""
    from distill.training.trainer import DistillationTrainer

    step = DistillationTrainer.training_step

    def counted(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    DistillationTrainer.training_step = counted
    _as_command("orphaned", *CASES["plain"], *ranks(1), *ON[device])


def no_teacher(device):
    _as_command("none", "teacher.model=nowhere", *ranks(1), *ON[device])


def _as_command(name, *overrides):
    from distill.cli import run_command

    Path("tiny.yaml").write_text(RECIPE) if os.environ["RANK"] == "0" else None
    while not Path("tiny.yaml").exists() or not Path("tiny.yaml").read_text():
        pass
    leave(run_command(["run", "tiny.yaml", "--name", name, *overrides]))


# ------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from tiny import save_tiny, tiny_model, tiny_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("ranks"), tiny_tokenizer()
    teacher = tiny_model(tokenizer, layers=3, hidden=48, seed=1, kind="gemma2", final_logit_softcapping=5.0)
    save_tiny(folder / "teacher", teacher, tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (folder / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(80)))
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n * n}."}]}
        for n in range(40)
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture(scope="module")
def by_two(place):
    return place, in_one_line(run_as_two(__file__, "two", place, "cpu", cwd=place))


@pytest.fixture(scope="module")
def by_three(place):
    return place, in_one_line(run_as_two(__file__, "three", place, "cpu", cwd=place, processes=3))


def in_one_line(said):
    """Lines are broken at the width of the console."""
    return " ".join(said.split())


def outcome(folder):
    """Weights, held-out figures and logged figures of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [{key: line[key] for key in line if key in ("step", "loss", "grad_norm", "eval_loss")} for line in lines]
    result = json.loads((folder / "result.json").read_text())
    return load_file(folder / "student" / "model.safetensors"), figures, result["before"], result["after"]


def assert_same(one, other):
    (weights, *figures), (others, *expected) = outcome(one), outcome(other)
    assert figures == expected
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def alone(place):
    """Runs with the teacher in the process, by case."""
    from distill.run import run

    made = {}

    def of(case, *overrides):
        if case not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(place)
                made[case] = run(recipe(*CASES[case], *ON["cpu"]), name=f"alone-{case}".replace(" ", "-")).folder
        return place / made[case]

    return of


@pytest.mark.parametrize("case", CASES)
def test_one_rank_trains_and_one_teaches(by_two, alone, case):
    folder, said = by_two
    assert_same(folder / "runs" / f"{case} 1-1".replace(" ", "-"), alone(case))
    assert "on 1 rank of its own, copied" in said and "192 bytes a learned token" in said
    assert "are those of its own logits" in said


def test_a_resumed_run_is_the_same_to_the_bit(by_two):
    runs = by_two[0] / "runs"
    assert_same(runs / "again", runs / "plain-1-1")
    assert (runs / "again" / "checkpoint-4").is_dir()


def test_two_ranks_train_with_one_teacher(by_two, by_three):
    """As two with copies of it."""
    assert_same(by_three[0] / "runs" / "plain-2-1", by_two[0] / "runs" / "two-copies")


@pytest.mark.parametrize("layout", ["", "-sharded"])
def test_two_ranks_teach_one(by_three, alone, layout):
    assert_same(by_three[0] / "runs" / f"plain-1-2{layout}", alone("plain"))
    assert "on 2 ranks of its own, sharded (FSDP2)" in by_three[1] and "ranks of its own, copied" in by_three[1]


def failed(place, what, device="cpu"):
    """Exit codes of two processes, and what they wrote to standard error."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        codes, late = codes_of(
            (__file__, what, place, device), 2, place, (out, error), 140, all_end=True, device=device
        )
        error.seek(0)
        written = error.read()
        lines = [line for line in written.splitlines() if line.startswith("distill")]
    assert late == [False, False], written[-4000:]
    return codes, lines


def test_a_dead_teacher_ends_the_run_with_a_checkpoint(place, alone, by_two, monkeypatch):
    codes, lines = failed(place, "killed")
    assert codes == [1, -signal.SIGKILL] and len(lines) == 1, (codes, lines)
    assert "parallel.teacher: rank 1 (process " in lines[0] and " is gone; continue from step 3 " in lines[0], lines
    folder = place / "runs" / "killed"
    step = int(lines[0].rpartition("from step ")[2].split()[0])
    assert (folder / f"checkpoint-{step}" / "manifest.json").is_file()
    again = place / "runs" / "killed-again"
    shutil.copytree(folder, again)
    run_as_two(__file__, "resumed", place, "cpu", cwd=place)
    assert_same(again, by_two[0] / "runs" / "plain-1-1")


def resumed(device):
    make_run("killed-again", *CASES["plain"], *ranks(1), *ON[device], resume=True)


@pytest.mark.full
def test_a_teacher_on_another_host_that_falls_silent_ends_the_run(place):
    codes, lines = failed(place, "silent")
    assert codes == [1, -signal.SIGKILL] and len(lines) == 1, (codes, lines)
    assert "rank 1 (process " in lines[0] and " on host-1) has given no sign of life for " in lines[0], lines
    step = int(lines[0].rpartition("from step ")[2].split()[0])
    assert (place / "runs" / "silent" / f"checkpoint-{step}" / "manifest.json").is_file()


def test_a_dead_student_ends_the_teacher(place):
    codes, lines = failed(place, "student_killed")
    assert codes == [-signal.SIGKILL, 1], (codes, lines)
    assert len(lines) == 1 and "so the teacher's " in lines[0], lines


def test_what_the_user_got_wrong_ends_both_sides(place):
    codes, lines = failed(place, "no_teacher")
    assert codes[0] == 2 and codes[1] == 2, (codes, lines)
    assert any("teacher.model" in line for line in lines), lines


def test_it_takes_more_processes_than_the_teacher_has(place, monkeypatch):
    from distill.run import run

    monkeypatch.chdir(place)
    with pytest.raises(ValueError, match=r"parallel\.teacher: ranks needs 1 process.*got 1 in all"):
        run(recipe(*ranks(1), "train.device=cpu"))


IN_BF16 = ["train.precision=bfloat16", "teacher.dtype=bfloat16", "train.tokens_per_step=64"]


@pytest.fixture(scope="module")
def on_gpus(place):
    """Runs over NCCL beside those of one process, and one whose teacher is killed: all at once, each in new processes.
    Gives exit codes and what was written to standard error, of the first two ranks and of those of the killed run."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with tempfile.TemporaryFile("w+") as error, ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as stack:
        alone = started_on_gpu((__file__, "alone_on_gpu", place, "cuda"), place, (None, error))
        stack.enter_context(ending(alone, 150))
        both = pool.submit(run_as_two, __file__, "two_on_gpus", place, "cuda", device="cuda", timeout=150)
        fails = pool.submit(failed, place, "killed", "cuda")
        code = alone.wait()
        error.seek(0)
        assert code == 0, error.read()[-4000:]
        return in_one_line(both.result()), fails.result()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_on_two_gpus_it_is_the_same_to_the_bit(place, on_gpus, name):
    assert_same(place / "runs" / f"{name}-on-two", place / "runs" / f"{name}-on-one")
    assert "on 1 rank of its own, copied" in on_gpus[0] and "are those of its own logits" in on_gpus[0]


@pytest.mark.gpu
def test_a_teacher_that_dies_on_its_gpu_ends_the_run(on_gpus):
    codes, lines = on_gpus[1]
    assert codes == [1, -signal.SIGKILL] and len(lines) == 1, (codes, lines)
    assert "parallel.teacher: rank 1 (process " in lines[0] and " is gone; continue from step " in lines[0], lines


def two_on_gpus(device):
    make_run("plain-on-two", *CASES["plain"], *ranks(1), *ON[device])
    make_run("bf16-on-two", *CASES["plain"], *ON[device], *IN_BF16, *ranks(1))


def alone_on_gpu(device):
    make_run("plain-on-one", *CASES["plain"], *ON[device])
    make_run("bf16-on-one", *CASES["plain"], *ON[device], *IN_BF16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    program, folder, device = sys.argv[1:]
    os.chdir(folder)
    globals()[program](device)
    leave(0)


def test_time_in_which_a_rank_itself_stood_still_is_no_silence_of_others():
    """A machine that was paused pauses both sides; a sign that stays the same while one looks is silence."""
    store = dist.HashStore()
    worlds = Worlds(store, 0, 1, 1)
    store.set("sign/1", "3 1 elsewhere")
    assert worlds._fault_of(1, 100.0) is None and worlds._fault_of(1, 200.0) is None
    looks = [worlds._fault_of(1, 200.0 + second) for second in range(1, 20)]
    assert looks[:14] == [None] * 14 and looks[-1].startswith("rank 1 (process 1 on elsewhere) has given no sign")
    store.set("sign/1", "4 1 elsewhere")
    assert worlds._fault_of(1, 220.0) is None
    worlds._ended.set()


def test_answers_are_received_whatever_the_training_does():
    """By a thread: a send that waits keeps the teacher's GPU from its next forward."""
    from subjects import link

    query = TargetRequest(np.full((1, 6), 7, np.int32), None, np.arange(5, dtype=np.int32))
    futures = [link().ask(query) for _ in range(3)]
    until = time.monotonic() + 20
    while not all(future.done() for future in futures) and time.monotonic() < until:
        time.sleep(0.01)
    hidden = [future.result(timeout=0) for future in futures]
    assert hidden[0].shape == (5, link().facts.width) and all(torch.equal(hidden[0], each) for each in hidden)
