"""Experts and routers of mixtures, patched, beside transformers' eager experts: loss and every gradient."""

import copy

import pytest
import torch
from distill_kernels.layers.experts import experts

from distill.models.patch import experts as patched_experts
from distill.models.patch.patching import patch, unpatch
from scripts.families import checks

# what is replaced of a layer in fp64, where most routers keep their fp32 softmax, and in fp32
BOTH = {"experts", "router"}
FAMILIES = {
    "deepseek_v2": (BOTH, BOTH),
    "deepseek_v3": (BOTH, BOTH),
    "dots1": (BOTH, BOTH),
    "ernie4_5_moe": (BOTH, BOTH),
    "flex_olmo": ({"experts"}, BOTH | {"sparse_block"}),
    "glm4_moe": (BOTH, BOTH),
    "gpt_oss": (BOTH, BOTH),
    "granitemoe": ({"experts"}, BOTH),
    "hunyuan_v1_moe": ({"experts"}, {"experts"}),
    "minimax_m2": (BOTH | {"sparse_block"}, BOTH | {"sparse_block"}),
    "mixtral": (BOTH | {"sparse_block"}, BOTH | {"sparse_block"}),
    "olmoe": ({"experts"}, BOTH | {"sparse_block"}),
    "phimoe": ({"experts"}, {"experts"}),
    "qwen2_moe": ({"experts"}, BOTH),
    "qwen3_moe": ({"experts"}, BOTH | {"sparse_block"}),
    "qwen3_next": ({"experts"}, BOTH),
}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5}  # routers of transformers compute in fp32 in a model in fp64


def eager_model(name, dtype):
    model = checks.random_model(name, scale=2).to(dtype)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model


def loss_and_gradients(model):
    model.zero_grad()
    ids = torch.arange(24).view(2, 12) % model.config.get_text_config().vocab_size
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.plain("deepseek_v2-torch.float64", "gpt_oss-torch.float64", "phimoe-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_stay(name, dtype):
    model = eager_model(name, dtype)
    ours = copy.deepcopy(model)
    report = patch(ours, attention=None, log_it=False)
    swapped = {kind for kind in ("experts", "router", "sparse_block") if report.swapped[kind]}
    assert swapped == FAMILIES[name][dtype == torch.float32], str(report)
    (loss, gradients), (our_loss, our_gradients) = map(loss_and_gradients, (model, ours))
    assert abs(our_loss - loss) <= TOLERANCE[dtype] * abs(loss)
    assert our_gradients.keys() == gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    for key, gradient in gradients.items():
        error = (our_gradients[key] - gradient).norm() / gradient.norm().clamp_min(1e-3 * largest)
        assert error <= TOLERANCE[dtype], f"{key}: {error:.1e}"
    unpatch(ours)
    assert loss_and_gradients(ours)[0] == loss


def test_experts_that_are_called_with_more_are_left_with_the_reason():
    report = patch(checks.random_model("llama4_text"), attention=None, log_it=False)
    assert "experts" not in report.swapped
    assert report.left["Llama4TextExperts"].startswith("not a experts of ours: it does not run on tokens, indices")


def test_experts_with_another_activation_are_left():
    model = checks.random_model("qwen3_moe")
    for module in model.modules():
        if patched_experts.looks_like_experts(module):
            module.act_fn = torch.nn.ReLU()
    report = patch(model, attention=None, log_it=False)
    assert "experts" not in report.swapped and "differs" in report.left["Qwen3MoeExperts"]


def test_a_router_whose_bias_is_ignored_would_be_seen():
    """A selection bias of zeros hides what it is for: the trial gives it values."""
    model = checks.random_model("deepseek_v3")
    router = next(module for module in model.modules() if patched_experts.looks_like_router(module))
    assert not router.e_score_correction_bias.any()
    form = patched_experts.router_form(router, gradients=True)
    assert form.score == "sigmoid" and form.normalised == router.norm_topk_prob
    router.e_score_correction_bias[:] = torch.linspace(-3, 3, router.num_experts)
    x = torch.randn(16, router.hidden_dim, generator=torch.Generator().manual_seed(0))
    expected = router(x)[2].sort().values
    assert torch.equal(patched_experts.router_forward(form)(router, x)[2].sort().values, expected)


def test_experts_on_several_devices_keep_their_forward(monkeypatch):
    model = checks.random_model("qwen3_moe")
    patch(model, attention=None, log_it=False)
    called = []
    monkeypatch.setattr(patched_experts, "experts", lambda *args, **more: called.append(1) or experts(*args, **more))
    ids = torch.arange(12)[None]
    model(input_ids=ids, use_cache=False)
    count = len(called)
    assert count
    for module in model.modules():
        if patched_experts.looks_like_experts(module):
            module._is_expert_parallel = True
    model(input_ids=ids, use_cache=False)
    assert len(called) == count
