"""What a command's process sets before it imports the libraries: no garbage collection meanwhile, and their silence.

    with paused_collection():
        import transformers

Importing torch and transformers makes a million objects, all of which stay. Python's garbage collector goes through
them ten times in vain, and again at each full collection of the training that follows.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

# torch's DataLoader warns of a worker count and of pinned memory that data.workers and the device decide; PEFT, at each
# checkpoint, that no config.json stands beside a .gguf file, which it would compare the vocabulary with
WARNINGS = (
    r"This DataLoader will create \d+ worker processes",
    r"'pin_memory' argument is set as true",
    r"Could not find a config file in .* - will assume that the vocabulary was not modified",
)
BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
PARALLELISM = "TOKENIZERS_PARALLELISM"
# On CPUs with bfloat16 instructions bitsandbytes, which PEFT imports where it is installed, asks the hub for kernels
# that nf4 weights here are not packed for, and warns that it has none.
LOGGERS = ("bitsandbytes.backends.cpu.ops",)


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector while the body imports; later collections leave out all that there is by then.

    Only for the process of a command: in another program, objects of others would be left out, too. A body that
    imports nothing new leaves nothing out.
    """
    enabled = gc.isenabled()
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if enabled:
            gc.enable()


def silence_libraries() -> None:
    """Silence them in this process and its children; call it before the libraries are imported."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    for name in BARS:  # the lines of `console.spinner` take their place
        os.environ.setdefault(name, "1")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if hasattr(os, "register_at_fork") and PARALLELISM not in os.environ:
        # the tokenizers library warns in each fork that it disables its threads, unless the variable is set
        os.register_at_fork(
            before=lambda: os.environ.__setitem__(PARALLELISM, "false"),
            after_in_parent=lambda: os.environ.pop(PARALLELISM, None),
        )


def cache_root() -> Path:
    """Return the folder of what is kept between runs: `$DISTILL_CACHE`, else `distill` in the user's cache folder."""
    if os.environ.get("DISTILL_CACHE"):
        return Path(os.environ["DISTILL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distill"
