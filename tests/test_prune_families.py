"""Families whose widths can be cut, each tried on a small model with zeros in place of what is dropped."""

import pytest

from distill.models.prune.width_trial import proven_layout
from scripts.families.configs import tiny_config

ALL = ("hidden", "heads", "intermediate")


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3", "granite", "glm4", "phi3"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "deepseek_v3", "exaone4", "arcee"),
    ],
)
def test_all_widths_can_be_cut(family):
    layout = proven_layout(tiny_config(family), ALL)
    axes = {block.axis for dims in layout.dims.values() for blocks in dims for block in blocks}
    assert axes >= set(ALL)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_mixtures_of_experts_are_cut_outside_of_their_experts(family):
    layout = proven_layout(tiny_config(family), ("hidden", "heads"))
    assert any("experts" in name for name in layout.on("hidden")), "experts read and write hidden channels"
    assert not any("experts" in name for name in layout.on("heads"))
    with pytest.raises(ValueError, match=r"^student\.from_teacher\.intermediate: "):
        proven_layout(tiny_config(family), ALL)


@pytest.mark.parametrize(
    "family, axes, said",
    [
        ("cohere", ("hidden",), "expected RMSNorms over what is cut, got model.layers.0.input_layernorm"),
        ("olmo", ("hidden",), "differs from the same with zeros there by"),
        ("stablelm", ("heads",), "is no multiple of hidden"),
        ("gpt2", ("heads",), "expected a configuration with one width of all layers to cut widths, got GPT2Config"),
        ("mamba2", ("hidden",), "student.from_teacher"),
    ],
)
def test_other_families_are_refused_in_a_line(family, axes, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
        proven_layout(tiny_config(family), axes)
    assert said in str(raised.value) and "\n" not in str(raised.value)
