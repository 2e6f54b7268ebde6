"""Table of the public functions of distill_kernels, each with a plain PyTorch reference, for `doctor --machine`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import distill_kernels as ours
import torch
from distill_kernels.launch import INTERPRETER, DeviceFacts
from torch.nn import functional as F

FP8_ALLOWED = 6e-2  # relative error of an fp8 layer
Tensor = torch.Tensor


class Sizes(NamedTuple):
    """Sizes of the tensors: tokens, hidden size, vocabulary, sequence length, heads, key-value heads, head size."""

    rows: int
    hidden: int
    vocab: int
    length: int
    heads: int = 4
    kv_heads: int = 2
    size: int = 16


SMALL, FULL = Sizes(20, 32, 304, 40), Sizes(384, 256, 5008, 320, 8, 2, 64)


class Check(NamedTuple):
    """Public function of distill_kernels and its reference.

    Attributes:
        name: Display name.
        shapes: Function from `Sizes` to the shapes of its tensors by name; fp32, standard normal.
        ours, reference: Functions of these tensors that return one or several tensors; the reference works in any
            dtype.
        learned: Names of the tensors that are differentiated.
        needs: Function that returns whether a device supports it.
        wide: Compute in fp32 on GPUs too.
        allowed: Bound on the relative error; None for the one from SLACK and FLOOR.
    """

    name: str
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    learned: str = ""
    needs: Callable[[DeviceFacts], bool] = lambda facts: True
    wide: bool = False
    allowed: float | None = None


# ------------------------------------------------------------------ plain PyTorch


def wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or fp64 if it has that dtype."""
    return x if x.dtype == torch.float64 else x.float()


def _logits(x: Tensor, w: Tensor) -> Tensor:
    return wide(x) @ wide(w).t()


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    p, q = wide(student).log_softmax(-1), wide(teacher).log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1).mean()


def _jsd(student: Tensor, teacher: Tensor) -> Tensor:
    p, q = wide(student).log_softmax(-1), wide(teacher).log_softmax(-1)
    m = ((p.exp() + q.exp()) / 2).log()
    return ((p.exp() * (p - m) + q.exp() * (q - m)) / 2).sum(-1).mean()


def _labels(x: Tensor, vocab: int) -> Tensor:
    return (torch.arange(len(x), device=x.device) * 7919) % vocab


def _mixture(x: Tensor, w: Tensor, x_t: Tensor, w_t: Tensor) -> Tensor:
    both = [_logits(states, w_t).softmax(-1) for states in (x_t, -x_t)]
    return _kl(_logits(x, w), (0.75 * both[0] + 0.25 * both[1]).log())


def _top(logits: Tensor, count: int = 8) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of a teacher's top-`count` tokens, with the same ids in every dtype."""
    ids = logits.detach().double().topk(count).indices
    return ids, wide(logits).log_softmax(-1).gather(-1, ids)


def _bucket_kl(x: Tensor, w: Tensor, z_t: Tensor) -> Tensor:
    ids, q = _top(z_t)
    p = _logits(x, w).log_softmax(-1).gather(-1, ids)
    rest_p, rest_q = (torch.log1p(-part.exp().sum(-1)) for part in (p, q))
    return ((q.exp() * (q - p)).sum(-1) + rest_q.exp() * (rest_q - rest_p)).mean()


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def _documents(length: int, device: torch.device) -> Tensor:
    """Return the bounds of three documents in a row, int32 [4]."""
    return torch.tensor([0, length // 3, length // 2, length], dtype=torch.int32, device=device)


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = _documents(q.shape[2], q.device).tolist()
    cut = [slice(*pair) for pair in itertools.pairwise(bounds)]
    return torch.cat([_attention(*(x[:, :, part] for x in (q, k, v))) for part in cut], 2)


def _lengths(k: Tensor) -> Tensor:
    return torch.tensor([k.shape[2], k.shape[2] // 2 + 1], dtype=torch.int32, device=k.device)


def _decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.arange(k.shape[2], device=k.device)[None] < _lengths(k)[:, None]
    return _attention(q, k, v, seen[:, None, None])


def _cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, length, size = k.shape
    cache = ours.KVCache(batch, length + 3, heads, size, dtype=k.dtype, device=k.device)
    cache.append(k, v)
    return cache.attend(q)


def _rotated(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    both = torch.cat((angles, angles), -1)
    turned = [torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) for x in (q, k)]
    return tuple(x * both.cos() + y * both.sin() for x, y in zip((q, k), turned, strict=True))


def _rope(q: Tensor, k: Tensor, angles: Tensor) -> Any:
    both = torch.cat((angles, angles), -1)[None]
    return ours.rope(q, k, both.cos(), both.sin())


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return (wide(x) * (wide(x).square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * w


def _steps(kind: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that makes three steps of an AdamW optimizer."""

    def run(parameter: Tensor, gradient: Tensor) -> Tensor:
        parameter = parameter.clone()
        optimizer = kind([parameter], lr=0.01, weight_decay=0.1)
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    return run


def _greedy(z: Tensor) -> Tensor:
    zeros = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    return ours.sample_tokens(z, zeros, zeros, temperature=0.0)


def _fp8(x: Tensor, w: Tensor) -> Tensor:
    weight, scale = ours.quantize_rows(w)
    return ours.fp8_linear(x, weight, scale.flatten())


# ------------------------------------------------------------------ the table


def _heads(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"x": (s.rows, s.hidden), "w": (s.vocab, s.hidden), "x_t": (s.rows, 2 * s.hidden),
            "w_t": (s.vocab, 2 * s.hidden)}  # fmt: skip


def _qkv(s: Sizes) -> dict[str, tuple[int, ...]]:
    keys = (1, s.kv_heads, s.length, s.size)
    return {"q": (1, s.heads, s.length, s.size), "k": keys, "v": keys}


def _newest(s: Sizes) -> dict[str, tuple[int, ...]]:
    keys = (2, s.kv_heads, s.length, s.size)
    return {"q": (2, s.heads, 1, s.size), "k": keys, "v": keys}


def _named(*names: str) -> Callable[[Sizes], dict[str, tuple[int, ...]]]:
    return lambda s: {name: (s.rows, s.hidden) if name in "xyr" else (s.hidden,) for name in names}


def _product(rows: int) -> Callable[[Sizes], dict[str, tuple[int, ...]]]:
    return lambda s: {"x": (rows, s.hidden), "w": (2 * s.hidden, s.hidden)}


def _pair(s: Sizes) -> dict[str, tuple[int, ...]]:
    return {"student": (s.rows, s.vocab), "teacher": (s.rows, s.vocab)}


CHECKS = [
    Check("fused KL", _heads, lambda x, w, x_t, w_t: ours.fused_kl_loss(x, w, x_t, w_t),
          lambda x, w, x_t, w_t: _kl(_logits(x, w), _logits(x_t, w_t)), "x w"),
    Check("fused JSD", _heads, lambda x, w, x_t, w_t: ours.fused_jsd_loss(x, w, x_t, w_t),
          lambda x, w, x_t, w_t: _jsd(_logits(x, w), _logits(x_t, w_t)), "x w"),
    Check("fused cross-entropy", lambda s: dict(list(_heads(s).items())[:2]),
          lambda x, w: ours.fused_cross_entropy_loss(x, w, _labels(x, len(w))),
          lambda x, w: F.cross_entropy(_logits(x, w), _labels(x, len(w))), "x w"),
    Check("fused KL of several teachers", _heads,
          lambda x, w, x_t, w_t: ours.FusedKLLoss()(
              x, w, teachers=[ours.TeacherHead(x_t, w_t, 0.75), ours.TeacherHead(-x_t, w_t, 0.25)]),
          _mixture, "x w"),
    Check("fused top-k KL", lambda s: {**dict(list(_heads(s).items())[:2]), "z_t": (s.rows, s.vocab)},
          lambda x, w, z_t: ours.fused_top_k_kl_loss(x, w, *_top(z_t)), _bucket_kl, "x w"),
    Check("KL over logits", _pair, lambda student, teacher: ours.kl_div(student, teacher), _kl, "student"),
    Check("JSD over logits", _pair, lambda student, teacher: ours.jsd(student, teacher), _jsd, "student"),
    Check("cross-entropy over logits", lambda s: {"z": (s.rows, s.vocab)},
          lambda z: ours.cross_entropy(z, _labels(z, z.shape[1])),
          lambda z: F.cross_entropy(wide(z), _labels(z, z.shape[1])), "z"),
    Check("KL of probabilities", _pair,
          lambda student, teacher: ours.kl_probabilities(
              wide(student).log_softmax(-1), wide(teacher).softmax(-1), "batchmean"), _kl, "student"),
    Check("RMSNorm", _named("x", "w"), lambda x, w: ours.rms_norm(x, w), _rms, "x w"),
    Check("residual and RMSNorm", _named("x", "r", "w"), lambda x, r, w: ours.add_rms_norm(x, r, w),
          lambda x, r, w: (_rms(x + r, w), x + r), "x r w"),
    Check("LayerNorm", _named("x", "w", "b"), lambda x, w, b: ours.layer_norm(x, w, b),
          lambda x, w, b: F.layer_norm(x, w.shape, w, b), "x w b"),
    Check("SwiGLU", _named("x", "y"), lambda x, y: ours.swiglu(x, y), lambda x, y: F.silu(x) * y, "x y"),
    Check("GEGLU", _named("x", "y"), lambda x, y: ours.geglu(x, y), lambda x, y: F.gelu(x) * y, "x y"),
    Check("bias and GELU", _named("x", "b"), lambda x, b: ours.bias_gelu(x, b), lambda x, b: F.gelu(x + b), "x b"),
    Check("rotary embedding", lambda s: {**dict(list(_qkv(s).items())[:2]), "angles": (s.length, s.size // 2)},
          _rope, _rotated, "q k"),
    Check("softmax", lambda s: {"z": (s.rows, s.vocab)}, lambda z: ours.softmax(z), lambda z: z.softmax(-1), "z"),
    Check("attention", _qkv, lambda q, k, v: ours.flash_attention(q, k, v), _attention, "q k v"),
    Check("attention of packed documents", _qkv,
          lambda q, k, v: ours.flash_attention(
              q, k, v, cu_seqlens_q=_documents(q.shape[2], q.device), cu_seqlens_k=_documents(q.shape[2], q.device)),
          _packed, "q k v"),
    Check("attention of a new token", _newest,
          lambda q, k, v: ours.decode_attention(q, k, v, _lengths(k)), _decoded),
    Check("key-value cache", _newest, _cached,
          lambda q, k, v: _attention(q, k, v, torch.ones(1, k.shape[2], dtype=torch.bool, device=q.device))),
    Check("greedy tokens", lambda s: {"z": (s.rows, s.vocab)},
          _greedy,
          lambda z: z.argmax(-1), wide=True),
    Check("product of few rows", _product(16), lambda x, w: ours.split_k_linear(x, w), lambda x, w: x @ w.t(), "x w"),
    Check("product by tiles", _product(160), lambda x, w: ours.triton_linear(x, w), lambda x, w: x @ w.t(),
          needs=lambda facts: facts.tma or not facts.has_kernels),
    Check(  # Triton's interpreter does not round e4m3 to the nearest
        "fp8 layer", _product(64), _fp8, lambda x, w: x @ w.t(), allowed=FP8_ALLOWED,
        needs=lambda facts: facts.fp8 and facts.family != INTERPRETER,
    ),
    Check("LoRA layer", lambda s: {**_product(64)(s), "a": (4, s.hidden), "b": (2 * s.hidden, 4)},
          lambda x, w, a, b: ours.lora_linear(x, w, None, a, b, 0.5),
          lambda x, w, a, b: x @ w.t() + 0.5 * ((x @ a.t()) @ b.t()), "x a b"),
    Check("AdamW", lambda s: {"parameter": (s.rows, s.hidden), "gradient": (s.rows, s.hidden)},
          _steps(ours.FusedAdamW), _steps(torch.optim.AdamW), wide=True),
]  # fmt: skip
