"""Examples of every op: one row each, its call, tensors, what is differentiated, and where it can run.

Read by `distill doctor --machine` (every row against its own reference in fp64), by the tests of strides, refusals and
outputs (the rows of public names, at TINY sizes), and by the test that every compiled kernel has an example. Rows of
losses, fake quantisers and attention follow from their tables: a divergence or a format that is added is in here.

A CPU tensor takes the op's reference, in any dtype: `example.run(**example.tensors(sizes))` is the specification too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import distill_kernels as ours
from distill_kernels.decoding.experts import decode_experts
from distill_kernels.launch import INTERPRETER, DeviceFacts
from distill_kernels.layers.attention_relation import relation_divergence
from distill_kernels.layers.experts import experts
from distill_kernels.layers.router import route
from distill_kernels.layers.state_distance import state_distance
from distill_kernels.losses import DIVERGENCES
from distill_kernels.losses.policy_reference import KL_ESTIMATORS
from distill_kernels.matmul.fp8 import fp8_rms_norm
from distill_kernels.matmul.fp8_experts import Fp8Experts
from distill_kernels.matmul.fp8_train import fp8_linears, fp8_swiglu_mlp
from distill_kernels.matmul.shared_input import shared_linear
from distill_kernels.quantisation.fake_quantise import fake_quantise_into, learned_gradients
from distill_kernels.quantisation.formats import FORMATS

VALUE_TYPES = {"Clip", "LossTerm", "Temperatures", "TokenStats"}  # they hold what they are given, and compute nothing
SIXTEEN = (torch.bfloat16,)
BOTH = (torch.float32, torch.bfloat16)
MANY = 160  # rows: more than split_k_linear takes, so that triton_linear makes its own tiles
Tensors = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    """Sizes of the tensors of all examples: of losses and layers, then of attention, and the K of top-k losses."""

    rows: int
    hidden: int
    vocab: int
    length: int
    heads: int
    kv_heads: int
    head: int
    k: int


TINY = Sizes(4, 32, 48, 20, 2, 1, 16, 4)
SMALL = Sizes(20, 32, 304, 40, 4, 2, 16, 8)  # several blocks for the interpreter, the last ones incomplete
FULL = Sizes(384, 256, 5008, 320, 8, 2, 64, 8)
Make = Callable[[Sizes], torch.Tensor]


def _anywhere(facts: DeviceFacts) -> bool:
    return True


def _fp8_units(facts: DeviceFacts) -> bool:
    return facts.fp8 and facts.family != INTERPRETER  # which does not round e4m3 to the nearest


def _tiles(facts: DeviceFacts) -> bool:
    return facts.tma or not facts.has_kernels


def _rounding(facts: DeviceFacts) -> bool:
    return facts.family != INTERPRETER  # which truncates fp32 to bf16


class Example(NamedTuple):
    """Example call of an op.

    Attributes:
        run: Of the tensors, by name; returns a tensor or several.
        tensors: By name, of some sizes, on the CPU, fp32 where floating.
        learned: Names of tensors that are differentiated.
        dtypes: In which it is called (on a GPU, too).
        fixed: Names of floating tensors that keep their dtype.
        scalar: Whether it returns one number, whose upstream gradient has no strides.
        family: Of calls that differ in their settings alone; "" of others.
        needs: Whether a device supports it.
        wide: Computed in fp32 on a GPU too when it is compared: a result that jumps where an input is rounded.
    """

    run: Callable[..., object]
    tensors: Callable[..., Tensors]
    learned: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = BOTH
    fixed: frozenset[str] = frozenset()
    scalar: bool = False
    family: str = ""
    needs: Callable[[DeviceFacts], bool] = _anywhere
    wide: bool = False


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, equal in each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def below(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return integers from 0 on, equal in each call."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a weight matrix whose products with normal inputs have a deviation of about 1."""
    return floats(rows, columns, seed=seed) * 1.1 * columns**-0.5


def call(
    run: Callable[..., object],
    learned: str = "",
    dtypes: tuple[torch.dtype, ...] = BOTH,
    fixed: str = "",
    scalar: bool = False,
    family: str = "",
    needs: Callable[[DeviceFacts], bool] = _anywhere,
    wide: bool = False,
    **tensors: Make,
) -> Example:
    """Return an example of the functions that make its tensors."""

    def make(sizes: Sizes = TINY) -> Tensors:
        return {name: value(sizes) for name, value in tensors.items()}

    return Example(run, make, frozenset(learned.split()), dtypes, frozenset(fixed.split()), scalar, family, needs, wide)


def _shuffled(rows: int) -> torch.Tensor:
    return torch.tensor([row for row in (*range(3, rows), 0, 2) if row < rows])


STUDENT: dict[str, Any] = {
    "student_hidden": lambda s: floats(s.rows, s.hidden),
    "student_weight": lambda s: weights(s.vocab, s.hidden),
}
TEACHER: dict[str, Any] = {
    "teacher_hidden": lambda s: floats(s.rows, 3 * s.hidden // 4),
    "teacher_weight": lambda s: weights(s.vocab, 3 * s.hidden // 4, seed=1),
}
TOKENS: dict[str, Any] = {
    "labels": lambda s: below(s.vocab, s.rows, seed=1),
    "student_bias": lambda s: floats(s.vocab, seed=2),
    "token_weights": lambda s: floats(s.rows, seed=3).abs() + 0.5,
    "valid_rows": lambda s: _shuffled(s.rows),
    "lora_a": lambda s: floats(3, s.hidden, seed=4),
    "lora_b": lambda s: floats(s.vocab, 3, seed=5) * 0.2,
}
TEACHER_BIAS: dict[str, Any] = {"teacher_bias": lambda s: floats(s.vocab, seed=6)}
TOP_K: dict[str, Any] = {
    "teacher_ids": lambda s: floats(s.rows, s.vocab, seed=8).argsort(-1)[:, : s.k].contiguous(),
    "teacher_logprobs": lambda s: floats(s.rows, s.k, seed=7).log_softmax(-1) - 0.3,
}
SAMPLED: dict[str, Any] = {
    "advantages": lambda s: floats(s.rows, seed=9),
    "old_logprobs": lambda s: floats(s.rows, seed=10) * 0.1 - 4,
    "reference_logprobs": lambda s: floats(s.rows, seed=11) - 4,
}
LEARNED = "student_hidden student_weight student_bias lora_a lora_b"


def linear(loss: Callable[..., object], *given: dict[str, Any], scalar: bool = True, wide: bool = False) -> Example:
    """Return an example of a loss of hidden states and heads, with every argument that such losses take."""

    def run(lora_a: torch.Tensor, lora_b: torch.Tensor, **tensors: Any) -> object:
        return loss(**tensors, student_lora=(lora_a, lora_b, 0.5))

    tensors = {name: value for part in (STUDENT, *given, TOKENS) for name, value in part.items()}
    return call(
        run,
        LEARNED,
        fixed=f"token_weights teacher_logprobs {' '.join(SAMPLED)}",
        scalar=scalar,
        family="linear",
        wide=wide,
        **tensors,
    )


def plain(loss: Callable[..., object], *given: dict[str, Any], wide: bool = False) -> Example:
    """Return an example of a loss of hidden states and heads, without optional arguments."""
    tensors = {name: value for part in (STUDENT, *given) for name, value in part.items()}
    return call(loss, "student_hidden student_weight", fixed="teacher_logprobs", scalar=True, wide=wide, **tensors)


def logits(loss: Callable[..., object], scalar: bool = True, wide: bool = False) -> Example:
    """Return an example of a loss of logits."""
    return call(
        loss,
        "student_logits",
        student_logits=lambda s: floats(s.rows, s.vocab),
        teacher_logits=lambda s: floats(s.rows, s.vocab, seed=1),
        labels=TOKENS["labels"],
        token_weights=TOKENS["token_weights"],
        fixed="token_weights",
        scalar=scalar,
        family="logits",
        wide=wide,
    )


def several_teachers(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor):
    two = [ours.TeacherHead(hidden, weight, 0.7, bias), ours.TeacherHead(hidden * 0.5, weight, 0.3)]
    return ours.FusedDistillationLoss([ours.LossTerm("forward_kl", 1.0)], 2.0)(x, w, teachers=two)


def own_loss(student: torch.Tensor, teacher: torch.Tensor | None, labels: torch.Tensor | None) -> torch.Tensor:
    assert teacher is not None and labels is not None
    picked = student.gather(1, labels[:, None])[:, 0]
    return (student - teacher).square().mean(-1) - picked


def head_of(weight: torch.Tensor, bias: torch.Tensor) -> Any:
    head: Any = nn.Linear(1, 1)
    del head.weight, head.bias
    # as given: a Parameter would lose no stride, but be another leaf
    head.weight = weight
    head.bias = bias
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
    batch, heads, _, size = next(tensor for tensor in (keys, values) if isinstance(tensor, torch.Tensor)).shape
    cache = ours.KVCache(batch, 12, heads, size, dtype=like.dtype, device=like.device)
    cache.append(keys, values, counts)
    cache.append(newest, newest)
    return cache.attend(q)


def in_fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    weight8, scale = ours.quantize_rows(weight)
    return ours.fp8_linear(x, weight8, scale.flatten(), bias)


def swapped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor):
    linear = nn.Linear(weight.shape[1], weight.shape[0], device=x.device)
    linear.weight = nn.Parameter(weight)
    linear.bias = nn.Parameter(bias)
    model = nn.Sequential(linear)
    ours.swap_linears_for_fp8(model)
    with torch.no_grad():
        return model(x)


def layer(module: nn.Module, **parameters: torch.Tensor) -> nn.Module:
    # of any size, since the parameters are replaced
    for name, tensor in parameters.items():
        delattr(module, name)
        setattr(module, name, tensor)
    return module


def _documents(sizes: Sizes, first: int) -> torch.Tensor:
    """Return bounds of two documents, the first of `first` in 20 of the positions."""
    return torch.tensor([0, sizes.length * first // 20, sizes.length])


MATRICES: dict[str, Any] = {
    "x": lambda s: floats(s.rows, s.hidden),
    "weight": lambda s: weights(s.vocab, s.hidden),
    "bias": lambda s: floats(s.vocab, seed=1),
}
ROWS: dict[str, Any] = {"x": lambda s: floats(s.rows, s.hidden), "weight": lambda s: floats(s.hidden) + 1}
FIRST_AND_LAST = [ours.LossTerm("jsd", 0.5), ours.LossTerm("reverse_kl", 0.5), ours.LossTerm("cross_entropy", 0.3)]
LENGTHS: dict[str, Any] = {
    "lengths": lambda s: torch.tensor([s.length - 3, s.length // 2 + 1]),
    "starts": lambda s: torch.tensor([2, 1]),
}
CACHE: dict[str, Any] = {
    "k": lambda s: floats(2, s.kv_heads, s.length, s.head),
    "v": lambda s: floats(2, s.kv_heads, s.length, s.head, seed=1),
}

PUBLIC: dict[str, Example] = {
    "BiasGELU": call(lambda x, b: layer(ours.BiasGELU(1), bias=b)(x), "x b", x=ROWS["x"], b=ROWS["weight"]),
    "ChunkedLoss": linear(ours.ChunkedLoss(own_loss), TEACHER, TEACHER_BIAS),
    "Fp8Linear": call(
        lambda x, weight, bias: ours.Fp8Linear(weight, bias)(x), dtypes=SIXTEEN, needs=_fp8_units, **MATRICES
    ),
    "FusedAdamW": call(
        adamw,
        wide=True,
        gradient=lambda s: floats(9, 16),
        parameter=lambda s: floats(9, 16, seed=1),
        other=lambda s: floats(5),
    ),
    "FusedCrossEntropyLoss": linear(ours.FusedCrossEntropyLoss(label_smoothing=0.1)),
    "FusedDistillationLoss": linear(ours.FusedDistillationLoss(FIRST_AND_LAST, 2.0), TEACHER, TEACHER_BIAS),
    "FusedJSDLoss": linear(ours.FusedJSDLoss(), TEACHER, TEACHER_BIAS),
    "FusedKLLoss": linear(ours.FusedKLLoss(ce_weight=0.5), TEACHER, TEACHER_BIAS),
    "FusedPolicyGradientLoss": linear(
        ours.FusedPolicyGradientLoss(kl_weight=0.5, reduction="none"), SAMPLED, scalar=False
    ),
    "FusedSkewKLLoss": linear(ours.FusedSkewKLLoss(), TEACHER, TEACHER_BIAS),
    "FusedStudentTopKKLLoss": linear(ours.FusedStudentTopKKLLoss(4, ce_weight=0.5), TEACHER, TEACHER_BIAS, wide=True),
    "FusedTVDLoss": linear(ours.FusedTVDLoss(reduction="none"), TEACHER, TEACHER_BIAS, scalar=False, wide=True),
    "FusedTopKKLLoss": linear(ours.FusedTopKKLLoss(ce_weight=0.5), TOP_K),
    "KVCache": call(
        cached,
        keys=lambda s: floats(2, s.kv_heads, 3, s.head),
        values=lambda s: floats(2, s.kv_heads, 3, s.head, seed=1),
        newest=lambda s: floats(2, s.kv_heads, 1, s.head),
        counts=lambda s: torch.tensor([3, 2]),
        q=lambda s: floats(2, s.heads, 1, s.head),
    ),
    "LayerNorm": call(
        lambda x, w, b: layer(ours.LayerNorm(1), weight=w, bias=b)(x),
        "x w b",
        x=ROWS["x"],
        w=ROWS["weight"],
        b=lambda s: floats(s.hidden, seed=2),
    ),
    "RMSNorm": call(
        lambda x, r, w: layer(ours.RMSNorm(1, form="gemma"), weight=w)(x, r),
        "x r w",
        x=ROWS["x"],
        r=lambda s: floats(s.rows, s.hidden, seed=1),
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
    "add_rms_norm": call(
        ours.add_rms_norm, "x residual weight", residual=lambda s: floats(s.rows, s.hidden, seed=1), **ROWS
    ),
    "bias_gelu": call(ours.bias_gelu, "x bias", x=ROWS["x"], bias=ROWS["weight"]),
    "call_inside": call(
        inside, "hidden weight bias", hidden=ROWS["x"], weight=MATRICES["weight"], bias=MATRICES["bias"]
    ),
    "cross_entropy": call(
        ours.cross_entropy,
        "student_logits",
        fixed="token_weights",
        scalar=True,
        student_logits=lambda s: floats(s.rows, s.vocab),
        labels=TOKENS["labels"],
        token_weights=TOKENS["token_weights"],
    ),
    "cu_seqlens_from_position_ids": call(
        ours.cu_seqlens_from_position_ids, position_ids=lambda s: torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    ),
    "decode_attention": call(
        ours.decode_attention,
        q=lambda s: floats(2, s.heads, 2, s.head),
        sinks=lambda s: floats(s.heads, seed=2),
        **CACHE,
        **LENGTHS,
    ),
    "distillation_loss": logits(
        lambda *a, **k: ours.distillation_loss(*a, terms=FIRST_AND_LAST, temperature=2.0, reduction="none", **k),
        scalar=False,
    ),
    "flash_attention": call(
        ours.flash_attention,
        "q k v sinks",
        q=lambda s: floats(1, s.heads, s.length, s.head),
        k=lambda s: floats(1, s.kv_heads, s.length, s.head),
        v=lambda s: floats(1, s.kv_heads, s.length, s.head, seed=1),
        sinks=lambda s: floats(s.heads, seed=3),
        cu_seqlens_q=lambda s: _documents(s, 7),
        cu_seqlens_k=lambda s: _documents(s, 9),
    ),
    "fp8_linear": call(in_fp8, dtypes=SIXTEEN, needs=_fp8_units, **MATRICES),
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
        lambda **k: ours.fused_student_top_k_kl_loss(k=4, tail="renormalize", **k), TEACHER, TEACHER_BIAS, wide=True
    ),
    "fused_top_k_kl_loss": linear(lambda **k: ours.fused_top_k_kl_loss(tail="renormalize", **k), TOP_K),
    "fused_tvd_loss": linear(ours.fused_tvd_loss, TEACHER, TEACHER_BIAS, wide=True),
    "geglu": call(
        ours.geglu, "gate up", gate=lambda s: floats(s.rows, s.hidden), up=lambda s: floats(s.rows, s.hidden, seed=1)
    ),
    "glu": call(ours.glu, "gate", gate=lambda s: floats(s.rows, 2 * s.hidden)),
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
        wide=True,
        scalar=True,
        input=lambda s: floats(s.rows, s.hidden).log_softmax(-1),
        target=lambda s: floats(s.rows, s.hidden, seed=1).softmax(-1),
    ),
    "layer_norm": call(ours.layer_norm, "x weight bias", bias=lambda s: floats(s.hidden, seed=2), **ROWS),
    "lora_linear": call(
        lambda x, weight, bias, a, b: ours.lora_linear(x, weight, bias, a, b, 0.5),
        "x a b",
        **MATRICES,
        a=lambda s: floats(3, s.hidden, seed=3),
        b=lambda s: floats(s.vocab, 3, seed=4),
    ),
    "quantize_rows": call(ours.quantize_rows, needs=_fp8_units, x=ROWS["x"]),
    "rms_norm": call(ours.rms_norm, "x weight", **ROWS),
    "rope": call(
        ours.rope,
        "q k",
        q=lambda s: floats(2, s.heads, s.length, s.head),
        k=lambda s: floats(2, s.kv_heads, s.length, s.head, seed=2),
        cos=lambda s: floats(2, s.length, 3 * s.head // 4),
        sin=lambda s: floats(2, s.length, 3 * s.head // 4, seed=1),
    ),
    "sample_tokens": call(
        ours.sample_tokens,
        wide=True,
        logits=lambda s: floats(s.rows, s.vocab),
        seeds=lambda s: below(1 << 40, s.rows),
        draws=lambda s: below(9, s.rows),
    ),
    "skew_kl": logits(ours.skew_kl),
    "softmax": call(ours.softmax, "x", x=ROWS["x"]),
    "split_k_linear": call(
        ours.split_k_linear,
        "x weight bias",
        dtypes=SIXTEEN,
        x=lambda s: floats(min(s.rows, 40), s.hidden),
        weight=MATRICES["weight"],
        bias=MATRICES["bias"],
    ),
    "swap_linears_for_fp8": call(swapped, dtypes=SIXTEEN, needs=_fp8_units, **MATRICES),
    "swiglu": call(
        ours.swiglu, "gate up", gate=lambda s: floats(s.rows, s.hidden), up=lambda s: floats(s.rows, s.hidden, seed=1)
    ),
    "triton_linear": call(
        ours.triton_linear,
        dtypes=SIXTEEN,
        needs=_tiles,
        x=lambda s: floats(MANY, s.hidden),
        weight=MATRICES["weight"],
        bias=MATRICES["bias"],
    ),
    "tvd": logits(ours.tvd, wide=True),
}


# ------------------------------------------------------------------ variants: an op's settings, "NAME: WHAT" each


def _divergences() -> dict[str, Example]:
    """Return every divergence over hidden states and over logits, at T = 2, alone."""
    rows = {}
    for kind in DIVERGENCES:
        # whose gradient is a sign
        terms = [ours.LossTerm(kind, 0.7)]
        jumps = kind == "tvd"

        def over_heads(terms: list[Any] = terms, **tensors: Any) -> object:
            return ours.fused_distillation_loss(terms=terms, temperature=2.0, **tensors)

        def over_logits(terms: list[Any] = terms, **tensors: Any) -> object:
            return ours.distillation_loss(terms=terms, temperature=2.0, **tensors)

        rows[f"fused_distillation_loss: {kind}"] = plain(over_heads, TEACHER, wide=jumps)
        rows[f"distillation_loss: {kind}"] = logits(over_logits, wide=jumps)
    return rows


CAPPED: dict[str, Any] = {
    "student_softcap": 5.0,
    "teacher_softcap": 7.0,
    "student_logit_scale": 0.5,
    "teacher_logit_scale": 1.5,
}


def _capped(**tensors: Any) -> object:
    return ours.fused_kl_loss(**tensors, temperature=2.0, **CAPPED)


def _smoothed(**tensors: Any) -> object:
    return ours.fused_cross_entropy_loss(**tensors, label_smoothing=0.1, z_loss=0.01)


def _smoothed_logits(student_logits: torch.Tensor, labels: torch.Tensor) -> object:
    return ours.cross_entropy(student_logits, labels, label_smoothing=0.1, z_loss=0.01)


def _with_stats(**tensors: Any) -> object:
    made: Any = ours.fused_kl_loss(**tensors, temperature=2.0, clip=ours.Clip(entry=0.01), return_stats=True)
    loss, stats = made
    # the rows' agreement of top tokens may differ by rounding
    return (loss, *(value for name, value in stats._asdict().items() if name != "agreement"))


LABELS: dict[str, Any] = {"labels": TOKENS["labels"]}


def _losses() -> dict[str, Example]:
    rows = {
        "fused_kl_loss: reverse": plain(lambda **k: ours.fused_kl_loss(direction="reverse", **k), TEACHER),
        "fused_skew_kl_loss: reverse": plain(lambda **k: ours.fused_skew_kl_loss(direction="reverse", **k), TEACHER),
        "fused_kl_loss: soft caps and scales": plain(_capped, TEACHER),
        "fused_kl_loss: statistics": call(_with_stats, **STUDENT, **TEACHER, **LABELS),
        "fused_kl_loss: no factor of T squared": plain(
            lambda **k: ours.fused_kl_loss(temperature=2.0, scale_by_temperature_squared=False, **k), TEACHER
        ),
        "fused_cross_entropy_loss: smoothing and z-loss": plain(_smoothed, LABELS),
        "cross_entropy: smoothing and z-loss": call(
            _smoothed_logits,
            "student_logits",
            scalar=True,
            student_logits=lambda s: floats(s.rows, s.vocab),
            labels=TOKENS["labels"],
        ),
    }
    for tail in ("bucket", "renormalize", "sampled"):

        def top_k(tail: str = tail, **tensors: Any) -> object:
            return ours.fused_top_k_kl_loss(tail=tail, temperature=1.0 if tail == "sampled" else 2.0, **tensors)

        rows[f"fused_top_k_kl_loss: {tail}"] = plain(top_k, TOP_K)
    for tail in ("bucket", "renormalize"):
        for direction in ("forward", "reverse"):

            def student_top_k(tail: str = tail, direction: str = direction, **tensors: Any) -> object:
                return ours.fused_student_top_k_kl_loss(k=4, tail=tail, direction=direction, **tensors)

            rows[f"fused_student_top_k_kl_loss: {direction}, {tail}"] = plain(student_top_k, TEACHER, wide=True)
    for estimator in KL_ESTIMATORS:

        def policy(estimator: str = estimator, **tensors: Any) -> object:
            settings = {"clip": 0.2, "kl_weight": 0.3, "kl_estimator": estimator, "temperature": 2.0}
            return ours.fused_policy_gradient_loss(**tensors, **settings)

        rows[f"fused_policy_gradient_loss: KL by {estimator}"] = call(
            policy,
            "student_hidden student_weight",
            fixed=" ".join(SAMPLED),
            scalar=True,
            wide=True,
            **STUDENT,
            **LABELS,
            **SAMPLED,
        )
    return rows


QUERIES: dict[str, Any] = {
    "q": lambda s: floats(1, s.heads, s.length, s.head),
    "k": lambda s: floats(1, s.kv_heads, s.length, s.head),
    "v": lambda s: floats(1, s.kv_heads, s.length, s.head, seed=1),
}
SINKS: dict[str, Any] = {"sinks": lambda s: floats(s.heads, seed=3)}
ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 7},
    "window on both sides": {"causal": False, "window": 7},
    "soft cap": {"softcap": 2.0},
    "scale": {"scale": 0.4},
    "window and soft cap": {"window": 7, "softcap": 2.0},
}


def _attention() -> dict[str, Example]:
    rows = {}
    for name, settings in ATTENTION.items():

        def attend(settings: dict[str, Any] = settings, **tensors: Any) -> object:
            return ours.flash_attention(**tensors, **settings)

        rows[f"flash_attention: {name}"] = call(attend, "q k v", **QUERIES)
        rows[f"flash_attention: {name}, sinks"] = call(attend, "q k v sinks", **QUERIES, **SINKS)
        if settings.get("causal", True):
            rows[f"flash_attention: {name}, packed documents"] = call(
                attend,
                "q k v",
                **QUERIES,
                cu_seqlens_q=lambda s: torch.tensor([0, s.length // 3, s.length // 2, s.length], dtype=torch.int32),
            )
    new: dict[str, Any] = {"q": lambda s: floats(2, s.heads, 1, s.head), **CACHE, "lengths": LENGTHS["lengths"]}
    rows["decode_attention: one token"] = call(ours.decode_attention, **new)
    rows["decode_attention: window and soft cap"] = call(
        lambda **k: ours.decode_attention(window=7, softcap=2.0, **k), **new
    )
    return rows


def _fake_quantised(name: str) -> Callable[..., torch.Tensor]:
    def run(weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(weight)
        fake_quantise_into(out, weight, name)
        return out

    return run


def _learned_scales(name: str) -> Callable[..., Any]:
    def run(weight: torch.Tensor, upstream: torch.Tensor) -> Any:
        form = FORMATS[name]
        scales = form.snap(form.first(weight.float()))
        smaller = form.snap(scales._replace(scale=scales.scale * 0.8))  # so that some weights are clamped
        out = torch.empty_like(weight)
        fake_quantise_into(out, weight, name, smaller)
        d_weight, d_scales = learned_gradients(weight, smaller, upstream, name)
        return [out, d_weight, *(part for part in d_scales if part is not None)]

    return run


def _quantisers() -> dict[str, Example]:
    rows = {}
    matrix: dict[str, Any] = {"weight": lambda s: floats(s.rows, 768)}
    for name, form in FORMATS.items():
        rounds_to_bf16 = form.in_kernel and form.scale_dtype == torch.bfloat16
        needs = _rounding if rounds_to_bf16 else _anywhere
        rows[f"fake_quantise_into: {name}"] = call(_fake_quantised(name), wide=True, needs=needs, **matrix)
        if form.is_learned:
            rows[f"learned_gradients: {name}"] = call(
                _learned_scales(name), wide=True, **matrix, upstream=lambda s: floats(s.rows, 768, seed=1)
            )
    return rows


def _three_steps(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    own = parameter.detach().clone()
    optimizer = ours.FusedAdamW([own], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        own.grad = gradient.detach().clone()
        optimizer.step()
    return own.detach()


def _shared(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    half = len(weight) // 2
    return shared_linear(x, [weight[:half], weight[half:]], [bias[:half], None])


def _distance(metric: Any) -> Callable[..., torch.Tensor]:
    def run(first: torch.Tensor, last: torch.Tensor, other: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return state_distance([first, last], [other, 0.5 * other], rows, metric)

    return run


def _relation(packed: bool) -> Callable[..., torch.Tensor]:
    def run(student: torch.Tensor, teacher: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return relation_divergence(student, teacher, documents if packed else None)

    return run


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return ours.sample_tokens(logits, zeros, zeros, 0.0)


def _layers() -> dict[str, Example]:
    pair: dict[str, Any] = {
        "gate": lambda s: floats(s.rows, s.hidden),
        "up": lambda s: floats(s.rows, s.hidden, seed=1),
    }
    states: dict[str, Any] = {
        "first": lambda s: floats(s.rows, s.hidden),
        "last": lambda s: floats(s.rows, s.hidden, seed=1),
        "other": lambda s: floats(s.rows, s.hidden, seed=2),
        "rows": lambda s: _shuffled(s.rows),
    }
    relations: dict[str, Any] = {
        "student": lambda s: floats(2, s.heads, s.length, s.head),
        "teacher": lambda s: floats(2, s.heads, s.length, s.head + 8, seed=1),
        "documents": lambda s: (torch.arange(s.length) * 3 // s.length).expand(2, -1).contiguous(),
    }
    two: dict[str, Any] = {"x": ROWS["x"], "weight": lambda s: weights(2 * s.hidden, s.hidden)}
    return {
        "rms_norm: gemma": call(lambda x, weight: ours.rms_norm(x, weight, form="gemma"), "x weight", **ROWS),
        "rms_norm: another epsilon": call(
            lambda x, weight: ours.rms_norm(x * 0.01, weight, eps=1e-3), "x weight", **ROWS
        ),
        "add_rms_norm: gemma": call(
            lambda x, weight, residual: ours.add_rms_norm(x, residual, weight, form="gemma"),
            "x weight residual",
            residual=lambda s: floats(s.rows, s.hidden, seed=1),
            **ROWS,
        ),
        "geglu: tanh": call(lambda gate, up: ours.geglu(gate, up, "tanh"), "gate up", **pair),
        "rope: whole heads": call(
            ours.rope,
            "q k",
            q=lambda s: floats(1, s.heads, s.length, s.head),
            k=lambda s: floats(1, s.kv_heads, s.length, s.head),
            cos=lambda s: floats(1, s.length, s.head),
            sin=lambda s: floats(1, s.length, s.head, seed=1),
        ),
        "kl_probabilities: batchmean": call(
            lambda input, target: ours.kl_probabilities(input.log_softmax(-1), target.softmax(-1), "batchmean"),
            "input",
            scalar=True,
            wide=True,
            input=lambda s: floats(s.rows, s.vocab),
            target=lambda s: floats(s.rows, s.vocab, seed=1),
        ),
        "softmax: long rows": call(ours.softmax, "x", x=lambda s: floats(s.rows, 8 * s.vocab)),
        "sample_tokens: greedy": call(
            _greedy,
            wide=True,
            logits=lambda s: floats(s.rows, s.vocab),
        ),
        "split_k_linear: few rows": call(
            ours.split_k_linear, "x weight", x=lambda s: floats(3, s.hidden), weight=two["weight"]
        ),
        "FusedAdamW: three steps": call(
            _three_steps,
            wide=True,
            parameter=lambda s: floats(s.rows, s.hidden),
            gradient=lambda s: floats(s.rows, s.hidden, seed=1),
        ),
        "shared_linear": call(_shared, "x weight bias", **two, bias=lambda s: floats(2 * s.hidden, seed=1)),
        "fp8_rms_norm": call(
            lambda x, weight: fp8_rms_norm(x, weight)[0].to(torch.float32), needs=_fp8_units, dtypes=SIXTEEN, **ROWS
        ),
        "fp8_linears": call(
            lambda x, weight: fp8_linears(x, weight)[0],
            "x weight",
            dtypes=SIXTEEN,
            needs=_fp8_units,
            x=lambda s: floats(64, s.hidden),
            weight=two["weight"],
        ),
        "fp8_swiglu_mlp": call(
            lambda x, weight, down: fp8_swiglu_mlp(x, weight.chunk(2)[0], weight.chunk(2)[1], down),
            "x weight down",
            dtypes=SIXTEEN,
            needs=_fp8_units,
            x=lambda s: floats(64, s.hidden),
            weight=two["weight"],
            down=lambda s: weights(s.hidden, s.hidden, seed=1),
        ),
        **{
            f"state_distance: {metric}": call(_distance(metric), "first last", **states) for metric in ("mse", "cosine")
        },
        "relation_divergence": call(_relation(False), "student", **relations),
        "relation_divergence: packed documents": call(_relation(True), "student", **relations),
    }


def _mixture(**settings: Any) -> Callable[..., torch.Tensor]:
    def run(
        x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, *rest: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        call_experts: Any = experts
        result: torch.Tensor = call_experts(x, index, shares, *rest, **named, **settings)
        return result

    return run


def _decoded(
    x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad():
        return decode_experts(x, index, shares, gate_up, down)


def _quantised_mixture(
    x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    quantised: torch.Tensor = Fp8Experts(gate_up, down)(x, index, shares)
    return quantised


def _routed(**settings: Any) -> Callable[..., torch.Tensor]:
    """Return the weights of two experts of each token."""

    def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return route(logits, 2, bias, **settings)[0]

    return run


def _experts() -> dict[str, Example]:
    """Return mixtures of four experts, of which each token has two and the last has none."""
    tensors: dict[str, Any] = {
        "x": ROWS["x"],
        "index": lambda s: floats(s.rows, 3, seed=1).argsort(-1)[:, :2].contiguous(),
        "shares": lambda s: floats(s.rows, 2, seed=2).softmax(-1),
        "gate_up": lambda s: weights(8 * s.hidden, s.hidden).view(4, 2 * s.hidden, s.hidden),
        "down": lambda s: weights(4 * s.hidden, s.hidden, seed=1).view(4, s.hidden, s.hidden),
    }
    biases: dict[str, Any] = {
        "gate_up_bias": lambda s: floats(4, 2 * s.hidden, seed=5),
        "down_bias": lambda s: floats(4, s.hidden, seed=6),
    }
    clamped = _mixture(activation="clamped_silu", interleaved=True, alpha=1.702, limit=1.5)
    return {
        "experts: silu": call(_mixture(), "x shares gate_up down", **tensors),
        "experts: few tokens": call(_decoded, **tensors),
        "experts: fp8": call(_quantised_mixture, dtypes=SIXTEEN, needs=_fp8_units, **tensors),
        "experts: clamped silu, biases, interleaved": call(
            clamped, "x shares gate_up down gate_up_bias down_bias", **tensors, **biases
        ),
        "route: softmax": call(_routed(), "logits", logits=lambda s: floats(s.rows, 8)),
        "route: sigmoid, bias, groups": call(
            _routed(score="sigmoid", groups=4, kept_groups=2),
            "logits",
            logits=lambda s: floats(s.rows, 8),
            bias=lambda s: 0.1 * floats(8, seed=1),
        ),
    }


EXAMPLES: dict[str, Example] = (
    PUBLIC | _divergences() | _losses() | _attention() | _quantisers() | _layers() | _experts()
)
