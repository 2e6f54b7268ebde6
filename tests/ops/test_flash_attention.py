"""FlashAttention against its definition in fp64, forward and gradient, over masks, shapes, dtypes and layouts."""

import itertools

import pytest
import torch
from distill_kernels.attention import ranges
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.ranges import (
    cu_seqlens_from_position_ids,
    packed_ranges,
    reference_mask,
    reference_ranges,
)
from distill_kernels.attention.reference import (
    reference_attention,
    reference_attention_backward,
)
from distill_kernels.launch import interpreted
from grids import pairwise
from helpers import assert_as_good_as_torch, kernels_launched, relative_error

HALVES = [torch.float32, torch.bfloat16, torch.float16]


def draw(shape, dtype, device, seed=0):
    """q, k, v, dout as [B, H, T, D] views of [B, T, H, D] tensors; scores have a standard deviation of about 2."""
    batch, heads, kv_heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(seed)

    def one(positions, count, std):
        tensor = torch.randn(batch, positions, count, size, generator=generator) * std
        return tensor.to(device, dtype).transpose(1, 2)

    return one(queries, heads, 1.5), one(keys, kv_heads, 1.5), one(keys, kv_heads, 1.0), one(queries, heads, 1.0)


def eager(q, k, v, masking):
    """Return PyTorch's attention in the inputs' dtype, every step rounded."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * masking.scale
    if masking.softcap is not None:
        scores = masking.softcap * torch.tanh(scores / masking.softcap)
    from distill_kernels.attention.reference import kept_scores

    kept = kept_scores(masking, q.shape[0], q.shape[2], k.shape[2], q.device)
    scores = scores.masked_fill(~kept, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1, torch.promote_types(q.dtype, torch.float32))).to(q.dtype) @ v


def gradients(function, q, k, v, dout):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(shape, dtype, device, *, cu=None, seed=0, **options):
    q, k, v, dout = draw(shape, dtype, device, seed)
    if cu is not None:
        cu = torch.tensor(cu, dtype=torch.int32, device=device)
    masking = ScoreSettings(
        options.get("causal", True),
        options.get("scale") or shape[-1] ** -0.5,
        options.get("window"),
        options.get("softcap"),
        cu,
        cu,
    )
    ours = gradients(lambda *x: flash_attention(*x, cu_seqlens_q=cu, **options), q, k, v, dout)
    theirs = gradients(lambda *x: eager(*x, masking), q, k, v, dout)
    exact_inputs = [x.double() for x in (q, k, v, dout)]
    exact = gradients(lambda *x: reference_attention(*x, masking)[0], *exact_inputs)
    for name, *values in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        assert_as_good_as_torch(*values, dtype, name)


MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 17},
    "window, both sides": {"window": 9, "causal": False},
    "window of two": {"window": 2},
    "soft cap": {"softcap": 3.0},
    "all": {"window": 30, "softcap": 5.0, "scale": 0.2},
}


@pytest.mark.plain("full-torch.bfloat16", "soft cap-torch.float16", "window, both sides-torch.float32")
@pytest.mark.parametrize(*pairwise({"mask": MASKS, "dtype": HALVES}))
def test_masks_leave_out_the_same_keys(kernel_device, mask, dtype):
    check((2, 2, 1, 70, 70, 16), dtype, kernel_device, **MASKS[mask])


@pytest.mark.plain("(1, 1, 1, 2, 2, 32)", "(2, 6, 2, 50, 50, 32)", "(1, 2, 2, 45, 45, 33)")
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 2, 2, 32),
        (1, 2, 2, 32, 32, 16),  # one tile
        (1, 2, 2, 33, 33, 16),  # one tile and one row
        (1, 4, 1, 40, 40, 64),  # multi-query
        (2, 6, 2, 50, 50, 32),  # groups of three
        (1, 2, 1, 20, 75, 32),  # fewer queries than keys: the last positions
        (1, 2, 1, 75, 20, 32),  # more: the first queries see nothing
        (1, 2, 2, 45, 45, 20),  # head size no power of two
        (1, 2, 2, 45, 45, 33),  # rows of no 16 bytes
        (1, 1, 1, 40, 40, 128),
        (1, 1, 1, 36, 36, 256),
    ],
    ids=str,
)
def test_any_shape_gives_the_reference(kernel_device, shape):
    check(shape, torch.float32, kernel_device)


@pytest.mark.plain("0 settings-[0, 70]", "causal-[0, 1, 2, 35, 36, 70]")
@pytest.mark.parametrize(
    *pairwise(
        {
            "options": [{}, {"causal": False}, {"window": 7, "softcap": 4.0}],
            "cu": [[0, 70], [0, 1, 2, 35, 36, 70], [0, 33, 33, 70, 70, 70], [0, 20, 50]],
        }
    )
)
def test_packed_documents_do_not_attend_to_each_other(kernel_device, cu, options):
    check((1, 2, 1, 70, 70, 16), torch.float32, kernel_device, cu=cu, **options)


def test_packed_batch_of_two(kernel_device):
    check((2, 2, 1, 50, 50, 16), torch.bfloat16, kernel_device, cu=[0, 7, 50, 61, 90, 100, 100, 100])


def test_packed_equals_documents_alone(kernel_device):
    lengths = [5, 40, 1, 24]
    q, k, v, _ = draw((1, 2, 1, sum(lengths), sum(lengths), 16), torch.float32, kernel_device)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=kernel_device)
    packed = flash_attention(q, k, v, cu_seqlens_q=cu)
    for start, end in itertools.pairwise(cu.tolist()):
        alone = flash_attention(*(x[:, :, start:end] for x in (q, k, v)))
        assert relative_error(packed[:, :, start:end], alone) < 1e-6


def test_different_lengths_of_queries_and_keys(kernel_device):
    q, k, v, dout = draw((1, 2, 1, 30, 60, 16), torch.float32, kernel_device)
    cu_q = torch.tensor([0, 10, 10, 30], device=kernel_device)
    cu_k = torch.tensor([0, 25, 40, 60], device=kernel_device)
    masking = ScoreSettings(True, 0.25, None, None, cu_q, cu_k)
    ours = gradients(lambda *x: flash_attention(*x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), q, k, v, dout)
    exact = gradients(lambda *x: reference_attention(*x, masking)[0], *(x.double() for x in (q, k, v, dout)))
    for mine, right in zip(ours, exact, strict=True):
        assert relative_error(mine, right) < 2e-6


@pytest.mark.plain("heads first", "odd stride", "expanded")
@pytest.mark.parametrize("layout", ["heads first", "fused projection", "odd stride", "columns apart", "expanded"])
def test_any_layout_gives_the_same(kernel_device, layout):
    batch, heads, positions, size = 2, 2, 40, 16
    if layout == "heads first":
        q, k, v = torch.randn(3, batch, heads, positions, size, device=kernel_device).unbind()
    elif layout == "fused projection":
        q, k, v = torch.randn(batch, positions, 3, heads, size, device=kernel_device).permute(2, 0, 3, 1, 4).unbind()
    elif layout == "odd stride":
        q, k, v = torch.randn(3, batch, heads, positions, size + 3, device=kernel_device)[..., 1:-2].unbind()
    elif layout == "columns apart":
        q, k, v = torch.randn(3, batch, heads, size, positions, device=kernel_device).transpose(-1, -2).unbind()
    else:
        q, k, v = torch.randn(3, batch, 1, positions, size, device=kernel_device).expand(-1, -1, heads, -1, -1).unbind()
    dout = torch.randn(batch, heads, positions, size, device=kernel_device).expand(batch, heads, positions, size)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ours = torch.autograd.grad(flash_attention(*leaves), leaves, dout)
    exact = gradients(
        lambda *x: reference_attention(*x, ScoreSettings(True, 0.25))[0], *(x.double() for x in (q, k, v, dout))
    )[1:]
    for mine, right in zip(ours, exact, strict=True):
        assert relative_error(mine, right) < 2e-6


def test_a_window_of_one_copies_the_values(kernel_device):
    q, k, v, _ = draw((1, 2, 2, 40, 40, 16), torch.float32, kernel_device)
    assert torch.equal(flash_attention(q, k, v, window=1), v)


def test_large_scores_stay_finite(kernel_device):
    q, k, v, dout = draw((1, 1, 1, 40, 40, 16), torch.float32, kernel_device)
    for result in gradients(flash_attention, q * 1e3, k * 1e1, v, dout):
        assert torch.isfinite(result).all()


def test_tiles_of_other_documents_are_skipped(kernel_device):
    q, k, v, _ = draw((1, 1, 1, 256, 256, 16), torch.float32, kernel_device)
    cu = torch.tensor([0, 128, 256], device=kernel_device)
    clean = flash_attention(q, k, v, cu_seqlens_q=cu)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")
    poisoned = flash_attention(q, k, v, cu_seqlens_q=cu)
    assert torch.equal(poisoned[:, :, :128], clean[:, :, :128])
    assert torch.isnan(poisoned[:, :, 128:]).all()


@pytest.mark.full
def test_gradients_repeat_to_the_bit(kernel_device):
    q, k, v, dout = draw((1, 4, 2, 70, 70, 16), torch.bfloat16, kernel_device)
    first, second = (gradients(flash_attention, q, k, v, dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_backward_raises(kernel_device):
    q, k, v, dout = draw((1, 1, 1, 8, 8, 16), torch.float32, kernel_device)
    out = flash_attention(q.requires_grad_(), k, v)
    out.backward(dout)
    with pytest.raises(RuntimeError):
        out.backward(dout)


def test_inputs_without_positions_are_fine(device):
    q = torch.randn(1, 2, 0, 16, device=device, requires_grad=True)
    flash_attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("causal, window", [*itertools.product([True, False], [None, 1, 5, 100])])
def test_ranges_are_the_mask(kernel_device, causal, window):
    queries, keys = 13, 19
    cu_q, cu_k = (torch.tensor([0, n], device=kernel_device) for n in (queries, keys))
    mask = reference_mask(queries, keys, causal, window, kernel_device)
    column = torch.arange(keys, device=kernel_device)
    low, high = packed_ranges(cu_q, cu_k, queries, causal, window)
    assert torch.equal((column >= low[:, None]) & (column < high[:, None]), mask)
    row = torch.arange(queries, device=kernel_device)
    low, high = packed_ranges(cu_q, cu_k, keys, causal, window, from_keys=True)
    assert torch.equal((row >= low[:, None]) & (row < high[:, None]), mask.T)


def test_ranges_kernel_equals_reference(kernel_device):
    cu = torch.tensor([0, 0, 3, 3, 40, 300, 300, 310, 310], device=kernel_device)
    for causal, window, from_keys in itertools.product([True, False], [None, 4], [True, False]):
        ours = packed_ranges(cu, cu, 330, causal, window, from_keys=from_keys)
        assert torch.equal(ours.long(), reference_ranges(cu, cu, 330, causal, window, from_keys=from_keys))


@pytest.mark.full
def test_layers_share_the_intervals_of_packed_documents(hardware):
    q, k, v, dout = draw((2, 2, 1, 48, 48, 16), torch.float32, "cpu")
    positions = torch.cat([torch.arange(20), torch.arange(28), torch.arange(40), torch.arange(8)]).view(2, 48)
    other = torch.arange(48).expand(2, 48)
    with interpreted(), kernels_launched() as launched:

        def launches():
            """The launches since the last call."""
            count = launched.count("_ranges_kernel")
            launched.clear()
            return count

        cu = cu_seqlens_from_position_ids(positions)

        def layer(q, k, v, cu=cu, window=None):
            return flash_attention(q, k, v, cu_seqlens_q=cu, window=window)

        expected = gradients(lambda *x: layer(*x, cu.clone()), q, k, v, dout)  # a clone keeps nothing
        assert launches() == 3
        for _ in range(3):
            assert all(map(torch.equal, expected, gradients(layer, q, k, v, dout)))
        assert launches() == 2
        layer(q, k, v, window=8)
        assert launches() == 1
        with torch.inference_mode():
            own = cu_seqlens_from_position_ids(positions)
            assert torch.equal(layer(q, k, v, own), layer(q, k, v, own)) and launches() == 1
        cu.copy_(cu_seqlens_from_position_ids(other))  # another batch's documents
        assert torch.equal(layer(q, k, v), layer(q, k, v, cu_seqlens_from_position_ids(other)))
        hardware.setattr(ranges, "_is_captured", lambda tensor: True)  # a replay may find other lengths
        launches()
        assert torch.equal(layer(q, k, v), layer(q, k, v)) and launches() == 2


def test_cu_seqlens_from_position_ids():
    position_ids = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    cu = cu_seqlens_from_position_ids(position_ids)
    assert cu.dtype == torch.int32
    assert cu.tolist() == [0, 3, 5, 6, 10, 10, 10, 10, 10, 10, 10]


@pytest.mark.parametrize("mask", MASKS)
def test_the_references_gradient_is_autograds(mask):
    q, k, v, dout = (x.double() for x in draw((2, 4, 2, 30, 41, 8), torch.float32, "cpu"))
    options = {"causal": True, "scale": 0.3, **MASKS[mask]}
    masking = ScoreSettings(**options)
    out, lse = reference_attention(q, k, v, masking)
    exact = gradients(lambda *x: reference_attention(*x, masking)[0], q, k, v, dout)[1:]
    ours = reference_attention_backward(dout, q, k, v, out, lse, masking)
    assert max(relative_error(a, b) for a, b in zip(ours, exact, strict=True)) < 1e-12


def test_reference_equals_torch():
    q, k, v, _ = (x.double() for x in draw((2, 4, 2, 30, 30, 8), torch.float32, "cpu"))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_error(reference_attention(q, k, v, ScoreSettings(True, 8**-0.5))[0], theirs) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_op_passes_opcheck_and_compiles(kernel_device, packed):
    q, k, v, dout = draw((1, 2, 1, 20, 20, 16), torch.float32, kernel_device)
    cu = torch.tensor([0, 8, 20], device=kernel_device) if packed else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.distill.flash_attention, (*leaves, cu, cu, True, 0.25, None, None))

    compiled = torch.compile(lambda *x: flash_attention(*x, cu_seqlens_q=cu) * 2, fullgraph=True, backend="aot_eager")
    ours = gradients(compiled, q, k, v, dout)
    plain = gradients(lambda *x: flash_attention(*x, cu_seqlens_q=cu) * 2, q, k, v, dout)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", {"q": torch.zeros(2, 3, 4)}),
        ("q", {"q": torch.zeros(1, 3, 8, 16)}),  # three heads over two
        ("k", {"k": torch.zeros(1, 2, 8, 16, dtype=torch.float16)}),
        ("k, v", {"v": torch.zeros(1, 2, 9, 16)}),
        ("head size", {name: torch.zeros(1, 2, 8, 300) for name in "qkv"}),
        ("scale", {"scale": 0.0}),
        ("window", {"window": 0}),
        ("softcap", {"softcap": -1.0}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.zeros(3)}),
        ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 8])}),
    ],
)
def test_mistakes_are_named(name, change):
    arguments = {n: torch.zeros(1, 2, 8, 16) for n in "qkv"} | change
    with pytest.raises(ValueError, match=name):
        flash_attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 300, "softcap": 20.0}], ids=str)
def test_shapes_of_real_models_agree(device, size, dtype, options):
    check((2, 4, 2, 1027, 1027, size), dtype, device, **options)
    check((1, 4, 2, 1027, 1027, size), dtype, device, cu=[0, 100, 101, 640, 1000], **options)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_past_two_to_the_31(device):
    q = torch.randn(1, 2**17 + 8, 130, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)  # 2.2e9 elements
    out = flash_attention(q, q, q, window=64)
    alone = flash_attention(q[:, -1:], q[:, -1:], q[:, -1:], window=64)
    assert torch.equal(out[:, -1:], alone)
