"""A teacher server that the launch starts (`parallel.teacher: served`) changes no bit of what is learned.

One process that trains, and two; a copy of the teacher, two, and shards of one; a server that is killed, one that
cannot load its model, and a run that is killed. The file is also the program of the processes, which make several runs
in one start.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from forked import PIPE, Forked, clean_environment
from safetensors.torch import load_file
from two_ranks import run_as_two

from distill.core import launch
from distill.core.errors import RunError
from distill.core.ranks import exit_process
from distill.teachers.backends.served import launched
from distill.teachers.backends.served.launched import LaunchedServers, launched_servers

RECIPE = """
name: tiny
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss: {terms: [{type: jsd}, {type: cross_entropy, weight: 0.5}]}
train: {steps: 5, batch_size: 1, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 2,
        device: cpu}
generate: {prompts: [], max_new_tokens: 4}
"""
OWN = [
    "data.source=pairs.jsonl",
    "data.max_length=96",
    "loss.terms=[{type: reverse_kl}]",
    "train.steps=3",
    "train.tokens_per_step=192",
    "data.on_policy={fraction: 0.5, max_new_tokens: 6, max_staleness: 1}",
]
CASES = {
    "plain": ["train.eval_every=2"],
    "on-policy": OWN,
    "cut": ["student={from_teacher: {layers: 2}}", "train.steps=2"],
    "hard labels": ["loss.terms=[{type: cross_entropy}]", "train.steps=2"],
    "itself": [
        "data.source=pairs.jsonl",
        "data.max_length=96",
        "teacher={type: student, top_k: 8, context: {template: 'Multiply {prompt}', place: after}}",
        "loss.terms=[{type: reverse_kl}]",
        "train.tokens_per_step=192",
        "train.steps=2",
    ],
    "prompts": [
        "data={source: prompts.jsonl, format: prompts, max_length: 96, cache: false, on_policy: {max_new_tokens: 6}}",
        "data.validation={source: pairs.jsonl}",
        "loss.terms=[{type: reverse_kl}]",
        "train.tokens_per_step=192",
        "train.steps=2",
    ],
}


def served(count=1, layout="auto"):
    return ["parallel.teacher=served", f"parallel.teacher_gpus={count}", f"parallel.teacher_layout={layout}"]


def recipe(*overrides):
    from distill.recipe import parse

    return parse(RECIPE, overrides)


def servers():
    """The processes of teacher servers that this process has started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if launch.is_running(child.pid) and "serve" in child.cmdline()]


def make_run(name, *overrides, resume=False):
    """One run of a launch of several processes, which keep their process group for the next one."""
    from accelerate.state import AcceleratorState, PartialState

    from distill.run import run

    run(recipe(*overrides), name=name, resume=resume)
    AcceleratorState._reset_state()
    PartialState._shared_state.clear()


def two():
    """Body of each of two training processes."""
    make_run("two-copies", *CASES["plain"])
    make_run("two-served", *CASES["plain"], *served())
    assert LaunchedServers.current is None and not servers()


def at_step(step, act):
    """Have this process do something within a step."""
    from distill.training.trainer import DistillationTrainer

    training_step, steps = DistillationTrainer.training_step, set()

    def watched(self, *args, **kwargs):
        if self.state.global_step == step and step not in steps:
            steps.add(step)
            act()
        return training_step(self, *args, **kwargs)

    DistillationTrainer.training_step = watched


def killed():
    """The server is killed while the third step is made, of whose micro-batches all targets have come."""
    at_step(2, lambda: os.kill(LaunchedServers.current.children[0].pid, signal.SIGKILL))
    as_command("killed", *CASES["plain"], *served())


def dies_evaluating():
    """The server is killed when the evaluation after the fourth step begins."""
    from distill.training.trainer import DistillationTrainer

    evaluate = DistillationTrainer.evaluate

    def watched(self, *args, **kwargs):
        if self.state.global_step == 4:
            os.kill(LaunchedServers.current.children[0].pid, signal.SIGKILL)
            time.sleep(0.2)
        return evaluate(self, *args, **kwargs)

    DistillationTrainer.evaluate = watched
    as_command("dies-evaluating", *CASES["plain"], *served())


def waits():
    """A run that has begun and stands still: says which processes serve it."""

    def stand():
        Path("children").write_text(" ".join(str(process.pid) for process in servers()))
        time.sleep(300)

    at_step(1, stand)
    as_command("waits", *CASES["plain"], *served(2, "sharded"))


def as_command(name, *overrides):
    from distill.cli import run_command

    Path("tiny.yaml").write_text(RECIPE)
    sys.exit(run_command(["run", "tiny.yaml", "--name", name, *overrides]))


# ------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from tiny import save_tiny, tiny_model, tiny_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("launched"), tiny_tokenizer(chat_template=None)
    teacher = tiny_model(tokenizer, layers=3, hidden=48, seed=1, kind="gemma2", final_logit_softcapping=5.0)
    save_tiny(folder / "teacher", teacher, tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (folder / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(80)))
    pairs = ({"prompt": f"Say {n}.", "completion": f"It is {n * n}."} for n in range(40))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"Tell {n}."}) for n in range(20)))
    return folder


@pytest.fixture
def place(models, monkeypatch):
    """The working directory; runs in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of servers
    monkeypatch.chdir(models)
    yield models
    torch.set_num_threads(threads)


@pytest.fixture
def forked_servers(library):
    """Servers are forked from a process with everything imported, where a run starts a Python for each."""

    def start(command, *, env, stdin, stdout, stderr, start_new_session):
        own = {name: value for name, value in env.items() if name != launch.OWNER}  # its parent is whoever forks
        with open(os.devnull, "w") as nowhere:
            streams = {"stdout": nowhere, "stderr": stderr}
            return Forked(command[1:], cwd=os.getcwd(), env=own, start_new_session=start_new_session, **streams)

    library.setattr(launched, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def run_here(name, *overrides, resume=False):
    """A run in this process."""
    from distill.run import run

    return run(recipe(*overrides), name=name, resume=resume).folder


@pytest.fixture
def alone(place):
    """Runs with the teacher in the process, by case; each is made once."""

    def of(case):
        name = f"alone-{case}".replace(" ", "-")
        return place / "runs" / name if (place / "runs" / name).exists() else place / run_here(name, *CASES[case])

    return of


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


OTHERS = [case for case in CASES if case not in ("plain", "itself", "prompts")]


@pytest.mark.full
@pytest.mark.parametrize("case", ["plain", *OTHERS])
def test_it_is_the_same_to_the_bit(alone, capsys, request, case):
    if case != "plain":
        request.getfixturevalue("forked_servers")
    expected = alone(case)
    capsys.readouterr()
    assert_same(run_here(f"served-{case}".replace(" ", "-"), *CASES[case], *served()), expected)
    said = " ".join(capsys.readouterr().out.split())
    assert "K parameters, served from 1 process, copied" in said
    assert re.search(r"served 19\d bytes per trained token", said)  # 48 numbers of 4 bytes, and what names them
    assert "are those of its own logits" in said
    assert LaunchedServers.current is None and not servers()


@pytest.mark.full
@pytest.mark.parametrize("case", ["itself", "prompts"])
def test_servers_leave_the_rest_of_the_recipe_to_the_run(alone, forked_servers, case):
    """The student's own outputs after another prompt, of which K tokens are trained on; prompts without answers."""
    assert_same(run_here(f"served-{case}", *CASES[case], *served()), alone(case))


@pytest.mark.full  # what shards answer is held by test_serve_sharded.py
def test_two_servers_teach_one(alone, capsys, forked_servers):
    folder = run_here("by-two", *CASES["plain"], *served(2, "copied"))
    assert_same(folder, alone("plain"))
    assert "served from 2 processes, copied" in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_two_processes_train_with_one_server(place):
    """The first process starts the server; results equal those with replicated teachers."""
    run_as_two(__file__, "two", place, cwd=place)
    assert_same(place / "runs" / "two-served", place / "runs" / "two-copies")


def program(what, place):
    """A process that carries out a function of this file."""
    return Forked([__file__, what, str(place)], cwd=place, env=clean_environment(), stdout=PIPE, stderr=PIPE)


@pytest.mark.full
def test_a_server_that_dies_ends_the_run_with_a_checkpoint(place, alone, forked_servers):
    with program("killed", place) as process:
        _, written = process.communicate(timeout=140)
    lines = [line for line in written.splitlines() if line.startswith("distill")]
    assert process.returncode == 1 and len(lines) == 1, written
    assert "parallel.teacher: the teacher server (process " in lines[0], lines
    assert ") has ended by SIGKILL; continue from step " in lines[0], lines
    step = int(lines[0].rpartition("from step ")[2].split()[0])
    assert step in (3, 4) and (place / "runs" / "killed" / f"checkpoint-{step}" / "manifest.json").is_file()
    assert_same(run_here("killed", *CASES["plain"], *served(), resume=True), alone("plain"))


@pytest.mark.full
def test_an_evaluation_that_a_dying_server_ended_is_made_on_resume(place, alone, forked_servers):
    with program("dies_evaluating", place) as process:
        _, written = process.communicate(timeout=140)
    assert process.returncode == 1 and "continue from step 4" in written, written
    assert_same(run_here("dies-evaluating", *CASES["plain"], *served(), resume=True), alone("plain"))


@pytest.mark.full
def test_a_run_that_is_killed_takes_its_server_along(place):
    """The server's launcher and both processes with a shard."""
    children = place / "children"
    with program("waits", place) as process:
        until = time.monotonic() + 200
        while not (children.exists() and children.read_text()) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        pids = list(map(int, children.read_text().split()))
        assert len(pids) == 3 and all(map(launch.is_running, pids))
        process.kill()
        until = time.monotonic() + 10
        while any(map(launch.is_running, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(launch.is_running, pids))


@pytest.mark.full
def test_model_that_a_server_cannot_load_is_the_users_line(place, forked_servers):
    """Weights that are no weights, which the process that trains never reads."""
    spoiled = place / "spoiled"
    shutil.copytree(place / "teacher", spoiled)
    (spoiled / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"^teacher\.model: .*spoiled") as told:
        run_here("spoiled", "teacher.model=spoiled", *served())
    assert "\n" not in str(told.value) and not (place / "runs" / "spoiled").exists()
    assert not servers()


def test_a_server_that_does_not_finish_loading_is_not_waited_for(place):
    """It is alive and has not ended with an error."""
    with pytest.raises(
        RunError, match=r"parallel\.teacher_timeout: .* has not loaded the teacher within 0\.2 s"
    ) as late:
        run_here("late", *CASES["hard labels"], *served(), "parallel.teacher_timeout=0.2")
    assert "\n" not in str(late.value) and not servers()


@pytest.mark.parametrize(
    "given, own",
    [(None, [["3"], ["2", "3"]]), ("4,5,GPU-6,7", [["7"], ["GPU-6", "7"]])],
)
def test_servers_have_the_last_gpus(monkeypatch, given, own):
    """Those that the processes which train, LOCAL_RANK 0 and on, do not have."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    cuda = torch.device("cuda", 0)
    for count, names in enumerate(own, 1):
        copies = launched._visible_to(count, cuda, sharded=False)
        assert [each["CUDA_VISIBLE_DEVICES"] for each in copies] == names
        shards = launched._visible_to(count, cuda, sharded=True)
        assert [each["CUDA_VISIBLE_DEVICES"] for each in shards] == [",".join(names)]
    with pytest.raises(
        ValueError, match=r"teacher_gpus: 4 for the teacher server and 1 for training are more than the 4 GPUs"
    ):
        launched._visible_to(4, cuda, sharded=False)


def test_processes_on_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"all 4 processes there, got 2; start distill serve yourself"):
        launched._visible_to(1, torch.device("cpu"), sharded=False)


def test_without_such_a_teacher_nothing_is_started():
    with launched_servers(recipe(), torch.device("cpu"), sharded=False):
        assert LaunchedServers.current is None


def test_a_process_ends_with_its_owner_on_any_system(place):
    """On systems that do not kill the process at once, as Linux does, it polls."""
    code = (
        "import sys, time; sys.platform = 'other'\nfrom distill.core import launch\n"
        "launch.end_with_owner()\nprint('begun', flush=True)\ntime.sleep(300)"
    )
    env = clean_environment(**{launch.OWNER: str(os.getpid() + 10**6)})  # who is gone already
    with Forked(["-c", code], cwd=place, env=env, stdout=PIPE, stderr=PIPE) as process:
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder = sys.argv[1:]
    os.chdir(folder)
    globals()[what]()
    exit_process(0)
