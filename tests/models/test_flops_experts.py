"""FLOPs and active parameters of mixtures of experts, against PyTorch's own count of one forward."""

import pytest
import torch
from test_prune_experts import drawn
from tiny import tiny_model, tiny_tokenizer
from torch.utils.flop_counter import FlopCounterMode

from distill.models.flops import count_flops
from distill.models.head import attention_sizes
from distill.models.shape import model_sizes, parameters_text
from scripts.families.configs import tiny_config

# families whose attention is the plain one, which the formula of a pair of query and key describes
FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "glm4_moe",
    "ernie4_5_moe",
    "minimax_m2",
)
ROWS = 2
LENGTH = 16


@pytest.mark.plain("qwen2_moe", "gpt_oss", "ernie4_5_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_tokens_own_experts_are_counted(family):
    """Eager experts multiply each expert's tokens alone, so PyTorch counts what is computed."""
    model = drawn(family)
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    work = count_flops(model, trains=False)
    tokens = ROWS * LENGTH
    expected = work.total(tokens, tokens, tokens * LENGTH)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)
    shape = model_sizes(model)
    assert shape.active < shape.parameters
    assert "active per token" in parameters_text([shape])


@pytest.mark.full
def test_layers_that_differ_are_counted_by_the_widest():
    """Transformers refuses `num_attention_heads` of such a configuration as a whole."""
    wide = {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8, "swa_head_dim": 32}  # of layers with windows
    assert attention_sizes(tiny_config("dots3_note_text")) == (4, 4, 16)
    assert attention_sizes(tiny_config("dots3_note_text", **wide)) == (8, 8, 32)
    assert count_flops(drawn("dots3_note_text"), trains=True) is not None


def test_a_dense_model_has_no_inactive_parameters():
    shape = model_sizes(tiny_model(tiny_tokenizer(259)))
    assert shape.active == shape.parameters
    assert "active" not in parameters_text([shape])
