"""Install engines for the tests, or serve a model by vLLM.

python -m scripts.engines install vllm llama_cpp        # into .cache/engines, or DISTILL_ENGINES
python -m scripts.engines serve MODEL_FOLDER [arguments of vllm serve]
pytest -m engines
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from scripts.engines import llama_cpp, vllm

ENGINES = {"vllm": vllm, "llama_cpp": llama_cpp}


def main(arguments: list[str]) -> None:
    """Do what the command line asks for."""
    match arguments:
        case ["install", *names] if names and set(names) <= set(ENGINES):
            for name in names:
                print(f"{name}: {ENGINES[name].install()}", flush=True)
        case ["serve", model, *more]:
            with vllm.serving(Path(model), *more, log=Path(tempfile.mkstemp(suffix=".log")[1])) as url:
                print(url, flush=True)
                threading.Event().wait()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
