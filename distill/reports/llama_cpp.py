"""GGUF files in llama.cpp: prebuilt binaries of the npm package node-llama-cpp, run through Node.js on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import torch

from distill.core.errors import RunError

PROGRAM = "llama_cpp.mjs"
VERSION = "3.22.1"
SECONDS = 600  # of one request
GENERATED = 64  # tokens whose time is measured


def folder() -> Path:
    """Return the folder that node-llama-cpp is installed in: under DISTILL_ENGINES, by default `.cache/engines`."""
    return Path(os.environ.get("DISTILL_ENGINES") or Path(".cache") / "engines") / "llama_cpp"


def llama_cpp_is_installed() -> bool:
    manifest = folder() / "node_modules" / "node-llama-cpp" / "package.json"
    return manifest.is_file() and json.loads(manifest.read_text())["version"] == VERSION


def install_command() -> str:
    """Return the command that installs llama.cpp for Linux on x64, without the scripts that would compile it."""
    packages = f"node-llama-cpp@{VERSION} @node-llama-cpp/linux-x64@{VERSION}"
    return f"npm install --ignore-scripts --omit=optional --prefix {folder()} {packages}"


class LlamaCppFigures(TypedDict):
    """Answer of llama.cpp; `llama_cpp.mjs` describes its fields."""

    tokens: list[list[int]]
    greedy: list[list[int]]
    seconds: list[float]
    top: list[list[list[tuple[int, float]]]]
    kl: list[list[float]]


def request(model: Path, asked: Mapping[str, object]) -> LlamaCppFigures:
    """Return the answer of llama.cpp to a request, whose fields `llama_cpp.mjs` describes.

    Raises:
        RunError: llama.cpp cannot load the file, with its message.
    """
    place = folder().resolve()
    shutil.copy(Path(__file__).with_name(PROGRAM), place)  # Node.js looks for packages beside the program
    given = json.dumps({"model": str(model.resolve()), **asked})
    done = subprocess.run(
        ["node", PROGRAM], cwd=place, input=given, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        message = (done.stderr.strip() or "ended without a message").splitlines()[0]
        raise RunError(f"llama.cpp cannot read {model}: {message}")
    answer: LlamaCppFigures = json.loads(done.stdout)
    return answer


class HeldOutTokens(NamedTuple):
    """Held-out documents, the positions that count, and the teacher's distribution there.

    Attributes:
        positions: Positions of each document whose next token counts, ascending.
        log_probs: The teacher's log-probabilities of the next token at all of these, fp32 [positions, V].
    """

    documents: list[list[int]]
    positions: list[list[int]]
    log_probs: torch.Tensor


class FileMetrics(NamedTuple):
    """Metrics of a GGUF file in llama.cpp.

    Attributes:
        kl: KL(teacher || file), nats per token.
        tokens_per_second: Speed of greedy generation of one sequence.
    """

    kl: float
    bytes: int
    tokens_per_second: float

    def __str__(self) -> str:
        return f"KL {self.kl:.4f}, {self.bytes / 1e6:,.1f} MB, {self.tokens_per_second:,.0f} tokens/s"


def measure_with_llama_cpp(file: Path, held_out: HeldOutTokens) -> FileMetrics:
    """Return the metrics of a GGUF file on this machine's CPU."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "reference")
        held_out.log_probs.numpy().astype(np.float32).tofile(path)
        tokens = {"sequences": held_out.documents, "positions": held_out.positions, "reference": str(path)}
        greedy = {"prompts": [held_out.documents[0][:16]], "count": GENERATED}
        answer = request(file, {**tokens, "greedy": greedy, "threads": os.cpu_count()})
    values = np.array([value for row in answer["kl"] for value in row])
    speed = (len(answer["greedy"][0]) - 1) / answer["seconds"][0]
    return FileMetrics(float(values.mean()), file.stat().st_size, speed)
