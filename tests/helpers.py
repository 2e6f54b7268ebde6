"""Shared test helpers: error measures, the slack that they allow, and realistic inputs.

A result of ours is right when its error against fp64 is at most `SLACK` times the error that PyTorch's own eager
computation makes in the same dtype, plus `FLOOR[dtype]`. bf16 fused losses also keep a promise that does not depend on
eager PyTorch, which in bf16 misses by ten times as much.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SLACK = 1.5
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
PROMISED_LOSS, PROMISED_ROW_LOSSES, PROMISED_GRADIENT, PROMISED_WORST_ROW = 2e-4, 3e-4, 3e-3, 2e-2


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """`||actual - expected|| / ||expected||` in fp64; infinite if either holds a NaN, absolute if expected is 0."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    same_infinity = torch.isinf(expected) & (actual == expected)
    actual, expected = actual.masked_fill(same_infinity, 0), expected.masked_fill(same_infinity, 0)
    difference = torch.linalg.vector_norm(actual - expected)
    norm = torch.linalg.vector_norm(expected)
    error = (difference / norm if norm > 0 else difference).item()
    return error if error == error else float("inf")


def assert_as_good_as_torch(
    ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, name: str = "result"
) -> None:
    """Hold `ours` against fp64 `exact`, allowing what torch `eager` in `dtype` misses by, times the slack."""
    error, allowed = relative_error(ours, exact), SLACK * relative_error(eager, exact) + FLOOR[dtype]
    assert error <= allowed, f"{name}: error {error:.3e} exceeds {allowed:.3e} ({dtype})"


def assert_as_promised(name: str, ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Hold what a bf16 fused loss made to its promise, against fp64.

    Args:
        name: "loss" ([] or row losses [N]), "dx" ([N, H]) or another gradient.
        ours, exact: of one shape.
    """
    assert ours.shape == exact.shape, f"shapes differ: {tuple(ours.shape)} and {tuple(exact.shape)}"
    errors = {"relative error": (relative_error(ours, exact), PROMISED_GRADIENT)}
    if name == "loss":
        errors = {"error of the sum": (relative_error(ours.double().sum(), exact.sum()), PROMISED_LOSS)}
        if ours.dim():
            errors["relative error of rows"] = (relative_error(ours, exact), PROMISED_ROW_LOSSES)
    elif name == "dx":
        rows = torch.linalg.vector_norm(ours.double() - exact, dim=-1)
        mean = torch.linalg.vector_norm(exact, dim=-1).mean()
        errors["worst row's error of the mean row"] = ((rows.max() / mean).item(), PROMISED_WORST_ROW)
    for what, (error, allowed) in errors.items():
        assert error <= allowed, f"{name}: {what} {error:.3e} exceeds {allowed:.1e}"


def round_gradient(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `z`, whose gradient autograd rounds to `dtype`, as kernels do that store it so for the products."""
    if z.requires_grad:
        z.register_hook(lambda g: g.to(dtype).to(g.dtype))
    return z


def assert_rounded_once(ours: torch.Tensor, products: torch.Tensor, exact: torch.Tensor) -> None:
    """Hold a gradient to the error of exact `products` of the rounded gradient for the logits, themselves rounded.

    Over a few hundred columns these alone may miss by more than what is promised for a vocabulary.
    """
    error, least = relative_error(ours, exact), relative_error(products.to(ours.dtype), exact)
    assert error <= 1.3 * least, f"error {error:.3e} exceeds 1.3 x {least:.3e}"


def assert_parts(
    ours: Iterable[torch.Tensor], eager: Iterable[torch.Tensor], exact: Iterable[torch.Tensor], dtype: torch.dtype
) -> None:
    """Hold loss, dx, dW and db, as many as there are of `ours`, to both of the above (the promise: bf16)."""
    for name, mine, theirs, right in zip(("loss", "dx", "dW", "db"), ours, eager, exact, strict=False):
        assert_as_good_as_torch(mine, theirs, right, dtype, name)
        if dtype == torch.bfloat16:
            assert_as_promised(name, mine, right)


def realistic_logits(
    rows: int, vocab: int, *, seed: int = 0, std: float = 4.0, correlation: float = 0.9, device: object = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated student and teacher logits, fp64 [rows, vocab], standard deviation `std`."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    student = correlation * teacher + (1 - correlation**2) ** 0.5 * noise
    return (student * std).to(device), (teacher * std).to(device)


def realistic_heads(
    rows: int,
    vocab: int,
    student_hidden: int,
    teacher_hidden: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    std: float = 4.0,
    correlation: float = 0.9,
    device: object = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and head weights whose two models' logits correlate and have standard deviation about `std`.

    Returns student hidden [rows, student_hidden], student weight [vocab, student_hidden], teacher hidden
    [rows, teacher_hidden], teacher weight [vocab, teacher_hidden], drawn on the device, rounded to `dtype`.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shared = min(student_hidden, teacher_hidden)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x_teacher, w_teacher = draw(rows, teacher_hidden), draw(vocab, teacher_hidden)
    x_student, w_student = draw(rows, student_hidden), draw(vocab, student_hidden)
    mix = correlation**0.5
    rest = (1 - mix**2) ** 0.5
    # the shared coordinates carry the correlated part; the teacher's other coordinates are its own
    x_student[:, :shared] = mix * x_teacher[:, :shared] + rest * x_student[:, :shared]
    w_student[:, :shared] = mix * w_teacher[:, :shared] + rest * w_student[:, :shared]
    w_teacher[:, shared:] *= 0.3
    w_student = w_student * (std / (x_student @ w_student[: min(vocab, 4096)].T).std())
    w_teacher = w_teacher * (std / (x_teacher @ w_teacher[: min(vocab, 4096)].T).std())
    return x_student.to(dtype), w_student.to(dtype), x_teacher.to(dtype), w_teacher.to(dtype)


def differentiate(function, tensors, dtype=None):
    """A loss and the gradients of tensors, for an upstream gradient of 2."""
    leaves = [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]
    loss = function(leaves)
    (2 * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@contextmanager
def no_syncs() -> Iterator[None]:
    """Whatever waits for the GPU inside raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_captures(step) -> None:
    """Hold a step that returns tensors to wait for the GPU nowhere, and its CUDA graph to replay the same bits."""
    expected = [tensor.clone() for tensor in step()]
    with no_syncs():
        step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for tensor in made:
        tensor.zero_()
    graph.replay()
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)


class Coarse:
    """`torch.nn.functional` of a machine whose float32 log-softmax is off by 3e-3 of a nat, alike in all rows."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name)

    @staticmethod
    def log_softmax(z, dim):
        exact = torch.log_softmax(z, dim)
        return exact if z.dtype == torch.float64 else exact + 3e-3 * torch.linspace(-1, 1, z.shape[-1]).cos()


def faulty_job(number, device):
    """A job of doctor that succeeds, or ends its process or hangs in one of the ways that kernels do."""
    from distill.doctor.check_result import CheckResult

    os.write(1, b"a compiler says something\n")
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        os.write(2, b"LLVM ERROR: no such register\n")
        os._exit(70)
    if number == 4:
        time.sleep(600)
    return CheckResult(f"job {number}", number != 2, "CUDA error" * (number == 2))


def stored_documents(folder):
    """Return the stored tensors of each document in the shards of a folder, by the document's key."""
    from distill.teachers.backends.stored import format as layout

    found = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        arrays = layout.map_tensors(path)
        names = arrays.keys() - set(layout.DOCUMENTS)
        for number, key in enumerate(arrays["keys"]):
            start, stop = arrays["offsets"][number : number + 2].tolist()
            found[key.tobytes()] = {name: arrays[name][start:stop].tobytes() for name in names}
    return found


class Call(NamedTuple):
    """Call of an op: its name (`distill::glu`), arguments and result."""

    name: str
    args: tuple
    kwargs: dict
    result: object


@contextmanager
def ops_called(*names: str) -> Iterator[list[Call]]:
    """Note the calls of ops of PyTorch and of ours while the block runs; of all ops where none is named.

    What an op of ours calls within is not seen, and no launch is planned: calls go through the dispatcher.
    """
    calls: list[Call] = []

    class Noted(TorchDispatchMode):
        """Dispatch mode that changes nothing."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            """Make the call and note it."""
            result = function(*args, **(kwargs or {}))
            name = function.name().partition(".")[0]
            if not names or name in names:
                calls.append(Call(name, args, kwargs or {}, result))
            return result

    with Noted():
        yield calls


@contextmanager
def kernels_launched() -> Iterator[list[str]]:
    """Note the names of the Triton kernels that are launched, or interpreted, while the block runs."""
    import triton
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []
    execute = GridExecutor.__call__

    def interpret(executor, *args, **kwargs):
        names.append(executor.fn.__name__)
        return execute(executor, *args, **kwargs)

    def launched(metadata):
        names.append(metadata.get()["name"])

    GridExecutor.__call__ = interpret
    triton.knobs.runtime.launch_enter_hook.add(launched)
    try:
        yield names
    finally:
        GridExecutor.__call__ = execute
        triton.knobs.runtime.launch_enter_hook.remove(launched)


def operator_arguments(student, teacher, row_scale, vocab, **more):
    """Return the arguments by position and by name of `distill::linear_divergence`, fp32, of (hidden, weight) pairs."""
    from distill_kernels.losses.operator import TOKENS

    named = {
        "teacher_hidden": [teacher[0]],
        "teacher_weight": [teacher[1]],
        "teacher_bias": [None],
        "labels": None,
        "row_scale": row_scale,
        "valid_rows": None,
        "mixture": [1.0, 1.0, 0.0],  # share, scale and soft cap
        "lora_scale": 1.0,
        "vocab": vocab,
        "dtype": torch.float32,
        "workspace": None,
        "skip_rows": False,
        "no_ignored_rows": False,
        "per_row": False,
        "required": [True, True, False, False, False, True],
        **dict.fromkeys(TOKENS),
        "tail": "",
        "student_k": 0,
        "policy": "",
    }
    return (*student, None, None, None), named | more
