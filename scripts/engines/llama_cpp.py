"""llama.cpp as the judge of a GGUF file: prebuilt binaries of the npm package node-llama-cpp, run through Node.js.

made = judge(path, texts=["Hello"], prompts=[[1, 2]], count=16, sequences=[[1, 2, 3]], top=8)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.engines.environments import HERE, folder_of, install_once, is_installed

PINS = ("package.json",)
PROGRAM = "judge.mjs"
SECONDS = 600  # of one judgement
GENERATED = 64  # tokens whose time is measured


class Judged(NamedTuple):
    """Result of llama.cpp on a file.

    Attributes:
        tokens: Token ids of each text, special tokens in the text recognised.
        greedy: Token ids of each prompt's greedy continuation, the token that ends it included.
        top: For each position of each sequence the likeliest next tokens, as (id, natural log-probability).
    """

    tokens: list[list[int]]
    greedy: list[list[int]]
    top: list[list[list[tuple[int, float]]]]


def installed() -> bool:
    """Return whether llama.cpp is installed as this file says."""
    return is_installed("llama_cpp", *PINS)


def install() -> Path:
    """Install llama.cpp unless that is done; returns its folder.

    Raises:
        SystemExit: Node.js is missing.
        subprocess.CalledProcessError: a package that cannot be had.
    """
    if shutil.which("npm") is None:
        raise SystemExit("llama.cpp: expected Node.js with npm on the PATH (apt-get install nodejs npm)")
    return install_once("llama_cpp", _install, *PINS)


def _install(folder: Path) -> None:
    for name in PINS:
        shutil.copy(HERE / name, folder / name)
    # scripts would compile llama.cpp; the optional packages are builds for other systems and GPUs
    command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=folder, check=True)


def judge(
    model: Path,
    *,
    texts: Sequence[str] = (),
    prompts: Sequence[Sequence[int]] = (),
    count: int = 0,
    sequences: Sequence[Sequence[int]] = (),
    top: int = 0,
) -> Judged:
    """Ask llama.cpp on the CPU.

    Args:
        model: A GGUF file.
        texts: To tokenise.
        prompts: Token ids to continue greedily by at most `count` tokens.
        sequences: Token ids to read; the `top` likeliest next tokens of every position are returned.

    Raises:
        RuntimeError: llama.cpp cannot load the file, with its message.
    """
    request = {
        "texts": list(texts),
        "greedy": {"prompts": list(prompts), "count": count},
        "sequences": list(sequences),
        "top": top,
    }
    made = _answer(model, request)
    top_of = [[[(int(id), float(p)) for id, p in each] for each in positions] for positions in made["top"]]
    return Judged(made["tokens"], made["greedy"], top_of)


def _answer(model: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of judge.mjs to a request, whose fields that file names."""
    folder = folder_of("llama_cpp")
    shutil.copy(HERE / PROGRAM, folder / PROGRAM)  # Node.js looks for packages beside the program
    given = json.dumps({"model": str(model.resolve()), **request})
    command = ["node", PROGRAM]
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"llama.cpp: {model}: {done.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


class FileMetrics(NamedTuple):
    """A GGUF file as llama.cpp computes with it.

    Attributes:
        kl: KL(reference || file), nats per token.
        bytes: Size of the file.
        tokens_per_second: Speed of greedy generation of one sequence.
    """

    kl: float
    bytes: int
    tokens_per_second: float

    def __str__(self) -> str:
        return f"KL {self.kl:.4f}, {self.bytes / 1e6:,.1f} MB, {self.tokens_per_second:,.0f} tokens/s"


def measure(file: Path, rows: Sequence[Sequence[int]], reference: torch.Tensor) -> FileMetrics:
    """Measure a GGUF file on this machine's CPU.

    Args:
        file: The file.
        rows: Token ids of at least one row.
        reference: Log-probabilities of the next token at each position of all rows, [positions, V].
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "reference")
        reference.float().contiguous().numpy().tofile(path)
        request: dict[str, Any] = {"sequences": [list(row) for row in rows], "reference": str(path)}
        request |= {"threads": os.cpu_count(), "greedy": {"prompts": [list(rows[0][:16])], "count": GENERATED}}
        answer = _answer(file, request)
    values = torch.tensor([value for row in answer["kl"] for value in row], dtype=torch.float64)
    speed = (len(answer["greedy"][0]) - 1) / answer["seconds"][0]
    return FileMetrics(float(values.mean()), file.stat().st_size, speed)
