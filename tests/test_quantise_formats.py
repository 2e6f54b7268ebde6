"""Block formats against the gguf package to the bit, the fused kernel against its reference, gradients by autograd."""

import gguf
import numpy as np
import pytest
import torch
from distill_kernels.quantisation.fake_quantise import fake_quantise_into, learned_gradients
from distill_kernels.quantisation.formats import (
    FORMATS,
    reference_fake_quantise,
    reference_learned_gradients,
    reference_quantise,
    reference_scale,
)
from layer_checks import DTYPES, poisoned_memory

from distill.models.precision.exact_blocks import exact_blocks

GGUF = ("q4_0", "q8_0")


def fake_quantise(w, name, scale=None):
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    fake_quantise_into(out, w, name, scale)
    return out


def draw(rows, columns, seed=0, dtype=torch.float32):
    """Return weights whose blocks differ widely in size, with blocks of zeros, ties of both signs and halves."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    w[0, :32] = 0
    w[-1, :32] = torch.tensor([1.0, -1.0] * 16)  # the first of equal magnitudes decides the sign
    w[-1, 32:64] = torch.arange(-16, 16) / 2.0
    return w.to(dtype)


@pytest.mark.parametrize("name", GGUF)
def test_blocks_are_those_of_the_gguf_package_to_the_bit(name):
    w = draw(67, 192)
    kind = gguf.GGMLQuantizationType[name.upper()]
    theirs = gguf.quants.quantize(w.numpy(), kind)  # uint8 [67, blocks x bytes]
    blocks = theirs.reshape(67, 6, -1)
    ours = reference_quantise(w, name)
    assert np.array_equal(ours.scale.numpy().view(np.uint16), blocks[..., :2].copy().view(np.uint16)[..., 0])
    codes = ours.codes.view(67, 6, 32).numpy()
    if name == "q4_0":
        packed = (codes[..., :16] + 8).astype(np.uint8) | ((codes[..., 16:] + 8).astype(np.uint8) << 4)
        assert np.array_equal(packed, blocks[..., 2:])
    else:
        assert np.array_equal(codes, blocks[..., 2:].view(np.int8))
    assert np.array_equal(ours.values().numpy(), gguf.quants.dequantize(theirs, kind))


@pytest.mark.parametrize("name", FORMATS)
def test_quantising_twice_is_quantising_once(name):
    """A student that holds the file's values keeps its file."""
    for seed in range(5):
        once = reference_quantise(draw(65, 128, seed), name)
        again = reference_quantise(once.values(), name)
        assert torch.equal(again.values(), once.values()) and torch.equal(again.scale, once.scale)
        assert torch.equal(again.codes, once.codes)


@pytest.mark.parametrize("name", FORMATS)
def test_error_is_at_most_half_a_step(name):
    w = draw(64, 128)
    form, blocks = FORMATS[name], reference_quantise(w, name)
    assert blocks.codes.min() >= form.low and blocks.codes.max() <= form.high
    step = blocks.scale.float().abs().repeat_interleave(form.columns(w), -1)
    error = (blocks.values() - w).abs()
    # signed scales clip: +8 d becomes 7 d; and q4_0's is rounded to fp16 after the integers are found
    clipped = w / blocks.scale.float().repeat_interleave(form.columns(w), -1) > form.high + 0.5
    assert (error <= step * (0.5 + 2**-8 * 127) + 1e-30)[~clipped].all()
    assert (error[~clipped] <= step[~clipped] * 0.52 + 1e-30).float().mean() > 0.97
    assert not clipped.any() or form.signed


@pytest.mark.parametrize("name", FORMATS)
def test_exact_blocks_are_found_whatever_chose_the_scale(name):
    w, form = draw(40, 128), FORMATS[name]
    scale = reference_scale(w, name) * (0.6 + torch.rand(reference_scale(w, name).shape))
    values = reference_fake_quantise(w, name, scale)
    found = exact_blocks(values, name)
    assert found is not None and torch.equal(found.values(), values)
    assert found.codes.min() >= form.low and found.codes.max() <= form.high and found.scale.dtype == form.scale_dtype
    off = values.clone()
    off[3, 5] += off[3].abs().max() * 1e-3
    assert exact_blocks(off, name) is None, "a number off the grid is not rounded in silence"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, columns", [(1, 32), (5, 96), (130, 64), (3, 1056)])
def test_kernel_has_the_bits_of_its_reference(kernel_device, name, given, dtype, rows, columns):
    w = draw(rows, max(columns, 64), dtype=dtype)[:, :columns].to(kernel_device)
    scale = (reference_scale(w, name) * 0.8) if given else None
    with poisoned_memory():
        ours = fake_quantise(w, name, scale)
    assert torch.equal(ours, reference_fake_quantise(w, name, scale))


@pytest.mark.parametrize("name", FORMATS)
def test_strided_and_empty_matrices(kernel_device, name):
    wide = draw(24, 192).to(kernel_device)
    for w in (wide[:, 64:128], wide[::3], wide.view(4, 6, 192).transpose(0, 1), wide[:0]):
        assert torch.equal(fake_quantise(w, name), reference_fake_quantise(w, name))


def straight_through(w, name, scale):
    """Return the definition in terms that autograd differentiates: rounding and storing a scale have derivative 1."""
    form = FORMATS[name]
    stored = scale + (scale.to(form.scale_dtype).to(scale.dtype) - scale).detach()
    x = w.unflatten(-1, (-1, form.columns(w))) / stored[..., None]
    q = x + (torch.copysign((x.abs() + 0.5).floor(), x) - x).detach()
    return (q.clamp(form.low, form.high) * stored[..., None]).flatten(-2)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_straight_through_definition(kernel_device, name):
    w = draw(33, 96, seed=3).double()
    scale = (reference_scale(w, name).double() * 0.7).requires_grad_()
    w.requires_grad_()
    upstream = torch.randn(33, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(straight_through(w, name, scale), [w, scale], upstream)
    assert 0 < (expected[0] == 0).sum() < expected[0].numel() / 2, "some numbers are clamped"
    ours_w, ours_scale = (t.detach().float().to(kernel_device) for t in (w, scale))
    given = upstream.float().to(kernel_device)
    for ours, right in zip(learned_gradients(ours_w, ours_scale, given, name), expected, strict=True):
        # a block of zeros has a scale of 0, by which the definition divides
        live = right.isfinite()
        assert live.double().mean() > 0.95
        torch.testing.assert_close(ours.double().cpu()[live], right[live], rtol=2e-4, atol=2e-5)


def test_errors_name_the_invalid_argument():
    with pytest.raises(ValueError, match="format: expected one of q4_0, q8_0, int4_g32, int8, got 'q5_0'"):
        fake_quantise(torch.zeros(2, 64), "q5_0")
    with pytest.raises(ValueError, match=r"weight: expected .* K divisible by 32 for q4_0, got \(2, 40"):
        fake_quantise(torch.zeros(2, 40), "q4_0")
    with pytest.raises(ValueError, match=r"scale: expected \(2, 2\), one for each block, got \(2, 1\)"):
        fake_quantise(torch.zeros(2, 64), "int4_g32", torch.ones(2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, columns", [(8192, 2048), (151_936, 1536), (4096, 14_336)])
def test_kernel_equals_the_reference_on_shapes_of_real_models(device, name, rows, columns):
    w = torch.randn(rows, columns, device=device) * 0.02
    scale = reference_scale(w, name) * 0.9
    assert torch.equal(fake_quantise(w, name), reference_fake_quantise(w, name))
    assert torch.equal(fake_quantise(w, name, scale), reference_fake_quantise(w, name, scale))
    g = torch.randn_like(w)
    ours, right = learned_gradients(w, scale, g, name), reference_learned_gradients(w, scale, g, name)
    assert torch.equal(ours[0], right[0])
    torch.testing.assert_close(ours[1], right[1], rtol=1e-3, atol=1e-3 * columns**0.5)
