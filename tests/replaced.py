"""Fixtures by which a test replaces what is ours: each is pytest's `monkeypatch` under the reason for it.

What an argument, a recipe, a real file or a fake teacher can do is done by those. transformers is imported where it is
used: tests choose Triton's interpreter before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook


@pytest.fixture
def fault(monkeypatch):
    """Put a fault into the program, which a check must find, or end it at a given moment."""
    return monkeypatch


@pytest.fixture
def hardware(monkeypatch):
    """Stand for a GPU: its launch configurations, its timers, its processes."""
    return monkeypatch


@pytest.fixture
def limit(monkeypatch):
    """Lower a limit, of bytes, rows or seconds, that a test could not reach."""
    return monkeypatch


@pytest.fixture
def library(monkeypatch):
    """Stand for another library, or for a service that is not here."""
    return monkeypatch


@pytest.fixture
def watch(monkeypatch):
    """Note a call that nothing outside shows, and make it."""
    return monkeypatch


@pytest.fixture
def without(monkeypatch):
    """Leave out a step whose results are compared with those of the whole, or that other tests take."""
    return monkeypatch


@pytest.fixture(scope="session", autouse=True)
def _no_curves():
    """A run draws its curves, half of its time, only where a test asks for `curves`."""
    with pytest.MonkeyPatch.context() as library:
        own = importlib.import_module("distill.reports.curves").draw_curves
        library.setattr("distill.reports.curves.draw_curves", lambda *args, **kwargs: None)
        yield own


@pytest.fixture
def curves(library, _no_curves):
    """Runs draw their curves."""
    library.setattr("distill.reports.curves.draw_curves", _no_curves)


@pytest.fixture
def forked_ranks(library):
    """Doctor's two processes are forked, where it would have torchrun start them."""
    from two_ranks import run_as_two

    def two_processes(folder, program, gpus):
        try:
            return 0, run_as_two(*program, folder)
        except AssertionError as failure:
            return 1, str(failure)

    library.setattr("distill.doctor.invariants_runs._two_processes", two_processes)


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(step, action)`: every training of the test calls `action(arguments)` where it begins that step.

    The step is the number of optimizer steps that are done; `micro_batches` more of the next one are waited for. An
    action that must happen once takes itself off: `at_step(None, None)`. A range stands for each of its steps.
    """
    import transformers.trainer
    from transformers import TrainerCallback

    usual = transformers.trainer.DEFAULT_CALLBACKS

    def act(step: int | range | None, action: Callable | None, micro_batches: int = 0) -> None:
        steps = range(step, step + 1) if isinstance(step, int) else step

        class AtStep(TrainerCallback):
            """Callback that transformers gives to every trainer."""

            done = 0

            def on_step_begin(self, args, state, control, **kwargs):
                """Begin to count micro-batches."""
                self.done = 0
                if micro_batches == 0 and state.global_step in steps:
                    action(args)

            def on_substep_end(self, args, state, control, **kwargs):
                """Count a micro-batch."""
                self.done += 1
                if self.done == micro_batches and state.global_step in steps:
                    action(args)

        monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", usual if step is None else [*usual, AtStep])

    return act


@pytest.fixture
def interrupted(at_step):
    """`interrupted(run, step)`: call `run()`, which Ctrl-C ends at that step."""

    def interrupt(run: Callable, step: int, micro_batches: int = 0) -> None:
        def stop(arguments):
            raise KeyboardInterrupt

        at_step(step, stop, micro_batches)
        with pytest.raises(KeyboardInterrupt):
            run()
        at_step(None, None)

    return interrupt


@pytest.fixture
def teacher_batches():
    """Sizes of the batches that models without a trainable embedding compute: those of teachers in this process."""
    sizes = []

    def note(module, args):
        if isinstance(module, torch.nn.Embedding) and not module.weight.requires_grad:
            sizes.append(len(args[0]))

    watched = register_module_forward_pre_hook(note)
    yield sizes
    watched.remove()


@pytest.fixture
def unread(monkeypatch):
    """`unread(folder)`: transformers fails from now on where it would read the weights of the model in `folder`."""
    from transformers import AutoModelForCausalLM

    from_pretrained = AutoModelForCausalLM.from_pretrained

    def refuse(folder: str) -> None:
        def read(place, *args, **kwargs):
            assert Path(place).resolve() != Path(folder).resolve(), f"the weights of {folder} were read"
            return from_pretrained(place, *args, **kwargs)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)

    return refuse


@pytest.fixture
def torchrun(monkeypatch):
    """`torchrun(gpus)`: a machine with so many GPUs, on which torchrun starts nothing.

    The list that it returns holds the processes and the arguments of `distill` of each start.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api

    def machine(gpus: int) -> list[tuple[int, list[str]]]:
        starts = []

        def start(arguments):
            (processes,) = (part.partition("=")[2] for part in arguments if part.startswith("--nproc-per-node="))
            starts.append((int(processes), arguments[arguments.index("distill") + 1 :]))

        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(run, "main", start)
        monkeypatch.setattr(api, "_terminate_process_handler", api._terminate_process_handler)  # a launch sets it
        return starts

    return machine
