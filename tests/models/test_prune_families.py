"""Families whose widths can be cut, each tried on a small model with zeros in place of what is dropped."""

import pytest
import torch
from test_prune import logits, student_of
from transformers import AutoModelForCausalLM

from distill.models.prune.width_trial import verified_layout
from scripts.families.configs import tiny_config

ALL = ("hidden", "heads", "intermediate")


@pytest.mark.plain("llama", "seed_oss", "gemma", "deepseek_v3")
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "seed_oss", "smollm3", "granite", "glm4", "phi3"),
        *("gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "deepseek_v3", "exaone4", "arcee"),
    ],
)
def test_all_widths_can_be_cut(family):
    layout = verified_layout(tiny_config(family), ALL)
    axes = {block.axis for dims in layout.dims.values() for blocks in dims for block in blocks}
    assert axes >= set(ALL)


CUT = {"layers": 3, "hidden": 24, "heads": 2, "kv_heads": 1, "intermediate": 48}
PLAIN_NORMS = "expected RMSNorms over what is cut, got model.layers.0.input_layernorm"
# dense families like Llama: the parts of `CUT` that cannot be cut, and the refusal
DENSE = dict.fromkeys(
    (
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
        *("olmo2", "olmo3", "granite", "glm", "glm4", "smollm3", "seed_oss", "exaone4", "arcee", "ernie4_5", "cwm"),
        *("apertus", "hunyuan_v1_dense"),
    ),
    ((), ""),
) | {
    "phi": (("hidden",), PLAIN_NORMS),
    "starcoder2": (("hidden",), PLAIN_NORMS),
    "cohere": (("hidden",), PLAIN_NORMS),
    "cohere2": (("hidden",), PLAIN_NORMS),
    "nemotron": (("hidden",), PLAIN_NORMS),
    "olmo": (
        ("hidden",),
        "a small OlmoConfig that is cut along hidden, intermediate, heads differs from the same with",
    ),
    "stablelm": (("hidden", "heads", "kv_heads"), "k_proj.weight is no multiple of hidden; leave hidden out"),
    "diffllama": (
        ("heads", "kv_heads"),
        "a small DiffLlamaConfig that is cut along hidden, intermediate, heads differs",
    ),
    "helium": (tuple(CUT)[1:], "HeliumForCausalLM takes no head_dim of its own"),
    "bitnet": (("hidden", "heads", "kv_heads"), "a small BitNetConfig cannot be cut along hidden, intermediate, heads"),
}


@pytest.mark.plain("llama", "olmo3")
@pytest.mark.parametrize("family", DENSE)
def test_students_load_as_they_are_and_what_cannot_be_cut_is_refused(family, tmp_path):
    """A student is saved and read by transformers alone, with the same logits; the teacher keeps its own."""
    lacks, said = DENSE[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        teacher = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    before = logits(teacher)
    if lacks:
        with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
            student_of(teacher, **CUT)
        assert said in str(raised.value) and "\n" not in str(raised.value)
    cut = {name: value for name, value in CUT.items() if name not in lacks} | {"importance": {}}
    student, _ = student_of(teacher, **cut)
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(student))
    assert torch.equal(logits(teacher), before)
    config = again.config
    found = {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "intermediate": config.intermediate_size,
    }
    assert found == {name: cut.get(name, size) for name, size in {"hidden": 32, "heads": 4, "intermediate": 64}.items()}
    assert config.num_hidden_layers == 3
    fewer = sum(parameter.numel() for parameter in again.parameters())
    assert fewer < sum(parameter.numel() for parameter in teacher.parameters())


@pytest.mark.parametrize("family", ["gemma3n_text", "hy_v4"])
def test_layers_that_take_something_of_others_are_not_chosen_by_the_loss_without_them(family):
    teacher = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    with pytest.raises(
        ValueError, match=r"^student\.from_teacher\.layers: .* has layers that take keys and values or selected tokens"
    ):
        student_of(teacher, layers=3, importance={})


@pytest.mark.parametrize("family", ["bamba", "glm_moe_dsa"])
def test_layers_that_return_more_than_hidden_states_are_chosen_by_the_loss(family):
    teacher = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    student, chosen = student_of(teacher, layers=3, importance={})
    assert len(chosen.layers) == 3 == student.config.num_hidden_layers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_mixtures_of_experts_are_cut_outside_of_their_experts(family):
    layout = verified_layout(tiny_config(family), ("hidden", "heads"))
    assert any("experts" in name for name in layout.on("hidden")), "experts read and write hidden channels"
    assert not any("experts" in name for name in layout.on("heads")) and not layout.mlps


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
        verified_layout(tiny_config(family), axes)
    assert said in str(raised.value) and "\n" not in str(raised.value)
