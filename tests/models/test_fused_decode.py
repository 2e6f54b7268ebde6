"""The fused step of the decode loop: kernels against their definitions, the step against the model's own forward."""

import logging

import pytest
import torch
from distill_kernels.decoding.plan import FASTER_ON
from distill_kernels.launch import INTERPRETER
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from distill.generation.decode_loop import DecodeLoop, EngineSettings, Request
from distill.generation.sampling import GREEDY, Sampling
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch
from distill.models.patch.shared_input import FP8_GROUP
from distill.models.patch.triton_only import use_triton_only

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40], [100, 3, 77]]
KINDS = {
    "llama": {},
    "qwen2": {"kind": "qwen2", "tie": False},
    "qwen3": {"kind": "qwen3", "head_dim": 16},
    "smollm2": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden": 24, "head_dim": 8, "layers": 3},
    "mistral-window": {"kind": "mistral", "sliding_window": 5},
}


# ---- kernels


# ---- the step


def settings(fused=True, **more):
    return EngineSettings(2, [0], log_probs=True, fused=fused, **more)


def step_of(model, fused=True, **more):
    """Return the step that a decode loop of `model` uses."""
    return step_in(DecodeLoop(model, settings(fused, **more)))


def step_in(loop):
    with loop._decoding_mode():
        return loop._slots_for(Request(PROMPTS, [2, 2, 2], [1, 2, 3], GREEDY, 3)).fused


def lively(device, kind="llama", dtype=torch.float32, **more):
    """A tiny model whose biases and norms do something."""
    model = tiny_model(**KINDS[kind] | more)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else dtype)


def answers(model, fused, sampling=GREEDY, new=4, **more):
    loop = DecodeLoop(model, settings(fused, **more))
    return loop.generate(PROMPTS, max_new_tokens=new, sampling=sampling, seeds=[5, 6, 7])


CUT = Sampling(0.9, 20, 0.9, 0.02)


# how a token is drawn knows no kind of model
@pytest.mark.plain("mistral-window-cut")
@pytest.mark.parametrize(
    "kind, sampling",
    [("llama", Sampling(1.0)), ("qwen2", GREEDY), ("qwen3", CUT), ("smollm2", GREEDY), ("mistral-window", CUT)],
    ids=["llama-all", "qwen2-greedy", "qwen3-cut", "smollm2-greedy", "mistral-window-cut"],
)
def test_tokens_equal_those_of_the_models_own_layers(kernel_device, kind, sampling):
    model = lively(kernel_device, kind)
    loop = DecodeLoop(model, settings())
    assert step_in(loop) is not None
    ours, again = (loop.generate(PROMPTS, max_new_tokens=4, sampling=sampling, seeds=[5, 6, 7]) for _ in range(2))
    assert ours == again
    own = answers(model, False, sampling)
    if kernel_device.type == "cuda":  # 16 bits: equal logits part ways
        return
    assert ours.tokens == own.tokens and ours.truncated == own.truncated
    for one, other in zip(ours.log_probs, own.log_probs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("autocast", [torch.bfloat16, None])
def test_log_probs_in_16_bits_are_as_good_as_without(kernel_device, autocast):
    """Against fp64: the engine's log-probabilities of its own tokens are no further from the truth."""
    model = lively(kernel_device, layers=1, dtype=torch.float32 if autocast else torch.bfloat16)
    if autocast:
        patch(model.float(), log_it=False)  # rotary embeddings in the dtype of what they turn
    errors = []
    for fused in (True, False):
        found = answers(model, fused, autocast=autocast)
        exact = lively(torch.device("cpu"), layers=1).double()
        exact.load_state_dict(model.state_dict())
        for prompt, tokens_, given in zip(PROMPTS, found.tokens, found.log_probs, strict=True):
            ids = torch.tensor([prompt + tokens_])
            right = exact(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            right = right.gather(1, ids[0, len(prompt) :, None])[:, 0]
            errors.append((fused, (right - torch.tensor(given, dtype=torch.float64)).square().mean().item()))
    ours, own = (sum(error for fused, error in errors if fused is which) ** 0.5 for which in (True, False))
    assert ours <= 1.5 * own + 1e-3, (ours, own)


@pytest.mark.full
def test_weights_are_read_without_a_copy(kernel_device):
    """Joined, patched, on Triton alone or checkpointed, and after they changed."""
    for put in (join_projections, patch, use_triton_only, PreTrainedModel.gradient_checkpointing_enable):
        model = lively(kernel_device, layers=1)
        put(model)
        loop = DecodeLoop(model, settings())
        assert step_in(loop) is not None, put
        for _ in range(2):
            ours = loop.generate(PROMPTS, max_new_tokens=2)
            assert kernel_device.type == "cuda" or ours.tokens == answers(model, False, new=2).tokens
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * torch.randn_like(parameter)


def spoiled(how):
    model = lively(torch.device("cpu"))
    layer = model.model.layers[1]
    if how == "hook":
        layer.mlp.register_forward_hook(lambda *args: None)
    elif how == "lora":
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    elif how == "fp8":
        layer.mlp.up_proj.__dict__[FP8_GROUP] = None
    elif how == "forward":
        layer.mlp.up_proj.forward = lambda x: x
    elif how == "dtypes":
        layer.mlp.half()
    elif how == "double":
        model.double()
    elif how == "activation":
        layer.mlp.act_fn = nn.GELU()
    elif how == "twist":  # which its structure does not show
        layer.self_attn.__class__ = type("Twisted", (type(layer.self_attn),), {"forward": twisted})
    elif how == "scale":
        model.lm_head.register_buffer("unused", torch.zeros(1))
        model.__class__ = type("Scaled", (type(model),), {"forward": scaled})
    elif how == "dynamic":
        model.model.rotary_emb.rope_type = "dynamic"
    return model


def twisted(self, *args, **kwargs):
    out, weights = super(type(self), self).forward(*args, **kwargs)
    return 1.01 * out, weights


def scaled(self, *args, **kwargs):
    out = super(type(self), self).forward(*args, **kwargs)
    out.logits = out.logits * 1.01
    return out


SPOILED = {
    "hook": "hooks",
    "lora": "has other parameters",
    "forward": "does more",
    "fp8": "does more",
    "dtypes": "differ in dtype",
    "double": "computes in torch.float64",
    "activation": "come out different",
    "twist": "come out different",
    "scale": "come out different",
    "dynamic": "of the kind dynamic",
}


@pytest.mark.plain("hook", "forward", "dtypes", "activation", "scale")
@pytest.mark.parametrize("how", SPOILED)
def test_unsupported_models_run_unfused_with_the_reason_logged(kernel_device, how, caplog):
    if kernel_device.type == "cuda":
        pytest.skip("of the host alone")
    with caplog.at_level(logging.DEBUG, logger="distill.generation.fused_step"):
        assert step_of(spoiled(how)) is None
    (record,) = caplog.records
    assert SPOILED[how] in record.message


def test_a_changed_model_is_checked_again(kernel_device):
    model = lively(kernel_device, layers=1)
    loop = DecodeLoop(model, settings())
    request = Request(PROMPTS, [2, 2, 2], [1, 2, 3], GREEDY, 3)
    with loop._decoding_mode():
        assert loop._slots_for(request).fused is not None
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
        assert loop._slots_for(request).fused is None
        hook.remove()
        assert loop._slots_for(request).fused is not None
        up = model.model.layers[0].mlp.up_proj
        up.forward = lambda x: torch.nn.functional.linear(x, up.weight)
        loop.buffers.clear()
        assert loop._slots_for(request).fused is None


@pytest.mark.parametrize("kind", ["gemma2", "granite", "gpt2", "phi"])
def test_other_families_run_as_they_are(kernel_device, kind):
    if kernel_device.type == "cuda":
        pytest.skip("of the host alone")
    more = {"gemma2": {"attn_logit_softcapping": 1.0}, "granite": {"logits_scaling": 3.0}}
    assert step_of(tiny_model(kind=kind, **more.get(kind, {}))) is None


@pytest.mark.full
def test_fused_decoding_is_used_on_measured_families(kernel_device, hardware, limit):
    """One line of a table turns them on; more rows than kernels take, and `fused=False`, leave them out."""
    if kernel_device.type == "cuda":
        pytest.skip("of the host alone")
    assert {INTERPRETER, "sm_90"} == FASTER_ON
    model = lively(kernel_device)
    assert step_of(model, None) is not None and step_of(model, False) is None
    hardware.setattr("distill.generation.support_check.FASTER_ON", frozenset())
    assert step_of(model, None) is None and step_of(model, True) is not None
    limit.setattr("distill.generation.support_check.MAX_ROWS", 2)
    assert step_of(model, True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_captured_step_on_the_gpu(kind):
    """A graph that kept old weights would show; the same bits each time; logits within rounding of the own layers'."""
    model = lively(torch.device("cuda"), kind)
    loop = DecodeLoop(model, settings())
    for _ in range(2):
        first = loop.generate(PROMPTS, max_new_tokens=20)
        assert loop.buffers[-1].graph is not None and loop.buffers[-1].fused is not None
        assert loop.generate(PROMPTS, max_new_tokens=20) == first
        for prompt, answer, given in zip(PROMPTS, first.tokens, first.log_probs, strict=True):
            ids = torch.tensor([prompt + answer], device="cuda")
            with torch.no_grad():
                right = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            right = right.gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert (right.cpu() - torch.tensor(given)).abs().mean() < 0.05
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
