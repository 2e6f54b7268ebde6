"""Decode attention against its definition in fp64 and against full attention's last rows."""

import pytest
import torch
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.decoding import cached_attention
from distill_kernels.decoding.cached_attention import (
    DecodeConfig,
    choose_decode_config,
    chunk_count,
    decode_attention,
    reference_decode_attention,
)
from distill_kernels.launch import DeviceFacts
from grids import pairwise
from helpers import assert_as_good_as_torch, relative_error


def draw(shape, dtype, device):
    """q [B, H, S, D] and k, v [B, Hkv, T, D], views of position-major tensors."""
    batch, heads, kv_heads, new, slots, size = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, t, h, size, generator=generator).to(device, dtype).transpose(1, 2) * 1.5
        for t, h in ((new, heads), (slots, kv_heads), (slots, kv_heads))
    )
    return q, k, v


def eager(q, k, v, lengths, masking):
    """PyTorch in the inputs' dtype: the attention of each sequence's own keys."""
    outs = []
    for i, length in enumerate(lengths.tolist()):
        keys, values = (x[i, :, :length].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
        end = length - q.shape[2] + 1 + torch.arange(q.shape[2], device=q.device)[:, None]
        column = torch.arange(length, device=q.device)
        kept = (column < end) & (column >= end - (masking.window or length))
        scores = q[i] @ keys.transpose(-1, -2) * masking.scale
        if masking.softcap is not None:
            scores = masking.softcap * torch.tanh(scores / masking.softcap)
        outs.append(
            torch.softmax(scores.masked_fill(~kept, float("-inf")), -1, torch.promote_types(q.dtype, torch.float32)).to(
                q.dtype
            )
            @ values
        )
    return torch.stack(outs)


def check(shape, dtype, device, lengths, **options):
    q, k, v = draw(shape, dtype, device)
    lengths = torch.tensor(lengths, device=device)
    masking = ScoreSettings(
        True, options.get("scale") or shape[-1] ** -0.5, options.get("window"), options.get("softcap")
    )
    for i, length in enumerate(lengths.tolist()):  # slots behind the length must not matter
        k[i, :, length:] = float("nan")
        v[i, :, length:] = float("nan")
    ours = decode_attention(q, k, v, lengths, **options)
    exact = eager(q.double(), k.double(), v.double(), lengths, masking)
    assert_as_good_as_torch(ours, eager(q, k, v, lengths, masking), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 30}, {"softcap": 3.0}, {"scale": 0.1, "window": 1}], ids=str)
def test_options_give_the_reference(kernel_device, dtype, options):
    check((3, 4, 2, 1, 150, 32), dtype, kernel_device, [150, 1, 77], **options)


@pytest.mark.parametrize("config", [DecodeConfig(256, 1, 4, 3), DecodeConfig(64, 4, 2, 3)], ids=str)
def test_other_launch_configs_give_the_same(kernel_device, hardware, config):
    hardware.setattr(cached_attention, "choose_decode_config", lambda *_: config)
    for options in ({}, {"window": 30}):
        check((2, 4, 2, 1, 600, 64), torch.bfloat16, kernel_device, [600, 70], **options)


def test_launch_config_follows_the_work():
    """Long steps where every multiprocessor has thousands of keys of 64 elements, and only there."""
    hopper = DeviceFacts(132, "sm_90", 227 << 10, 50 << 20, 80 << 30)
    small = DeviceFacts(132, "sm_89", 99 << 10, 50 << 20, 24 << 30)
    assert choose_decode_config(64, 16, True, 8192, 64, hopper).keys == 256
    assert choose_decode_config(64, 16, True, 4096, 32, hopper).keys == 64
    assert choose_decode_config(64, 16, True, 8192, 64, small).keys == 64  # its shared memory does not hold long steps
    for rows, low_precision, heads in ((16, False, 64), (32, True, 64), (16, True, 512)):
        assert choose_decode_config(64, rows, low_precision, 8192, heads, hopper) == DecodeConfig(128)
    assert choose_decode_config(128, 16, True, 8192, 64, hopper) == DecodeConfig(64)


@pytest.mark.plain("1-(1, 1)", "5-(6, 2)", "16-(8, 1)")
@pytest.mark.parametrize(*pairwise({"new": [1, 2, 5, 8, 16], "heads": [(1, 1), (8, 1), (6, 2)]}))
def test_new_tokens_and_groups(kernel_device, new, heads):
    check((2, *heads, new, 140, 16), torch.float32, kernel_device, [140, 64])


@pytest.mark.plain("16-63", "16-300", "20-64", "128-1", "128-65", "256-63", "256-300")
@pytest.mark.parametrize("slots", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("size", [16, 20, 128, 256])
def test_any_size_gives_the_reference(kernel_device, slots, size):
    check((2, 2, 1, 1, slots, size), torch.float32, kernel_device, [slots, max(1, slots // 2)])


def test_equals_the_last_rows_of_full_attention(kernel_device):
    q, k, v = draw((2, 4, 2, 90, 90, 32), torch.float32, kernel_device)
    full = flash_attention(q, k, v, window=40)
    lengths = torch.tensor([90, 90], device=kernel_device)
    assert relative_error(decode_attention(q[:, :, -3:], k, v, lengths, window=40), full[:, :, -3:]) < 1e-6


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"softcap": 3.0}], ids=str)
def test_left_padding_is_masked(kernel_device, options):
    q, k, v = draw((4, 4, 2, 1, 150, 32), torch.float32, kernel_device)
    lengths = torch.tensor([150, 140, 77, 9], device=kernel_device)
    starts = torch.tensor([0, 131, 64, 9], device=kernel_device)
    for i, start in enumerate(starts.tolist()):
        k[i, :, :start] = v[i, :, :start] = float("nan")
    ours = decode_attention(q, k, v, lengths, starts=starts, **options)
    for i, (start, end) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if start == end:
            assert not ours[i].any()
            continue
        alone = [x[i : i + 1, :, start:end] for x in (k, v)]
        expected = decode_attention(q[i : i + 1], *alone, lengths[i : i + 1] - start, **options)
        assert relative_error(ours[i : i + 1], expected) < 1e-6
    with pytest.raises(ValueError, match="starts"):
        decode_attention(q, k, v, lengths, starts=starts[:2])


def test_an_empty_sequence_gives_zeros(kernel_device):
    q, k, v = draw((2, 2, 1, 1, 70, 16), torch.float32, kernel_device)
    out = decode_attention(q, k, v, torch.tensor([0, 70], device=kernel_device))
    assert (out[0] == 0).all() and (out[1] != 0).any()


def test_reference_on_the_cpu():
    q, k, v = draw((2, 4, 2, 2, 40, 16), torch.float64, "cpu")
    lengths, masking = torch.tensor([40, 13]), ScoreSettings(True, 0.25, 9, 4.0)
    exact = eager(q, k, v, lengths, masking)
    assert relative_error(reference_decode_attention(q, k, v, lengths, masking), exact) < 1e-12


def test_chunks_fill_the_machine_and_hold_a_tile():
    assert chunk_count(64, 1, 132) == 1
    assert chunk_count(8192, 8, 132) == 33
    assert chunk_count(8192, 64, 132) == 4  # 256 programs, not 320 in two waves
    assert chunk_count(8192, 1024, 132) == 1
    assert chunk_count(1 << 20, 1, 132) == 128


@pytest.mark.full
def test_op_passes_opcheck_and_compiles(kernel_device):
    q, k, v = draw((2, 4, 2, 1, 40, 16), torch.float32, kernel_device)
    lengths = torch.tensor([40, 13], device=kernel_device)
    torch.library.opcheck(torch.ops.distill.decode_attention, (q, k, v, lengths, 0.25, None, None))
    compiled = torch.compile(lambda *x: decode_attention(*x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, lengths), decode_attention(q, k, v, lengths) + 1)


@pytest.mark.parametrize(
    "name, change",
    [
        ("new tokens", {"q": torch.zeros(2, 4, 17, 16)}),
        ("lengths", {"lengths": torch.zeros(3, dtype=torch.int32)}),
        ("lengths", {"lengths": torch.zeros(2)}),
        ("window", {"window": 0}),
        ("q", {"q": torch.zeros(2, 3, 1, 16)}),
    ],
)
def test_mistakes_are_named(name, change):
    arguments = {"q": torch.zeros(2, 4, 1, 16), "k": torch.zeros(2, 2, 9, 16), "v": torch.zeros(2, 2, 9, 16)}
    arguments["lengths"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=name):
        decode_attention(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("new", [1, 4])
def test_shapes_of_real_models_agree(device, size, new):
    check((4, 32, 8, new, 8192, size), torch.bfloat16, device, [8192, 5000, 17, 4096])


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_while_the_cache_grows(device):
    q, k, v = draw((2, 8, 2, 1, 500, 64), torch.bfloat16, device)
    lengths = torch.tensor([100, 7], device=device)
    decode_attention(q, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, lengths)
    lengths += 300
    graph.replay()
    assert torch.equal(out, decode_attention(q, k, v, lengths))
