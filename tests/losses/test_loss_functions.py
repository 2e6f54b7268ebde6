"""The losses as functions give what the modules give."""

import distill_kernels
import pytest
import torch
from distill_kernels import LossTerm, fused_kl_loss
from distill_kernels.losses.logits import kl_div
from helpers import realistic_heads
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear

PAIRS = {
    "kl": {"direction": "reverse", "temperature": 2.0},
    "jsd": {"beta": 0.3},
    "skew_kl": {"alpha": 0.2, "direction": "reverse"},
    "tvd": {"ce_weight": 0.5, "label_smoothing": 0.1},
    "distillation": {"terms": (LossTerm("forward_kl", 0.7), LossTerm("cross_entropy", 0.3))},
}
NAMES = {"kl": "KL", "jsd": "JSD", "skew_kl": "SkewKL", "tvd": "TVD", "distillation": "Distillation"}


@pytest.mark.parametrize("kind", PAIRS)
def test_functions_equal_modules(kind):
    heads = realistic_heads(12, 97, 16, 24)
    labels = torch.randint(0, 97, (12,))
    labels[3] = -100
    module = getattr(distill_kernels, f"Fused{NAMES[kind]}Loss")(**PAIRS[kind])
    function = getattr(distill_kernels, f"fused_{kind}_loss")
    results = []
    for call, more in ((module, {}), (function, PAIRS[kind])):
        hidden, weight = heads[0].clone().requires_grad_(), heads[1].clone().requires_grad_()
        loss, stats = call(hidden, weight, *heads[2:], labels, num_items=5, return_stats=True, **more)
        loss.backward()
        results.append((loss, hidden.grad, weight.grad, *stats))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_cross_entropy_takes_no_teacher():
    hidden, weight, *_ = realistic_heads(12, 97, 16, 24)
    labels = torch.randint(0, 97, (12,))
    loss = distill_kernels.fused_cross_entropy_loss(hidden, weight, labels, label_smoothing=0.1)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_top_k_takes_tokens_of_the_teacher():
    hidden, weight, *teacher = realistic_heads(12, 97, 16, 24)
    top, ids = (teacher[0] @ teacher[1].T).log_softmax(-1).topk(8, -1)
    loss = distill_kernels.fused_top_k_kl_loss(hidden, weight, ids, top, tail="renormalize", direction="reverse")
    assert torch.equal(loss, distill_kernels.FusedTopKKLLoss("reverse", "renormalize")(hidden, weight, ids, top))


def test_an_unmerged_adapter_on_the_head_is_refused():
    hidden, *_ = realistic_heads(6, 97, 16, 24)
    labels, linear = torch.randint(0, 97, (6,)), torch.nn.Linear(16, 97)
    head = LoraLinear(linear, "default", config=LoraConfig(init_lora_weights=False), r=4, lora_alpha=8)
    loss = distill_kernels.FusedCrossEntropyLoss()
    for named in ({}, {"teacher_head": head}):
        with pytest.raises(ValueError, match="_head: expected a head whose weight says all"):
            distill_kernels.head_loss(linear if named else head, loss, hidden, labels=labels, **named)
    expected = torch.nn.functional.cross_entropy(head(hidden), labels)
    lora = head.lora_A["default"].weight, head.lora_B["default"].weight, 2.0
    torch.testing.assert_close(
        distill_kernels.head_loss(head, loss, hidden, labels=labels, student_lora=lora), expected
    )
    head.merge()
    torch.testing.assert_close(distill_kernels.head_loss(head, loss, hidden, labels=labels), expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_head_loss_in_a_compiled_model(hooked):
    hidden, *_ = realistic_heads(6, 97, 16, 24)
    labels, head, loss_fn = torch.randint(0, 97, (6,)), torch.nn.Linear(16, 97), distill_kernels.FusedCrossEntropyLoss()
    if hooked:  # as FSDP2 does
        head.register_forward_pre_hook(lambda _, given: (given[0] * 2,))

    def student(x):
        return distill_kernels.head_loss(head, loss_fn, x * 1.0, labels=labels)

    compiled = torch.compile(student, backend="aot_eager")
    gradients = []
    for call in (compiled, student):
        loss = call(hidden)
        gradients.append((loss.detach(), *torch.autograd.grad(loss, head.weight)))
    torch.testing.assert_close(*gradients)
    assert "forward" not in vars(head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tokens_at_all(device, dtype):
    hidden, weight, teacher_hidden, teacher_weight = realistic_heads(4, 97, 16, 24, dtype=dtype, device=device)
    for reduction in ("mean", "none"):
        student = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
        loss = distill_kernels.fused_kl_loss(*student, teacher_hidden[:0], teacher_weight, reduction=reduction)
        loss.sum().backward()
        assert loss.sum() == 0 and not student[1].grad.any()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_a_step_without_any_token_that_counts(device, items, skip):
    hidden, weight, *teacher = realistic_heads(4, 97, 16, 24, device=device)
    weight.requires_grad_()
    labels = torch.full((4,), -100, device=device)
    settings = {"ce_weight": 1.0, "num_items": items, "skip_ignored_rows": skip}
    loss = distill_kernels.fused_kl_loss(hidden, weight, *teacher, labels, **settings)
    loss.backward()
    assert loss == 0 and not weight.grad.any()


def test_settings_that_are_tensors_are_read_at_each_call():
    heads = realistic_heads(4, 31, 8, 8)
    logits = heads[0] @ heads[1].T, heads[2] @ heads[3].T
    temperature, weight = torch.tensor(1.0), torch.tensor(0.5)
    for _ in range(2):  # annealed in place
        temperature, weight = temperature.mul_(2), weight.add_(0.1)
        expected = distill_kernels.FusedKLLoss(temperature=float(temperature), divergence_weight=float(weight))(*heads)
        term, named = LossTerm("forward_kl", weight), {"temperature": temperature}
        assert torch.equal(distill_kernels.fused_kl_loss(*heads, divergence_weight=weight, **named), expected)
        assert torch.equal(distill_kernels.fused_distillation_loss(*heads, terms=[term], **named), expected)
        torch.testing.assert_close(distill_kernels.distillation_loss(*logits, terms=[term], **named), expected)


@pytest.mark.full
def test_functions_compile():
    heads = [tensor.requires_grad_() for tensor in realistic_heads(4, 31, 8, 8)]
    labels = torch.arange(4)

    def step(*heads):
        return distill_kernels.fused_kl_loss(*heads, labels, temperature=2.0, ce_weight=0.5)

    results = []
    for call in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
        loss = call(*heads)
        results.append((loss.detach(), *torch.autograd.grad(loss, heads[:2])))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_terms_may_be_lists():
    heads = realistic_heads(4, 31, 8, 8)
    loss = distill_kernels.fused_distillation_loss(*heads, terms=[["forward_kl", 1.0]])
    assert torch.equal(loss, distill_kernels.fused_kl_loss(*heads))


def test_mistakes_name_the_field():
    heads = realistic_heads(4, 31, 8, 8)
    with pytest.raises(ValueError, match="direction"):
        distill_kernels.fused_kl_loss(*heads, direction="sideways")
    with pytest.raises(TypeError, match="temprature"):
        distill_kernels.fused_kl_loss(*heads, temprature=2.0)


def test_a_setting_on_a_gpu_is_refused_without_a_host_sync():
    there = torch.ones((), device="meta")  # as on a GPU: to read it is more than to look at memory
    with pytest.raises(ValueError, match="temperature: expected a number, or a tensor on the CPU, got one on meta"):
        kl_div(torch.zeros(2, 8), torch.zeros(2, 8), temperature=there)
    with pytest.raises(ValueError, match="temperature: expected a number, or a tensor on the CPU, got one on meta"):
        fused_kl_loss(*(torch.zeros(2, 8) for _ in range(4)), temperature=there)
