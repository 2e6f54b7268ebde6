"""Checks of `doctor --machine`: each public kernel against its own reference in fp64, and a GPU's rates.

A public function of distill_kernels takes its PyTorch reference on CPU tensors, in any dtype: one call gives a kernel's
result on the GPU, the exact result (fp64, CPU), and what the dtype allows (the same reference in the GPU's dtype).
A relative error may be SLACK times that of the reference in the same dtype, plus FLOOR.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import distill_kernels as ours
import torch
from distill_kernels.launch import HAS_TRITON, INTERPRETER, DeviceFacts, device_facts, interpreted

from distill.doctor.check_result import CheckResult
from distill.models.gpu_specs import gpu_spec_of

SLACK, FLOOR = 2.0, {torch.float32: 5e-6, torch.bfloat16: 5e-3}
LEAST_COPY, LEAST_GEMM = 0.6, 0.4  # smallest fraction of the data sheet's rates
BUSY = "; another program uses the GPU, or it is throttled (nvidia-smi -q -d PERFORMANCE)"
SMALL, FULL = (20, 32, 304, 40, 4, 2, 16), (384, 256, 5008, 320, 8, 2, 64)
Sizes = tuple[int, ...]
Shapes = dict[str, tuple[int, ...]]
Tensor = torch.Tensor


def shapes_of(sizes: Sizes) -> Shapes:
    """Return the shapes of the tensors of all checks, by the names under which the checks take them.

    Args:
        sizes: Tokens, hidden size, vocabulary, sequence length, heads, key-value heads, head size.
    """
    rows, hidden, vocab, length, heads, kv_heads, size = sizes
    keys, cached = (1, kv_heads, length, size), (2, kv_heads, length, size)
    shapes: Shapes = {"x": (rows, hidden), "y": (rows, hidden), "head": (vocab, hidden), "z": (rows, vocab)}
    shapes |= {"x_t": (rows, 2 * hidden), "head_t": (vocab, 2 * hidden), "z_t": (rows, vocab)}
    shapes |= {"scale": (hidden,), "bias": (hidden,), "w": (2 * hidden, hidden)}
    shapes |= {"few": (16, hidden), "many": (160, hidden), "a": (4, hidden), "b": (2 * hidden, 4)}
    shapes |= {"q": (1, heads, length, size), "k": keys, "v": keys, "angles": (1, length, size // 2)}
    return shapes | {"newest": (2, heads, 1, size), "cached_k": cached, "cached_v": cached}


class Check(NamedTuple):
    """Public function of distill_kernels.

    Attributes:
        call: Function of tensors named as in `shapes_of`, standard normal, that returns one or several tensors.
        learned: Names of the tensors that are differentiated.
        needs: Function that returns whether a device supports it.
        wide: Compute in fp32 on GPUs too.
    """

    call: Callable[..., Any]
    learned: str = ""
    needs: Callable[[DeviceFacts], bool] = lambda facts: True
    wide: bool = False


def _labels(x: Tensor, vocab: int) -> Tensor:
    return (torch.arange(len(x), device=x.device) * 7919) % vocab


def _top_k(x: Tensor, head: Tensor, z_t: Tensor) -> Any:
    log_probs = z_t.double().log_softmax(-1)
    # bf16 logits are often equal, and a CPU and a GPU order equal ones differently: the smaller id goes first
    ids = (log_probs - 1e-9 * torch.arange(z_t.shape[1], device=z_t.device)).topk(8).indices
    return ours.fused_top_k_kl_loss(x, head, ids, log_probs.gather(1, ids).to(x.dtype))


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    bounds = torch.tensor([0, length // 3, length // 2, length], dtype=torch.int32, device=q.device)
    return ours.flash_attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def _decoded(newest: Tensor, cached_k: Tensor, cached_v: Tensor) -> Tensor:
    length = cached_k.shape[2]
    lengths = torch.tensor([length, length // 2 + 1], dtype=torch.int32, device=newest.device)
    return ours.decode_attention(newest, cached_k, cached_v, lengths)


def _cached(newest: Tensor, cached_k: Tensor, cached_v: Tensor) -> Tensor:
    batch, heads, length, size = cached_k.shape
    cache = ours.KVCache(batch, length + 3, heads, size, dtype=newest.dtype, device=newest.device)
    cache.append(cached_k, cached_v)
    return cache.attend(newest)


def _rotated(q: Tensor, k: Tensor, angles: Tensor) -> Any:
    both = torch.cat((angles, angles), -1)
    return ours.rope(q, k, both.cos(), both.sin())


def _fp8(x: Tensor, w: Tensor) -> Tensor:
    weight, scale = ours.quantize_rows(w)
    return ours.fp8_linear(x, weight, scale.flatten())


def _adamw(x: Tensor, y: Tensor) -> Tensor:
    parameter = x.clone()
    optimizer = ours.FusedAdamW([parameter], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        parameter.grad = y.clone()
        optimizer.step()
    return parameter.detach()


def _greedy(z: Tensor) -> Tensor:
    zeros = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    return ours.sample_tokens(z, zeros, zeros, temperature=0.0)


def _mixture(x: Tensor, head: Tensor, x_t: Tensor, head_t: Tensor) -> Any:
    teachers = [ours.TeacherHead(x_t, head_t, 0.75), ours.TeacherHead(-x_t, head_t, 0.25)]
    return ours.FusedKLLoss()(x, head, teachers=teachers)


CHECKS = {
    "fused KL": Check(lambda x, head, x_t, head_t: ours.fused_kl_loss(x, head, x_t, head_t), "x head"),
    "fused JSD": Check(lambda x, head, x_t, head_t: ours.fused_jsd_loss(x, head, x_t, head_t), "x head"),
    "fused cross-entropy": Check(
        lambda x, head: ours.fused_cross_entropy_loss(x, head, _labels(x, len(head))),
        "x head",
    ),
    "fused KL of several teachers": Check(_mixture, "x head"),
    "fused top-k KL": Check(_top_k, "x head"),
    "KL over logits": Check(lambda z, z_t: ours.kl_div(z, z_t), "z"),
    "JSD over logits": Check(lambda z, z_t: ours.jsd(z, z_t), "z"),
    "cross-entropy over logits": Check(lambda z: ours.cross_entropy(z, _labels(z, z.shape[1])), "z"),
    "KL of probabilities": Check(
        lambda z, z_t: ours.kl_probabilities(z.log_softmax(-1), z_t.softmax(-1), "batchmean"),
        "z",
        wide=True,
    ),
    "RMSNorm": Check(lambda x, scale: ours.rms_norm(x, scale), "x scale"),
    "residual and RMSNorm": Check(lambda x, y, scale: ours.add_rms_norm(x, y, scale), "x y scale"),
    "LayerNorm": Check(lambda x, scale, bias: ours.layer_norm(x, scale, bias), "x scale bias"),
    "SwiGLU": Check(lambda x, y: ours.swiglu(x, y), "x y"),
    "GEGLU": Check(lambda x, y: ours.geglu(x, y), "x y"),
    "bias and GELU": Check(lambda x, bias: ours.bias_gelu(x, bias), "x bias"),
    "rotary embedding": Check(_rotated, "q k"),
    "softmax": Check(lambda z: ours.softmax(z), "z"),
    "attention": Check(lambda q, k, v: ours.flash_attention(q, k, v), "q k v"),
    "attention of packed documents": Check(_packed, "q k v"),
    "attention of a new token": Check(_decoded),
    "key-value cache": Check(_cached),
    "greedy tokens": Check(_greedy, wide=True),
    "product of few rows": Check(lambda few, w: ours.split_k_linear(few, w), "few w"),
    "product by tiles": Check(
        lambda many, w: ours.triton_linear(many, w),
        needs=lambda facts: facts.tma or not facts.has_kernels,
    ),
    # Triton's interpreter does not round e4m3 to the nearest
    "fp8 layer": Check(_fp8, needs=lambda facts: facts.fp8 and facts.family != INTERPRETER),
    "LoRA layer": Check(lambda x, w, a, b: ours.lora_linear(x, w, None, a, b, 0.5), "x a b"),
    "AdamW": Check(_adamw, wide=True),
}


def check_kernel(name: str, device: torch.device) -> CheckResult:
    """Run a check of CHECKS on a device; the result names the launched kernels and the errors relative to fp64."""
    check = CHECKS[name]
    facts = device_facts(device)
    on_triton = os.environ.get("TRITON_INTERPRET") == "1" if device.type == "cpu" else facts.has_kernels
    if not check.needs(facts) and (device.type == "cuda" or on_triton):
        return CheckResult(name, None, f"not supported on {facts.family}")
    dtype = torch.float32 if check.wide or device.type != "cuda" or not facts.has_kernels else torch.bfloat16
    shapes = shapes_of(FULL if device.type == "cuda" else SMALL)
    drawn = draw({key: shapes[key] for key in inspect.signature(check.call).parameters}, dtype)
    exact = results_of(check, {key: x.double() for key, x in drawn.items()})
    eager = results_of(check, drawn)
    with _launches() as launched, interpreted() if device.type == "cpu" and on_triton else contextlib.nullcontext():
        made = results_of(check, {key: x.to(device) for key, x in drawn.items()})
    errors = [(_error(x, e), _error(t, e)) for x, t, e in zip(made, eager, exact, strict=True)]
    fine = [mine <= SLACK * theirs + FLOOR[dtype] for mine, theirs in errors]
    mine, theirs = max(errors, key=lambda pair: pair[0] / (pair[1] + FLOOR[dtype]))
    return CheckResult(name, all(fine), f"{_path(launched)}; error {mine:.1e}, PyTorch's {theirs:.1e}")


def draw(shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return normal tensors, equal in each call; weights scaled so that logits have a deviation of 3."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = ("w", "head", "head_t")
    return {name: (x * 3 * x.shape[-1] ** -0.5 if name in weights else x).to(dtype) for name, x in made.items()}


def results_of(check: Check, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of their randomly weighted sum."""
    learned = check.learned.split()
    given = {name: x.detach().clone().requires_grad_(name in learned) for name, x in tensors.items()}
    made = check.call(**given)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    if not learned:
        return outputs
    weights = [draw({"upstream": tuple(x.shape)}, torch.float32)["upstream"] if x.dim() else 1.0 for x in outputs]
    wide = [x if x.dtype == torch.float64 else x.float() for x in outputs]
    parts = [(x * (y.to(x.device) if isinstance(y, Tensor) else y)).sum() for x, y in zip(wide, weights, strict=True)]
    return [*outputs, *torch.autograd.grad(torch.stack(parts).sum(), [given[name] for name in learned])]


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
    """Return a description of the kernels that ran: registers, spilled bytes, shared memory."""
    texts = []
    for name, kernel in launched.items():
        if getattr(kernel, "n_regs", None) is not None:
            spilled, shared = 4 * (getattr(kernel, "n_spills", None) or 0), kernel.metadata.shared / 1024
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
