"""Kills, faults and flipped bits, over and over: does a run end with the bits of an undisturbed one?

    python tests/runs/interrupt_runs.py --minutes 10 [--processes 2] [--seed 0]
    python tests/runs/interrupt_runs.py --steps 5000 --disturbances 24 --minutes 0.1 --processes 2     # one long round

Each round starts a tiny run and disturbs it at random moments until it ends: kill -9 of one process or of all, SIGTERM,
a rank stopped (SIGSTOP) and continued, a full disk (a limit on the size of files), a bit flipped in the newest
checkpoint, a file of it deleted, two resumes at once. Printed are how often each was done and survived: a round
survives where the run ends with the student and the figures of the undisturbed run, and is lost where it ends with
others or can be neither resumed nor started again. The exit code is 1 where any is lost.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
teacher: {init: random, config: tiny.json}
student: {init: random, config: tiny.json}
data: {source: synthetic, max_length: 32, max_rows: 64, cache: false, validation: {fraction: 0.1}}
train: {steps: STEPS, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: SAVE, device: cpu}
generate: {prompts: []}
"""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "tie_word_embeddings": False,
}
DISTURBANCES = ("kill one", "kill all", "SIGTERM", "stop", "full disk", "flipped bit", "deleted file", "two at once")


class Runs:
    """Tiny runs in a folder of their own."""

    def __init__(self, folder: Path, processes: int, steps: int) -> None:
        self.folder, self.processes = folder, processes
        (folder / "tiny.json").write_text(json.dumps(MODEL))
        (folder / "r.yaml").write_text(RECIPE.replace("STEPS", str(steps)).replace("SAVE", str(max(5, steps // 200))))

    def start(self, name: str, *, full: bool = False) -> subprocess.Popen[bytes]:
        """`distill run --resume-if-any`, in a group of its own."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        launch = f"import sys; from distill.core.launch import start; sys.exit(start({self.processes}, sys.argv[1:]))"
        program = ["-m", "distill"] if self.processes == 1 else ["-c", launch]
        command = [sys.executable, *program, "run", "r.yaml", "--name", name, "--resume-if-any"]
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))) if full else None
        log = self.folder / f"{name}.txt"
        if full:
            log.write_bytes(b"")  # what it prints has room; what it saves has none
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=limit,
            )

    def outcome(self, name: str) -> tuple[bytes, object]:
        """Return the result of a run: its student's weights and its metrics."""
        run = self.folder / "runs" / name
        return (
            (run / "student/model.safetensors").read_bytes(),
            json.loads((run / "result.json").read_text())["after"],
        )


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None where it has not ended in time."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def end_orphans(members: list[psutil.Process]) -> None:
    """Wait until processes whose launcher was killed have ended by themselves."""
    for process in psutil.wait_procs(members, timeout=90)[1]:
        process.kill()
        raise RuntimeError(f"process {process.pid} outlives its launcher")


def pause(process: subprocess.Popen[bytes], run: Path, steps: int) -> None:
    """Wait until the run has a checkpoint of `steps` steps more, or has ended."""
    goal = steps_saved(run) + steps
    while process.poll() is None and steps_saved(run) < goal:
        time.sleep(0.2)


def steps_saved(run: Path) -> int:
    """Return the steps of the newest complete checkpoint; 0 without one."""
    return max((int(path.name[11:]) for path in run.glob("checkpoint-*") if path.name[11:].isdigit()), default=0)


def disturb(how: str, runs: Runs, name: str, draw: random.Random, steps: int) -> None:
    """Start the run, or go on with it, and disturb it once: after some seconds, or at most `steps` steps if not 0."""
    run = runs.folder / "runs" / name
    newest = [run / f"checkpoint-{steps_saved(run)}"] if steps_saved(run) else []
    if how in ("flipped bit", "deleted file") and newest:
        victim = draw.choice(sorted(path for path in newest[0].iterdir() if path.stat().st_size))
        if how == "deleted file":
            victim.unlink()
        else:
            content = bytearray(victim.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            victim.write_bytes(content)
    process = runs.start(name, full=how == "full disk")
    if how == "full disk":
        wait(process, 300)
        return
    second = runs.start(name) if how == "two at once" else None
    if steps:
        pause(process, run, draw.randint(1, steps))
    else:
        wait(process, 4 + 10 * draw.random())
    members = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if how == "kill one" and process.poll() is None:
        draw.choice([psutil.Process(process.pid), *members]).kill()
    elif how == "kill all" and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        for each in members:
            each.kill()
    elif how == "SIGTERM" and process.poll() is None:
        process.terminate()
    elif how == "stop" and members:
        victim = draw.choice(members)
        victim.suspend()
        time.sleep(3)
        victim.resume()
        wait(process, 2)
        process.terminate()
    if second is not None:  # whichever of them was not refused
        process.terminate()
        second.terminate()
        wait(second, 300)
    if steps and how in ("flipped bit", "deleted file"):  # in a long round the next one comes before the end
        process.terminate()
    wait(process, 300)
    end_orphans(members)


def kinds(number: int | None, draw: random.Random) -> list[str]:
    """The disturbances of a round: 1 to 5 by chance, or as many as asked for, each kind about equally often."""
    if number is None:
        return [draw.choice(DISTURBANCES) for _ in range(draw.randint(1, 5))]
    chosen = [DISTURBANCES[index % len(DISTURBANCES)] for index in range(number)]
    draw.shuffle(chosen)
    return chosen


def main() -> int:
    """Torture until the time is over; print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    meaning = "of each round, over all of its steps; without it 1 to 5 by chance, seconds after a start"
    parser.add_argument("--disturbances", type=int, help=meaning)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    counts: collections.Counter[str] = collections.Counter()
    survived, lost = 0, []
    apart = 2 * arguments.steps // (arguments.disturbances + 1) if arguments.disturbances else 0
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        place = Path(folder)
        runs = Runs(place, arguments.processes, arguments.steps)
        if runs.start("whole").wait() != 0:
            print((place / "whole.txt").read_text())
            return 1
        expected, number, until = runs.outcome("whole"), 0, time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < until:
            number += 1
            name, done = f"round-{number}", []
            try:
                for how in kinds(arguments.disturbances, draw):
                    done.append(how)
                    disturb(how, runs, name, draw, apart)
                    saved = steps_saved(place / "runs" / name)
                    print(f"{time.strftime('%H:%M:%S')} {name}: {how}, {saved} steps", flush=True)
                code = wait(runs.start(name), 300 + arguments.steps / 5)
                same = code == 0 and runs.outcome(name) == expected
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                code, same = f"{type(error).__name__}: {error}", False
            counts.update(done)
            survived += same
            if not same:
                lost.append(f"{name} ({', '.join(done)}), exit code {code}:")
                lost.append("    " + "\n    ".join((place / f"{name}.txt").read_text().splitlines()[-8:]))
            print(f"{name}: {', '.join(done)}: {'survived' if same else 'LOST'}", flush=True)
            shutil.rmtree(place / "runs" / name, ignore_errors=True)
    for how in DISTURBANCES:
        print(f"{how:<14}{counts[how]}")
    print(f"{number} rounds: {survived} survived, {number - survived} lost")
    print("\n".join(lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
