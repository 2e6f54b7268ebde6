"""Families of models: packed, padded, patched, cut, resumed, reloaded, exported; a few here, all of them by script."""

import copy

import pytest
import torch
from helpers import assert_as_good_as_torch

from distill.models.flops import count_flops
from distill.models.head import probe_logits
from distill.models.patch.packed import packing_problem
from distill.models.patch.patching import patch
from distill.models.prune.pruning import cut_config
from scripts.families import checks, page
from scripts.families.configs import families, shortened, tiny_config

# what each of them is tried for: `python -m scripts.families` tries every family that transformers has
KINDS = {
    "qwen3": "norms of heads",
    "bloom": "attention biased by distance",
    "cohere": "layers that compute attention and MLP side by side",
    "deepseek_v3": "latent attention and experts",
    "doge": "residual weights",
    "falcon_mamba": "no attention at all",
    "gemma2": "soft caps and windows",
    "gemma3n_text": "layers that share keys",
    "gpt2": "learned positions",
    "granitemoehybrid": "state spaces beside attention",
    "kimi_linear": "linear attention",
    "lfm2": "convolutions",
    "phi3": "joined projections",
    "qwen3_moe": "experts",
}


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_a_family_holds(name, tmp_path):
    assert checks.examine(name, tmp_path)["failed"] == []


@pytest.mark.full
def test_a_failure_of_a_family_is_a_row_and_not_the_end(tmp_path, fault):
    fault.setattr(checks, "MOST_KL", -1.0)
    found = checks.examine("llama", tmp_path)
    assert [line.partition(":")[0] for line in found["failed"]] == ["divergences"]
    assert found["resume"] == "to the bit"


def test_every_recorded_failure_has_a_reason():
    rows = page.read_rows()
    assert len(rows) >= 60 and rows.keys() <= set(families())
    failed = {name for name, row in rows.items() if row["failed"]}
    assert failed == page.KNOWN.keys(), "explain what fails in scripts/families/page.py"


def test_tiny_configurations_have_each_kind_of_layer():
    assert shortened(["a"] * 5 + ["b"] + ["c"]) == ["a", "a", "b", "c"]
    assert set(tiny_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert tiny_config("llama", scale=2).hidden_size == 2 * tiny_config("llama").hidden_size
    with pytest.raises(ValueError, match="family: expected a model type"):
        tiny_config("llamma")


@pytest.mark.parametrize(
    "name, field, whole, cut",
    [("zamba2", "hybrid_layer_ids", [1, 3], [0, 1]), ("qwen2_moe", "mlp_only_layers", [0, 3], [1])],
)
def test_lists_of_layers_numbers_are_cut_with_the_layers(name, field, whole, cut):
    config = tiny_config(name, **{} if name == "zamba2" else {field: whole})
    if name == "zamba2":
        config.layers_block_type, config.hybrid_layer_ids = ["linear_attention", "hybrid"] * 2, whole
    assert getattr(cut_config(config, [1, 3]), field) == cut


@pytest.mark.parametrize("name", ["recurrent_gemma", "xlstm"])
def test_soft_caps_of_logits_are_read_by_any_name(name):
    assert probe_logits(checks.random_model(name), "teacher").softcap is not None


def test_models_without_attention_have_work_to_count():
    work = count_flops(checks.random_model("falcon_mamba"), trains=True)
    assert work is not None and work.token > 0 and work.pair == 0


# ---- on a GPU


def outcome(model, batch):
    """Logits, and the gradients of all parameters by name."""
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    (logits.float() * torch.linspace(0.5, 1.5, logits.shape[-1], device=logits.device)).square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


DENSE = (
    "cohere2",
    "diffllama",
    "doge",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "mistral",
    "nemotron",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
)
EXPERTS = ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "granitemoe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE + EXPERTS)
def test_patched_families_on_a_gpu(name, dtype):
    """Experts in fp32 alone: in 16 bits, rounding decides which of them a token gets."""
    if name in EXPERTS and dtype != torch.float32:
        pytest.skip("rounding decides which experts a token gets")
    assert_patched_as_good(name, dtype, "cuda")


def assert_patched_as_good(name, dtype, device):
    eager = checks.random_model(name, scale=2).to(device, dtype)
    exact = copy.deepcopy(eager).float() if dtype != torch.float32 else None
    ours = copy.deepcopy(eager)
    batch = {key: tensor.to(device) for key, tensor in checks.Family(name, None).batch(packed=True).items()}
    batch = {key: batch[key] for key in ("input_ids", "position_ids") if key in batch}
    if packing_problem(eager) is not None:
        del batch["position_ids"]
    report = patch(ours)
    assert report.swapped or report.attention, str(report)
    (expected, wanted), (actual, got) = outcome(eager, batch), outcome(ours, batch)
    assert got.keys() == wanted.keys()
    if exact is None:
        scale = expected.abs().max()
        assert (actual - expected).abs().max() <= 1e-4 * scale
        largest = max(gradient.norm() for gradient in wanted.values())
        for key, gradient in wanted.items():
            error = (got[key] - gradient).norm() / gradient.norm().clamp_min(1e-3 * largest)
            assert error <= 1e-3, f"{key}: {error:.1e}"
        return
    right, gradients = outcome(exact, batch)
    assert_as_good_as_torch(actual, expected, right, dtype, "logits")
    flat = [torch.cat([g.flatten().float() for _, g in sorted(each.items())]) for each in (got, wanted, gradients)]
    assert_as_good_as_torch(*flat, dtype, "gradients")
