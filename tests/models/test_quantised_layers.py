"""Formats of a student's parameters by layer and name, and those that stay as they are."""

import re

import pytest
from tiny import tiny_model

from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe.quantise import Quantise


def all_formats(model, name, **more):
    return formats_of(model, Quantise(format=name, **more))


def test_formats_by_layer_part_and_name():
    model = tiny_model(seed=1, hidden=64)
    found = all_formats(
        model, "q4_0", modules={"down_proj": "q8_0", "0.self_attn": "keep", "1.mlp.up_proj": "q8_0"}
    ).by_name
    last = len(model.model.layers) - 1
    assert found[f"model.layers.{last}.mlp.down_proj.weight"] == found["model.layers.1.mlp.up_proj.weight"] == "q8_0"
    assert found["model.layers.0.mlp.up_proj.weight"] == found["model.layers.1.self_attn.q_proj.weight"] == "q4_0"
    assert not [key for key in found if "layers.0.self_attn" in key] and found["model.embed_tokens.weight"] == "q8_0"
    assert "model.embed_tokens.weight" not in all_formats(model, "int4_g32").by_name
    with pytest.raises(
        ValueError, match=r"student\.quantise\.modules: 'wide' matches no linear layer; there are layers 0"
    ):
        all_formats(model, "q4_0", modules={"wide": "keep"})
    odd = formats_of(tiny_model(hidden=64, intermediate_size=72), Quantise(format="q4_0"))
    assert odd.unfit and all("down_proj" in name for name in odd.unfit), "rows of 72 are not whole blocks"
    assert not set(odd.unfit) & set(odd.by_name) and formats_of(model, Quantise(format="q4_0")).note() == ""
    narrow = tiny_model(hidden=40, head_dim=10, intermediate_size=72)
    with pytest.raises(ValueError, match=r"no linear layer has rows that are whole blocks of q4_0; expected"):
        formats_of(narrow, Quantise(format="q4_0"))
    mixed = all_formats(tiny_model(hidden=256, layers=12), "q4_k").by_name
    wide = {key.split(".")[2] for key, form in mixed.items() if "v_proj" in key and form == "q6_k"}
    assert wide == {"0", "3", "6", "9", "10", "11"}, "llama.cpp's q4_k_m: the first and last eighth, and every third"
    assert {form for key, form in mixed.items() if "down_proj" in key and key.split(".")[2] in wide} == {"q6_k"}
    assert {form for key, form in mixed.items() if "q_proj" in key} == {"q4_k"} and mixed[
        "model.embed_tokens.weight"
    ] == "q6_k"
    assert set(all_formats(tiny_model(hidden=64), "q4_k").by_name.values()) == {"q5_0", "q8_0"}, "narrow rows"
    with pytest.raises(ValueError, match=r"expected weights in float32, got torch\.bfloat16"):
        quantise_student(model.bfloat16(), all_formats(model, "q4_0"))


@pytest.mark.parametrize(
    "modules, names",
    [
        ({"q_proj": "keep"}, "keep for q_proj, int4_g32 for k_proj, int4_g32 for v_proj"),
        ({"1.mlp.up_proj": "int8"}, "int4_g32 for gate_proj, int8 for up_proj"),
    ],
)
def test_layers_that_vllm_joins_have_one_format(modules, names):
    """It refuses a folder that has two; llama.cpp joins nothing."""
    with pytest.raises(ValueError, match=f"student.quantise.modules: expected one format for .*, got {names}"):
        formats_of(tiny_model(hidden=64), Quantise(format="int4_g32", modules=modules))
    formats_of(tiny_model(hidden=64), Quantise(format="int4_g32", modules={"0": "keep", "down_proj": "int8"}))
    formats_of(tiny_model(hidden=64), Quantise(format="q4_0", modules={"q_proj": "keep"}))


def test_routers_and_experts_of_one_tensor_are_not_quantised_and_named():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = tiny_model(kind="qwen2_moe", hidden=64, shared_expert_intermediate_size=64, **experts)
    found = formats_of(model, Quantise(format="int4_g32"))
    assert not [name for name in found.by_name if "gate." in name or ".experts." in name]
    assert {name.rpartition(".")[2] for name in found.unfit} == {"gate_up_proj", "down_proj"} and len(found.unfit) == 4
    text = r"4 matrices \((\d+)% of the layers' weights\) stay as they are, such as model.layers.0.mlp.experts.gate_up"
    inside = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    of_layers = sum(p.numel() for p in model.model.layers.parameters())
    assert abs(float(re.match(text, found.note())[1]) - 100 * inside / of_layers) <= 0.5
