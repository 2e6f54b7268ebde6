"""The decode loop against transformers' `generate`: the same greedy tokens, for ragged prompts, models and kernels."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.engines import TransformersEngine
from distill.generation.sampling import Sampling
from distill.generation.support_check import unsupported_reason
from distill.models.head import decoder_of
from distill.models.patch.attention import keep_soft_cap, use_fused_attention
from distill.models.patch.patching import patch

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40], [100, 3, 77], list(range(30, 52)), [200, 201]]
KINDS = {
    "llama": {},
    "qwen2": {"kind": "qwen2", "tie": False},
    "smollm2": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden": 24, "head_dim": 8, "layers": 3},
    "mistral-window": {"kind": "mistral", "sliding_window": 5},
    "gemma2": {"kind": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 1.0},
    "granite": {"kind": "granite", "logits_scaling": 3.0},
    "gpt2": {"kind": "gpt2"},
}


def theirs(model, prompts, new, **more):
    """`generate` on a batch padded on the left, without what it pads answers with."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=2, **more
    )[:, width:].tolist()
    ends = more.get("eos_token_id", [0])
    cut = []
    for tokens in out:
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), new)
        cut.append((tokens[:stop], tokens[stop - 1] not in ends))
    return [tokens for tokens, _ in cut], [truncated for _, truncated in cut]


def ours(model, prompts, new, ends=(0,), **more):
    return DecodeLoop(model, EngineSettings(2, ends)).generate(prompts, max_new_tokens=new, **more)


@pytest.mark.plain("llama", "gemma2")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind):
    # transformers' mask for gemma2's eager attention overflows its float32 softmax where weights are float64
    model = tiny_model(**KINDS[kind], dtype=torch.float32 if kind == "gemma2" else torch.float64)
    keep_soft_cap(model)  # transformers 5.17 drops it
    tokens, truncated = theirs(model, PROMPTS, 12)
    assert len({tuple(t) for t in tokens}) > 1
    found = ours(model, PROMPTS, 12)
    assert found.tokens == tokens and found.truncated == truncated
    assert unsupported_reason(model) is None


def test_answers_end_where_the_model_ends_them():
    model = tiny_model(dtype=torch.float64)
    free, _ = theirs(model, PROMPTS, 16)
    ends = [free[0][5], free[3][2]]
    tokens, truncated = theirs(model, PROMPTS, 16, eos_token_id=ends)
    found = ours(model, PROMPTS, 16, ends)
    assert found.tokens == tokens and found.truncated == truncated
    assert len({len(t) for t in tokens}) > 1
    assert len(found.tokens[3]) <= 3 and not found.truncated[3]


def test_token_limits_per_sequence_and_batch(tmp_path):
    model = tiny_model(dtype=torch.float64)
    tokens, _ = theirs(model, PROMPTS, 9, eos_token_id=[250])
    limits = [3, 0, 9, 1, 5]
    for size in (1, 2, 3, 64):
        found = ours(model, PROMPTS, limits, ends=[250], batch_size=size)
        assert found.tokens == [t[:n] for t, n in zip(tokens, limits, strict=True)]
        assert found.truncated == [True] * 5


def test_tokens_are_copied_while_the_next_are_sampled(monkeypatch):
    order, loop = "", DecodeLoop(tiny_model(dtype=torch.float64), EngineSettings(2, []))

    def noted(letter, method):
        def run(*args):
            nonlocal order
            order += letter
            return method(*args)

        return run

    monkeypatch.setattr(loop, "_step", noted("s", loop._step))
    monkeypatch.setattr(loop, "_read", noted("r", loop._read))
    found = loop.generate(PROMPTS[:2], max_new_tokens=[3, 5])
    assert list(map(len, found.tokens)) == [3, 5]
    assert order == "ssrsrrssrr"  # the first answer's end, and the last, are read at once


def test_buffers_serve_call_after_call_while_weights_change():
    model = tiny_model(dtype=torch.float64)
    loop = DecodeLoop(model, EngineSettings(2, [0]))
    for count, new in ((3, 8), (2, 4), (5, 12)):
        assert loop.generate(PROMPTS[:count], max_new_tokens=new).tokens == theirs(model, PROMPTS[:count], new)[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)


def test_lora_and_training_mode_are_restored():
    torch.manual_seed(3)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.5))
    model = model.double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    expected = theirs(model, PROMPTS, 12)[0]
    with model.disable_adapter():
        assert theirs(model, PROMPTS, 12)[0] != expected
    model.train()
    frozen = model.base_model.model.model.norm.eval()
    assert ours(model, PROMPTS, 12).tokens == expected
    assert model.training and not frozen.training
    assert model.config._attn_implementation == "sdpa"


def test_patched_models_and_training_hooks_play_no_part():
    model = tiny_model(dtype=torch.float64)
    expected = theirs(model, PROMPTS, 12)[0]
    patch(model, "student")
    model.forward = None  # what a trainer would have put there
    assert ours(model, PROMPTS, 12).tokens == expected


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_kernels_give_the_same_tokens(kernel_device, kind):
    model = tiny_model(**KINDS[kind])
    keep_soft_cap(model)
    prompts = PROMPTS[:3]
    tokens = theirs(model, prompts, 4)[0]
    model = model.to(kernel_device)
    use_fused_attention(model, decoder_of(model))
    assert ours(model, prompts, 4).tokens == tokens


def test_sampled_tokens_depend_on_the_seed_alone():
    model = tiny_model(dtype=torch.float64)
    seeds = [7, -3, 2**62, 99, 5]
    whole = ours(model, PROMPTS, 8, sampling=Sampling(1.0), seeds=seeds)
    assert whole == ours(model, PROMPTS, 8, sampling=Sampling(1.0), seeds=seeds, batch_size=2)
    for number in range(5):
        alone = ours(model, [PROMPTS[number]], 8, sampling=Sampling(1.0), seeds=[seeds[number]])
        assert alone.tokens == [whole.tokens[number]]
    other = ours(model, PROMPTS, 8, sampling=Sampling(1.0), seeds=[seed + 1 for seed in seeds])
    assert all(a != b for a, b in zip(whole.tokens, other.tokens, strict=True))
    state = torch.random.get_rng_state()
    ours(model, PROMPTS, 3, sampling=Sampling(1.0))
    assert torch.equal(state, torch.random.get_rng_state())


def test_tokens_beyond_the_shared_vocabulary_are_never_generated():
    model = tiny_model(dtype=torch.float64)
    loop = DecodeLoop(model, EngineSettings(2, [0], vocab_size=60))
    for temperature in (0.0, 5.0):
        found = loop.generate([[5, 6]] * 8, max_new_tokens=8, sampling=Sampling(temperature))
        assert max(max(tokens) for tokens in found.tokens) < 60


def test_autocast_computes_in_its_dtype():
    model = tiny_model()
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: seen.append(a[2].dtype))
    DecodeLoop(model, EngineSettings(2, [0], autocast=torch.bfloat16)).generate(PROMPTS, max_new_tokens=2)
    assert set(seen) == {torch.bfloat16}


def test_a_model_that_the_loop_would_decode_wrongly_is_detected(monkeypatch):
    model = tiny_model()
    assert unsupported_reason(model) is None
    rotary = model.model.rotary_emb.forward

    def stubborn(x, position_ids):  # positions by index, not as given
        return rotary(x, torch.arange(position_ids.shape[1])[None].expand_as(position_ids))

    monkeypatch.setattr(model.model.rotary_emb, "forward", stubborn)
    assert "different" in unsupported_reason(model)
    plain = tiny_model()
    plain._supports_attention_backend = False
    assert "attention" in unsupported_reason(plain)
    config = tiny_model(layers=1)
    config.config.layer_types = ["linear_attention"]
    assert "linear_attention" in unsupported_reason(config)


def test_mistakes_are_named():
    model = tiny_model()
    with pytest.raises(ValueError, match="empty prompt"):
        ours(model, [[1], []], 3)
    with pytest.raises(ValueError, match="max_new_tokens, seeds: expected 2 each, got 1 and 2"):
        ours(model, [[1], [2]], [3])


@pytest.mark.slow
def test_a_real_model_gives_the_same_outputs(smollm2_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill.generation.prompts import encode_prompt

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(smollm2_folder),
        AutoTokenizer.from_pretrained(smollm2_folder),
    )
    texts = ["What is the capital of France?", "Name three colours.", "Write a haiku about autumn rain in the city."]
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    tokens, truncated = theirs(model, prompts, 32, eos_token_id=[tokenizer.eos_token_id])
    found = ours(model, prompts, 32, ends=[tokenizer.eos_token_id])
    assert found.tokens == tokens and found.truncated == truncated
    assert "Paris" in tokenizer.decode(found.tokens[0])


@pytest.mark.full
def test_a_model_on_triton_kernels_alone(kernel_device):
    from distill.models.patch.triton_only import linear_on_triton, use_triton_only

    model = tiny_model(layers=1).to(kernel_device, torch.bfloat16 if kernel_device.type == "cuda" else torch.float32)
    model.generation_config.eos_token_id = None
    prompts = [[5, 6, 7], [8, 9, 10]]
    on_triton = copy.deepcopy(model)
    use_triton_only(on_triton)
    found = DecodeLoop(on_triton, EngineSettings(0, [])).generate(prompts, max_new_tokens=3)
    assert found.tokens == theirs(model, prompts, 3)[0]
    x = torch.randn(2, 70, 32, device=kernel_device, dtype=model.dtype)
    linear = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        torch.testing.assert_close(linear_on_triton(linear, x), linear(x))
    with pytest.raises(ValueError, match="--kernels: triton takes plain linear layers, got the products of a GPT-2"):
        use_triton_only(tiny_model(kind="gpt2"))
    with pytest.raises(ValueError, match=r"multiples of 8, got model.layers.0.*36 x 32"):
        use_triton_only(tiny_model(intermediate_size=36))


@pytest.mark.plain(
    "llama-Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)",
    "gpt2-Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)",
)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.8, 20, 0.9, 0.02)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_engine_draws_the_same_tokens_however_many_at_once(kind, sampling):
    """Each row samples from its own seed, whatever the batch or the number of processes."""
    model = tiny_model(**KINDS[kind])
    more = {"max_new_tokens": [9, 3, 9, 1, 9], "sampling": sampling, "seeds": [5, -6, 7, 2**62, 9]}
    made = EngineSettings(2, [0], vocab_size=250, log_probs=True)
    first, *others = (TransformersEngine(model, made).generate(PROMPTS, **more, batch_size=n) for n in (5, 2, 1))
    assert len(set(map(tuple, first.tokens))) == 5
    for other in (*others, DecodeLoop(model, made).generate(PROMPTS, **more)):
        assert (other.tokens, other.truncated) == (first.tokens, first.truncated)
        for ours, theirs in zip(other.log_probs, first.log_probs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
