"""Faster imports: no garbage collection meanwhile.

    with paused_collection():
        import transformers

Importing torch and transformers makes a million objects, all of which stay. Python's garbage collector goes through
them ten times in vain, and again at each full collection of the training that follows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path


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


def cache_root() -> Path:
    """Return the folder of what is kept between runs: `$DISTILL_CACHE`, else `distill` in the user's cache folder."""
    if os.environ.get("DISTILL_CACHE"):
        return Path(os.environ["DISTILL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distill"
