"""Runs of pytest that import this project anew, each in a fork of one process that imported torch and the rest once.

    with Pytests(clean_environment()) as pytests:
        done = pytests.run("tests/ops/test_ops.py", "-q")      # its exit code and output

A run takes the seconds of its tests, where a process of its own takes as many again for imports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

# nothing that imports this project, which a run may find elsewhere (`-o pythonpath=`)
PRELOADED = (
    "hypothesis",
    "pytest",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "triton",
)


class Pytests:
    """The process from which runs are forked, started at the first of them."""

    def __init__(self, environment: dict[str, str], cwd: Path) -> None:
        self.settings = {"env": environment, "cwd": cwd}
        self.process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest with these arguments."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, __file__], text=True, **pipes, **self.settings)
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        code, output = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, output, "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.communicate()


def serve() -> None:
    """Answer each line of arguments on standard input by a line with the exit code and the output."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.split(".")[0] in ("distill", "distill_kernels") for name in sys.modules)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _become(json.loads(line), output.fileno())
            status = os.waitpid(child, 0)[1]
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read()]), flush=True)


def _become(arguments: list[str], output: int) -> None:
    import pytest

    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 70  # as of a program's fault, beyond those of pytest
    try:
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
