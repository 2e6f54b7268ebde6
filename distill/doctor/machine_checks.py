"""Checks of `doctor --machine`: each kernel against its own reference in fp64, and a GPU's rates.

What is checked are the examples of distill_kernels, a row for each op and setting. An op takes its PyTorch reference on
CPU tensors, in any dtype: one call gives a kernel's result on the GPU, the exact result (fp64, CPU), and what the dtype
allows (the same reference in the GPU's dtype). A relative error may be SLACK times that of the reference in the same
dtype, plus FLOOR.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.examples import EXAMPLES, FULL, SMALL, Example, floats
from distill_kernels.launch import HAS_TRITON, device_facts, interpreted

from distill.doctor.check_result import CheckResult
from distill.models.gpu_specs import gpu_spec_of

SLACK = 2.0
FLOOR = {torch.float32: 5e-6, torch.bfloat16: 5e-3}
# smallest fraction of the data sheet's rates
LEAST_COPY = 0.6
LEAST_GEMM = 0.4
BUSY = "; another program uses the GPU, or it is throttled (nvidia-smi -q -d PERFORMANCE)"
Tensor = torch.Tensor
CHECKS = EXAMPLES


def check_kernel(name: str, device: torch.device) -> CheckResult:
    """Run a check of CHECKS on a device; the result names the launched kernels and the errors relative to fp64."""
    check = CHECKS[name]
    facts = device_facts(device)
    on_triton = os.environ.get("TRITON_INTERPRET") == "1" if device.type == "cpu" else facts.has_kernels
    if not check.needs(facts) and (device.type == "cuda" or on_triton):
        return CheckResult(name, None, f"not supported on {facts.family}")
    dtype = torch.float32 if check.wide or device.type != "cuda" or not facts.has_kernels else torch.bfloat16
    drawn = check.tensors(FULL if device.type == "cuda" else SMALL)
    drawn = {key: x if key in check.fixed or not x.is_floating_point() else x.to(dtype) for key, x in drawn.items()}
    exact = results_of(check, {key: x.double() if x.is_floating_point() else x for key, x in drawn.items()})
    eager = results_of(check, drawn)
    with _launches() as launched, interpreted() if device.type == "cpu" and on_triton else contextlib.nullcontext():
        made = results_of(check, {key: x.to(device) for key, x in drawn.items()})
    errors = [(_error(x, e), _error(t, e)) for x, t, e in zip(made, eager, exact, strict=True)]
    fine = [mine <= SLACK * theirs + FLOOR[dtype] for mine, theirs in errors]
    mine, theirs = max(errors, key=lambda pair: pair[0] / (pair[1] + FLOOR[dtype]))
    return CheckResult(name, all(fine), f"{_path(launched)}; error {mine:.1e}, PyTorch's {theirs:.1e}")


def results_of(example: Example, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of their randomly weighted sum."""
    learned = sorted(example.learned)
    given = {name: x.detach().clone().requires_grad_(name in learned) for name, x in tensors.items()}
    made: Any = example.run(**given)
    outputs: list[Tensor] = [made] if isinstance(made, Tensor) else list(made)
    if not learned:
        return outputs
    # drawn apart from the inputs: a norm's gradient along its own input is 0, whatever is wrong with it
    weights = [floats(*x.shape, seed=7919 + place) if x.dim() else 1.0 for place, x in enumerate(outputs)]
    wide = [x if x.dtype == torch.float64 else x.float() for x in outputs]
    parts = [(x * (y.to(x.device) if isinstance(y, Tensor) else y)).sum() for x, y in zip(wide, weights, strict=True)]
    return [*outputs, *torch.autograd.grad(torch.stack(parts).sum(), [given[name] for name in learned])]


def _error(x: Tensor, exact: Tensor) -> float:
    """Return ||x - exact|| / ||exact||; infinite if there is a NaN."""
    x = x.detach().double().cpu()
    exact = exact.detach().double().cpu()
    error = ((x - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


@contextlib.contextmanager
def _launches() -> Iterator[dict[str, Any]]:
    """Record the Triton kernels launched in the block: the last launch's compiled form, by name."""
    launched: dict[str, Any] = {}
    if not HAS_TRITON:
        yield launched
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]

    def recording(run: Any) -> Any:
        def recorded(self: Any, *args: Any, **settings: Any) -> Any:
            launched[self.fn.__name__] = kernel = run(self, *args, **settings)
            return kernel

        return recorded

    for kind, run in before:
        kind.run = recording(run)
    try:
        yield launched
    finally:
        for kind, run in before:
            kind.run = run


def _path(launched: dict[str, Any]) -> str:
    """Return a description of the kernels that ran: registers, spilled bytes, shared memory."""
    texts = []
    for name, kernel in launched.items():
        if getattr(kernel, "n_regs", None) is not None:
            spilled = 4 * (getattr(kernel, "n_spills", None) or 0)
            shared = kernel.metadata.shared / 1024
            name += f" ({kernel.n_regs} registers, {spilled} bytes spilled, {shared:.0f} KiB shared)"
        texts.append(name)
    where = "" if any(hasattr(kernel, "asm") for kernel in launched.values()) else " in its interpreter"
    return f"Triton{where}: {', '.join(texts)}" if launched else "PyTorch"


# ------------------------------------------------------------------ rates


def _seconds(run: Callable[[], object], device: torch.device, times: int = 10) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    for _ in range(3):
        run()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - begun) / times


def copy_rate(device: torch.device) -> CheckResult:
    """Measure a copy within the device's memory, GB/s read and written."""
    most = torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 64 << 20
    source = torch.zeros(min(1 << 30, most), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2e-9 * source.numel() / _seconds(lambda: target.copy_(source), device)
    gpu_spec = gpu_spec_of(device)
    return rated("copy", rate, "GB/s", None if gpu_spec is None else gpu_spec.bandwidth, LEAST_COPY)


def gemm_rate(device: torch.device) -> CheckResult:
    """Measure a large GEMM, TFLOP/s: bf16 (fp16 without bf16 units) on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    narrow = torch.bfloat16 if gpu and torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    dtype, size = (narrow, 8192) if gpu else (torch.float32, 1024)
    a = torch.randn(size, size, device=device, dtype=dtype)
    rate = 2e-12 * size**3 / _seconds(lambda: a @ a, device)
    gpu_spec = gpu_spec_of(device)
    name = f"GEMM, {str(dtype).removeprefix('torch.')}"
    return rated(name, rate, "TFLOP/s", gpu_spec.bf16 if gpu_spec is not None else None, LEAST_GEMM)


def rated(name: str, rate: float, unit: str, sheet: float | None, least: float) -> CheckResult:
    """Return the result for a measured rate; it fails below a fraction `least` of the data sheet's."""
    text = f"{rate:,.3g} {unit}" if rate < 100 else f"{rate:,.0f} {unit}"
    if sheet is None:
        return CheckResult(name, True, text)
    fine = rate >= least * sheet
    return CheckResult(name, fine, f"{text}, {rate / sheet:.0%} of the data sheet's {sheet:,.0f}" + BUSY * (not fine))
