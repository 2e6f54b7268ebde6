"""Attention where products and rotated queries and keys differ in dtype: every mix, as exact as PyTorch's own."""

import copy

import pytest
import torch
from grids import pairwise
from helpers import assert_as_good_as_torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from distill.generation import ragged_cache
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.models.head import decoder_of
from distill.models.patch.attention import use_fused_attention
from distill.models.patch.patching import patch

PROMPT, NEW = [5, 6, 7, 8], 3
KINDS = {"llama": {}, "window": {"kind": "mistral", "sliding_window": 3}}
MIXES = {
    "autocast": [torch.bfloat16, None],
    "patched": [False, True],
    "weights": [torch.float32, torch.bfloat16],
    "lora": [False, True],
    "kind": KINDS,
}


@pytest.mark.plain("torch.bfloat16-False-torch.float32-False-llama")
@pytest.mark.parametrize(*pairwise(MIXES))
def test_generation_and_forward_take_every_mix_of_dtypes(kernel_device, kind, patched, weights, autocast, lora, watch):
    plain = tiny_model(layers=1, **KINDS[kind]).to(kernel_device, weights)
    if lora:
        plain = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    plain = plain.eval().requires_grad_(False)
    exact, model, computes = copy.deepcopy(plain).double(), copy.deepcopy(plain), autocast or weights
    if patched:
        patch(model, "student")
    stored, allocate = [], ragged_cache.RaggedLayer.lazy_initialization
    watch.setattr(
        ragged_cache.RaggedLayer,
        "lazy_initialization",
        lambda layer, *states: (allocate(layer, *states), stored.append({layer.keys.dtype, layer.values.dtype})),
    )
    settings = EngineSettings(0, [], autocast=autocast, log_probs=True)
    answer = DecodeLoop(model, settings).generate([PROMPT], max_new_tokens=NEW)
    assert stored and all(dtypes == {computes} for dtypes in stored)

    def given(ids):
        """Logits of a row by fp64, and by PyTorch in this mix."""
        with torch.autocast(kernel_device.type, autocast, enabled=autocast is not None):
            eager = plain(input_ids=ids, use_cache=False).logits
        return eager, exact(input_ids=ids, use_cache=False).logits

    ids = torch.tensor([PROMPT + answer.tokens[0]], device=kernel_device)
    picked = ids[0, len(PROMPT) :, None]
    eager, wide = (logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1).gather(1, picked) for logits in given(ids))
    ours = torch.tensor(answer.log_probs[0], device=kernel_device)[:, None]
    assert_as_good_as_torch(ours, eager, wide, computes, "decode loop")

    if not patched:
        use_fused_attention(model, decoder_of(model))
    with torch.autocast(kernel_device.type, autocast, enabled=autocast is not None):
        whole = model(input_ids=ids, use_cache=False).logits
    assert_as_good_as_torch(whole, *given(ids), computes, "forward")
