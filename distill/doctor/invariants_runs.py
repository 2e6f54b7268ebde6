"""Invariants that need whole training runs of truncated models: resuming, and training on two processes.

The file is also the program of these processes: `torchrun -m distill.doctor.invariants_runs FOLDER`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from distill.core.ranks import exit_process
from distill.core.tensor_files import write_tensors
from distill.doctor.check_result import CheckResult
from distill.doctor.check_setup import CheckSetup
from distill.doctor.invariants import difference, without_training_mode
from distill.doctor.setup_file import read_setup, without_adapters, write_setup
from distill.training.checkpoints import checkpoints
from distill.training.quantise import add_quantiser
from distill.training.step_listeners import RolloutBatches
from distill.training.trainer import DistillationTrainer

MINUTES = 10
PROGRAM = ("-m", "distill.doctor.invariants_runs")
TWO = "two.safetensors"  # weights after a step on two processes

Weights = dict[str, torch.Tensor]


def resume_is_exact(subject: CheckSetup) -> CheckResult:
    """Check that a resumed run is bit-exact: weights, optimizer, scheduler, random state, losses.

    It stops one step before an epoch's end and makes three more, packed and accumulated; compared with a run
    without the stop.
    """
    subject = subject.truncated()
    accumulation = 2 if len(subject.rows) >= 4 else 1
    stop = max(-(-len(subject.rows) // accumulation) - 1, 1)
    gpu = subject.device.type == "cuda"
    with tempfile.TemporaryDirectory() as name, _deterministic(gpu):
        whole = Path(name) / "whole"
        parts = Path(name) / "parts"

        def trainer(folder: Path) -> DistillationTrainer:
            torch.manual_seed(1)
            return _trainer(
                replace(subject, student=copy.deepcopy(subject.student)),
                folder,
                batch_size=1,
                accumulation=accumulation,
                max_steps=stop + 3,
                save_steps=stop,
                learning_rate=1e-3,
                lr_scheduler_type="cosine",
                use_cpu=subject.device.type == "cpu",
            )

        straight = trainer(whole)
        straight.train()
        resumed = trainer(parts)
        resumed.train(resume_from_checkpoint=str(checkpoints(whole)[0]))
        ends = [checkpoints(folder)[-1] for folder in (whole, parts)]
        differing = [file for file in ("optimizer.pt", "scheduler.pt") if not _same(*(_read(e / file) for e in ends))]
        if not _same(*(_read(end / "rng_state.pth") for end in ends)):
            differing.append("random state")
        if not _same(*(dict(t.model.named_parameters()) for t in (straight, resumed))):
            differing.insert(0, "weights")
        losses = [{e["step"]: e["loss"] for e in t.state.log_history if "loss" in e} for t in (straight, resumed)]
        if losses[0] != losses[1]:
            differing.append("logged losses")
    what = f"{' and '.join(differing)} differ" if differing else "weights, optimizer, scheduler, random state, losses"
    detail = f"{what}: {stop} + 3 steps against {stop + 3}" + ("" if differing else ", bit for bit")
    return CheckResult("resume", not differing, detail + (", with deterministic kernels" if gpu else ""))


@contextlib.contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels in the block: on a GPU, not even the same run twice is bit-exact otherwise.

    `train.deterministic` makes PyTorch refuse all other kernels, which needs a cuBLAS setting before the first GEMM of
    the process. Here PyTorch only warns of them, and attention uses the math back end, since the gradient of the
    memory-efficient one would remain nondeterministic.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def ranks_change_nothing(subject: CheckSetup, *, program: Sequence[str] = PROGRAM) -> CheckResult:
    """Check that one step on two processes equals the same step on one.

    With two GPUs through NCCL, else through gloo on the CPU, since two NCCL ranks cannot share a GPU.
    """
    return check_ranks_of_setups([subject], program=program)[0]


def check_ranks_of_setups(subjects: Sequence[CheckSetup], *, program: Sequence[str] = PROGRAM) -> list[CheckResult]:
    """Run `ranks_change_nothing` for several subjects in the same two processes."""
    subjects = [subject.truncated() for subject in subjects]
    on_gpu = subjects[0].device.type == "cuda"  # before the models are written, from the CPU
    gpus = on_gpu and torch.cuda.device_count() > 1
    how = "NCCL" if gpus else "gloo, CPU" + (", without a second GPU" if on_gpu else "")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"{number:03}" for number in range(len(subjects))]
        for folder, subject in zip(folders, subjects, strict=True):
            folder.mkdir()
            rows = subject.uneven_rows()[: len(subject.rows) // 2 * 2]
            plain = [{key: list(map(int, row[key])) for key in row} for row in rows]
            write_setup(replace(subject, rows=plain, tokenizers=None, readers={}, small=None), folder)
        code, errors = _two_processes(Path(name), program, gpus)
        if code != 0:
            return [CheckResult("ranks", False, f"two processes failed: {failure_reason(errors)}")] * len(subjects)
        alone = [_one_step(folder, processes=1, cpu=not gpus) for folder in folders]
        two = [load_file(folder / TWO) for folder in folders]
    return [_compared(*each, how) for each in zip(subjects, two, alone, strict=True)]


def _compared(subject: CheckSetup, two: Weights, alone: Weights, how: str) -> CheckResult:
    """Compare the steps of two processes and of one from the same start."""
    before = without_adapters(subject.student).float().state_dict()
    start = {name: before[name].cpu() for name in alone}
    off = difference(*({name: step[name] - start[name] for name in alone} for step in (two, alone)))
    allowed = subject.tolerance
    return CheckResult(
        "ranks", off <= allowed, f"steps on 2 processes ({how}) and on 1 differ by {off:.1e} (bound {allowed:.0e})"
    )


RUN_CHECKS: tuple[Callable[[CheckSetup], CheckResult], ...] = (resume_is_exact, ranks_change_nothing)


def _trainer(
    subject: CheckSetup, folder: Path, *, batch_size: int, accumulation: int = 1, **settings: Any
) -> DistillationTrainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    rows = Dataset.from_list([{key: list(row[key]) for key in row} for row in subject.rows])
    trainer = DistillationTrainer(
        subject.student,
        subject.teacher,
        arguments,
        loss=subject.loss,
        vocab_size=subject.vocab_size,
        train_dataset=rows,
    )
    if subject.rollouts is not None and "spans" not in subject.rows[0]:  # their rows hold rollouts already
        trainer.add_callback(RolloutBatches(subject.rollouts.in_training(subject.student), trainer))
    trainer.remove_callback(PrinterCallback)
    add_quantiser(trainer)
    return trainer


def _read(path: Path) -> Any:
    with safe_globals():  # the classes of numpy's and Python's random states
        return torch.load(path, weights_only=True)


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are bit-identical, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else a == b


RAISED = re.compile(r"^(?:\[rank\d+\]: ?)?(?!Traceback)([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Fault)\b.*)")
ENDED = re.compile(r"exitcode\s*:\s*-(\d+)")
LAUNCHER = ("torch.distributed.elastic", "SignalException", "ChildFailedError")


def failure_reason(errors: str) -> str:
    """Return why a process under torchrun failed, from its standard error.

    The first exception that is not torchrun's own, else the signal that ended a process, else the first line.
    """
    lines = errors.strip().splitlines()
    for line in lines:
        match = RAISED.match(line)
        if match and not match[1].startswith(LAUNCHER):
            return match[1].strip()[:300]
    for line in lines:
        match = ENDED.search(line)
        if match:
            number = int(match[1])
            known = {int(entry): entry.name for entry in signal.Signals}
            return f"a process was ended by {known.get(number, f'signal {number}')}" + (
                " (kill -9; most often the system, out of memory)" if known.get(number) == "SIGKILL" else ""
            )
    plain = [line.strip() for line in lines if line.strip("=-* ")]
    return (plain or ["no output"])[0][:300]


def _two_processes(folder: Path, program: Sequence[str], gpus: bool) -> tuple[int, str]:
    """Run the program in two processes through torchrun; returns exit code and standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # doctor itself may run under a launcher, whose rank and address the two processes must not take for theirs
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        *program,
        str(folder),
    ]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as launcher:
        try:
            errors = launcher.communicate(timeout=MINUTES * 60)[1]
        except subprocess.TimeoutExpired:
            launcher.terminate()  # lets torchrun end its processes, which SIGKILL of torchrun would leave running
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.communicate(timeout=60)
            launcher.kill()
            return 1, f"TimeoutError: the two processes did not end within {MINUTES:g} minutes"
    return launcher.returncode, errors


def _one_step(folder: Path, *, processes: int, cpu: bool) -> Weights:
    """Return the weights after one SGD step over the rows in `folder`, shared equally by the processes.

    Without dropout, whose random numbers differ between processes.
    """
    subject = read_setup(folder)
    trainer = _trainer(
        subject,
        folder / "run",
        max_steps=1,
        batch_size=len(subject.rows) // processes,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        use_cpu=cpu,
    )
    with contextlib.closing(subject.teacher), without_training_mode(subject.student):
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _main(folder: Path) -> None:
    for place in sorted(folder.iterdir()):
        weights = _one_step(place, processes=2, cpu=not torch.cuda.is_available())
        if os.environ.get("RANK", "0") == "0":
            write_tensors(place / TWO, weights)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    exit_process(0)


if __name__ == "__main__":
    _main(Path(sys.argv[-1]))
