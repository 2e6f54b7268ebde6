"""One run, one writer: two at once, processes whose launcher is killed, a rank that hangs, a folder that is deleted."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import psutil
import pytest
from forked import free_port
from test_resume import RECIPE, WHOLE
from torch.distributed import HashStore

from distill import run as run_module
from distill.cli import run_command
from distill.core import heartbeat, ranks, run_lock
from distill.core.errors import RunError
from distill.core.run_lock import RunLock
from distill.training.progress import read_metrics

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.place(**WHOLE)


# ------------------------------------------------------------------ the lock


@pytest.mark.full
def test_a_second_resume_is_refused_and_names_the_process_with_the_lock(workplace, capsys):
    folder = workplace / "runs/whole"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with RunLock(folder) as held:
        held.acquire()
        assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 1
        err = capsys.readouterr().err
        assert f"runs/whole: another process writes there (process {os.getpid()} on " in err and err.count("\n") == 1
        assert {path: path.read_bytes() for path in before} == before
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0


HOLDS = """
import sys, time
from pathlib import Path
from distill.core.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
(lock.acquire if sys.argv[2] == "take" else lock.share)()
print("held", flush=True)
time.sleep(600)
"""


def holder(folder, how="take"):
    """A process that holds the lock of a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-c", HOLDS, str(folder), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_ends_with_the_last_of_its_processes(tmp_path):
    first = holder(tmp_path / "x")
    with pytest.raises(RunError, match=rf"\(process {first.pid} on "):
        RunLock(tmp_path / "x").acquire()
    first.kill()
    first.wait()
    with RunLock(tmp_path / "x") as ours:
        ours.acquire()
        ours.share()
        second = holder(tmp_path / "x", "share")
    with pytest.raises(RunError, match="another process writes there"):
        RunLock(tmp_path / "x").acquire()
    second.kill()
    second.wait()
    with RunLock(tmp_path / "x") as ours:
        ours.acquire()


def test_a_data_worker_does_not_hold_it(tmp_path):
    with RunLock(tmp_path / "x") as held:
        held.acquire()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with RunLock(tmp_path / "x") as again:
            again.acquire()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "host, process, refused",
    [("this", "ours", True), ("this", "ended", False), ("another", "ended", True)],
    ids=["a process of this machine", "one that has ended", "one of another machine"],
)
def test_the_file_tells_of_its_holder_on_a_disk_without_locks(tmp_path, hardware, host, process, refused):
    hardware.setattr(run_lock, "try_lock", lambda handle, shared=False: None)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with RunLock(tmp_path / "x") as held:
        held.acquire()
        held.share()
    assert json.loads((tmp_path / "x/.lock").read_text()) == {}, "it ended in order"
    holder = {"host": socket.gethostname() if host == "this" else host, "since": 0}
    holder["pid"] = os.getpid() if process == "ours" else ended.pid
    (tmp_path / "x/.lock").write_text(json.dumps(holder))
    if not refused:
        with RunLock(tmp_path / "x") as after:
            after.acquire()
        return
    with pytest.raises(RunError, match=rf"process {holder['pid']} on .*delete {tmp_path / 'x/.lock'}"):
        RunLock(tmp_path / "x").acquire()


def test_a_run_that_was_killed_on_another_machine_does_not_hold_it(tmp_path):
    (tmp_path / ".lock").write_text(json.dumps({"host": "another", "pid": 7, "since": 0}))
    with RunLock(tmp_path) as ours:
        ours.acquire()


def test_a_start_that_was_killed_before_its_recipe_can_be_started_again(workplace, monkeypatch):
    """Neither --resume (no recipe.yaml) nor --name (lock.yaml was there) took such a folder."""

    class Killed(BaseException):
        pass

    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as fault:
        fault.setattr(run_module, "write_text", killed)
        with pytest.raises(Killed):
            run_command(["run", "r.yaml", "--name", "early"])
    assert [path.name for path in (workplace / "runs/early").iterdir()] == [".lock"]
    with monkeypatch.context() as fault:
        fault.setattr(run_module, "to_yaml", killed)
        with pytest.raises(Killed):
            run_command(["run", "r.yaml", "--name", "early"])
    assert run_command(["run", "r.yaml", "--name", "early", "--resume"]) == 0


@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_that_is_deleted_under_a_run_ends_it_in_a_line(workplace, at_step, capsys, moved):
    def delete(arguments):
        shutil.move("runs/gone", "elsewhere") if moved else shutil.rmtree("runs/gone")

    at_step(2, delete)
    assert run_command(["run", "r.yaml", "--name", "gone"]) == 1
    err = capsys.readouterr().err
    assert "runs/gone: the folder was deleted or moved" in err and err.count("\n") == 1


def test_resume_if_any_starts_and_resumes(workplace, capsys):
    assert run_command(["run", "r.yaml", "--resume-if-any"]) == 2
    assert "--resume-if-any: expected --name" in capsys.readouterr().err
    for expected in ("step 4/4", "continuing from runs/new/checkpoint-4"):
        assert run_command(["run", "r.yaml", "--name", "new", "--resume-if-any"]) == 0
        assert expected in capsys.readouterr().out


# ------------------------------------------------------------------ several processes


LONG = RECIPE.replace("steps: 4,", "steps: 300,").replace("save_every: 2", "save_every: null")
START = "import sys; from distill.core.launch import start; sys.exit(start(2, sys.argv[1:]))"
HANGS = """
import sys
from distill.core import heartbeat
heartbeat.SILENT_S = 5.0
from distill.__main__ import main
main()
"""


def two(workplace, name, code=("-c", START), **more):
    """A run of two processes; `code` starts them."""
    (workplace / "long.yaml").write_text(LONG)
    environment = {key: value for key, value in os.environ.items() if key not in ranks.LAUNCHED}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    with (workplace / f"{name}.txt").open("w") as out:
        command = [sys.executable, *code, "run", "long.yaml", "--name", name]
        return subprocess.Popen(command, cwd=workplace, env=environment, stdout=out, stderr=subprocess.STDOUT, **more)


def trains(workplace, name, process, steps=3):
    """Wait until some steps are made; returns the processes that make them."""
    metrics, until = workplace / "runs" / name / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None and time.monotonic() < until, (workplace / f"{name}.txt").read_text()
        time.sleep(0.05)
    return [each for each in psutil.Process(process.pid).children(recursive=True) if "run" in each.cmdline()]


@pytest.mark.full
def test_processes_whose_launcher_is_killed_end_with_a_checkpoint(workplace):
    process = two(workplace, "orphans")
    workers = trains(workplace, "orphans", process)
    assert len(workers) == 2
    process.kill()
    process.wait()
    with pytest.raises(RunError, match="another process writes there"):
        RunLock(workplace / "runs/orphans").acquire()
    assert not psutil.wait_procs(workers, timeout=300)[1]
    said = (workplace / "orphans.txt").read_text()
    assert "is gone, so this run ends too" in said and "stopped by SIGTERM" in said, said
    (last,) = (workplace / "runs/orphans").glob("checkpoint-*")
    assert run_command(["verify", "orphans"]) == 0
    rows = [row["step"] for row in read_metrics(workplace / "runs/orphans/metrics.jsonl")]
    assert rows == list(range(1, int(last.name.split("-")[1]) + 1))
    with RunLock(workplace / "runs/orphans") as ours:
        ours.acquire()


@pytest.mark.full
def test_a_rank_that_is_stopped_is_named_and_ends_the_run(workplace):
    (workplace / "hangs.py").write_text(HANGS)
    code = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    process = two(workplace, "hung", [*code, "hangs.py"])
    workers = trains(workplace, "hung", process)
    hung = next(each for each in workers if each.environ().get("RANK") == "1")
    hung.suspend()
    printed = workplace / "hung.txt"
    until = time.monotonic() + 300
    while "has sent no heartbeat" not in printed.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    hung.kill()  # as torchrun does, 30 s after its SIGTERM, which such a process does not hear
    assert process.wait(timeout=300) != 0
    said = printed.read_text()
    assert f"distill: rank 1 has ended: process {hung.pid} on " in said and "has sent no heartbeat" in said, said
    assert "there is no checkpoint" in said
    assert not psutil.wait_procs(workers, timeout=300)[1]


@pytest.mark.parametrize(
    "counts, begun, named",
    [
        ([0, 0], [2, 2], "has sent no heartbeat"),
        ([0, 1], [1, 1], "hangs"),
        ([0, 1], [1, 2], None),
        ([0, 1], [2, 2], None),
    ],
    ids=["silent", "behind", "begins the batch", "all wait alike"],
)
def test_a_rank_is_named_by_its_counts(counts, begun, named, monkeypatch, limit):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    limit.setattr(heartbeat, "SILENT_S", 0.0)
    limit.setattr(heartbeat, "STALLED_S", 0.0)
    store = HashStore()
    ours = heartbeat.Heartbeat()
    ours.begun = 2
    for count, batches in zip(counts, begun, strict=True):
        store.set("beat/1", f"{count} {batches} 7 there")
        time.sleep(0.01)
        end = ours._end_of_another(store)
    assert (end is not None) is (named is not None)
    assert named is None or (end["rank"] == 1 and f"process 7 on there {named}" in end["text"])
    assert store.check(["failed"]) is (named is not None), "the others are told"


# ------------------------------------------------------------------ torchrun starts the processes again


AGAIN = """
import os, signal, time
import torch.distributed as dist
from distill.core.ranks import restart_store
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
    time.sleep(2)  # the other one looks for its address meanwhile
dist.init_process_group("gloo", **restart_store())
said = [None, None]
dist.all_gather_object(said, (os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() else signal.pause()
with open("said-by-" + os.environ["RANK"], "w") as file:
    file.write(repr(said))
dist.barrier()
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize("rendezvous", [[], ["--standalone"]])
def test_processes_that_torchrun_starts_again_find_each_other(tmp_path, rendezvous):
    """They waited for the addresses of the attempt before, which torchrun's store still held."""
    (tmp_path / "again.py").write_text(AGAIN)
    port = [] if rendezvous else [f"--master-port={free_port()}"]
    command = ["-m", "torch.distributed.run", *rendezvous, *port, "--nproc-per-node=2", "--max-restarts=1", "again.py"]
    done = forked.run(command, cwd=tmp_path, env=forked.clean_environment(**forked.stand_ins(tmp_path)))
    assert done.returncode == 0, done.stderr[-2000:]
    # A file a rank: two processes that print into one pipe share its lines.
    assert [(tmp_path / f"said-by-{rank}").read_text() for rank in (0, 1)] == ["[('1', 0), ('1', 1)]"] * 2
