"""Arguments of every loss as people have them: strided, and mistakes, which are named; kernels and CPU.

Views of each argument are in test_strides.py.
"""

import functools

import forked
import numpy as np
import pytest
import torch
from distill_kernels import (
    ChunkedLoss,
    FusedDistillationLoss,
    FusedKLLoss,
    FusedTopKKLLoss,
    LossTerm,
    TeacherHead,
    distillation_loss,
)
from distill_kernels.losses.fused import fused_linear_divergence
from distill_kernels.losses.operands import Head, RequiredGrads, RowBatch
from distill_kernels.losses.terms import make_objective
from distill_kernels.losses.topk_reference import TopK
from distill_kernels.operands import contiguous_rows
from helpers import realistic_heads, relative_error

N, V, K = 6, 40, 4
SETTINGS = {"skip_ignored_rows": True}
MIXED = (LossTerm("forward_kl", 0.7), LossTerm("cross_entropy", 0.3))


@pytest.fixture(params=["specification", "kernel"])
def where(request, device):
    """CPU tensors through the PyTorch path, and the same calls through the kernels."""
    return torch.device("cpu") if request.param == "specification" else request.getfixturevalue("kernel_device")


def draw(device):
    x, w, xt, wt = realistic_heads(N, V, 16, 24, device=device)
    top, ids = (xt @ wt.T).log_softmax(-1).topk(K, -1)
    made = {"x": x, "w": w, "bias": torch.randn(V), "a": torch.randn(2, 16), "b": torch.randn(V, 2)}
    made |= {"xt": xt, "wt": wt, "teacher_bias": torch.randn(V), "top": top, "ids": ids}
    made |= {"x_other": x.roll(1, 0), "small_labels": torch.randint(0, 16, (N,))}  # logits of 16 columns
    made |= {"labels": torch.randint(0, V, (N,)), "weights": torch.rand(N), "rows": torch.tensor([4, 1, 3])}
    return {name: tensor.to(device) for name, tensor in made.items()}


def margin(student, teacher, labels):
    return student.logsumexp(-1) - student.gather(-1, labels.clamp_min(0)[:, None])[:, 0] + (teacher * student).mean(-1)


def heads(t):
    named = {"student_bias": t["bias"], "student_lora": (t["a"], t["b"], 0.5), "token_weights": t["weights"]}
    return (t["x"], t["w"]), named | {"valid_rows": t["rows"]}


def fused(t):
    student, named = heads(t)
    module = FusedDistillationLoss(MIXED, 2.0, **SETTINGS)
    return module(*student, t["xt"], t["wt"], t["labels"], teacher_bias=t["teacher_bias"], **named)


def mixture(t):
    student, named = heads(t)
    two = [TeacherHead(t["xt"], t["wt"], 0.6, t["teacher_bias"]), TeacherHead(t["xt"], t["wt"], 0.4)]
    return FusedDistillationLoss(MIXED, **SETTINGS)(*student, labels=t["labels"], teachers=two, **named)


def chunked(t):
    student, named = heads(t)
    return ChunkedLoss(margin)(*student, t["xt"], t["wt"], t["labels"], teacher_bias=t["teacher_bias"], **named)


def top_k(t):
    student, named = heads(t)
    return FusedTopKKLLoss(ce_weight=0.5, **SETTINGS)(*student, t["ids"], t["top"], t["labels"], **named)


def of_logits(t):
    return distillation_loss(t["x"], t["x_other"], t["small_labels"], terms=MIXED, token_weights=t["weights"])


def table(tensor):
    """A column of a table (the last dimension of which the kernels would run along)."""
    garbage = torch.full_like(tensor, 10**6 if not tensor.is_floating_point() else torch.nan)
    return torch.stack([garbage, tensor, garbage], -1)[..., 1]


def results_of(call, tensors):
    leaves = {key: tensors[key].detach().requires_grad_() for key in ("x", "w", "bias", "a", "b")}
    loss = call(tensors | leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def test_an_upstream_gradient_and_the_compiled_call_may_be_strided(kernel_device):
    t = draw(kernel_device)
    labels, upstream = table(t["labels"]), table(torch.rand(N, device=kernel_device))
    x = t["x"].requires_grad_()

    def step(x, labels):
        return FusedDistillationLoss(MIXED, reduction="none")(x, t["w"], t["xt"], t["wt"], labels)

    right = torch.autograd.grad(step(x, t["labels"]), x, upstream.clone())[0]
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        assert relative_error(torch.autograd.grad(call(x, labels), x, upstream)[0], right) < 1e-6


def test_contiguous_rows_copies_only_tensors_with_gaps():
    x = torch.arange(12.0).view(3, 4)
    assert (
        contiguous_rows(x[0]).data_ptr() == x.data_ptr()
        and contiguous_rows(x[:, :2]).stride() == (4, 1)
        and contiguous_rows(None) is None
    )
    for view in (x[:, 1], x[0, ::2], x[0, :1].expand(5), x.t()):
        assert contiguous_rows(view).stride(-1) == 1 and torch.equal(contiguous_rows(view), view)


BAD = {
    "labels": [
        ({"labels": torch.full((N,), V)}, f"labels: expected 0 to {V - 1}, got {V}"),
        ({"labels": torch.full((N,), -1)}, f"labels: expected 0 to {V - 1}, got -1"),
        ({"labels": torch.ones(N, dtype=torch.bool)}, "labels: expected integers"),
        ({"labels": np.zeros(N, dtype=np.int64)}, "labels: expected a torch.Tensor, got numpy.ndarray"),
    ],
    "others": [
        ({"student_lora": (torch.ones(2, 16), torch.ones(V, 2))}, r"student_lora: expected \(A, B, scale\), got"),
        ({"valid_rows": torch.tensor([1, 1])}, "valid_rows: expected each row once"),
        ({"valid_rows": torch.tensor([-1, 1])}, f"valid_rows: expected indices of 0 to {N - 1}"),
        ({"valid_rows": torch.tensor([N])}, f"valid_rows: expected indices of 0 to {N - 1}"),
        ({"num_items": 0}, "num_items: expected above 0, since rows count, got 0"),
        ({"num_items": torch.tensor(0)}, "num_items: expected above 0"),
        ({"num_items": torch.tensor([3, 4])}, "num_items: expected one number"),
        ({"student_hidden": np.zeros((N, 16), np.float32)}, "student_hidden: expected a torch.Tensor"),
        ({"student_weight": torch.ones(V, 16).to_sparse()}, "student_weight: expected a dense tensor, got layout"),
    ],
    "top-k": [
        ({"teacher_ids": torch.full((N, K), V)}, f"teacher_ids: expected 0 to {V - 1}, got {V}"),
        ({"teacher_ids": torch.full((N, K), -1)}, f"teacher_ids: expected 0 to {V - 1}, got -1"),
        ({"teacher_ids": torch.ones(N, K, dtype=torch.bool)}, "teacher_ids: expected integers"),
        ({"teacher_logprobs": np.zeros((N, K), np.float32)}, "teacher_logprobs: expected a torch.Tensor"),
    ],
}


def call_with(kind, change, device):
    t = draw(device)
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    named = {"student_hidden": t["x"], "student_weight": t["w"], "labels": t["labels"]}
    if kind == "top-k":
        return FusedTopKKLLoss(ce_weight=0.5)(
            **(named | {"teacher_ids": t["ids"], "teacher_logprobs": t["top"]} | change)
        )
    return FusedKLLoss(ce_weight=0.5)(**(named | {"teacher_hidden": t["xt"], "teacher_weight": t["wt"]} | change))


@pytest.mark.parametrize("kind, change, message", [(kind, *bad) for kind, bads in BAD.items() for bad in bads])
def test_mistakes_are_named_on_both_paths(where, kind, change, message):
    if (
        where.type == "cuda"
        and "got" in message
        and message.startswith(("labels: expected 0", "teacher_ids: expected 0"))
    ):
        pytest.skip("values on a GPU are not looked at")
    with pytest.raises(ValueError, match=message):
        call_with(kind, change, where)


@pytest.mark.parametrize("change, message", BAD["labels"])
def test_mistakes_in_labels_of_logits(where, change, message):
    logits = torch.randn(N, V, device=where)
    labels = change["labels"]
    labels = labels.to(where) if isinstance(labels, torch.Tensor) else labels
    with pytest.raises(ValueError, match=message):
        distillation_loss(logits, logits, labels, terms=MIXED)
    for wrong, name in (((logits.numpy(), logits), "student_logits"), ((logits, logits.to_sparse()), "teacher_logits")):
        with pytest.raises(ValueError, match=f"{name}: expected a"):
            distillation_loss(*wrong, terms=MIXED)


def test_top_k_has_an_upper_bound(where):
    """511 and the tail fill the 512 lanes of a program; one more is refused, also where the reference would take it."""
    torch.manual_seed(1)
    x, w = torch.randn(2, 8), torch.randn(600, 8)
    top, ids = torch.randn(2, 600).log_softmax(-1).topk(512, -1)
    right = FusedTopKKLLoss()(x.double(), w.double(), ids[:, :511], top[:, :511].double())
    x, w, ids, top = (tensor.to(where) for tensor in (x, w, ids, top))
    assert relative_error(FusedTopKKLLoss()(x, w, ids[:, :511], top[:, :511]), right) < 1e-5
    with pytest.raises(ValueError, match="teacher_ids: expected K of 1 to 511, got 512"):
        FusedTopKKLLoss()(x, w, ids, top)


def test_labels_used_only_as_a_mask_may_exceed_the_vocabulary(where):
    """A student of fewer columns than the tokenizer has tokens, without a hard-label term."""
    t = draw(where)
    few, many = t["labels"].clone(), t["labels"] + 10**6
    few[0] = many[0] = -100
    losses = [FusedKLLoss()(t["x"], t["w"], t["xt"], t["wt"], labels) for labels in (few, many)]
    assert torch.equal(*losses)


def test_unchecked_out_of_range_values_give_nan_for_their_row(kernel_device):
    """Kernels without the check before them: a label or id out of range spoils its row, and no other."""
    t = draw(kernel_device)
    scale, (label, token) = torch.ones(N, device=kernel_device), (torch.tensor(2**32 + 1), torch.tensor(V))
    student, wanted = Head(t["x"], t["w"]), RequiredGrads(True, True)
    objective = make_objective(MIXED)
    t["labels"][2], t["ids"][2, 1] = label, token
    run = functools.partial(fused_linear_divergence, required=wanted, vocab=V, dtype=torch.float32)
    full = run(student, Head(t["xt"], t["wt"]), RowBatch(t["labels"], scale, None), objective)
    soft = make_objective(MIXED[:1])
    some = [
        run(student, None, RowBatch(None, scale, None, TopK(t["ids"], t["top"], tail)), soft)
        for tail in ("bucket", "renormalize", "sampled")
    ]
    for outcome in (full, *some):
        assert outcome.loss[2].isnan() and outcome.loss.isnan().sum() == 1


def test_a_nan_hidden_state_gives_a_nan_loss(where):
    t = draw(where)
    t["x"][1] = torch.nan
    assert fused(t).isnan() and of_logits(t).isnan() and top_k(t).isnan()


def test_environment_variable_enables_value_checks_on_gpus(tmp_path):
    code = """
import importlib, os, torch
from distill_kernels.losses import arguments
for value in "10":
    os.environ["DISTILL_CHECK_VALUES"] = value
    print(importlib.reload(arguments).can_check_values(torch.ones(1, device="meta")))
"""
    done = forked.run(["-c", code], cwd=tmp_path, env=forked.clean_environment())
    assert done.stdout.split() == ["True", "False"], done.stderr


CALLS = [fused, mixture, chunked, top_k, of_logits]


@pytest.mark.plain(
    "specification-fused", "specification-chunked", "specification-of_logits", "kernel-chunked", "kernel-of_logits"
)
@pytest.mark.parametrize("call", CALLS)
def test_a_second_order_gradient_is_refused(where, call):
    t = draw(where)
    x = t["x"].requires_grad_()
    with pytest.raises(ValueError, match="create_graph: expected False"):
        torch.autograd.grad(call(t), x, create_graph=True)


@pytest.mark.plain(
    "specification-fused", "specification-chunked", "specification-of_logits", "kernel-chunked", "kernel-of_logits"
)
@pytest.mark.parametrize("call", CALLS)
def test_transforms_of_functions_are_refused(where, call):
    t = draw(where)
    name = "student_logits" if call is of_logits else "student_hidden"
    for transform in (torch.func.grad, lambda loss: lambda x: torch.vmap(loss)(x[None])):
        with pytest.raises(ValueError, match=f"{name}: expected a plain tensor, got one inside torch.vmap"):
            transform(lambda x: call(t | {"x": x}))(t["x"])


@pytest.mark.plain("specification-xt-False", "kernel-xt-False", "kernel-top-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["xt", "wt", "labels", "ids", "top"])
def test_modifying_tensors_that_backward_reads_raises(where, name, compiled):
    t = draw(where)
    x = t["x"].requires_grad_()

    def step(x):
        if name in ("ids", "top"):
            return FusedTopKKLLoss(ce_weight=0.5, reduction="none")(x, t["w"], t["ids"], t["top"], t["labels"])
        return FusedDistillationLoss(MIXED, reduction="none")(x, t["w"], t["xt"], t["wt"], t["labels"])

    t["w"].requires_grad_()  # whose gradient is made in backward
    loss = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(x)
    with torch.no_grad():
        t[name].add_(1)
    with pytest.raises((ValueError, RuntimeError), match=r"modified (in place|by an inplace operation)"):
        loss.sum().backward()


def test_inference_tensors_have_no_version_check(where):
    t = draw(where)
    with torch.inference_mode():
        xt = t["xt"] * 1
    loss = FusedDistillationLoss(MIXED, reduction="none")(t["x"].requires_grad_(), t["w"], xt, t["wt"], t["labels"])
    loss.sum().backward()
    assert t["x"].grad.isfinite().all()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("call", [fused, chunked, top_k, mixture])
def test_rows_that_do_not_count_may_hold_anything(where, call, named, monkeypatch):
    """Named by `valid_rows` though their label says no, or computed because `skip_ignored_rows` is off."""
    monkeypatch.setitem(SETTINGS, "skip_ignored_rows", False)
    t = draw(where) | {"rows": torch.tensor([4, 1, 3, 0], device=where) if named else None}
    t["labels"][[1, 3]] = -100
    spoilt = t | {"x": t["x"].clone(), "xt": t["xt"].clone()}
    spoilt["x"][[1, 3]], spoilt["xt"][[1, 3]] = torch.nan, torch.inf
    for one, other in zip(results_of(call, t), results_of(call, spoilt), strict=True):
        assert one.isfinite().all() and relative_error(other, one) < 1e-6


@pytest.mark.plain("specification-mean-torch.float16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_calls_scale_as_eager_ones(where, dtype, reduction):
    """Small upstream gradients, which fp16 would lose and bf16 round."""
    x, w, xt, wt = realistic_heads(N, V, 16, 24, dtype=dtype, device=where)
    module = FusedKLLoss(reduction=reduction)
    upstream = 0.3 / 65536

    def step(x, w):
        return module(x, w, xt, wt).sum() * upstream * 65536**0.5

    leaves = [x.requires_grad_(), w.requires_grad_()]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    one, other = (torch.autograd.grad(call(*leaves), leaves) for call in (compiled, step))
    for mine, eager in zip(one, other, strict=True):
        assert relative_error(mine, eager) < 1e-4
