"""Compilation of many kernels side by side, before any of them runs.

    with compiling_ahead():
        step()                # each kernel that is not compiled yet goes to a thread; none of them runs
    step()                    # all of them run at once

Triton compiles a kernel at its first launch, while the program waits: 30 kernels of a training step take 20 s of one
core. Three quarters of that is native code and ptxas, which threads run at the same time. Inside the context a launch
of a kernel that this process has not compiled returns at once; its outputs hold what was in memory before. Nothing that
is computed there may be kept or decided upon: whoever compares outputs asks `is_compiling_ahead`, and neither launch
plans nor tuning learn anything.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from distill_kernels.launch import HAS_TRITON

if HAS_TRITON:
    from triton import knobs
    from triton.compiler import ASTSource, compile

MAX_THREADS = 32
_pending: list[dict[Any, Future[Any]]] = []  # at most one: kernels that were handed to threads, by function and key


def cache_folder() -> Path:
    """Return the folder of Triton's cache of compiled kernels."""
    return Path(knobs.cache.dir)


def is_compiling_ahead() -> bool:
    """Return whether launches compile their kernels and do not run them."""
    return bool(_pending)


@contextlib.contextmanager
def compiling_ahead(progress: Callable[[int, int], object] = lambda count, total: None) -> Iterator[None]:
    """Compile kernels on threads instead of launching them; at the end wait until all of them are compiled.

    A kernel that fails to compile does so again at its launch, which reports it.

    Args:
        progress: Called while waiting, with 1 for each compiled kernel and the number of all.
    """
    assert not _pending, "kernels are compiled ahead already"
    pending: dict[Any, Future[Any]] = {}
    pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "compile kernels")

    def compile_later(*, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if (fn.jit_function, key) not in pending:
            pending[fn.jit_function, key] = pool.submit(_compile, fn.jit_function, compile)
        return True  # nothing is launched

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = compile_later
    _pending.append(pending)
    try:
        yield
        for _ in as_completed(pending.values()):
            progress(1, len(pending))
    finally:
        _pending.clear()
        knobs.runtime.jit_cache_hook = before
        pool.shutdown(cancel_futures=True)
    for (function, key), kernel in pending.items():
        if kernel.exception() is None:
            device, compiled = kernel.result()
            function.device_caches[device][0][key] = compiled


def _compile(function: Any, form: dict[str, Any]) -> tuple[int, Any]:
    """Compile a kernel in the form that Triton's hook describes, as its launch would; return its device as well."""
    _, _, target, backend, _ = function.device_caches[form["device"]]
    source = ASTSource(function, form["signature"], form["constants"], form["configs"][0])
    written = json.loads(form["specialization_data"])["options"]
    options = backend.parse_options(
        {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    )
    return form["device"], compile(source, target=target, options=options.__dict__)
