"""Sequences that outgrow LongRoPE's short set: the tokens of the model's own forward, in every engine and batch."""

import pytest
import torch
from test_document_rope import KINDS as TRAINED
from test_document_rope import LIMIT, LONG
from tiny import tiny_model

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.engines import TransformersEngine
from distill.generation.sampling import Sampling
from distill.generation.support_check import unsupported_reason
from distill.models.patch import packed
from distill.models.patch.document_rope import generates_with_cache, short_length
from distill.models.patch.patching import patch

KINDS = {
    "phi3": TRAINED["phi3"],
    "phi3-window": TRAINED["phi3"] | {"sliding_window": 9},
    "phimoe": TRAINED["phimoe"] | {"original_max_position_embeddings": LIMIT},
    "llama": {"rope_parameters": LONG},  # its class keeps a cache of short keys: no reference with a cache
    "minicpm3": {
        "rope_parameters": LONG,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.5,
    },
}
WORDS = [7 * n % 250 + 5 for n in range(40)]
# below the limit by more than an answer has, by less, by one token, on it, beyond it; prefixes of each other
PROMPTS = [WORDS[:length] for length in (2, LIMIT - 6, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 7)]
PROMPTS += [[200, 201, 202], WORDS[: LIMIT - 6]]
NEW = 12


def make(kind, dtype=None):
    exact = torch.float32 if kind == "phimoe" else torch.float64  # its experts' products take no float64
    return tiny_model(kind=kind.partition("-")[0], dtype=dtype or exact, tie=False, **KINDS[kind])


def alone(model, prompt, new=NEW):
    """Return the greedy tokens of transformers' forward over the whole sequence, without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind):
    plain = make(kind)
    expected = [alone(plain, prompt) for prompt in PROMPTS]
    if kind not in ("llama", "minicpm3"):  # one sequence at a time, transformers' cache is dropped where it has to be
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            ids = torch.tensor([prompt])
            out = plain.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
            assert out[0, len(prompt) :].tolist() == tokens
    for size in (1, 3, 64):
        settings = EngineSettings(2, [])
        assert (
            DecodeLoop(make(kind), settings).generate(PROMPTS, max_new_tokens=NEW, batch_size=size).tokens == expected
        )
        found = TransformersEngine(make(kind), settings).generate(PROMPTS, max_new_tokens=NEW, batch_size=size)
        assert found.tokens == expected
    assert unsupported_reason(make(kind)) is None
    # and the test can fail: with the keys of the short set, other tokens follow
    unaware = DecodeLoop(make(kind), EngineSettings(2, []))
    unaware.short_length = None
    assert unaware.generate(PROMPTS, max_new_tokens=NEW).tokens != expected


@pytest.mark.full
def test_buffers_that_hold_earlier_sequences_are_right_too():
    plain, loop = make("phi3"), DecodeLoop(make("phi3"), EngineSettings(2, []))
    for count in (3, 8, 5):
        expected = [alone(plain, prompt) for prompt in PROMPTS[:count]]
        assert loop.generate(PROMPTS[:count], max_new_tokens=NEW, batch_size=2).tokens == expected


@pytest.mark.full
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_sampled_tokens_and_their_probabilities_go_on_across_the_change(kind):
    settings, seeds = EngineSettings(2, [250, 17], log_probs=True), [3, -4, 5, 66, 7, 8, 9, 10]
    arguments = {"max_new_tokens": [NEW, 9, 3, 1, 12, 0, 30, 8], "sampling": Sampling(1.0), "seeds": seeds}
    whole = DecodeLoop(make(kind), settings).generate(PROMPTS, **arguments)
    theirs = TransformersEngine(make(kind), settings).generate(PROMPTS, **arguments)
    split = DecodeLoop(make(kind), settings).generate(PROMPTS, batch_size=2, **arguments)
    assert whole.tokens == theirs.tokens == split.tokens and whole.truncated == theirs.truncated == split.truncated
    for ours, others in zip(whole.log_probs, theirs.log_probs, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(others))
    assert max(map(len, whole.tokens)) > 14, "a sequence of three tokens outgrows the limit while it is sampled"


@pytest.mark.full
def test_a_patched_student_decodes_the_same():
    expected = [alone(make("phi3", torch.float32), prompt) for prompt in PROMPTS]
    model = make("phi3", torch.float32)
    patch(model)
    assert DecodeLoop(model, EngineSettings(2, [])).generate(PROMPTS, max_new_tokens=NEW).tokens == expected


def test_a_loop_that_forgets_the_change_is_found_by_the_trial(fault):
    assert unsupported_reason(make("phi3")) is None
    fault.setattr("distill.generation.support_check.short_length", lambda model: None)
    assert "different" in unsupported_reason(make("phi3"))


def test_a_cache_that_forgets_a_window_is_found_by_the_trial(fault):
    """The window is wider than the trial's tokens; for the trial it is lowered."""
    model = tiny_model(kind="phi3", **TRAINED["phi3"], sliding_window=100)
    assert unsupported_reason(model) is None and model.config.sliding_window == 100
    for layer in model.model.layers:
        own = layer.self_attn.forward

        def without_window(*args, own=own, config=model.config, **kwargs):
            kept, config.sliding_window = config.sliding_window, None
            try:
                return own(*args, **kwargs)
            finally:
                config.sliding_window = kept

        fault.setattr(layer.self_attn, "forward", without_window)
    assert "different" in unsupported_reason(model)


def test_limits_are_lowered_and_come_back():
    model = make("phi3")
    with packed.lowered_limits(model):
        assert short_length(model) == packed.LOWERED
    assert short_length(model) == LIMIT
    assert generates_with_cache(model, 10**6) and generates_with_cache(make("llama"), LIMIT)
    assert not generates_with_cache(make("llama"), LIMIT + 1)
