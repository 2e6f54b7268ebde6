"""macOS and Windows: no Triton there, and on Windows no fcntl, no signals but a few, no positional reads.

A process in which Triton cannot be imported, and in which our own modules see `os` and `signal` as Windows has them,
runs what a person would run. Libraries of others see what is there: they have their own ways on Windows.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny import save_models

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = """
import builtins, os, signal, sys, types

ABSENT = {"triton", "fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"}
LACKS = {
    "os": {"fork", "forkpty", "register_at_fork", "sysconf", "getuid", "geteuid", "getgid", "killpg", "setsid",
           "getpgid", "setpgid", "uname", "pread", "pwrite", "statvfs", "sched_getaffinity", "mkfifo", "openpty",
           "O_DIRECTORY", "O_NONBLOCK", "O_NOFOLLOW", "fchmod", "chown", "wait", "WNOHANG", "nice", "getloadavg"},
    "signal": {"SIGHUP", "SIGKILL", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT", "setitimer",
               "ITIMER_REAL", "pthread_kill", "pause", "sigwait", "alarm"},
}
real = builtins.__import__

class View(types.ModuleType):
    def __getattr__(self, name):
        if name in LACKS[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this system")
        return getattr(sys.modules[self.__name__], name)

VIEWS = {name: View(name) for name in LACKS}

def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if name.partition(".")[0] == "triton":
        raise ImportError("No module named 'triton'", name="triton")
    ours = (globals or {}).get("__name__", "").partition(".")[0] in ("distill", "distill_kernels")
    if ours and name in ABSENT:
        raise ImportError(f"No module named {name!r}", name=name)
    return VIEWS[name] if ours and name in VIEWS and level == 0 else real(name, globals, locals, fromlist, level)

builtins.__import__ = importing
sys.modules["triton"] = None
"""
EVERYTHING = """
import importlib, pkgutil
count = 0
for package in ("distill_kernels", "distill"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        # launch plans are of Triton's launches, and imported at the first of them
        if not module.name.endswith(("__main__", ".launch_plans")):
            importlib.import_module(module.name)
            count += 1
from distill.core import files
from distill_kernels import launch
assert files.fcntl is None and not launch.HAS_TRITON
print(count)
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """The environment of such a process."""
    folder = tmp_path_factory.mktemp("system")
    (folder / "sitecustomize.py").write_text(SYSTEM)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "RANK")}
    paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "kernels")))
    return environment | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save_models(folder, teacher={"layers": 4})
    return folder


TINY = [
    "teacher.model=teacher",
    "teacher.config=null",
    "student.config=null",
    "student.from_teacher.layers=2",
    "train.steps=2",
    "train.save_every=1",
    "data.max_length=64",
    "data.max_rows=60",
    "generate.prompts=[One]",
]


COMMANDS = """
import contextlib, json, os, shutil, sys
from distill.cli import run_command
for words in json.loads(sys.argv[1]):
    if words[0] == "forget":
        shutil.rmtree(words[1] + "/checkpoint-2")
        os.remove(words[1] + "/result.json")
    elif words[0] == "doctor":
        with open("doctor.json", "w") as file, contextlib.redirect_stdout(file):
            code = run_command(words)
        print(words[0], code, flush=True)
    else:
        print(words[0], run_command(words), flush=True)
"""


@pytest.fixture(scope="module")
def said(system, workplace):
    """What one process said that ran the shipped recipe with other models and two steps, the doctor, and then imported
    every module: starting Python takes most of its time."""
    named = ["run", "quickstart", *TINY, "--name", "first"]
    commands = [["validate", "quickstart", *TINY], ["check", "quickstart", *TINY], named]
    commands += [["forget", str(workplace / "runs" / "first")]]  # as if it had ended before the second step
    commands += [[*named, "--resume"], ["generate", "first", "-p", "Two", "--max-new-tokens", "3"]]
    commands += [["doctor", "--machine", "--json"]]
    program = [sys.executable, "-c", COMMANDS + EVERYTHING, json.dumps(commands)]
    made = subprocess.run(program, env=system, cwd=workplace, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-1500:] + made.stderr[-3000:]
    return made.stdout


@pytest.mark.full
def test_every_module_is_imported(said):
    files = [path for name in ("distill", "kernels/distill_kernels") for path in (ROOT / name).rglob("*.py")]
    assert int(said.splitlines()[-1]) > 0.85 * len(files)


@pytest.mark.full
def test_the_quickstart_of_a_tiny_model_runs_resumes_and_answers(said, workplace):
    """Through locks, checkpoints and the student's folder."""
    run = workplace / "runs" / "first"
    ended = [line for line in said.splitlines() if re.fullmatch(r"(validate|check|run|generate) \d+", line)]
    assert ended == ["validate 0", "check 0", "run 0", "run 0", "generate 0"], said
    assert (run / "student" / "model.safetensors").is_file() and (run / "checkpoint-2").is_dir()
    assert json.loads((run / "result.json").read_text())["steps"] == 2
    assert "steps: 2" in said and "PyTorch reference implementations" in said and "reduction" in said
    assert f"continuing from {run.relative_to(workplace) / 'checkpoint-1'}" in said


@pytest.mark.full
def test_the_doctor_names_the_kernels_and_checks_them(said, workplace):
    assert "doctor 0" in said.splitlines()
    found = json.loads((workplace / "doctor.json").read_text())
    lines = {line["name"]: line for line in found["environment"]}
    assert lines["path"]["detail"].endswith("on the CPU; Triton is not installed") and lines["triton"]["fine"]
    assert all(finding["passed"] for finding in found["kernels"]) and len(found["kernels"]) > 25
    assert all("Triton" not in finding["detail"] for finding in found["kernels"])


@pytest.mark.parametrize("system, triton", [("Linux", True), ("Darwin", False), ("Windows", False)])
@pytest.mark.parametrize("project", ["pyproject.toml", "kernels/pyproject.toml"])
def test_triton_is_required_on_linux_alone(project, system, triton):
    asked = tomllib.loads((ROOT / project).read_text())["project"]["dependencies"]
    there = {"platform_system": system}
    names = {each.name for each in map(Requirement, asked) if not each.marker or each.marker.evaluate(there)}
    assert "torch" in names and ("triton" in names) is triton
