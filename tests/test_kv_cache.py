"""The preallocated cache: what it holds, what attention reads from it, and `generate` on it."""

import pytest
import torch
from distill_kernels.attention.operands import Masking
from distill_kernels.attention.reference import reference_attention
from distill_kernels.primitives.kv_cache import KVCache, write_newest
from helpers import relative_error
from tiny import tiny_model, tiny_tokenizer


def test_append_and_attend_equal_full_attention(kernel_device):
    batch, heads, kv_heads, size, total = 2, 4, 2, 16, 70
    q, k, v = (torch.randn(batch, h, total, size, device=kernel_device) for h in (heads, kv_heads, kv_heads))
    full, _ = reference_attention(q.double(), k.double(), v.double(), Masking(True, 0.25))
    cache = KVCache(batch, 80, kv_heads, size, dtype=torch.float32, device=kernel_device)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    start = 0
    for new in (60, 1, 1, 5, 3):
        cache.append(k[:, :, start : start + new], v[:, :, start : start + new])
        start += new
        assert cache.longest == start and cache.lengths.tolist() == [start] * batch
        if new <= 16:
            assert relative_error(cache.attend(q[:, :, start - new : start]), full[:, :, start - new : start]) < 1e-6


def test_sequences_of_different_lengths(kernel_device):
    cache = KVCache(2, 40, 1, 16, dtype=torch.float32, device=kernel_device)
    first, second = torch.randn(2, 2, 1, 20, 16, device=kernel_device)
    cache.append(first, first, counts=torch.tensor([20, 7], device=kernel_device))
    cache.append(second[:, :, :2], second[:, :, :2])
    assert cache.lengths.tolist() == [22, 9]
    assert torch.equal(cache.keys[1, :9, 0], torch.cat([first[1, 0, :7], second[1, 0, :2]]))
    q = torch.randn(2, 3, 1, 16, device=kernel_device)
    keys = cache.keys[1:, :9].transpose(1, 2).double()
    alone, _ = reference_attention(q[1:].double(), keys, keys, Masking(True, 0.25))
    assert relative_error(cache.attend(q)[1:], alone) < 1e-6


def test_truncation_reordering_and_reset_leave_the_right_rows():
    cache = KVCache(2, 8, 1, 4, dtype=torch.float32, device="cpu")
    rows = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 1, 6, 4)
    cache.append(rows, -rows, counts=torch.tensor([6, 5]))
    cache.truncate(4)
    assert cache.lengths.tolist() == [4, 4] and cache.longest == 4
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.keys[0, :4, 0], rows[1, 0, :4]) and torch.equal(cache.values[1, :4, 0], -rows[1, 0, :4])
    cache.reset()
    assert cache.longest == 0 and cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("size", [16, 20])
def test_write_newest_writes_each_sequences_own_slot(kernel_device, size):
    batch, heads, slots = 3, 2, 9
    keys, values = torch.zeros(2, batch, slots, heads, size, device=kernel_device)
    k, v = torch.randn(2, batch, heads, 1, size, device=kernel_device)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection gives it
    write_newest(keys, values, k, v, torch.tensor([1, 9, 4], device=kernel_device))
    for cached, new in ((keys, k), (values, v)):
        for sequence, slot in enumerate((0, 8, 3)):
            assert torch.equal(cached[sequence, slot], new[sequence, :, 0])
        assert int((cached != 0).sum()) == batch * heads * size
    with pytest.raises(ValueError, match="lengths"):
        write_newest(keys, values, k, v, torch.tensor([1, 2], device=kernel_device))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="max_length"):
        KVCache(1, 0, 1, 4, device="cpu")
    cache = KVCache(1, 4, 1, 8, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="expected"):
        cache.append(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1, 8))
    with pytest.raises(ValueError, match="max_length of 4"):
        cache.append(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8))
    with pytest.raises(ValueError, match="length"):
        cache.truncate(-1)


@pytest.fixture(scope="module")
def model_and_inputs():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer).eval()
    tokenizer.padding_side = "left"
    inputs = tokenizer(["a longer prompt than", "short"], return_tensors="pt", padding=True)
    return model, {name: inputs[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}], ids=str)
def test_generate_gives_the_same_tokens(model_and_inputs, options):
    from distill.models.patch.kv_cache import PreallocatedCache

    model, inputs = model_and_inputs
    options = {"max_new_tokens": 24, "min_new_tokens": 24, **options}
    default = model.generate(**inputs, **options)
    cache = PreallocatedCache(model.config, default.shape[1])
    ours = model.generate(**inputs, **options, past_key_values=cache)
    assert torch.equal(ours, default)
    assert cache.get_seq_length() == default.shape[1] - 1
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), default)


@pytest.mark.parametrize("candidates", ["prompt", "another model"])
def test_assisted_generation_truncates_rejected_tokens(candidates):
    from distill.models.patch.kv_cache import PreallocatedCache

    tokenizer = tiny_tokenizer()
    model, other = tiny_model(tokenizer).eval(), tiny_model(tokenizer, layers=1, seed=3).eval()
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    more = {"prompt_lookup_num_tokens": 2} if candidates == "prompt" else {"assistant_model": other}
    cache = PreallocatedCache(model.config, 32)
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more, past_key_values=cache)
    assert torch.equal(ours, expected)
    for crop, length in ((0, 14), (-3, 11), (5, 5)):
        cache.crop(crop)
        assert cache.get_seq_length() == length and cache.layers[0].keys.shape[2] == length


KINDS = {"llama": {}, "mistral": {"kind": "mistral", "sliding_window": 6}, "gemma2": {"kind": "gemma2"}}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_generate_decodes_on_our_kernel(kernel_device, kind, monkeypatch):
    from distill.models.head import decoder_of
    from distill.models.patch import attention
    from distill.models.patch.kv_cache import PreallocatedCache

    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    inputs = tokenizer(["a longer prompt than", "short", "middle one"], return_tensors="pt", padding=True)
    inputs = {name: inputs[name].to(kernel_device) for name in ("input_ids", "attention_mask")}
    model = tiny_model(tokenizer, **KINDS[kind]).to(kernel_device)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(**inputs, **options)
    attention.use_fused_attention(model, decoder_of(model))
    seen, decode = [], attention.decode_attention

    def counted(q, k, v, lengths, **more):
        seen.append((lengths.tolist(), more["starts"].tolist(), more["window"]))
        return decode(q, k, v, lengths, **more)

    monkeypatch.setattr(attention, "decode_attention", counted)
    width = inputs["input_ids"].shape[1]
    cache = PreallocatedCache(model.config, width + 5)
    assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected)
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    assert [(lengths, at) for lengths, at, _ in seen[::2]] == [([width + n] * 3, starts) for n in range(1, 5)]
    assert kind != "mistral" or seen[0][2] == 6


def test_other_padding_keeps_pytorchs_attention(kernel_device, caplog):
    from distill.models.head import decoder_of
    from distill.models.patch.attention import use_fused_attention
    from distill.models.patch.kv_cache import PreallocatedCache

    model = tiny_model().to(kernel_device)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 2, 11]], device=kernel_device)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]], device=kernel_device)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = model.generate(input_ids=ids, attention_mask=mask, **options)
    use_fused_attention(model, decoder_of(model))
    cache = PreallocatedCache(model.config, 8)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **options, past_key_values=cache), expected)
    assert caplog.text.count("not padded on the left") == 1


def test_cached_logits_equal_uncached(model_and_inputs):
    from distill.models.patch.kv_cache import PreallocatedCache

    model, inputs = model_and_inputs
    ids = inputs["input_ids"]
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        cache = PreallocatedCache(model.config, ids.shape[1])
        pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(3, dim=1)]
    assert relative_error(torch.cat(pieces, 1), full) < 1e-5


def test_generate_beyond_the_end_is_an_error(model_and_inputs):
    from distill.models.patch.kv_cache import PreallocatedCache

    model, inputs = model_and_inputs
    cache = PreallocatedCache(model.config, inputs["input_ids"].shape[1] + 2)
    with pytest.raises(ValueError, match="max_length"):
        model.generate(**inputs, max_new_tokens=9, min_new_tokens=9, past_key_values=cache)


def test_adapter_refuses_what_it_cannot_hold(model_and_inputs):
    from distill.models.patch.kv_cache import PreallocatedCache

    model, _ = model_and_inputs
    with pytest.raises(ValueError, match="max_length"):
        PreallocatedCache(model.config, 0)
    config = type(model.config)(**{**model.config.to_dict()})
    config.layer_types = ["linear_attention"] * config.num_hidden_layers
    with pytest.raises(ValueError, match="linear_attention"):
        PreallocatedCache(config, 8)
