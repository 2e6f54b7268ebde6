"""llama.cpp as the judge of a GGUF file: prebuilt binaries of the npm package node-llama-cpp, run through Node.js.

made = judge(path, texts=["Hello"], prompts=[[1, 2]], count=16, sequences=[[1, 2, 3]], top=8)
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distill.reports import llama_cpp


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
    """Return whether llama.cpp is installed."""
    return llama_cpp.llama_cpp_is_installed()


def install() -> Path:
    """Install llama.cpp unless that is done; returns its folder.

    Raises:
        SystemExit: Node.js is missing.
        subprocess.CalledProcessError: a package that cannot be had.
    """
    if shutil.which("npm") is None:
        raise SystemExit("llama.cpp: expected Node.js with npm on the PATH (apt-get install nodejs npm)")
    if not installed():
        llama_cpp.folder().mkdir(parents=True, exist_ok=True)
        subprocess.run(shlex.split(llama_cpp.install_command()), check=True)
    return llama_cpp.folder()


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
    asked = {
        "texts": list(texts),
        "greedy": {"prompts": list(prompts), "count": count},
        "sequences": list(sequences),
        "top": top,
    }
    made = llama_cpp.request(model, asked)
    top_of = [[[(int(id), float(p)) for id, p in each] for each in positions] for positions in made["top"]]
    return Judged(made["tokens"], made["greedy"], top_of)
