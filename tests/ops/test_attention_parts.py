"""Attention cut into parts: equal to its definition, forward and gradient, repeatable, and cut only where it pays."""

import itertools

import pytest
import torch
from distill_kernels.attention import flash, flash_backward
from distill_kernels.attention.flash import flash_attention, forward_on_triton
from distill_kernels.attention.flash_backward import backward_on_triton
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.ranges import reference_mask
from distill_kernels.attention.reference import reference_attention
from distill_kernels.attention.split_kv import MAX_PARTS, max_keys, part_count
from distill_kernels.launch import cdiv
from grids import pairwise
from helpers import assert_as_good_as_torch, relative_error
from hypothesis import given
from hypothesis import strategies as st
from test_flash_attention import draw, eager, gradients

DOCUMENTS = [0, 7, 7, 40, 61]  # and nine positions behind the last one
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window, both sides": {"window": 9, "causal": False},
    "soft cap": {"softcap": 3.0},
    "documents": {"documents": DOCUMENTS},
    "documents, window, soft cap": {"documents": DOCUMENTS, "window": 5, "softcap": 3.0},
}


def masking_of(options, size, device):
    documents = options.get("documents")
    cu = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=device)
    return ScoreSettings(options.get("causal", True), size**-0.5, options.get("window"), options.get("softcap"), cu, cu)


def in_parts(tensors, masking, parts):
    """out, lse, dq, dk, dv with every kernel cut into `parts`."""
    q, k, v, dout = tensors
    out, lse = forward_on_triton(q, k, v, masking, parts=parts)
    return out, lse, *backward_on_triton(dout, q, k, v, out, lse, masking, key_parts=parts, query_parts=parts)


def check(shape, dtype, device, options, parts):
    tensors = draw(shape, dtype, device)
    masking = masking_of(options, shape[-1], device)
    out, lse, *ours = in_parts(tensors, masking, parts)
    theirs = gradients(lambda *x: eager(*x, masking), *tensors)
    exact = gradients(lambda *x: reference_attention(*x, masking)[0], *(x.double() for x in tensors))
    for name, *values in zip(("out", "dq", "dk", "dv"), (out, *ours), theirs, exact, strict=True):
        assert_as_good_as_torch(*values, dtype, name)
    exact_lse = reference_attention(*(x.double() for x in tensors[:3]), masking)[1]
    assert relative_error(lse, exact_lse) < 2e-6


@pytest.mark.plain("2-causal", "2-soft cap", "7-full", "7-documents")
@pytest.mark.parametrize(*pairwise({"parts": [2, 7], "mask": MASKS}))
def test_masks_leave_out_the_same_keys(kernel_device, mask, parts):
    check((1, 2, 1, 70, 70, 16), torch.bfloat16, kernel_device, MASKS[mask], parts)


@pytest.mark.plain("(2, 6, 2, 40, 40, 32)", "(1, 1, 1, 2, 40, 256)")
@pytest.mark.parametrize(
    "shape",
    [
        (2, 6, 2, 40, 40, 32),  # groups of three
        (1, 2, 1, 20, 75, 32),  # fewer queries than keys: the last positions
        (1, 2, 1, 75, 20, 16),  # more: the first queries see nothing
        (1, 1, 1, 33, 50, 20),  # head size no power of two
        (1, 1, 1, 2, 40, 256),
    ],
    ids=str,
)
def test_any_shape_gives_the_same_output(kernel_device, shape):
    check(shape, torch.float32, kernel_device, {}, 3)


def test_more_parts_than_tiles(kernel_device):
    check((1, 1, 1, 40, 20, 16), torch.float32, kernel_device, {"causal": False}, 5)


def test_bits_repeat_and_large_scores_stay_finite(kernel_device):
    tensors = draw((1, 2, 1, 40, 70, 16), torch.bfloat16, kernel_device)
    first, second = (in_parts(tensors, ScoreSettings(True, 100.0), 4) for _ in range(2))
    assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("queries, keys, cut", [(40, 200, [True, False, True]), (200, 40, [False, True, False])])
def test_few_programs_are_cut(kernel_device, monkeypatch, queries, keys, cut):
    """Keys are split in the public function: for out, then dk and dv, then dq."""
    counted = []

    def count(programs, tiles, at_once):
        counted.append(part_count(programs, tiles, at_once))
        return counted[-1]

    for module in (flash, flash_backward):
        monkeypatch.setattr(module, "part_count", count)
    q, k, v, dout = draw((1, 1, 1, queries, keys, 16), torch.float32, kernel_device)
    ours = gradients(lambda *x: flash_attention(*x, causal=False), q, k, v, dout)
    if kernel_device.type == "cpu":
        assert [parts > 1 for parts in counted] == cut
    exact = gradients(
        lambda *x: reference_attention(*x, ScoreSettings(False, 0.25))[0], *(x.double() for x in (q, k, v, dout))
    )
    for mine, right in zip(ours, exact, strict=True):
        assert relative_error(mine, right) < 2e-6


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 300))
def test_parts_fit_at_once_and_none_is_empty(programs, tiles, at_once):
    parts = part_count(programs, tiles, at_once)
    assert 1 <= parts <= min(tiles, MAX_PARTS)
    assert parts == 1 or parts * programs <= at_once
    assert all(tiles * (part + 1) // parts > tiles * part // parts for part in range(parts))
    if parts > 1:  # no fewer parts have the same longest one
        assert cdiv(tiles, parts - 1) > cdiv(tiles, parts)


@pytest.mark.parametrize(
    "programs, tiles, wanted",
    [
        (32, 16, 8),  # one head, 2,048 queries and keys
        (16, 8, 8),  # 1,024
        (8, 4, 1),  # 512: a second kernel would take longer than what it saves
        (32, 128, 8),  # 32 heads, 64 new queries behind a long cache
        (256, 16, 1),  # 8 heads, 2,048
        (4096, 64, 1),  # a model's own
    ],
)
def test_parts_on_a_large_gpu(programs, tiles, wanted):
    assert part_count(programs, tiles, 2 * 132) == wanted


@pytest.mark.parametrize("causal, window", [*itertools.product([True, False], [None, 1, 5, 30])])
def test_no_tile_sees_more_keys_than_counted(causal, window):
    queries, keys, tile = 40, 50, 8
    mask = reference_mask(queries, keys, causal, window)
    seen = [int(mask[at : at + tile].any(0).sum()) for at in range(0, queries, tile)]
    assert max(seen) <= max_keys(tile, keys, causal, window)
    assert window is None or max(seen) == max_keys(tile, keys, causal, window)  # so it is not just a large number


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_shapes_of_real_models_agree(device, mask, size):
    options = MASKS[mask]
    if "documents" in options:
        options = {**options, "documents": [0, 100, 101, 640, 1000]}
    check((1, 4, 2, 1027, 1027, size), torch.bfloat16, device, options, 5)
