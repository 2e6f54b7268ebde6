"""Faster imports: no garbage collection meanwhile, and compiled modules that are kept.

    with paused_collection():
        import transformers

Importing torch and transformers makes a million objects, all of which stay. Python's garbage collector goes through
them ten times in vain, and again at each full collection of the training that follows.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PREFIX, UNWRITTEN = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector while the body imports; later collections leave out all that there is by then.

    Only for the process of a command: in another program, objects of others would be left out, too. A body that
    imports nothing new leaves nothing out.
    """
    enabled, modules = gc.isenabled(), len(sys.modules)
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


def keep_bytecode(package: str = "torch") -> None:
    """Have Python keep compiled modules in the cache folder where it neither finds nor may write them elsewhere.

    Container images often have none, to be smaller (`pip install --no-compile`), and forbid to write any by
    PYTHONDONTWRITEBYTECODE: each start would compile thousands of files. Where PYTHONPYCACHEPREFIX is set, where
    `package` has been compiled and where the cache folder cannot be written, nothing is changed. Child processes do
    the same.

    Args:
        package: Package that stands for all; it is not imported.
    """
    if sys.pycache_prefix is not None:
        return
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return  # Python writes them beside their sources
    folder = cache_root() / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ[PREFIX] = str(folder)
        os.environ.pop(UNWRITTEN, None)
