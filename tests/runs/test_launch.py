"""Number of processes that a run starts, and processes of torchrun as one run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from forked import PIPE, Forked, clean_environment, stand_ins
from forked import run as run_forked

from distill import cli
from distill.core import launch, ranks
from distill.core.launch import processes_to_start, threads_per_process, torchrun_arguments
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.2}}
train: {steps: 3, batch_size: 2, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: []}
"""


@pytest.mark.parametrize(
    "environment, gpus, device, expected",
    [
        ({}, 4, "auto", 4),
        ({}, 4, "cuda", 4),
        ({}, 4, "cpu", 1),
        ({}, 1, "auto", 1),
        ({}, 0, "auto", 1),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 4, "auto", 1),  # torchrun, accelerate launch
        ({"WORLD_SIZE": "1"}, 4, "auto", 1),  # one process was asked for
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 8, "auto", 8),  # a node of a scheduler, no launcher yet
    ],
)
def test_number_of_processes_follows_gpus_and_recipe(environment, gpus, device, expected):
    assert processes_to_start(environment, gpus=gpus, device=device) == expected


def test_torchrun_runs_this_very_command():
    arguments = torchrun_arguments(4, ["run", "my recipe.yaml", "train.steps=3", "--resume"])
    assert arguments[-5:] == ["distill", "run", "my recipe.yaml", "train.steps=3", "--resume"]
    assert "--nproc-per-node=4" in arguments
    assert threads_per_process(4, 64) == 16 and threads_per_process(8, 2) == 1


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {i} once more." for i in range(80)),
    files={"tiny.yaml": RECIPE},
    teacher={"layers": 3, "seed": 1},
)


def test_the_command_starts_itself(workplace, monkeypatch, torchrun):
    monkeypatch.chdir(workplace)
    for name in ranks.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    started = torchrun(gpus=4)
    again = ["run", "tiny.yaml", "train.device=auto", "--name", "mine"]
    assert cli.run_command(again) == 0
    assert started == [(4, again)]
    # what four processes cannot do is refused before any starts
    assert cli.run_command(["run", "tiny.yaml", "train.device=auto", "train.tokens_per_step=128"]) == 2
    assert len(started) == 1


def test_json_is_all_that_standard_output_gets(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: print("{}"))
    assert launch.start(2, ["cache", "tiny.yaml", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {} and captured.err.startswith("processes   2, one a GPU")
    assert launch.start(2, ["run", "tiny.yaml"]) == 0
    assert capsys.readouterr().out.startswith("processes   2, one a GPU")


def program(workplace, code, *arguments, **more):
    return run_forked([*code, *arguments], cwd=workplace, env=clean_environment(**more), timeout=240)


START = ["-c", "import sys; from distill.core.launch import start; sys.exit(start(2, sys.argv[1:]))"]


@pytest.mark.full  # starts torchrun; forked processes stand for it in test_sharded_run.py and test_conformance.py
def test_two_processes_make_one_run(workplace):
    one = program(workplace, ["-m", "distill"], "run", "tiny.yaml", "--name", "one")
    two = program(workplace, START, "run", "tiny.yaml", "--name", "two")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert (
        two.stdout.count("processes   2, one a GPU, as by: torchrun --nproc-per-node 2 -m distill run tiny.yaml") == 1
    )
    assert two.stdout.count("step 3/3") == one.stdout.count("step 3/3") == 1  # one rank talks
    assert [path.name for path in (workplace / "runs").iterdir() if path.name.startswith("two")] == ["two"]
    results = [json.loads((workplace / "runs" / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[1]["after"] == pytest.approx(results[0]["after"], rel=1e-5)
    assert results[1]["before"] == pytest.approx(results[0]["before"], rel=1e-5)


@pytest.mark.full
def test_a_users_mistake_keeps_its_exit_code_and_shows_no_traceback(workplace):
    done = program(workplace, START, "run", "tiny.yaml", "data.source=absent.txt", **stand_ins(workplace))
    assert done.returncode == 2
    assert "absent.txt" in done.stderr and "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr


WORKER = """
import os, signal, sys, time

heard, rank = [], os.environ["RANK"]
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, lambda number, frame: heard.append(signal.Signals(number).name))
open(f"ready-{rank}", "w").close()
wanted = int(sys.argv[1])
while len(heard) < wanted:
    time.sleep(0.02)
time.sleep(0.3)  # the checkpoint
open(f"heard-{rank}", "w").write(" ".join(heard))
sys.exit(130 if "SIGINT" in heard else 0)
"""
STARTS_WORKERS = """
import sys
from distill.core import launch

launch.torchrun_arguments = lambda processes, arguments: [
    "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "worker.py", *arguments
]
sys.exit(launch.start(2, sys.argv[1:]))
"""


def launcher(folder, *arguments):
    """Return a launcher of two `WORKER` processes in a session of its own."""
    environment, command = clean_environment(), ["-c", STARTS_WORKERS, *arguments]
    return Forked(command, cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, start_new_session=True)


def started(folder, code):
    """A program in a Python that was started, and ends as one does."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=240)


@pytest.mark.plain("['SIGTERM']-0")
@pytest.mark.parametrize("signals, code", [(["SIGTERM"], 0), (["SIGINT"], 130), (["SIGINT", "SIGINT"], 130)])
def test_processes_hear_each_signal_once_and_end_as_one_would(tmp_path, signals, code):
    """A second Ctrl-C, which is to stop at once, is one to the processes too, and SIGTERM is no failure."""
    (tmp_path / "worker.py").write_text(WORKER)
    with launcher(tmp_path, str(len(signals))) as started:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
            assert started.poll() is None, started.communicate()
            time.sleep(0.05)
        for name in signals:
            os.killpg(started.pid, getattr(signal, name))  # as a terminal does; the processes have groups of their own
            time.sleep(0.2)
        said = started.communicate(timeout=120)[1]
    for rank in (0, 1):
        heard = (tmp_path / f"heard-{rank}").read_text().split()
        # torchrun ends by SIGTERM whoever is left when the other one has gone
        assert heard[: len(signals)] == signals and heard[len(signals) :] in ([], ["SIGTERM"]), said
    assert started.returncode == code and "death signal" not in said


@pytest.mark.full
def test_a_third_ctrl_c_ends_processes_that_hear_nothing(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    with launcher(tmp_path, "9") as started:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
            assert started.poll() is None, started.communicate()
            time.sleep(0.05)
        for _ in range(3):
            os.killpg(started.pid, signal.SIGINT)
            time.sleep(0.2)
        said = started.communicate(timeout=120)[1]
    assert started.returncode == 128 + signal.SIGKILL and "was ended by SIGKILL" in said


def test_one_of_several_leaves_with_its_code_and_all_it_had_to_do(tmp_path):
    """Exit handlers run, threads end and output arrives; the interpreter's own shutdown is not reached."""
    code = """
import atexit, sys, threading, time
from distill.core.ranks import exit_process

def late():
    time.sleep(0.5)
    print("thread done")

class Kept:
    def __del__(self):
        print("the interpreter's end")

kept = Kept()
atexit.register(print, "at exit")
threading.Thread(target=late).start()
exit_process(7)
"""
    done = started(tmp_path, code)
    assert (done.returncode, done.stdout.splitlines()) == (7, ["thread done", "at exit"]), done.stderr


def test_one_of_several_leaves_though_executors_wait_for_work(tmp_path):
    """torch.compile leaves such threads behind; all that they were given is done first."""
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
from distill.core.ranks import exit_process

pool = ThreadPoolExecutor()
pool.submit(len, "").result()
pool.submit(lambda: (time.sleep(0.3), print("done late", flush=True)))
exit_process(0)
"""
    done = started(tmp_path, code)
    assert done.returncode == 0 and "done late" in done.stdout, done.stderr


@pytest.mark.full
def test_the_recipe_decides_over_accelerates_configuration(workplace, monkeypatch, caplog):
    """`accelerate launch` hands its own precision over, and a Trainer without one would take it."""
    monkeypatch.chdir(workplace)
    recipe = parse(RECIPE, ["train.steps=1", "train.precision=float32"])
    plain = run(recipe)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    told = run(recipe, name="told")
    assert (
        read_metrics(told.folder / "metrics.jsonl")[0]["loss"]
        == read_metrics(plain.folder / "metrics.jsonl")[0]["loss"]
    )
    assert [record.getMessage() for record in caplog.records if "ACCELERATE" in record.getMessage()] == [
        "ACCELERATE_MIXED_PRECISION=bf16 of accelerate's configuration is ignored: the recipe's train.precision applies"
    ]
