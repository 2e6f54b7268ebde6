"""kill -9 at random moments of a real run: it resumes, ends as the undisturbed run does, and its files stay valid.

Set DISTILL_KILLS for another number of kills; the slow test does 20.
"""

import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from forked import Forked, clean_environment
from safetensors.torch import load_file
from tiny import save_models

STEPS = 28
RECIPE = f"""
teacher: {{model: teacher}}
student: {{model: student}}
data: {{source: text.txt, max_length: 32, cache: false, validation: {{fraction: 0.1}}}}
train: {{steps: {STEPS}, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1,
        save_every: 1, device: cpu}}
generate: {{prompts: []}}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(80))
TIMING = ("seconds", "tokens_per_second", "trained_tokens_per_second", "peak_memory_gib", "tokens_seen", "mfu", "time_")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    save_models(folder, text=TEXT, teacher={"layers": 3, "seed": 1}, student={"seed": 2, "attention_dropout": 0.1})
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def start(workplace, *arguments, gpu="", program=("-m", "distill"), forked=False, **more):
    """`distill run` in a process of its own; `gpu` is the one it sees, by default none; `more` is for Popen."""
    environment = clean_environment(CUDA_VISIBLE_DEVICES=gpu)
    command = [*program, "run", "recipe.yaml", *arguments]
    with (workplace / "out.txt").open("a") as out:
        settings = {"cwd": workplace, "env": environment, "stdout": out, "stderr": subprocess.STDOUT} | more
        return Forked(command, **settings) if forked else subprocess.Popen([sys.executable, *command], **settings)


def finish(workplace, *arguments, **more):
    code = start(workplace, *arguments, **{"forked": not more.get("gpu")} | more).wait(timeout=300)
    assert code == 0, (workplace / "out.txt").read_text()[-4000:]


@pytest.fixture(scope="module")
def undisturbed(workplace):
    finish(workplace, "--name", "whole")
    return workplace / "runs" / "whole"


def rows(folder):
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(TIMING)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def kill_at_random_moments(workplace, name, kills, generator, **more):
    """Start, kill, resume, kill, ... and let it end; returns the steps of the checkpoints that were there."""
    folder, found, killed = workplace / "runs" / name, [], 0
    while killed < kills:
        resume = ["--resume"] if (folder / "recipe.yaml").exists() else []
        process = start(workplace, "--name", name, *resume, forked=killed > 0 and not more.get("gpu"), **more)
        before = time.monotonic()
        seen = {path.name for path in folder.glob("checkpoint-*")}
        # most kills fall into training: from the first new checkpoint on, at any moment of writing or computing
        early = generator.random() < 0.15
        while process.poll() is None:
            if {path.name for path in folder.glob("checkpoint-*")} - seen or (early and time.monotonic() - before > 4):
                break
            time.sleep(0.002)
        time.sleep(generator.random() * 0.4)
        ended = process.poll()
        if ended is not None:
            assert ended == 0, (workplace / "out.txt").read_text()[-4000:]
            return found, killed
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed += 1
        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            *whole, _ = metrics.read_text().split("\n")  # a row that was being written has no line end yet
            steps = [json.loads(line)["step"] for line in whole]
            assert steps == sorted(set(steps)), steps
        for path in folder.glob("checkpoint-*"):
            assert (path / "trainer_state.json").exists() and load_file(path / "model.safetensors")
        found.append(max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0))
    finish(workplace, "--name", name, *(["--resume"] if (folder / "recipe.yaml").exists() else []), **more)
    return found, killed


def check(workplace, undisturbed, name, kills, seed, steps=STEPS, **more):
    found, killed = kill_at_random_moments(workplace, name, kills, random.Random(seed), **more)
    print(f"{killed} kills, last complete checkpoint after each: {found}")
    folder = workplace / "runs" / name
    assert killed == kills, f"the run ended after {killed} kills, at {found}; give it more steps"
    assert found == sorted(found) and found[-1] > 0
    assert rows(folder) == rows(undisturbed)
    assert [row["step"] for row in rows(folder)] == list(range(1, steps + 1))
    ours, theirs = (load_file(path / "student" / "model.safetensors") for path in (folder, undisturbed))
    assert all(torch.equal(ours[weight], theirs[weight]) for weight in theirs)
    results = [json.loads((path / "result.json").read_text()) for path in (folder, undisturbed)]
    assert results[0]["after"] == results[1]["after"] and results[0]["before"] == results[1]["before"]
    assert not (folder / ".unfinished").exists()


@pytest.mark.full  # a plain run kills and resumes in test_online_cache.py
def test_run_killed_twice_ends_undisturbed(workplace, undisturbed):
    check(workplace, undisturbed, "two", int(os.environ.get("DISTILL_KILLS", "2")), seed=1)


@pytest.mark.slow
def test_run_killed_twenty_times_ends_undisturbed(workplace):
    (workplace / "recipe.yaml").write_text(RECIPE.replace(f"steps: {STEPS},", "steps: 40,"))
    try:
        finish(workplace, "--name", "forty")
        check(workplace, workplace / "runs" / "forty", "twenty", 20, seed=2, steps=40)
    finally:
        (workplace / "recipe.yaml").write_text(RECIPE)


@pytest.mark.full
def test_sigterm_of_a_run_is_a_checkpoint_and_code_0(workplace, undisturbed):
    """Of a process that was started; those of the other signals are forked."""
    name = "stopped"
    process, folder = start(workplace, "--name", name), workplace / "runs" / name
    while process.poll() is None and not list(folder.glob("checkpoint-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0
    assert "stopped by SIGTERM after step" in (workplace / "out.txt").read_text()
    assert not (folder / "student").exists()
    finish(workplace, "--name", name, "--resume")
    assert rows(folder) == rows(undisturbed)


@pytest.mark.full  # a plain run is stopped by SIGTERM
def test_a_lost_terminal_is_a_checkpoint_and_code_0(workplace, undisturbed):
    """The terminal's end is closed, as by a broken ssh: SIGHUP, and errors for whoever writes there."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, and so it is by a run")
    terminal, theirs = pty.openpty()
    name = "hung-up"
    process = start(
        workplace,
        "--name",
        name,
        "train.save_every=null",
        forked=True,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        terminal=True,
    )
    os.close(theirs)
    folder = workplace / "runs" / name
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 1):
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(timeout=300) == 0
    assert list(folder.glob("checkpoint-*")) and not (folder / "student").exists()
    finish(workplace, "--name", name, "--resume", "train.save_every=null")
    assert rows(folder) == rows(undisturbed)


@pytest.mark.full  # a plain run is stopped by SIGTERM
def test_ctrl_c_of_a_run_without_checkpoints_leaves_one_to_resume_from(workplace):
    name = "pressed"
    folder, steps = workplace / "runs" / name, 3 * STEPS
    never = ["train.save_every=null", f"train.steps={steps}"]
    metrics = folder / "metrics.jsonl"
    process = start(workplace, *never, "--name", name, forked=True)
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 1):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    said = (workplace / "out.txt").read_text()
    assert "press Ctrl-C again to stop at once" in said and "Traceback" not in said
    assert f"continue with: distill run recipe.yaml {' '.join(never)} --name {name} --resume" in said
    assert len(list(folder.glob("checkpoint-*"))) == 1 and not (folder / "student").exists()
    finish(workplace, *never, "--name", name, "--resume")
    assert [row["step"] for row in rows(folder)] == list(range(1, steps + 1))


@pytest.mark.full
def test_a_half_written_checkpoint_is_named_and_ignored(workplace, undisturbed):
    folder = workplace / "runs" / "whole"
    half = folder / "checkpoint-99"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"cut")
    finish(workplace, "--name", "whole", "--resume")
    said = (workplace / "out.txt").read_text()
    assert "checkpoint-99 cannot be used: trainer_state.json cannot be read" in said
    assert f"continuing from runs/whole/checkpoint-{STEPS}" in said
    (half / "model.safetensors").unlink()
    half.rmdir()
