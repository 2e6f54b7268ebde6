"""The preallocated cache: what it holds, and what attention reads from it."""

import pytest
import torch
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.reference import reference_attention
from distill_kernels.extras.kv_cache import KVCache
from helpers import relative_error


def test_append_and_attend_equal_full_attention(kernel_device):
    batch, heads, kv_heads, size, total = 2, 4, 2, 16, 70
    q, k, v = (torch.randn(batch, h, total, size, device=kernel_device) for h in (heads, kv_heads, kv_heads))
    full, _ = reference_attention(q.double(), k.double(), v.double(), ScoreSettings(True, 0.25))
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
    alone, _ = reference_attention(q[1:].double(), keys, keys, ScoreSettings(True, 0.25))
    assert relative_error(cache.attend(q)[1:], alone) < 1e-6


def test_truncation_reordering_and_reset_leave_the_right_rows():
    cache = KVCache(2, 8, 1, 4, dtype=torch.float32, device="cpu")
    rows = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 1, 6, 4)
    cache.append(rows, -rows, counts=torch.tensor([6, 5]))
    cache.truncate(4)
    assert cache.lengths.tolist() == [4, 4] and cache.longest == 4
    held = cache.lengths
    cache.reorder(torch.tensor([1, 1]))
    assert cache.lengths is held, "what a captured step reads"
    assert torch.equal(cache.keys[0, :4, 0], rows[1, 0, :4]) and torch.equal(cache.values[1, :4, 0], -rows[1, 0, :4])
    cache.reset()
    assert cache.longest == 0 and cache.lengths.tolist() == [0, 0]


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
