"""Trials before kernels or packed rows are used find what fresh weights, first tokens or long documents hide."""

import copy

import pytest
import torch
from tiny import tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from distill.models.patch import packed
from distill.models.patch.packed import isolates_documents, lowered_limits, packing_problem
from distill.models.patch.patching import patch
from distill.models.trial import Mismatch, compare_forwards
from distill.recipe import dump, parse
from distill.teachers.opening import check_packing

MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "index_head_dim": 16,
}
GEMMA3N = {
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 259,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.95, 0.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", ["conv", "full_attention"])
def test_a_convolution_in_the_last_layer_leaks_into_first_tokens_alone(last, dtype):
    model = tiny_model(kind="lfm2", layers=3, layer_types=["full_attention"] * 2 + [last], dtype=dtype)
    assert packing_problem(model) == (packed.CARRIES if last == "conv" else None)


LLAMA4 = {
    "attention_chunk_size": 32,
    "floor_scale": 48,
    "num_local_experts": 2,
    "intermediate_size_mlp": 16,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}


@pytest.mark.parametrize("length", [None, 64, 48])
def test_positions_counted_from_the_beginning_of_a_row_are_found_where_rows_reach_them(length):
    """Llama 4 sharpens attention by the step that a token's place in its row has reached."""
    model = tiny_model(kind="llama4_text", **LLAMA4)
    assert packing_problem(model, longest=length) == (None if length == 48 else packed.SHIFTS)
    attention = model.model.layers[1].self_attn
    assert (model.config.attention_chunk_size, attention.floor_scale) == (32, 48)
    with lowered_limits(model):
        assert (model.config.attention_chunk_size, attention.floor_scale) == (packed.LOWERED,) * 2


def test_attention_in_chunks_is_left_to_the_model():
    model = tiny_model(kind="llama4_text", **LLAMA4)
    ids = torch.arange(3, 103)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    report = patch(model)
    assert report.attention is None and "comes out different" in report.left["attention"]
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, expected, atol=1e-4)


def test_a_selection_shows_in_documents_that_exceed_it():
    """Keys that no head of an indexer scores above zero are equal, and which of them are taken depends on the row."""
    model = tiny_model(kind="deepseek_v32", **MLA, index_topk=64, index_n_heads=2)
    assert packing_problem(model) == packed.SHIFTS and packing_problem(model, longest=64) is None
    assert model.model.layers[0].self_attn.indexer.index_topk == 64
    assert isolates_documents(tiny_model(kind="deepseek_v32", **MLA, index_topk=64, index_n_heads=32))


def test_packed_rows_whose_padding_has_no_gradient_are_refused_by_name():
    recipe = parse("{teacher: {model: a}, student: {model: a}, data: {source: a}, train: {steps: 1}}")
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3n_text", **GEMMA3N), dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"expected false, since the student \(Gemma3nForCausalLM\) has NaN .* padding"
    ):
        check_packing(recipe, model, "student")
    check_packing(parse(dump(recipe), ["data.packing=false"]), model, "student")
    check_packing(recipe, model.requires_grad_(False), "teacher")


def test_packed_rows_that_give_nan_are_named():
    model = tiny_model()
    forward = model.model.forward

    def breaks_on_restarts(*args, position_ids, **kwargs):
        output = forward(*args, position_ids=position_ids, **kwargs)
        restarts = (position_ids.diff(dim=-1) != 1).any()
        output.last_hidden_state = output.last_hidden_state * (torch.nan if restarts else 1)
        return output

    model.model.forward = breaks_on_restarts
    assert packing_problem(model) == packed.NOT_FINITE


def gradients(model):
    model.zero_grad()
    ids = torch.randint(3, 259, (2, 21), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(0.5, 1.5, logits.shape[-1])).square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# fresh parameters hide what is particular to these: residual weights of 1 (Doge), norms without a weight (DiffLlama)
@pytest.mark.parametrize("kind, fused", [("doge", 0), ("diffllama", 2), ("llama", 2)])
def test_fresh_models_get_the_gradients_of_every_parameter(kind, fused):
    model = tiny_model(kind=kind)
    plain = copy.deepcopy(model)
    report = patch(model, attention=None)
    assert report.swapped["residual_norm"] == fused, str(report)
    if not fused:
        assert "its output differs" in report.left["DogeDecoderLayer"]
    (actual, ours), (expected, theirs) = gradients(model), gradients(plain)
    assert torch.allclose(actual, expected, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"


class Scaled(nn.Module):
    """A product with a weight that is 1, and a bias that no output depends on yet."""

    def __init__(self):
        super().__init__()
        self.weight, self.matrix = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return (x * self.weight) @ self.matrix


def without_scale(self, x):
    return x @ self.matrix


def without_gradient(self, x):
    return (x * self.weight.detach()) @ self.matrix


@pytest.mark.parametrize(
    "other, reason",
    [
        (Scaled.forward, None),
        (without_scale, "its output differs"),
        (without_gradient, "gradient of its weight"),
    ],
)
def test_a_trial_perturbs_what_fresh_weights_hide_and_compares_every_gradient(other, reason):
    module, x = Scaled(), torch.randn(3, 8)
    before = copy.deepcopy(module.state_dict())
    found = compare_forwards(module, module.forward, lambda x: other(module, x), x, gradients=True)
    assert (found is None) if reason is None else (isinstance(found, Mismatch) and reason in found.reason)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    if other is without_gradient:
        assert compare_forwards(module, module.forward, lambda x: other(module, x), x, gradients=False) is None


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_that_are_close_in_16_bits_are_distinguished(dtype, activation):
    model = tiny_model(kind="gemma", hidden=64, hidden_act=activation, hidden_activation=activation, dtype=dtype)
    mlp = model.model.layers[0].mlp
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = mlp(x)
    assert patch(model, attention=None).swapped["glu"] == 2
    assert (mlp(x) - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()
