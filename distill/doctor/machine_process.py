"""Program of `doctor --machine`: compares kernels with PyTorch in fp64 on small shapes, and measures rates.

It is a separate process, since an unsupported kernel may crash the process or its CUDA context:

    python -m distill.doctor.machine_process cuda:0 0      # the jobs from number 0 on, two lines of JSON each

The error of a result may be SLACK times that of PyTorch in the same dtype, plus FLOOR.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.launch import HAS_TRITON, device_facts, interpreted, runs_on_triton

from distill.core.console import to_jsonable
from distill.doctor.invariants import CheckResult
from distill.doctor.machine_checks import CHECKS, FULL, SMALL, Check, Sizes, Tensor, wide
from distill.models.gpu_specs import gpu_spec_of

SLACK, FLOOR = 2.0, {torch.float32: 5e-6, torch.bfloat16: 5e-3}
LEAST_COPY, LEAST_GEMM = 0.6, 0.4  # smallest fraction of the data sheet's rates
BUSY = "; another program uses the GPU, or it is throttled (nvidia-smi -q -d PERFORMANCE)"
MARKS = {
    "tma": "cp.async.bulk.tensor",
    "cp.async": "cp.async.c",
    "wgmma": "wgmma.mma",
    "tcgen05": "tcgen05.mma",
    "mma": "mma.sync",
    "mfma": "v_mfma",
}


def check_kernel(check: Check, device: torch.device, sizes: Sizes) -> CheckResult:
    """Run a check on a device; the result names the launched kernels and the errors relative to fp64."""
    facts = device_facts(device)
    on_triton = runs_on_triton(torch.empty(0, device=device))
    if not check.needs(facts) and (device.type == "cuda" or on_triton):
        return CheckResult(check.name, None, f"not supported on {facts.family}")
    dtype = torch.float32 if check.wide or device.type != "cuda" or not facts.has_kernels else torch.bfloat16
    drawn = _drawn(check.shapes(sizes), dtype)
    exact = _results(check.reference, check, {name: x.double() for name, x in drawn.items()})
    here = {name: x.to(device) for name, x in drawn.items()}
    eager = _results(check.reference, check, here)
    with _launches() as launched:
        made = _results(check.ours, check, here)
    errors = [(_error(x, e), _error(t, e)) for x, t, e in zip(made, eager, exact, strict=True)]
    fine = [mine <= (check.allowed or SLACK * theirs + FLOOR[dtype]) for mine, theirs in errors]
    mine, theirs = max(errors, key=lambda pair: pair[0] / (pair[1] + FLOOR[dtype]))
    return CheckResult(check.name, all(fine), f"{_path(launched)}; error {mine:.1e}, PyTorch's {theirs:.1e}")


def _drawn(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: (x * 3 * x.shape[-1] ** -0.5 if "w" in name and x.dim() > 1 else x).to(dtype) for name, x in made.items()
    }


def _results(run: Callable[..., Any], check: Check, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of their randomly weighted sum."""
    learned = check.learned.split()
    given = {name: x.detach().clone().requires_grad_(name in learned) for name, x in tensors.items()}
    made = run(**given)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    if not learned:
        return outputs
    weights = [_drawn({"y": tuple(x.shape)}, torch.float32)["y"].to(x.device) if x.dim() else 1.0 for x in outputs]
    total = torch.stack([(wide(x) * y).sum() for x, y in zip(outputs, weights, strict=True)]).sum()
    return [*outputs, *torch.autograd.grad(total, [given[name] for name in learned])]


def _error(x: Tensor, exact: Tensor) -> float:
    """Return ||x - exact|| / ||exact||; infinite if there is a NaN."""
    x, exact = x.detach().double().cpu(), exact.detach().double().cpu()
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
    """Return a description of the kernels that ran: instructions, registers, shared memory."""
    if not launched:
        return "PyTorch"
    texts = []
    for name, kernel in launched.items():
        code = "".join(text for kind, text in getattr(kernel, "asm", {}).items() if kind in ("ptx", "amdgcn"))
        facts = [mark for mark, text in MARKS.items() if text in code]
        if (registers := getattr(kernel, "n_regs", None)) is not None:
            spilled = 4 * (getattr(kernel, "n_spills", None) or 0)
            facts += [f"{registers} registers", *([f"{spilled} bytes spilled"] if spilled else [])]
            facts.append(f"{kernel.metadata.shared / 1024:.0f} KiB shared")
        texts.append(f"{name} ({', '.join(facts)})" if facts else name)
    where = "" if any(hasattr(kernel, "asm") for kernel in launched.values()) else " in its interpreter"
    return f"Triton{where}: {', '.join(texts)}"


# ------------------------------------------------------------------ rates


def _seconds(run: Callable[[], object], device: torch.device, times: int = 10) -> float:
    for _ in range(3):
        run()
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begun) / times
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / times


def copy_rate(device: torch.device) -> CheckResult:
    """Measure a copy within the device's memory, GB/s read and written."""
    most = torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 64 << 20
    source = torch.zeros(min(1 << 30, most), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2e-9 * source.numel() / _seconds(lambda: target.copy_(source), device)
    gpu_spec = gpu_spec_of(device)
    return _rated("copy", rate, "GB/s", None if gpu_spec is None else gpu_spec.bandwidth, LEAST_COPY)


def gemm_rate(device: torch.device) -> CheckResult:
    """Measure a large GEMM, TFLOP/s: bf16 (fp16 without bf16 units) on a GPU, fp32 on a CPU."""
    gpu = device.type == "cuda"
    narrow = torch.bfloat16 if gpu and torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    dtype, size = (narrow, 8192) if gpu else (torch.float32, 1024)
    a = torch.randn(size, size, device=device, dtype=dtype)
    rate = 2e-12 * size**3 / _seconds(lambda: a @ a, device)
    gpu_spec = gpu_spec_of(device)
    name = f"GEMM, {str(dtype).removeprefix('torch.')}"
    return _rated(name, rate, "TFLOP/s", gpu_spec.bf16 if gpu_spec is not None else None, LEAST_GEMM)


def _rated(name: str, rate: float, unit: str, sheet: float | None, least: float) -> CheckResult:
    text = f"{rate:,.3g} {unit}" if rate < 100 else f"{rate:,.0f} {unit}"
    if sheet is None:
        return CheckResult(name, True, text)
    fine = rate >= least * sheet
    return CheckResult(name, fine, f"{text}, {rate / sheet:.0%} of the data sheet's {sheet:,.0f}" + BUSY * (not fine))


JOBS: list[tuple[str, Callable[[torch.device, Sizes], CheckResult]]] = [
    *((check.name, lambda device, sizes, check=check: check_kernel(check, device, sizes)) for check in CHECKS),
    ("copy", lambda device, sizes: copy_rate(device)),
    ("GEMM", lambda device, sizes: gemm_rate(device)),
]


def main(device_name: str, first: int) -> None:
    """Run the jobs from number `first` on; exit after one that breaks the CUDA context."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes = FULL if device.type == "cuda" else SMALL
    for number, (name, job) in enumerate(JOBS[first:], first):
        print(json.dumps({"number": number}), flush=True)
        begun = time.perf_counter()
        try:
            with interpreted() if os.environ.get("TRITON_INTERPRET") == "1" else contextlib.nullcontext():
                finding = job(device, sizes)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # a compiler or driver may raise anything
            first_line = (str(error).strip().splitlines() or [""])[0]
            finding = CheckResult(name, False, f"{type(error).__name__}: {first_line:.300}")
        finding = finding._replace(seconds=time.perf_counter() - begun)
        print(json.dumps({"number": number, "finding": to_jsonable(finding)}), flush=True)
        if "CUDA error" in finding.detail or "HIP error" in finding.detail:
            sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
