"""Processes of Python that begin with torch, transformers and distill imported: forked from a server that imports once.

    process = Forked(["-m", "distill", "run", "r.yaml"], cwd=folder, env=environment, stdout=PIPE, stderr=PIPE)
    out, error = process.communicate(timeout=300)

A forked process has a process id, environment, working directory, streams, session, signals and an exit code of its
own, as one that was started; runs draw no curves there, which is half of their time. It is not what a test needs of a
process that must not have imported something, or of an environment that is read at import (threads, HF_*,
TRITON_INTERPRET): those start one with `subprocess`.

For commands in a shell, `stand_ins` writes the programs `distill`, `python` and `torchrun`, which are forked as well;
so are the processes that torchrun starts.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from pathlib import Path

PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT
TESTS = Path(__file__).resolve().parent
TEST_FOLDERS = (TESTS, *sorted(folder for folder in TESTS.iterdir() if folder.is_dir()))
PLACES = [str(place) for place in (TESTS.parent, TESTS.parent / "kernels", *TEST_FOLDERS)]
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "distill.cli",
    "distill.run",
    "distill.commands.cache_epoch",
    "pytest",
    "triton",
)


def free_port() -> int:
    """A port of this machine that nobody listens at, for a process that is told where to listen.

    Not one that the system would give to who asks for any: it may give the same to another test's server before that
    process listens.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without a launcher, for one thread, without GPU and interpreted kernels, and with `more`."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET")
    given = {name: value for name, value in os.environ.items() if name not in launched}
    path = os.pathsep.join([*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])])
    return given | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | more


SERVER = "FORKED_SERVER"  # environment variable of a stand-in: the abstract address of the server


class Server:
    """The one server of all workers of a test session, started at the first use by whichever; ends with the last.

    A stand-in uses that of its test.
    """

    process: subprocess.Popen | None = None  # of the worker that started it

    def __init__(self) -> None:
        self.name = os.environ.get(SERVER) or f"forked-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind("\0" + self.name)
            except OSError:  # it is there
                self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self.socket.connect("\0" + self.name)
                return
            listener.listen()
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given = [theirs.fileno(), listener.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, __file__, *map(str, given)],
                env=clean_environment(),
                pass_fds=given,
                start_new_session=True,
            )
            theirs.close()


_servers: list[Server] = []


def close() -> None:
    """Let the server end, where there is one; its processor time and that of all it forked counts as that of the
    process that started it."""
    while _servers:
        server = _servers.pop()
        server.socket.close()
        if server.process is not None:
            server.process.wait()


class Forked:
    """Forked process with the interface of `subprocess.Popen([sys.executable, *arguments], text=True, ...)`.

    Args:
        arguments: `["-m", module, ...]`, `["-c", code, ...]` or `[file, ...]`.
        terminal: standard input becomes the controlling terminal of the new session.
    """

    def __init__(
        self, arguments, *, cwd, env, stdin=None, stdout=None, stderr=None, start_new_session=False, terminal=False
    ) -> None:
        if not _servers:
            _servers.append(Server())
        self.args, self.returncode, self.stdout, self.stderr = list(map(str, arguments)), None, None, None
        status, theirs = os.pipe()
        given = [theirs]
        nowhere = os.open(os.devnull, os.O_RDONLY)
        streams = [
            nowhere if stdin is None else stdin,
            1 if stdout is None else stdout,
            2 if stderr is None else stderr,
        ]
        for number, name in ((1, "stdout"), (2, "stderr")):
            if streams[number] == PIPE:
                reading, streams[number] = os.pipe()
                given.append(streams[number])
                setattr(self, name, os.fdopen(reading, encoding="utf-8", errors="replace"))
        streams[2] = streams[1] if streams[2] == STDOUT else streams[2]
        numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        request = (self.args, str(cwd), dict(env), start_new_session, terminal)
        socket.send_fds(_servers[0].socket, [pickle.dumps(request)], [theirs, *numbers])
        for each in (*given, nowhere):
            os.close(each)
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def wait(self, timeout=None):
        """The exit code, once there is one."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def communicate(self, timeout=None):
        """Return the process's output once it has ended."""
        read, texts = {name: getattr(self, name) for name in ("stdout", "stderr")}, {}
        threads = [
            threading.Thread(target=lambda name=name, file=file: texts.update({name: file.read()}), daemon=True)
            for name, file in read.items()
            if file is not None
        ]
        for each in threads:
            each.start()
        self.wait(timeout)
        for each in threads:
            each.join(timeout)
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number):
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()


def run(arguments, *, timeout=400, **more) -> subprocess.CompletedProcess:
    """Run a forked process as `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`."""
    with Forked(arguments, stdout=PIPE, stderr=PIPE, **more) as process:
        try:
            out, error = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


# ------------------------------------------------------------------------------------------------ programs in a shell

STAND_IN = """\
#!{python} -IS
import sys

sys.path.insert(0, {tests!r})
import forked

sys.exit(forked.stand_in({arguments}))
"""


def stand_ins(folder: Path) -> dict[str, str]:
    """Write the programs `distill`, `python` and `torchrun` into `folder`, each of which becomes a forked process.

    SIGINT, SIGTERM and SIGHUP reach that process; SIGKILL would end the stand-in alone.

    Returns:
        Environment of the shell, without `PATH`.
    """
    if not _servers:
        _servers.append(Server())
    programs = {"distill": ["-m", "distill"], "python": [], "torchrun": ["-m", "torch.distributed.run"]}
    for name, beginning in programs.items():
        program = folder / name
        arguments = f"[*{beginning}, *sys.argv[1:]]"
        program.write_text(STAND_IN.format(python=sys.executable, tests=str(TESTS), arguments=arguments))
        program.chmod(0o755)
    return {SERVER: _servers[0].name, "PYTHON_EXEC": str(folder / "python")}


def stand_in(arguments: list[str]) -> int:
    """Run a forked process in place of this one; return its exit code as a shell tells it."""
    arguments = arguments[arguments[:1] == ["-u"] :]  # torchrun's: it buffers nothing as it is
    os.environ.pop("DISTILL_LAUNCHER", None)  # a parent of this process, and not of the forked one
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        raise ValueError(f"expected python -m MODULE, python -c CODE or python FILE, got {arguments}")
    process = Forked(arguments, cwd=Path.cwd(), env=os.environ, stdin=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code


# ---------------------------------------------------------------------------------------------------------- the server


def serve(connection: socket.socket, listener: socket.socket) -> None:
    """Fork a process for each request, also of those who connect, until all other ends are closed."""
    import gc

    for name in PRELOADED:
        importlib.import_module(name)
    os.fsync = lambda handle: None  # as in conftest.py
    importlib.import_module("distill.reports.curves").draw_curves = lambda *args, **kwargs: None
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    ends = [listener, connection]
    while len(ends) > 1:
        for end in select.select(ends, [], [])[0]:
            if end is listener:
                ends.append(listener.accept()[0])
                continue
            message, fds, *_ = socket.recv_fds(end, 1 << 20, 4)
            if not message:
                ends.remove(end)
                end.close()
                continue
            if os.fork() == 0:
                for each in ends:
                    each.close()
                _keep(pickle.loads(message), fds)
            for each in fds:
                os.close(each)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(request, fds) -> None:
    """Fork once more, tell the process id, wait, tell the exit code."""
    status, *streams = fds
    child = os.fork()
    if child == 0:
        os.close(status)
        _become(*request, streams)
    for each in streams:
        os.close(each)
    os.write(status, b"%d\n" % child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, b"%d\n" % code)
    os._exit(0)


def _become(arguments, cwd, environment, session, terminal, streams) -> None:
    """Be a new Python that runs `arguments`."""
    import random

    import numpy as np

    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.fdopen(number, "w", 1 if number == 2 or os.isatty(number) else -1, "utf-8", closefd=False)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    random.seed()
    np.random.seed()
    code = 0
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # as an interpreter that ends does
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            file.flush()
    os._exit(code)


def _run(arguments) -> None:
    import runpy

    kind, *rest = arguments
    if kind == "-m":
        sys.argv = [rest[0], *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
