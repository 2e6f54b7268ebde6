"""Attention sinks: a logit a head in the softmax's denominator, against an extra key without a value, in fp64."""

import itertools

import pytest
import torch
from distill_kernels.attention.flash import flash_attention, forward_on_triton
from distill_kernels.attention.flash_backward import backward_on_triton
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.reference import kept_scores, reference_attention, reference_attention_backward
from distill_kernels.decoding.cached_attention import decode_attention
from grids import pairwise
from helpers import FLOOR, SLACK, assert_as_good_as_torch, relative_error
from layer_checks import poisoned_memory
from test_flash_attention import HALVES, MASKS, draw

NAMES = ("out", "dq", "dk", "dv", "dsinks")
DOCUMENTS = [0, 7, 7, 40, 61]  # and nine positions after the last one


def sinks_of(heads, dtype=torch.float32, device="cpu"):
    """Some far below the scores, some above them."""
    return torch.linspace(-4, 6, heads, dtype=torch.float64).to(device, dtype)


def definition(q, k, v, sinks, masking):
    """Plain attention over one key more, whose score is the sink and whose value is 0, in the inputs' dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * masking.scale
    if masking.softcap is not None:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    scores = scores.masked_fill(~kept_scores(masking, *q.shape[::2], k.shape[2], q.device), float("-inf"))
    last = sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.softmax(torch.cat([scores, last], -1), -1, wide).to(q.dtype)[..., :-1] @ v


def gradients(function, q, k, v, sinks, dout):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def norm_of_summed(q, k, v, sinks, dout, out, masking):
    """Norm of the rows' terms whose sum is a sink's gradient: their signs differ, and the sum may be near 0."""
    _, lse = reference_attention(q, k, v, masking._replace(sinks=sinks))
    return (torch.exp(sinks[:, None] - lse) * (dout * out).sum(-1)).norm().item()


def masking_of(options, size, device):
    documents = options.get("documents")
    cu = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=device)
    settings = {name: value for name, value in options.items() if name != "documents"}
    return ScoreSettings(**{"causal": True, "scale": size**-0.5} | settings, cu_seqlens_q=cu, cu_seqlens_k=cu)


def ours(masking):
    settings = {"causal": masking.causal, "scale": masking.scale, "window": masking.window, "softcap": masking.softcap}
    return lambda q, k, v, sinks: flash_attention(
        q, k, v, sinks=sinks, cu_seqlens_q=masking.cu_seqlens_q, cu_seqlens_k=masking.cu_seqlens_k, **settings
    )


def check(shape, dtype, device, sinks_dtype=None, **options):
    q, k, v, dout = draw(shape, dtype, device)
    sinks, masking = sinks_of(shape[1], sinks_dtype or dtype, device), masking_of(options, shape[-1], device)
    with poisoned_memory():
        given = gradients(ours(masking), q, k, v, sinks, dout)
    eager = gradients(lambda *x: definition(*x, masking), q, k, v, sinks, dout)
    exact = gradients(lambda *x: definition(*x, masking), *(x.double() for x in (q, k, v, sinks, dout)))
    assert given[-1].dtype == sinks.dtype
    *checked, (of_sinks, by_torch, right) = zip(given, eager, exact, strict=True)
    for name, values in zip(NAMES, checked, strict=False):
        assert_as_good_as_torch(*values, dtype, name)
    scale = norm_of_summed(*(x.double() for x in (q, k, v, sinks, dout)), exact[0], masking)
    error, theirs = ((each.double() - right).norm().item() / scale for each in (of_sinks, by_torch))
    assert error <= SLACK * theirs + FLOOR[dtype], f"dsinks: error {error:.3e}, torch's {theirs:.3e} ({dtype})"


SINKS_WITH_MASKS = dict(zip(MASKS, itertools.cycle(HALVES), strict=False))


# which keys a mask leaves out is the same code without sinks, which test_flash_attention.py tries in every dtype
@pytest.mark.plain("causal-torch.float32", "window-torch.float16", "window of two-torch.bfloat16", "all-torch.float32")
@pytest.mark.parametrize("mask, dtype", SINKS_WITH_MASKS.items())
def test_masks_leave_out_the_same_keys(kernel_device, mask, dtype):
    check((2, 4, 2, 70, 70, 16), dtype, kernel_device, **MASKS[mask])


@pytest.mark.plain("(1, 4, 2, 6, 6, 16)", "(1, 8, 1, 40, 40, 64)", "(1, 2, 1, 20, 75, 32)", "(1, 1, 1, 36, 36, 256)")
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4, 2, 6, 6, 16),
        (1, 2, 2, 32, 32, 16),  # one tile
        (1, 2, 2, 33, 33, 16),  # one tile and one row
        (1, 8, 1, 40, 40, 64),  # multi-query
        (2, 6, 2, 50, 50, 32),
        (1, 2, 1, 20, 75, 32),  # the last positions
        (1, 2, 1, 75, 20, 32),  # the first queries see nothing
        (1, 2, 2, 45, 45, 20),  # head size no power of two
        (1, 1, 1, 36, 36, 256),
    ],
    ids=str,
)
def test_any_shape_gives_the_reference(kernel_device, shape):
    check(shape, torch.float32, kernel_device)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 7, "softcap": 4.0}], ids=str)
def test_packed_documents_do_not_attend_to_each_other(kernel_device, options):
    check((1, 4, 2, 70, 70, 16), torch.bfloat16, kernel_device, documents=DOCUMENTS, **options)


def test_sinks_of_another_dtype(kernel_device):
    check((1, 4, 2, 40, 40, 16), torch.bfloat16, kernel_device, sinks_dtype=torch.float32)


@pytest.mark.plain("2-causal", "5-causal")
@pytest.mark.parametrize("options", [{}, {"documents": DOCUMENTS, "window": 5}], ids=["causal", "documents, window"])
@pytest.mark.parametrize("parts", [2, 5])
def test_keys_in_parts_count_a_sink_once(kernel_device, parts, options):
    q, k, v, dout = draw((1, 4, 2, 70, 70, 16), torch.float32, kernel_device)
    masking = masking_of(options, 16, kernel_device)._replace(sinks=sinks_of(4, device=kernel_device))
    with poisoned_memory():
        out, lse = forward_on_triton(q, k, v, masking, parts=parts)
        grads = backward_on_triton(dout, q, k, v, out, lse, masking, key_parts=parts, query_parts=parts)
    wide = (x.double() for x in (q, k, v, masking.sinks, dout))
    exact = gradients(lambda *x: definition(*x, masking), *wide)
    for name, value, right in zip(NAMES, (out, *grads), exact, strict=True):
        assert relative_error(value, right) < 3e-6, name


def test_queries_without_keys_give_zeros_and_no_gradient(kernel_device):
    q, k, v, dout = draw((1, 2, 1, 70, 70, 16), torch.float32, kernel_device)
    nothing = torch.tensor([0, 0, 0], device=kernel_device)
    with poisoned_memory():
        given = gradients(
            lambda *x: flash_attention(*x[:3], sinks=x[3], cu_seqlens_q=nothing),
            q,
            k,
            v,
            sinks_of(2, device=kernel_device),
            dout,
        )
    assert not any(value.any() for value in given)


def test_a_sink_of_minus_infinity_has_no_effect(kernel_device):
    q, k, v, dout = draw((1, 2, 1, 75, 20, 16), torch.float32, kernel_device)  # some rows see nothing
    sinks = torch.full((2,), float("-inf"), device=kernel_device)
    out, dq, dk, dv, dsinks = gradients(ours(ScoreSettings(True, 0.25)), q, k, v, sinks, dout)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    plain = flash_attention(*leaves, scale=0.25)
    for one, other in zip((out, dq, dk, dv), (plain, *torch.autograd.grad(plain, leaves, dout)), strict=True):
        assert relative_error(one, other.detach()) < 1e-6
    assert not dsinks.any()


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores_stay_finite(kernel_device, sink):
    q, k, v, dout = draw((1, 2, 1, 40, 40, 16), torch.float32, kernel_device)
    sinks = torch.full((2,), sink, device=kernel_device)
    out, *grads = gradients(ours(ScoreSettings(True, 0.25)), q, k, v, sinks, dout)
    assert all(torch.isfinite(value).all() for value in (out, *grads))
    assert bool(out.any()) == (sink < 0)


@pytest.mark.parametrize("name", MASKS)
def test_the_references_gradient_is_the_definitions(name):
    q, k, v, dout = (x.double() for x in draw((2, 4, 2, 30, 41, 8), torch.float32, "cpu"))
    sinks = sinks_of(4, torch.float64)
    masking = ScoreSettings(**{"causal": True, "scale": 0.3} | MASKS[name], sinks=sinks)
    out, lse = reference_attention(q, k, v, masking)
    exact = gradients(lambda *x: definition(*x, masking), q, k, v, sinks, dout)
    given = (out, *reference_attention_backward(dout, q, k, v, out, lse, masking))
    assert max(relative_error(a, b) for a, b in zip(given, exact, strict=True)) < 1e-12


@pytest.mark.full
def test_gradients_repeat_to_the_bit(kernel_device):
    q, k, v, dout = draw((1, 4, 2, 70, 70, 16), torch.bfloat16, kernel_device)
    sinks = sinks_of(4, torch.bfloat16, kernel_device)
    first, second = (gradients(ours(ScoreSettings(True, 0.25)), q, k, v, sinks, dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradient_of_sinks_alone(kernel_device):
    q, k, v, dout = draw((1, 4, 2, 40, 40, 16), torch.float32, kernel_device)
    sinks, masking = sinks_of(4, device=kernel_device), ScoreSettings(True, 0.25)
    (alone,) = torch.autograd.grad(ours(masking)(q, k, v, sinks.requires_grad_()), sinks, dout)
    assert torch.equal(alone, gradients(ours(masking), q, k, v, sinks, dout)[-1])


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_op_passes_opcheck_and_compiles(kernel_device, packed):
    q, k, v, dout = draw((1, 2, 1, 20, 20, 16), torch.float32, kernel_device)
    cu = torch.tensor([0, 8, 20], device=kernel_device) if packed else None
    sinks, masking = sinks_of(2, device=kernel_device), ScoreSettings(True, 0.25, None, None, cu, cu)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    arguments = (*leaves, cu, cu, True, 0.25, None, None, sinks.clone().requires_grad_())
    torch.library.opcheck(torch.ops.distill.flash_attention, arguments)
    compiled = torch.compile(lambda *x: ours(masking)(*x) * 2, fullgraph=True, backend="aot_eager")
    plain = gradients(lambda *x: ours(masking)(*x) * 2, q, k, v, sinks, dout)
    assert all(map(torch.equal, gradients(compiled, q, k, v, sinks, dout), plain))


@pytest.mark.parametrize(
    "sinks",
    [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64), [0, 0]],
    ids=["heads", "shape", "ints", "float64", "list"],
)
def test_mistakes_are_named(sinks):
    q, lengths = torch.zeros(1, 2, 8, 16), torch.tensor([8])
    for call in (
        lambda: flash_attention(q, q, q, sinks=sinks),
        lambda: decode_attention(q[:, :, -1:], q, q, lengths, sinks=sinks),
    ):
        with pytest.raises(ValueError, match="sinks: expected"):
            call()


# ---- decoding


@pytest.mark.plain("0 settings-1-64-torch.float32", "window-3-300-torch.bfloat16", "softcap-1-300-torch.float16")
@pytest.mark.parametrize(
    *pairwise({"options": [{}, {"window": 30}, {"softcap": 3.0}], "new": [1, 3], "slots": [64, 300], "dtype": HALVES})
)
def test_decoding_counts_a_sink_once(kernel_device, options, new, slots, dtype):
    q, k, v, _ = draw((2, 6, 2, new, slots, 32), dtype, kernel_device)
    lengths = torch.tensor([slots, slots // 2], device=kernel_device)
    k[1, :, slots // 2 :] = v[1, :, slots // 2 :] = float("nan")  # slots after the length are not read
    sinks = sinks_of(6, dtype, kernel_device)
    masking = masking_of(options, 32, kernel_device)

    def alone(function, dtype):
        rows = []
        for i, length in enumerate(lengths.tolist()):
            row = [x[i : i + 1, :, :length].to(dtype) for x in (k, v)]
            rows.append(function(q[i : i + 1].to(dtype), *row, sinks.to(dtype), masking))
        return torch.cat(rows)

    with poisoned_memory():
        given = decode_attention(q, k, v, lengths, sinks=sinks, **options)
    assert_as_good_as_torch(given, alone(definition, dtype), alone(definition, torch.float64), dtype)


def test_the_reference_of_decoding():
    q, k, v, _ = (x.double() for x in draw((2, 4, 2, 2, 40, 16), torch.float32, "cpu"))
    lengths, sinks, masking = torch.tensor([40, 13]), sinks_of(4, torch.float64), ScoreSettings(True, 0.25, 9, 4.0)
    given = decode_attention(q, k, v, lengths, scale=0.25, window=9, softcap=4.0, sinks=sinks)
    for i, length in enumerate(lengths.tolist()):
        one = slice(i, i + 1)
        exact = definition(q[one], k[one, :, :length], v[one, :, :length], sinks, masking)
        assert relative_error(given[one], exact) < 1e-12


def test_an_empty_cache_gives_zeros(kernel_device):
    q, k, v, _ = draw((2, 2, 1, 1, 70, 16), torch.float32, kernel_device)
    lengths, starts = torch.tensor([0, 70], device=kernel_device), torch.tensor([0, 70], device=kernel_device)
    assert not decode_attention(q, k, v, lengths, starts=starts, sinks=sinks_of(2, device=kernel_device)).any()


def test_decoding_equals_the_last_rows_of_full_attention(kernel_device):
    q, k, v, _ = draw((2, 4, 2, 90, 90, 32), torch.float32, kernel_device)
    sinks, lengths = sinks_of(4, device=kernel_device), torch.tensor([90, 90], device=kernel_device)
    full = flash_attention(q, k, v, window=40, sinks=sinks)[:, :, -3:]
    assert relative_error(decode_attention(q[:, :, -3:], k, v, lengths, window=40, sinks=sinks), full) < 1e-6


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size, heads", [(64, (64, 8)), (80, (32, 8)), (128, (32, 8)), (256, (32, 8))], ids=str)
@pytest.mark.parametrize("window", [None, 128])
def test_shapes_of_real_models_agree(device, size, heads, dtype, window):
    """Many heads: of a few sinks, whose gradients are one sum each, eager's error is small or large by chance."""
    check((1, *heads, 1027, 1027, size), dtype, device, sinks_dtype=torch.float32, window=window)
    check((1, *heads, 1027, 1027, size), dtype, device, window=window, documents=[0, 100, 101, 640, 1000])


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_sinks(device):
    q, k, v, dout = draw((1, 8, 2, 500, 500, 64), torch.bfloat16, device)
    sinks, masking = sinks_of(8, torch.bfloat16, device), ScoreSettings(True, 0.125, 100)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]

    def step():
        out = ours(masking)(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        sinks += 1
    graph.replay()
    expected = gradients(ours(masking), q, k, v, sinks, dout)
    assert all(map(torch.equal, made, expected))


@pytest.mark.gpu
def test_compiled_by_inductor(device):
    q, k, v, dout = draw((1, 8, 2, 300, 300, 64), torch.bfloat16, device)
    sinks, masking = sinks_of(8, torch.bfloat16, device), ScoreSettings(True, 0.125, 100)
    compiled = torch.compile(ours(masking), fullgraph=True)
    given, plain = (gradients(each, q, k, v, sinks, dout) for each in (compiled, ours(masking)))
    assert all(itertools.starmap(torch.equal, zip(given, plain, strict=True)))
