"""llama.cpp as the judge of a GGUF file: prebuilt binaries of the npm package node-llama-cpp, run through Node.js.

made = judge(path, texts=["Hello"], prompts=[[1, 2]], count=16, sequences=[[1, 2, 3]], top=8)
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.engines.environments import HERE, folder_of, install_once, is_installed

PINS = ("package.json",)
PROGRAM = "judge.mjs"
SECONDS = 600  # of one judgement


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
    folder = folder_of("llama_cpp")
    shutil.copy(HERE / PROGRAM, folder / PROGRAM)  # Node.js looks for packages beside the program
    asked = {
        "model": str(model),
        "texts": list(texts),
        "greedy": {"prompts": list(prompts), "count": count},
        "sequences": list(sequences),
        "top": top,
    }
    done = subprocess.run(
        ["node", PROGRAM], cwd=folder, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp: {model}: {done.stderr.strip()[-500:]}")
    made = json.loads(done.stdout)
    top_of = [[[(int(id), float(p)) for id, p in each] for each in positions] for positions in made["top"]]
    return Judged(made["tokens"], made["greedy"], top_of)
