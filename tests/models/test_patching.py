"""Patching: the same outputs and gradients with our kernels in place, everything back after unpatch."""

import copy
import itertools

import pytest
import torch
from helpers import assert_as_good_as_torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_config, tiny_model, tiny_tokenizer
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from distill import AutoFusedModelForCausalLM
from distill.models.patch.packed import isolates_documents
from distill.models.patch.patching import patch, unpatch
from distill.recipe import dump, parse
from distill.teachers.opening import check_packing, isolates_documents_with_kernels

# model type -> what must be swapped in two layers, and settings that make the tiny model exercise its particulars
LAYERS = {"glu": 2, "rope": 2, "shared_input": 4, "residual_norm": 2}  # of most
FAMILIES = {
    "llama": ({"rms_norm": 5} | LAYERS, {}),
    "mistral": ({"rms_norm": 5} | LAYERS, {"sliding_window": 8}),
    "qwen2": ({"rms_norm": 5} | LAYERS, {}),
    "qwen3": ({"rms_norm": 9} | LAYERS, {}),
    "gemma2": ({"rms_norm": 9} | LAYERS, {"query_pre_attn_scalar": 8}),
    "gemma3_text": ({"rms_norm": 13} | LAYERS, {"query_pre_attn_scalar": 8}),
    "phi3": ({"rms_norm": 5, "glu": 2, "rope": 2}, {}),
    "granite": ({"rms_norm": 5, "glu": 2, "rope": 2, "shared_input": 4}, {"residual_multiplier": 0.5}),
    "olmo2": ({"rms_norm": 9, "glu": 2, "rope": 2, "shared_input": 4}, {}),
    "smollm3": ({"rms_norm": 5} | LAYERS, {}),
    "mixtral": (
        {"rms_norm": 5, "rope": 2, "shared_input": 2, "residual_norm": 2, "experts": 2, "router": 2, "sparse_block": 2},
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ({"layer_norm": 5, "bias_gelu": 2}, {}),
}


def make(kind, **more):
    model = tiny_model(kind=kind, **(FAMILIES[kind][1] | more))
    if kind == "gemma2":  # sdpa drops its soft cap, and transformers 5.17 takes sdpa all the same
        model.set_attn_implementation("eager")
    # norms start as ones or zeros; trained weights differ
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def ids(rows=2, length=21):
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    weights = torch.linspace(0.5, 1.5, logits.shape[-1])
    (logits * weights).square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected, tolerance=2e-5):
    scale = expected.abs().max().clamp_min(1e-6)
    assert ((actual - expected).abs().max() / scale).item() < tolerance


@pytest.mark.plain("llama", "qwen2", "gemma2", "granite", "smollm3", "gpt2")
@pytest.mark.parametrize("kind", FAMILIES)
def test_outputs_and_gradients_stay(kind):
    model = make(kind)
    logits, gradients = loss_and_gradients(model, input_ids=ids())
    report = patch(model, "student")
    assert dict(report.swapped) == FAMILIES[kind][0], str(report)
    assert report.attention == "triton"
    patched_logits, patched_gradients = loss_and_gradients(model, input_ids=ids())
    assert_same(patched_logits, logits)
    assert patched_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_same(patched_gradients[name], gradient, 1e-4)
    unpatch(model)
    assert torch.equal(model(input_ids=ids(), use_cache=False).logits, logits)
    assert not [m for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("narrow", [False, True])
def test_residuals_are_added_within_the_product_for_inference(narrow):
    """Not under autocast, whose casts would be in the way."""
    model, plain = make("llama"), make("llama")
    patch(model, "teacher", attention=None)
    with torch.profiler.profile() as profile, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        actual = model(input_ids=ids(), use_cache=False).logits
    products = sum(event.name == "aten::addmm_" for event in profile.events())
    assert products == (0 if narrow else 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        assert_same(actual, plain(input_ids=ids(), use_cache=False).logits, 0.05 if narrow else 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_patched_on_the_kernels_themselves(kind, kernel_device):
    model = make(kind, hidden=64).to(kernel_device)
    inputs = {"input_ids": ids(1, 17).to(kernel_device)}
    logits = model(**inputs, use_cache=False).logits
    assert patch(model, "teacher").attention == "triton"  # a kernel that computes something else is not taken
    with torch.inference_mode():
        assert_same(model(**inputs, use_cache=False).logits, logits, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3", "olmo2"])
def test_bfloat16_loses_no_more_than_before(kind):
    exact = make(kind, hidden=256).double().cuda()
    narrow = make(kind, hidden=256).bfloat16().cuda()
    inputs = {"input_ids": ids(2, 300).cuda()}
    weights = torch.linspace(0.5, 1.5, 259, device="cuda")

    def run(model):
        model.zero_grad()
        logits = model(**inputs, use_cache=False).logits
        (logits.double() * weights).square().mean().backward()
        return logits, model.model.layers[0].self_attn.q_proj.weight.grad

    expected, eager = run(exact), run(narrow)
    patch(narrow, "student")
    for name, ours, theirs, right in zip(("logits", "gradient"), run(narrow), eager, expected, strict=True):
        assert_as_good_as_torch(ours, theirs, right, torch.bfloat16, name)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral"])
def test_packed_documents_do_not_see_each_other(kind):
    model = make(kind)
    patch(model, "student")
    tokens = ids(2, 20)
    positions = torch.tensor([[*range(7), *range(13)], [*range(12), *range(8)]])
    packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    for row, cuts in enumerate([(0, 7, 20), (0, 12, 20)]):
        for start, stop in itertools.pairwise(cuts):
            alone = model(input_ids=tokens[row : row + 1, start:stop], use_cache=False).logits
            assert_same(packed[row : row + 1, start:stop], alone)
    # and the test can fail: without the restart of positions the documents do see each other
    leaking = model(input_ids=tokens, use_cache=False).logits
    assert (leaking[0, 7:] - packed[0, 7:]).abs().max() > 1e-2


def test_a_model_that_computes_something_else_is_left_alone():
    model = make("llama")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: 1.1 * type(norm).forward(norm, x)
    own = model.model.layers[1].mlp
    own.forward = lambda x: 0.9 * type(own).forward(own, x)
    expected = model(input_ids=ids(), use_cache=False).logits
    patch(model, "student")
    assert_same(model(input_ids=ids(), use_cache=False).logits, expected)


# model type -> settings; modules that look like ours and are called otherwise, or attention that is not told all
UNLIKE = {
    "starcoder2": {},  # pre-norm layers around LayerNorms
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },  # RMSNorms with a gate
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "shared_intermediate_size": 64,
    },
    "nemotron": {},  # layers that do not hand on where documents end
    "doge": {},  # attention that makes its own mask
}
CARRY = {"qwen3_next", "granitemoehybrid", "gpt_oss"}  # no document of a packed row is alone there, unpatched


@pytest.mark.parametrize("kind", UNLIKE)
def test_models_with_other_layers_keep_their_outputs(kind):
    model = tiny_model(kind=kind, **UNLIKE[kind])
    if kind == "doge":  # of keys that a fresh model scores alike it chooses any
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.A)
    tokens, positions = ids(2, 14), torch.tensor([[*range(6), *range(8)]] * 2)
    inputs = [{"input_ids": tokens}] + [{"input_ids": tokens, "position_ids": positions}] * (kind not in CARRY)
    expected = [model(**one, use_cache=False).logits for one in inputs]
    assert isolates_documents(model) == (kind not in CARRY)
    patch(model)
    for one, logits in zip(inputs, expected, strict=True):
        assert_same(model(**one, use_cache=False).logits, logits)


def test_packed_rows_are_refused_where_documents_see_each_other():
    recipe = parse("{teacher: {model: a}, student: {model: a}, data: {source: a}, train: {steps: 1}}")
    model = tiny_model(kind="lfm2", layer_types=["conv", "full_attention"])
    check_packing(recipe, tiny_model(), "teacher")
    check_packing(parse(dump(recipe), ["data.packing=false"]), model, "student")
    with pytest.raises(ValueError, match=r"data\.packing: expected false, since the student \(Lfm2ForCausalLM"):
        check_packing(recipe, model, "student")
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = torch.nan
    check_packing(recipe, model, "student")  # this is told elsewhere


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_rounding_that_depends_on_the_other_rows_is_not_taken_for_documents_that_see_each_other(kind):
    model = tiny_model(kind=kind, **({} if kind == "llama" else {"layer_types": ["conv", "full_attention"]}))

    def rounds(module, inputs, output):  # as experts do in 16 bits, with the tokens that each of them gets
        generator = torch.Generator().manual_seed(int(inputs[0].double().sum().abs() * 1e6))
        return output * (1 + 0.03 * torch.randn(output.shape, generator=generator))

    model.model.layers[0].register_forward_hook(rounds)
    assert isolates_documents(model) == (kind == "llama")


def test_fused_attention_separates_documents_where_a_models_own_does_not():
    model = tiny_model(kind="opt", ffn_dim=32, word_embed_proj_dim=32, do_layer_norm_before=True)
    before = model.config._attn_implementation
    assert not isolates_documents(model) and isolates_documents_with_kernels(model)
    assert model.config._attn_implementation == before and not isolates_documents(model)
    assert not isolates_documents_with_kernels(tiny_model(kind="lfm2", layer_types=["conv", "full_attention"]))
    recipe = parse("{teacher: {model: a}, student: {model: a}, data: {source: a}, train: {steps: 1}}")
    with pytest.raises(ValueError, match=r"data\.packing: expected false"):  # on a CPU ours is not put in
        check_packing(recipe, model, "teacher")


@pytest.mark.gpu
def test_packed_rows_are_taken_where_our_attention_keeps_documents_apart():
    model = tiny_model(kind="opt", ffn_dim=32, word_embed_proj_dim=32, do_layer_norm_before=True).cuda()
    recipe = parse("{teacher: {model: a}, student: {model: a}, data: {source: a}, train: {steps: 1}}")
    check_packing(recipe, model, "student")
    own = parse(dump(recipe), ["student.attention=sdpa"])
    with pytest.raises(ValueError, match=r"data\.packing: expected false"):
        check_packing(own, model, "student")


def flash_of_transformers(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """Attention function like transformers' flash attention, which takes documents in batches of one row only."""
    keys, values = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    if len(query) == 1:
        document = (position_ids[0] == 0).cumsum(0)
        seen &= document[:, None] == document
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=scaling)
    return out.transpose(1, 2), None


def test_packed_rows_are_taken_one_at_a_time_by_flash_attention_of_transformers():
    AttentionInterface.register("row_by_row", flash_of_transformers)
    AttentionMaskInterface.register("row_by_row", lambda **_: None)
    model = make("llama")
    model.set_attn_implementation("row_by_row")
    recipe = parse(
        "{teacher: {model: a}, student: {model: a, attention: flash_attention_2}, data: {source: a}, "
        "train: {steps: 1, batch_size: 1}}"
    )
    check_packing(recipe, model, "student")
    with pytest.raises(ValueError, match=r"data\.packing: expected false"):
        check_packing(parse(dump(recipe), ["train.batch_size=2"]), model, "student")


def test_generate_with_padding_and_cache_as_before():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    model = make("llama")
    inputs = tokenizer(["The teacher", "A much longer prompt than that"], return_tensors="pt", padding=True)
    before = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    patch(model, "student")
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), before)


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_before_or_after(first):
    model = make("llama")
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    plain = get_peft_model(copy.deepcopy(model), config)
    expected = plain(input_ids=ids(), use_cache=False).logits
    torch.manual_seed(3)
    if first == "patch":
        patch(model, "student")
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        patch(model, "student")
    assert_same(model(input_ids=ids(), use_cache=False).logits, expected)


def test_gradient_checkpointing_recomputes_the_same():
    model = make("llama").train()
    patch(model, "student")
    positions = torch.tensor([[*range(9), *range(12)]] * 2)
    _, gradients = loss_and_gradients(model, input_ids=ids(), position_ids=positions)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, recomputed = loss_and_gradients(model, input_ids=ids(), position_ids=positions)
    for name, gradient in gradients.items():
        assert_same(recomputed[name], gradient)


def test_saves_and_loads_as_before(tmp_path):
    model = make("llama")
    expected = model(input_ids=ids(), use_cache=False).logits
    patch(model, "student")
    model.save_pretrained(tmp_path)
    assert "distill" not in (tmp_path / "config.json").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids()).logits, expected)
    fused = AutoFusedModelForCausalLM.from_pretrained(tmp_path, role="teacher")
    assert_same(fused(input_ids=ids(), use_cache=False).logits, expected)


def test_errors_name_the_invalid_argument():
    model = make("llama")
    with pytest.raises(ValueError, match="role"):
        patch(model, "teachers")
    with pytest.raises(ValueError, match="attention"):
        patch(model, attention="fast")
    unpatch(model)
    patch(model)
    with pytest.raises(ValueError, match="already"):
        patch(model)


def test_two_models_of_one_family_are_independent():
    teacher, student = make("llama"), make("llama", seed=2)
    before = student(input_ids=ids(), use_cache=False).logits
    patch(teacher, "teacher")
    assert not [m for m in student.modules() if "forward" in m.__dict__]
    assert student.config._attn_implementation == "sdpa"
    assert torch.equal(student(input_ids=ids(), use_cache=False).logits, before)


def test_every_family_has_a_tiny_model():
    for kind, (_, more) in FAMILIES.items():
        assert tiny_config(kind, **more).model_type == kind
