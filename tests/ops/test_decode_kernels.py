"""The kernels of the fused decode step against their definitions, and the plans that each GPU family gets."""

import itertools

import pytest
import torch
from distill_kernels.decoding import attention, fused_linear, tokens
from distill_kernels.decoding import plan as plan_module
from distill_kernels.decoding.common import Scratch, Stream
from distill_kernels.decoding.plan import choose_plan, fit_shared_memory
from distill_kernels.launch import FAMILIES, DeviceFacts
from helpers import assert_as_good_as_torch, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dtypes_on(device):
    """fp32 is for the interpreter, which it tells most in."""
    return [torch.bfloat16, torch.float16] if device.type == "cuda" else DTYPES


def drawn(device, dtype, *shape):
    return torch.randn(*shape, device=device).to(dtype)


TILES = [fused_linear.DecodeTile(16, 32), fused_linear.DecodeTile(16, 16, 3), fused_linear.DecodeTile(32, 64, 2)]


@pytest.mark.plain(
    "1-qkv-DecodeTile(outputs=16, inputs=32, splits=1, warps=4, stages=4)-torch.float32",
    "1-down-DecodeTile(outputs=16, inputs=32, splits=1, warps=4, stages=4)-torch.float32",
    "17-biases-DecodeTile(outputs=16, inputs=32, splits=1, warps=4, stages=4)-torch.float32",
    "17-down-DecodeTile(outputs=32, inputs=64, splits=2, warps=4, stages=4)-torch.float16",
    "65-biases-DecodeTile(outputs=32, inputs=64, splits=2, warps=4, stages=4)-torch.float16",
    "65-down with bias-DecodeTile(outputs=32, inputs=64, splits=2, warps=4, stages=4)-torch.float16",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", ["qkv", "biases", "gate_up", "down", "down with bias"])
@pytest.mark.parametrize("rows", [1, 17, 65])
def test_products_equal_the_reference(kernel_device, rows, kind, tile, dtype):
    """Results are as accurate as PyTorch's, on buffers that held NaN, and reproducible."""
    if dtype not in dtypes_on(kernel_device):
        pytest.skip("for the interpreter")
    inputs, sizes = 72, (40, 16, 24) if kind in ("qkv", "biases") else (40,)
    adds, biased = kind.startswith("down"), "bias" in kind
    wide = torch.float64
    weights = tuple(drawn(kernel_device, dtype, size, inputs) / inputs**0.5 for size in sizes)
    made = fused_linear.Product(
        weights,
        tuple(drawn(kernel_device, dtype, size) if biased else None for size in sizes),
        1 + 0.1 * drawn(kernel_device, dtype, 40 if adds else inputs),
        1e-5,
        drawn(kernel_device, dtype, 40, inputs) / inputs**0.5 if kind == "gate_up" else None,
        adds=adds,
    )
    x, before = drawn(kernel_device, dtype, rows, inputs), drawn(kernel_device, dtype, rows, sum(sizes))
    if not adds:  # near the end of float16's range, which x times the norm's weight would leave
        x, made.norm[:] = x * 1e4, made.norm * 8

    def reference(to):
        out = before.to(to, copy=True)
        cast = [tuple(None if t is None else t.to(to) for t in each) for each in (made.weights, made.biases)]
        norm, up = (None if t is None else t.to(to) for t in (made.norm, made.up))
        fused_linear.reference_product(x.to(to), made._replace(weights=cast[0], biases=cast[1], norm=norm, up=up), out)
        return out

    scratch = Scratch.allocate(*fused_linear.scratch_of(rows, made, tile), kernel_device)
    scratch.parts.fill_(torch.nan)
    results = []
    for _ in range(2):
        if adds:
            squares = torch.full((fused_linear.tiles_of(made, tile), rows), torch.nan, device=kernel_device)
            stream, given = Stream(before.clone(), torch.full_like(before, torch.nan), squares), x
        else:
            stream, given = stream_of(x, made.norm, dtype), torch.full_like(before, torch.nan)
        fused_linear.multiply_rows(given, stream, made, scratch, tile)
        results.append(stream if adds else Stream(given, given, given))
    assert all(map(torch.equal, *results)) and not scratch.counters.any()
    assert_as_good_as_torch((got := results[0]).x, reference(dtype), reference(wide), dtype)
    if adds:
        assert relative_error(got.squares.sum(0), got.x.double().pow(2).sum(1)) < 1e-5
        assert torch.equal(got.scaled, stream_of(got.x, made.norm, dtype).scaled)


def stream_of(x, norm, dtype, parts=3):
    """Return the stream of `x` prepared for a norm of weight `norm`."""
    squares = x.float().pow(2)
    squares = torch.stack([squares[:, part::parts].sum(1) for part in range(parts)])
    return Stream(x, (x.float() * norm.float() / 16).to(dtype), squares)


@pytest.mark.plain(
    "4-2-16-None-False-1-torch.float32", "3-1-64-5-True-1-torch.bfloat16", "2-2-8-None-False-1-torch.float16"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("window, normed", [(None, False), (5, True)])
@pytest.mark.parametrize("heads, kv_heads, size", [(4, 2, 16), (3, 1, 64), (8, 1, 48), (2, 2, 8)])
def test_attention_equals_the_reference(kernel_device, heads, kv_heads, size, window, normed, chunks, dtype):
    if dtype not in dtypes_on(kernel_device):
        pytest.skip("for the interpreter")
    batch, slots, wide = 3, 40, torch.float64
    norms = (1 + 0.1 * drawn(kernel_device, dtype, size), 1 + 0.1 * drawn(kernel_device, dtype, size), 1e-6)
    shape = attention.AttentionSpec(heads, kv_heads, size, size**-0.5, window, *(norms if normed else ()))
    rows = drawn(kernel_device, dtype, batch, (heads + 2 * kv_heads) * size)
    angles = torch.randn(slots, size // 2, device=kernel_device).repeat(1, 2)
    lengths = torch.tensor([1, 33, slots], device=kernel_device)
    keys, values = (drawn(kernel_device, dtype, batch, slots, kv_heads, size) for _ in range(2))
    keys[1, 33:], values[1, 33:] = torch.nan, torch.nan  # slots that are not filled hold anything

    def run(to, how):
        cached = attention.LayerCache(
            keys.to(to, copy=True),
            values.to(to, copy=True),
            lengths,
            angles.cos().to(dtype).to(to),
            angles.sin().to(dtype).to(to),
        )
        weights = {name: getattr(shape, name).to(to) for name in ("q_norm", "k_norm") if normed}
        out = torch.full((batch, heads * size), torch.nan, dtype=to, device=kernel_device)
        how(rows.to(to), shape._replace(**weights), cached, out)
        newest = torch.arange(batch, device=kernel_device), lengths - 1
        return out, cached.keys[newest], cached.values[newest]

    pace = attention.AttentionConfig(16, chunks)
    scratch = Scratch.allocate(*attention.scratch_of(batch, shape, pace), kernel_device)
    found, again = (run(dtype, lambda *args: attention.decode_step_attention(*args, scratch, pace)) for _ in range(2))
    assert all(map(torch.equal, found, again)) and not scratch.counters.any()
    eager, exact = (run(to, attention.reference_decode_step_attention) for to in (dtype, wide))
    for name, *three in zip(("out", "key", "value"), found, eager, exact, strict=True):
        assert_as_good_as_torch(*three, dtype, name)


@pytest.mark.plain("0.0-203-torch.float32", "1.0-203-torch.float32", "1.0-203-torch.float16", "0.7-150-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature, columns", [(0.0, 203), (1.0, 203), (0.7, 150)])
def test_tokens_and_sequence_state(kernel_device, temperature, columns, dtype):
    """The tokens that sampling draws from the rounded logits, also where two logits are equal; and all of the books."""
    if dtype not in dtypes_on(kernel_device):
        pytest.skip("for the interpreter")
    batch, inputs, tile = 5, 40, fused_linear.DecodeTile(32, 32)
    x, weight = drawn(kernel_device, dtype, batch, inputs), drawn(kernel_device, dtype, 203, inputs)
    weight[100:103] = weight[7:10]
    norm = 1 + 0.1 * drawn(kernel_device, dtype, inputs)
    factor = torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-5)
    logits = ((x.float() * norm.float()).to(dtype).float() @ weight.float().T * factor).to(dtype)
    number = torch.arange(batch, device=kernel_device)

    def books():
        return tokens.SequenceState(
            torch.zeros_like(number),
            number.clone(),
            torch.full_like(number, 3),
            number == 1,
            number == 2,
            number + 1,
            torch.zeros(batch, 4, dtype=torch.int64, device=kernel_device),
            torch.zeros(batch, 4, dtype=torch.float64, device=kernel_device),
            torch.tensor([2], device=kernel_device),
            torch.arange(0, 203, 2, device=kernel_device),
            7,
        )

    draw = tokens.Draw(number * 2**61 - 5, number * 1000, temperature, columns)
    expected, ours = books(), books()
    tokens.reference_finish(logits[:, :columns], draw, expected)
    stream = Stream(torch.empty_like(x), torch.empty_like(x), torch.empty(1, batch, device=kernel_device))
    tokens.embed_tokens(weight, norm, stream, ours)
    assert torch.equal(stream.x, weight[ours.token])
    assert relative_error(stream.squares[0], stream.x.double().pow(2).sum(1)) < 1e-5
    assert torch.equal(stream.scaled, stream_of(stream.x, norm, dtype).scaled)
    found = tokens.TileScores.allocate(batch, columns, tile, kernel_device)
    tokens.score_tokens(stream_of(x, norm, dtype), 1e-5, weight, draw, found, tile)
    tokens.finish_tokens(found, ours)
    assert torch.equal(ours.log_probs != 0, expected.log_probs != 0)
    assert relative_error(ours.log_probs, expected.log_probs) < (1e-5 if dtype == torch.float32 else 3e-3)
    for name in set(tokens.SequenceState._fields) - {"log_probs", "pad"}:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_names_a_token_that_there_is(kernel_device, temperature):
    """The next step reads its embedding: an index of no column would be an address anywhere."""
    batch, inputs, columns, tile = 3, 40, 192, fused_linear.DecodeTile(32, 32)  # no tile has columns past the end
    x = drawn(kernel_device, torch.float32, batch, inputs)
    weight = drawn(kernel_device, torch.float32, columns, inputs)
    x[1] = float("nan")
    norm = torch.ones(inputs, device=kernel_device)
    number = torch.arange(batch, device=kernel_device)
    state = tokens.SequenceState(
        token=torch.zeros_like(number),
        made=number.clone(),
        limits=torch.full_like(number, 9),
        done=number < 0,
        ended=number < 0,
        lengths=number + 1,
        answers=torch.zeros(batch, 4, dtype=torch.int64, device=kernel_device),
        log_probs=torch.zeros(batch, 4, dtype=torch.float64, device=kernel_device),
        column=torch.tensor([2], device=kernel_device),
        ends=torch.tensor([191], device=kernel_device),
        pad=7,
    )
    found = tokens.TileScores.allocate(batch, columns, tile, kernel_device)
    draw = tokens.Draw(number + 5, number, temperature, columns)
    tokens.score_tokens(stream_of(x, norm, torch.float32), 1e-5, weight, draw, found, tile)
    tokens.finish_tokens(found, state)
    assert (state.token >= 0).all() and (state.token < columns).all()
    assert state.log_probs[1, 1].isnan() and not state.log_probs[0, 1].isnan()


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_fit_every_family(family, hardware):
    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    hardware.setattr(plan_module, "device_facts", lambda device: facts)
    shapes = itertools.product((1, 32, 128), (torch.bfloat16, torch.float32), ((576, 1536, 9, 3), (2048, 8192, 32, 8)))
    for rows, dtype, (hidden, middle, heads, kv_heads) in shapes:

        def of(outputs, inputs, dtype=dtype, **more):
            weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
            return fused_linear.Product((weight,), (None,), weight[0], **more)

        up = of(middle, hidden).weights[0]
        products = (
            of((heads + 2 * kv_heads) * 64, hidden),
            of(hidden, heads * 64, adds=True),
            of(middle, hidden, up=up),
            of(hidden, middle, adds=True),
        )
        plan = choose_plan(rows, products, attention.AttentionSpec(heads, kv_heads, 64, 0.1), 4096, up.device)
        for tile, gated in zip((*plan[:4], plan.head), (False, False, True, False, False), strict=True):
            assert tile.inputs >= 16 and fit_shared_memory(tile, rows, dtype.itemsize, gated, facts) == tile
        assert 1 <= plan.attention.chunks <= 32
