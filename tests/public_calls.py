"""One small call of every public function of distill_kernels, its tensors by name: for tests that try them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import distill_kernels as ours
import torch
from torch import nn

N, H, V, K = 70, 32, 48, 4  # rows: more than split_k_linear takes, so that triton_linear makes its own tiles
VALUE_TYPES = {"LossTerm", "TokenStats"}  # they hold what they are given, and compute nothing
SIXTEEN = (torch.bfloat16,)
BOTH = (torch.float32, torch.bfloat16)
Tensors = dict[str, torch.Tensor]


class Call(NamedTuple):
    """Example call of a public name.

    Attributes:
        run: Of the tensors, by name; returns a tensor or several.
        tensors: By name, fp32 where floating; those of `learned` get gradients.
        learned: Names of tensors that are differentiated.
        dtypes: In which it is called (on a GPU, too).
        fixed: Names of floating tensors that keep their dtype.
        family: Of calls that differ in their settings alone; "" of others.
        scalar: Whether it returns one number, whose upstream gradient has no strides.
    """

    run: Callable[..., object]
    tensors: Callable[[], Tensors]
    learned: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = BOTH
    fixed: frozenset[str] = frozenset()
    scalar: bool = False
    family: str = ""


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def below(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def call(
    run: Callable[..., object],
    learned: str = "",
    dtypes: tuple[torch.dtype, ...] = BOTH,
    fixed: str = "",
    scalar: bool = False,
    family: str = "",
    **tensors: Callable[[], torch.Tensor],
) -> Call:
    def make() -> Tensors:
        return {name: value() for name, value in tensors.items()}

    return Call(run, make, frozenset(learned.split()), dtypes, frozenset(fixed.split()), scalar, family)


STUDENT = {"student_hidden": lambda: floats(4, H), "student_weight": lambda: floats(V, H) * 0.2}
TEACHER = {"teacher_hidden": lambda: floats(4, 24), "teacher_weight": lambda: floats(V, 24, seed=1) * 0.2}
TOKENS = {
    "labels": lambda: below(V, 4, seed=1),
    "student_bias": lambda: floats(V, seed=2),
    "token_weights": lambda: floats(4, seed=3).abs() + 0.5,
    "valid_rows": lambda: torch.tensor([3, 0, 2]),
    "lora_a": lambda: floats(3, H, seed=4),
    "lora_b": lambda: floats(V, 3, seed=5) * 0.2,
}
TEACHER_BIAS = {"teacher_bias": lambda: floats(V, seed=6)}
TOP_K = {
    "teacher_ids": lambda: floats(4, V, seed=8).argsort(-1)[:, :K].contiguous(),
    "teacher_logprobs": lambda: floats(4, K, seed=7).log_softmax(-1) - 0.3,
}
SAMPLED = {
    "advantages": lambda: floats(4, seed=9),
    "old_logprobs": lambda: floats(4, seed=10) * 0.1 - 4,
    "reference_logprobs": lambda: floats(4, seed=11) - 4,
}
LEARNED = "student_hidden student_weight student_bias lora_a lora_b"


def linear(loss: Callable[..., object], *given: dict[str, Callable[[], torch.Tensor]], scalar: bool = True) -> Call:
    def run(lora_a: torch.Tensor, lora_b: torch.Tensor, **tensors: torch.Tensor) -> object:
        return loss(**tensors, student_lora=(lora_a, lora_b, 0.5))

    tensors = {name: value for part in (STUDENT, *given, TOKENS) for name, value in part.items()}
    return call(
        run,
        LEARNED,
        fixed=f"token_weights teacher_logprobs {' '.join(SAMPLED)}",
        scalar=scalar,
        family="linear",
        **tensors,
    )


def logits(loss: Callable[..., object], scalar: bool = True) -> Call:
    return call(
        loss,
        "student_logits",
        student_logits=lambda: floats(4, V),
        teacher_logits=lambda: floats(4, V, seed=1),
        labels=TOKENS["labels"],
        token_weights=TOKENS["token_weights"],
        fixed="token_weights",
        scalar=scalar,
        family="logits",
    )


def several_teachers(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor):
    two = [ours.TeacherHead(hidden, weight, 0.7, bias), ours.TeacherHead(hidden * 0.5, weight, 0.3)]
    return ours.FusedDistillationLoss([ours.LossTerm("forward_kl", 1.0)], 2.0)(x, w, teachers=two)


def own_loss(student: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor | None) -> torch.Tensor:
    assert teacher is not None and labels is not None
    picked = student.gather(1, labels[:, None])[:, 0]
    return (student - teacher).square().mean(-1) - picked


def head_of(weight: torch.Tensor, bias: torch.Tensor) -> nn.Module:
    head = nn.Linear(1, 1)
    del head.weight, head.bias
    head.weight, head.bias = weight, bias  # as given: a Parameter would lose no stride, but be another leaf
    return head


def through_head(student_hidden: torch.Tensor, student_weight: torch.Tensor, student_bias: torch.Tensor, **rest):
    return ours.head_loss(
        head_of(student_weight, student_bias), ours.FusedKLLoss(ce_weight=0.5), student_hidden, **rest
    )


def inside(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    head = head_of(weight, bias)
    return ours.call_inside(head, lambda x: ours.bias_gelu(x @ head.weight.t(), head.bias), hidden)


def adamw(gradient: torch.Tensor, parameter: torch.Tensor, other: torch.Tensor):
    # what an optimizer writes to is given it as it lies, expanded tensors aside, which nothing can be written to
    owners = [nn.Parameter(tensor.detach()) for tensor in (parameter, other)]
    owners[0].grad = gradient.detach()
    owners[1].grad = torch.ones_like(owners[1])
    before = [owner.detach().clone() for owner in owners]
    optimizer = ours.FusedAdamW(owners, lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    changed = [owner.detach().clone() for owner in owners]
    for owner, value in zip(owners, before, strict=True):
        owner.data.copy_(value)
    assert optimizer.grad_norm is not None
    return (*changed, optimizer.grad_norm)


def cached(keys: torch.Tensor, values: torch.Tensor, newest: torch.Tensor, counts: torch.Tensor, q: torch.Tensor):
    like = next(tensor for tensor in (q, keys) if isinstance(tensor, torch.Tensor))
    cache = ours.KVCache(2, 12, 2, 16, dtype=like.dtype, device=like.device)
    cache.append(keys, values, counts)
    cache.append(newest, newest)
    return cache.attend(q)


def in_fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    weight8, scale = ours.quantize_rows(weight)
    return ours.fp8_linear(x, weight8, scale.flatten(), bias)


def swapped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    linear = nn.Linear(H, V, device=x.device)
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    model = nn.Sequential(linear)
    ours.swap_linears_for_fp8(model)
    with torch.no_grad():
        return model(x)


def layer(module: nn.Module, **parameters: torch.Tensor) -> nn.Module:
    for name, tensor in parameters.items():
        delattr(module, name)
        setattr(module, name, tensor)
    return module


MATRICES = {"x": lambda: floats(5, H), "weight": lambda: floats(V, H) * 0.2, "bias": lambda: floats(V, seed=1)}
ROWS = {"x": lambda: floats(5, H), "weight": lambda: floats(H) + 1}
FIRST_AND_LAST = [ours.LossTerm("jsd", 0.5), ours.LossTerm("reverse_kl", 0.5), ours.LossTerm("cross_entropy", 0.3)]
LENGTHS = {"lengths": lambda: torch.tensor([9, 4]), "starts": lambda: torch.tensor([2, 1])}
CACHE = {"k": lambda: floats(2, 2, 12, 16), "v": lambda: floats(2, 2, 12, 16, seed=1)}

CALLS: dict[str, Call] = {
    "BiasGELU": call(lambda x, b: layer(ours.BiasGELU(H), bias=b)(x), "x b", x=ROWS["x"], b=ROWS["weight"]),
    "ChunkedLoss": linear(ours.ChunkedLoss(own_loss), TEACHER, TEACHER_BIAS),
    "Fp8Linear": call(lambda x, weight, bias: ours.Fp8Linear(weight, bias)(x), dtypes=SIXTEEN, **MATRICES),
    "FusedAdamW": call(
        adamw, gradient=lambda: floats(9, 16), parameter=lambda: floats(9, 16, seed=1), other=lambda: floats(5)
    ),
    "FusedCrossEntropyLoss": linear(ours.FusedCrossEntropyLoss(label_smoothing=0.1)),
    "FusedDistillationLoss": linear(ours.FusedDistillationLoss(FIRST_AND_LAST, 2.0), TEACHER, TEACHER_BIAS),
    "FusedJSDLoss": linear(ours.FusedJSDLoss(), TEACHER, TEACHER_BIAS),
    "FusedKLLoss": linear(ours.FusedKLLoss(ce_weight=0.5), TEACHER, TEACHER_BIAS),
    "FusedPolicyGradientLoss": linear(
        ours.FusedPolicyGradientLoss(kl_weight=0.5, reduction="none"), SAMPLED, scalar=False
    ),
    "FusedSkewKLLoss": linear(ours.FusedSkewKLLoss(), TEACHER, TEACHER_BIAS),
    "FusedStudentTopKKLLoss": linear(ours.FusedStudentTopKKLLoss(K, ce_weight=0.5), TEACHER, TEACHER_BIAS),
    "FusedTVDLoss": linear(ours.FusedTVDLoss(reduction="none"), TEACHER, TEACHER_BIAS, scalar=False),
    "FusedTopKKLLoss": linear(ours.FusedTopKKLLoss(ce_weight=0.5), TOP_K),
    "KVCache": call(
        cached,
        keys=lambda: floats(2, 2, 3, 16),
        values=lambda: floats(2, 2, 3, 16, seed=1),
        newest=lambda: floats(2, 2, 1, 16),
        counts=lambda: torch.tensor([3, 2]),
        q=lambda: floats(2, 4, 1, 16),
    ),
    "LayerNorm": call(
        lambda x, w, b: layer(ours.LayerNorm(H), weight=w, bias=b)(x),
        "x w b",
        x=ROWS["x"],
        w=ROWS["weight"],
        b=lambda: floats(H, seed=2),
    ),
    "RMSNorm": call(
        lambda x, r, w: layer(ours.RMSNorm(H, form="gemma"), weight=w)(x, r),
        "x r w",
        x=ROWS["x"],
        r=lambda: floats(5, H, seed=1),
        w=ROWS["weight"],
    ),
    "SplitKLinear": call(
        lambda x, weight, bias: ours.SplitKLinear(weight, bias)(x), "x weight bias", dtypes=SIXTEEN, **MATRICES
    ),
    "TeacherHead": call(
        several_teachers,
        "x w",
        scalar=True,
        hidden=TEACHER["teacher_hidden"],
        weight=TEACHER["teacher_weight"],
        bias=TEACHER_BIAS["teacher_bias"],
        x=STUDENT["student_hidden"],
        w=STUDENT["student_weight"],
    ),
    "add_rms_norm": call(ours.add_rms_norm, "x residual weight", residual=lambda: floats(5, H, seed=1), **ROWS),
    "bias_gelu": call(ours.bias_gelu, "x bias", x=ROWS["x"], bias=ROWS["weight"]),
    "call_inside": call(
        inside, "hidden weight bias", hidden=ROWS["x"], weight=MATRICES["weight"], bias=MATRICES["bias"]
    ),
    "cross_entropy": call(
        ours.cross_entropy,
        "student_logits",
        fixed="token_weights",
        scalar=True,
        student_logits=lambda: floats(4, V),
        labels=TOKENS["labels"],
        token_weights=TOKENS["token_weights"],
    ),
    "cu_seqlens_from_position_ids": call(
        ours.cu_seqlens_from_position_ids, position_ids=lambda: torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    ),
    "decode_attention": call(
        ours.decode_attention, q=lambda: floats(2, 4, 2, 16), sinks=lambda: floats(4, seed=2), **CACHE, **LENGTHS
    ),
    "distillation_loss": logits(
        lambda *a, **k: ours.distillation_loss(*a, terms=FIRST_AND_LAST, temperature=2.0, reduction="none", **k),
        scalar=False,
    ),
    "flash_attention": call(
        ours.flash_attention,
        "q k v sinks",
        q=lambda: floats(1, 2, 20, 16),
        k=lambda: floats(1, 1, 20, 16),
        v=lambda: floats(1, 1, 20, 16, seed=1),
        sinks=lambda: floats(2, seed=3),
        cu_seqlens_q=lambda: torch.tensor([0, 7, 20]),
        cu_seqlens_k=lambda: torch.tensor([0, 9, 20]),
    ),
    "fp8_linear": call(in_fp8, dtypes=SIXTEEN, **MATRICES),
    "fused_cross_entropy_loss": linear(ours.fused_cross_entropy_loss),
    "fused_distillation_loss": linear(
        lambda **k: ours.fused_distillation_loss(terms=FIRST_AND_LAST, **k), TEACHER, TEACHER_BIAS
    ),
    "fused_jsd_loss": linear(ours.fused_jsd_loss, TEACHER, TEACHER_BIAS),
    "fused_kl_loss": linear(ours.fused_kl_loss, TEACHER, TEACHER_BIAS),
    "fused_log_probs": call(
        lambda lora_a, lora_b, **k: ours.fused_log_probs(lora=(lora_a, lora_b, 0.5), **k),
        "hidden weight bias lora_a lora_b",
        hidden=STUDENT["student_hidden"],
        weight=STUDENT["student_weight"],
        bias=TOKENS["student_bias"],
        **{name: TOKENS[name] for name in ("labels", "valid_rows", "lora_a", "lora_b")},
    ),
    "fused_policy_gradient_loss": linear(
        lambda **k: ours.fused_policy_gradient_loss(clip=0.2, entropy_weight=0.1, **k), SAMPLED
    ),
    "fused_skew_kl_loss": linear(ours.fused_skew_kl_loss, TEACHER, TEACHER_BIAS),
    "fused_student_top_k_kl_loss": linear(
        lambda **k: ours.fused_student_top_k_kl_loss(k=K, tail="renormalize", **k), TEACHER, TEACHER_BIAS
    ),
    "fused_top_k_kl_loss": linear(lambda **k: ours.fused_top_k_kl_loss(tail="renormalize", **k), TOP_K),
    "fused_tvd_loss": linear(ours.fused_tvd_loss, TEACHER, TEACHER_BIAS),
    "geglu": call(ours.geglu, "gate up", gate=lambda: floats(5, H), up=lambda: floats(5, H, seed=1)),
    "glu": call(ours.glu, "gate", gate=lambda: floats(5, 2 * H)),
    "head_loss": call(
        through_head,
        scalar=True,
        learned="student_hidden student_weight student_bias",
        **STUDENT,
        **TEACHER,
        student_bias=TOKENS["student_bias"],
        labels=TOKENS["labels"],
    ),
    "jsd": logits(ours.jsd),
    "kl_div": logits(ours.kl_div),
    "kl_probabilities": call(
        ours.kl_probabilities,
        "input target",
        scalar=True,
        input=lambda: floats(5, H).log_softmax(-1),
        target=lambda: floats(5, H, seed=1).softmax(-1),
    ),
    "layer_norm": call(ours.layer_norm, "x weight bias", bias=lambda: floats(H, seed=2), **ROWS),
    "lora_linear": call(
        lambda x, weight, bias, a, b: ours.lora_linear(x, weight, bias, a, b, 0.5),
        "x a b",
        **MATRICES,
        a=lambda: floats(3, H, seed=3),
        b=lambda: floats(V, 3, seed=4),
    ),
    "quantize_rows": call(ours.quantize_rows, x=ROWS["x"]),
    "rms_norm": call(ours.rms_norm, "x weight", **ROWS),
    "rope": call(
        ours.rope,
        "q k",
        q=lambda: floats(2, 2, 3, 16),
        k=lambda: floats(2, 1, 3, 16),
        cos=lambda: floats(2, 3, 12),
        sin=lambda: floats(2, 3, 12, seed=1),
    ),
    "sample_tokens": call(
        ours.sample_tokens, logits=lambda: floats(5, V), seeds=lambda: below(1 << 40, 5), draws=lambda: below(9, 5)
    ),
    "skew_kl": logits(ours.skew_kl),
    "softmax": call(ours.softmax, "x", x=ROWS["x"]),
    "split_k_linear": call(ours.split_k_linear, "x weight bias", dtypes=SIXTEEN, **MATRICES),
    "swap_linears_for_fp8": call(swapped, dtypes=SIXTEEN, **MATRICES),
    "swiglu": call(ours.swiglu, "gate up", gate=lambda: floats(5, H), up=lambda: floats(5, H, seed=1)),
    "triton_linear": call(
        ours.triton_linear, dtypes=SIXTEEN, x=lambda: floats(N, H), weight=MATRICES["weight"], bias=MATRICES["bias"]
    ),
    "tvd": logits(ours.tvd),
}
