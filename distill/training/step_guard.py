"""Guard against steps that are not finite, and against signals: checked once per optimizer step, equal on every rank.

A step whose loss or gradient is NaN or infinite is skipped: no weight and no optimizer state changes. It is counted
and logged, with the teacher's fault where that is the cause; after `LIMIT` of them in a row the run stops, and the last
batch is saved for study. SIGTERM, a lost terminal and Ctrl-C end the run after the current step, with a checkpoint; a
second Ctrl-C ends it at once.

Nothing here waits for a GPU: the flags are computed on the device, the optimizer skips the step by its `found_inf`, and
the host reads a step's flags while the next one runs. On a CPU, or with an optimizer without `found_inf`, they are read
at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from distill_kernels.optim.adamw import FusedAdamW
from torch import nn
from transformers import TrainerControl, TrainerState

from distill.core import console
from distill.core.errors import RunError
from distill.core.ranks import is_main_process
from distill.core.tensor_files import write_tensors
from distill.models.gpu_specs import joins_on
from distill.objectives.targets import Batch
from distill.training.listeners import StepListener
from distill.training.module_cache import cached_parameters

log = logging.getLogger(__name__)

LIMIT = 10


class StoppedBySignal(SystemExit):
    """End of training after the step and the checkpoint that followed a signal; its code is 128 + the number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(128 + number)
        self.signal = number.name


class StepGuard(StepListener):
    """Listener that guards one trainer's steps.

    Args:
        reduce: Function that sums a tensor over the ranks.
        folder: Folder for the saved batch.
        limit: Number of consecutive steps that may be skipped.
        diagnose: Function from a step's batches to a description of what is not finite in the teacher, None where all
            is finite; called on every rank for skipped steps.
    """

    def __init__(
        self,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        ranks: int,
        folder: Path,
        limit: int = LIMIT,
        diagnose: Callable[[list[Batch]], str | None] = lambda batches: None,
    ) -> None:
        self.reduce = reduce
        self.ranks = ranks
        self.folder = folder
        self.limit = limit
        self.diagnose = diagnose
        self.skipped = 0
        self.stopping = False
        self.interrupted = False
        self.ended_by_signal = "SIGTERM"
        self._stop_requested = threading.Event()
        self._in_a_row = 0
        self._norm: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self._batches: list[Batch] = []
        self._state: TrainerState | None = None
        self._waiting: tuple[torch.Tensor, torch.cuda.Event | None, int, list[Batch]] | None = None

    def micro_batch_done(self, batch: Batch, loss: torch.Tensor, is_last: bool = True) -> None:
        self._batches.append(batch)
        loss = loss.detach().float()
        self._loss = loss if self._loss is None else self._loss + loss

    def gradient_norm_computed(self, norm: Any) -> None:
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._norm = norm.detach() if isinstance(norm, torch.Tensor) else None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Handle signals while the trainer trains, and check afterwards how it ended.

        Raises:
            KeyboardInterrupt: Ctrl-C, after the current step and its checkpoint.
            StoppedBySignal: SIGTERM or SIGHUP, likewise.
            ValueError: Loss or gradients were NaN or infinite in every step.
        """
        with self.stop_on_signals():
            yield
        assert self._state is not None
        # a signal in the last step stops nothing: that run is complete, and its results are written
        if self._state.global_step >= self._state.max_steps:
            self.check_learning(self._state.global_step)
        elif self.interrupted:
            raise KeyboardInterrupt
        elif self.stopping:
            raise StoppedBySignal(signal.Signals[self.ended_by_signal])

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Keep the trainer's state, which tells how many steps it has made at the end."""
        self._state = state

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        self.before_step(kwargs["model"], kwargs["optimizer"], state.global_step + 1)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.stopping and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True

    def metrics(self) -> dict[str, float]:
        return {"skipped_steps": self.skipped} if self.skipped else {}

    def before_step(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Check the step's gradients; where they are not finite, make the optimizer skip the step.

        Raises:
            RunError: `limit` steps in a row were not finite.
        """
        assert self._loss is not None
        # One number tells of all gradients: a NaN or infinity in any of them makes their norm one. The loss is added
        # since a frozen part may hide it from the gradients.
        norm = norm_of(cached_parameters(model)) if self._norm is None else self._norm
        bad = (~torch.isfinite(norm.float() + self._loss)).float()
        flags = torch.stack([bad, torch.full_like(bad, float(self._stop_requested.is_set()))])
        # Every rank must skip the same steps and stop after the same one, else the next collective waits for ever: the
        # flags are summed, and read by all from the same sum.
        if self.ranks > 1:
            flags = self.reduce(flags)
        seen = self._batches
        self._batches = []
        self._norm = None
        self._loss = None
        inner = getattr(optimizer, "optimizer", optimizer)
        # The step before has long finished on the GPU: reading its flags now costs nothing, reading this step's would
        # wait for the whole backward.
        self._read()  # of the step before
        if flags.device.type == "cuda" and _supports_found_inf(inner):
            # The optimizer reads found_inf on the device and leaves weights and states as they are (the protocol of
            # GradScaler).
            inner.found_inf = (flags[0] > 0).float()
            # pinned, so that the copy is asynchronous; the event says when it may be read
            host = torch.empty(2, pin_memory=True)
            host.copy_(flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._waiting = (host, event, step, seen)
            return
        # without found_inf: an optimizer leaves parameters without a gradient alone
        if flags[0] > 0:
            for parameter in model.parameters():
                parameter.grad = None
        self._waiting = (flags.cpu(), None, step, seen)
        self._read()

    def _read(self) -> None:
        if self._waiting is None:
            return
        flags, event, step, seen = self._waiting
        self._waiting = None
        if event is not None:
            event.synchronize()
        bad, stop = flags.tolist()
        self.stopping = self.stopping or stop > 0
        if not bad:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        fault = self.diagnose(seen)
        what = "loss or gradient is not finite" if fault is None else f"the teacher is not finite ({fault})"
        log.warning("step %d: %s; the step is skipped (%d so far)", step, what, self.skipped)
        if self._in_a_row >= self.limit:
            raise RunError(self._stopped(step, fault, self._save(seen, step)))

    def check_learning(self, steps: int) -> None:
        """Check that at least one of the `steps` of a finished run was not skipped.

        Raises:
            ValueError: All were skipped, so the student is unchanged.
        """
        self._read()
        if not self.skipped or self.skipped < steps:
            return
        raise ValueError(
            f"train: no step was taken: loss or gradient was NaN or infinite in all {steps} steps of the run, and "
            "each was skipped; lower train.learning_rate, or set train.precision and teacher.dtype to float32 to see "
            "whether the models overflow in a narrower one"
        )

    def _stopped(self, step: int, fault: str | None, path: Path) -> str:
        if fault is not None:
            return (
                f"stopped at step {step}: the teacher is NaN or infinite ({fault}), and so was the loss "
                f"{self._in_a_row} steps in a row; the last batch is in {path}; fetch or make the teacher again, or "
                "set teacher.dtype to bfloat16 or float32 where float16 is too narrow for it, and continue from the "
                "last checkpoint with --resume"
            )
        return (
            f"stopped at step {step}: loss or gradient was NaN or infinite {self._in_a_row} steps in a row; the "
            f"last batch is in {path}; lower train.learning_rate, lengthen train.warmup or lower "
            "train.max_grad_norm, and continue from the last checkpoint with --resume"
        )

    def _save(self, batches: list[Batch], step: int) -> Path:
        whose = f"-rank-{os.environ.get('RANK', '0')}" if self.ranks > 1 else ""  # each process has rows of its own
        path = self.folder / f"not-finite-step-{step}{whose}.safetensors"
        tensors = {
            f"{name}.{number}": value
            for number, batch in enumerate(batches)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors)
        return path

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """End training after the current step, with a checkpoint, on SIGTERM, SIGHUP or a first Ctrl-C in the block.

        A second Ctrl-C raises `KeyboardInterrupt` at once, without a new checkpoint. SIGHUP comes when the terminal is
        lost (ssh); where it is ignored (nohup) it stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                # the second Ctrl-C: the handler that stood before, which may be the command's own
                at_once = before[number]
                handler = at_once if callable(at_once) else signal.default_int_handler
                return handler(number, frame)
            self.interrupted = True
            self._stop_requested.set()
            if is_main_process():
                console.print_error("finishing this step and writing a checkpoint; press Ctrl-C again to stop at once")

        terminals = [stream for stream in (1, 2) if os.isatty(stream)]

        def end(number: int, frame: object) -> None:
            self.ended_by_signal = signal.Signals(number).name
            self._stop_requested.set()
            if number != signal.SIGTERM:  # the terminal is gone: writes to it would fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in terminals:
                    os.dup2(nowhere, stream)
                os.close(nowhere)

        self.interrupted = False
        # Handlers only set flags. The step's own code runs to its end, on every rank, and ends there together.
        handlers: dict[int, Callable[[int, FrameType | None], object]] = {signal.SIGTERM: end, signal.SIGINT: interrupt}
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = end
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class IgnoreSignalsWorkerInit:
    """Initialiser of data workers that ignore SIGTERM, SIGHUP and Ctrl-C, unless their trainer sends them.

    A terminal, a scheduler and torchrun send signals to all processes of a group; a worker that ended by one would
    abort the step that is to be finished, and its checkpoint. Workers end when the trainer ends them, or with it: one
    that ignored its SIGTERM too would keep the trainer's process from ending, which waits for its children.

    Args:
        begin: Initialiser to call with the worker's number; None for none.
    """

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self.begin = begin

    def __call__(self, number: int) -> None:
        ignored = {getattr(signal, each) for each in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, each)}
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # before the thread, which inherits it
            threading.Thread(target=_exit_on_signal_of_parent, args=(ignored,), daemon=True).start()
        else:
            for each in ignored:
                signal.signal(each, signal.SIG_IGN)
        if self.begin is not None:
            self.begin(number)


def _exit_on_signal_of_parent(signals: set[signal.Signals]) -> None:
    """Receive the signals, which every thread blocks, and end the process at the first that its parent sent."""
    while signal.sigwaitinfo(signals).si_pid != os.getppid():
        pass
    os._exit(0)


def ignore_signals_in_workers(loader: Any) -> None:
    """Have the workers of a torch `DataLoader` ignore the signals that end a run."""
    if not isinstance(loader.worker_init_fn, IgnoreSignalsWorkerInit):
        loader.worker_init_fn = IgnoreSignalsWorkerInit(loader.worker_init_fn)


def _supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips the step where its `found_inf` is not 0: FusedAdamW and torch's fused ones."""
    return type(optimizer).__name__ == "FusedAdamW" or bool(optimizer.defaults.get("fused"))


def clip_in_optimizer(parameters: Sequence[torch.Tensor], optimizer: Any, most: float) -> torch.Tensor | None:
    """Clip gradients to a norm of `most` inside the optimizer, as it reads them.

    Clipping in place would read, write and round every gradient once more.

    Returns:
        The norm before clipping; None for an optimizer or a GPU without support, where nothing has been done.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    able = isinstance(inner, FusedAdamW) and joins_on(parameters[0].device)
    if not able:
        return None
    norm = norm_of(parameters)
    # FusedAdamW divides each gradient by this as it reads it; a norm below `most` gives 1. Nothing waits for the norm.
    # The small term is that of PyTorch's clip_grad_norm_.
    inner.grad_scale = ((norm.float() + 1e-6) / most).clamp_min(1.0)
    return norm


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients, a scalar on their device; 0 without any."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    whole: torch.Tensor = getattr(norm, "full_tensor", lambda: norm)()
    return whole
