"""Block formats against the gguf package to the bit, the fused kernel against its reference, gradients by autograd."""

import ctypes

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
)
from distill_kernels.quantisation.number_format import Scales
from grids import pairwise
from layer_checks import DTYPES, poisoned_memory

from distill.reports.llama_cpp import folder as llama_cpp_folder
from scripts.engines import llama_cpp

GGUF = [name for name, form in FORMATS.items() if form.file == "gguf"]
PACKED = [name for name, form in FORMATS.items() if form.file == "compressed-tensors"]


def fake_quantise(w, name, scales=None):
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    fake_quantise_into(out, w, name, scales)
    return out


def draw(rows, columns, seed=0, dtype=torch.float32):
    """Return weights whose blocks differ widely in size, with blocks of zeros, ties of both signs and halves."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * 10 ** (torch.randn(rows, 1, generator=generator) / 2 - 1)
    w[0, :32] = 0
    w[-1, :32] = torch.tensor([1.0, -1.0] * 16)  # the first of equal magnitudes decides the sign
    w[-1, 32:64] = torch.arange(-16, 16) / 8.0
    return w.to(dtype)


def changed(form, w, factor):
    """Return scales that no rule of the format would choose."""
    scales = form.first(w)
    factor = factor.to(scales.scale) if isinstance(factor, torch.Tensor) else factor
    return form.snap(Scales(*(None if part is None else part * factor for part in scales)))


def packed(w, name):
    """Return a matrix as ours, and its bytes in a GGUF file."""
    ours = reference_quantise(w, name)
    return ours, ours.form.pack(ours.codes, ours.stored)["weight"].numpy()


@pytest.mark.parametrize("name", GGUF)
def test_blocks_are_read_by_the_gguf_package_to_the_bit(name):
    kind = gguf.GGMLQuantizationType[name.upper()]
    ours, written = packed(draw(67, 768), name)
    assert np.array_equal(ours.values().numpy(), gguf.quants.dequantize(written, kind))
    if name in ("q4_0", "q5_0", "q8_0"):  # the package writes these
        assert np.array_equal(written, gguf.quants.quantize(draw(67, 768).numpy(), kind))


@pytest.mark.engines
@pytest.mark.skipif(not llama_cpp.installed(), reason="python -m scripts.engines install llama_cpp")
@pytest.mark.parametrize("name", GGUF)
def test_blocks_are_those_that_llama_cpp_writes_to_the_bit(name):
    (path,) = llama_cpp_folder().rglob("libggml-base.so")
    write = ctypes.CDLL(str(path)).ggml_quantize_chunk
    sizes, addresses = [ctypes.c_int64] * 3, [ctypes.c_void_p] * 2
    write.argtypes, write.restype = [ctypes.c_int, *addresses, *sizes, ctypes.c_void_p], ctypes.c_size_t
    kind = gguf.GGMLQuantizationType[name.upper()]
    for seed in range(3):
        w = draw(200, 1024, seed)
        w[1], w[2], w[3, :256] = w[1].abs() + 1, -w[2].abs() - 1, 0
        _, written = packed(w, name)
        theirs = np.zeros_like(written)
        assert write(int(kind), w.numpy().ctypes.data, theirs.ctypes.data, 0, 200, 1024, None) == written.size
        assert np.array_equal(written, theirs)


@pytest.mark.parametrize("name", PACKED)
def test_packed_tensors_are_unpacked_to_the_same_values(name):
    for scales in (None, changed(FORMATS[name], draw(40, 128), 0.7)):
        blocks = reference_quantise(draw(40, 128), name, scales)
        tensors = blocks.form.pack(blocks.codes, blocks.stored)
        assert torch.equal(blocks.form.unpack(tensors), blocks.values())
        kept = sum(
            tensor.nbytes for suffix, tensor in tensors.items() if suffix != "weight_shape" and tensor.numel() > 1
        )
        form = blocks.form
        assert 8 * kept == 40 * (128 * form.bits + 128 // form.columns(draw(40, 128)) * form.scale_bits)


@pytest.mark.parametrize("codes, dtype", [("fp8", torch.float8_e4m3fn), ("nvfp4", None)])
def test_floating_point_codes_are_the_nearest(codes, dtype):
    form = FORMATS[codes]
    x = torch.cat([torch.linspace(-1.1, 1.1, 40_001) * form.codes.high, torch.linspace(-0.02, 0.02, 9_999)])
    if dtype is not None:
        expected = x.clamp(form.codes.low, form.codes.high).to(dtype).float()
    else:
        table = all_codes(form)
        expected = table[(x[:, None] - table).abs().argmin(1)]
        halves = (x[:, None] - table).abs().sort(1).values  # halves between two codes are told apart below
        x, expected = x[halves[:, 0] < halves[:, 1]], expected[halves[:, 0] < halves[:, 1]]
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        assert form.codes.clamped(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0], "to the even code"
    assert torch.equal(form.codes.clamped(x), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_values_are_kept_by_the_files_scales(name):
    """A student that holds the file's values keeps its file, whatever chose its scales."""
    form = FORMATS[name]
    for seed in range(5):
        w = draw(65, 256, seed)
        for scales in (None, changed(form, w, 0.6 + torch.rand(form.first(w).scale.shape))):
            once = reference_quantise(w, name, scales)
            assert torch.equal(form.encode(once.values(), form.load(once.stored)), once.codes)
            again = once.form.store(once.form.load(once.stored))
            assert all(torch.equal(again[key].float(), once.stored[key].float()) for key in again)
        if form.in_kernel:  # and by the format's own rule
            assert torch.equal(reference_fake_quantise(once.values(), name), once.values()) or scales is not None
            own = reference_fake_quantise(w, name)
            assert torch.equal(reference_fake_quantise(own, name), own)


@pytest.mark.parametrize("power", [-20, -3, 8, 14])
def test_the_global_scale_of_nvfp4_follows_the_weights(kernel_device, power):
    """Weights of any size are rounded alike: no block is clipped, and no scale loses bits."""
    w = draw(24, 256)
    w = w.clamp_min(0.1 * w.abs().amax())  # blocks within the 1/7168 of the largest
    expected = fake_quantise(w.to(kernel_device), "nvfp4") * 2.0**power
    assert torch.equal(fake_quantise((w * 2.0**power).to(kernel_device), "nvfp4"), expected)
    form = FORMATS["nvfp4"].fitted((w * 2.0**power, w * 2.0 ** (power - 4)))
    blocks = reference_quantise(w * 2.0**power, form)
    assert torch.equal(blocks.values(), expected.cpu()), "one range for several matrices"
    assert float(blocks.stored["scale"].float().max()) in range(448 // 4 - 8, 448 // 2 + 1)
    tensors = form.pack(blocks.codes, blocks.stored)
    assert tensors["weight_global_scale"].tolist() == [form.global_scale]
    assert torch.equal(FORMATS["nvfp4"].unpack(tensors), blocks.values())
    assert form.global_scale * w.abs().amax() * 2.0**power <= 448 * 6 / 2 and FORMATS["nvfp4"].fitted((w * 0,))


def all_codes(form):
    """Return every number that a format's codes stand for."""
    if not form.codes.mantissa:
        return torch.arange(form.codes.low, form.codes.high + 1).float()
    if form.bits == 8:
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
        return every[every.isfinite()]
    return torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.parametrize("name", FORMATS)
def test_no_other_code_is_nearer(name):
    w, form = draw(24, 256), FORMATS[name]
    for given in (None, changed(form, w, 0.8)):
        blocks = reference_quantise(w, name, given)
        scales, table = form.load(blocks.stored), all_codes(form)
        assert torch.isin(blocks.codes, table).all()
        error = (blocks.values() - w).abs()
        least = torch.stack([(form.values(code.expand_as(w), scales) - w).abs() for code in table]).amin(0)
        assert (error <= least + 1e-6 * w.abs()).float().mean() > 0.97
        # GGUF's rounds by a scale in fp32 that is then stored in fp16
        slack = 0.13 * scales.scale.abs().repeat_interleave(form.columns(w), -1)
        assert (error <= least + slack * (given is None and not form.rounds_by_stored) + 1e-6 * w.abs()).all()


@pytest.mark.parametrize(
    *pairwise(
        {
            "dtype": DTYPES,
            "given": [False, True],
            "name": FORMATS,
            "rows, columns": [(1, 256), (5, 768), (130, 64), (3, 1056)],
        }
    )
)
def test_kernel_has_the_bits_of_its_reference(kernel_device, name, given, dtype, rows, columns):
    form = FORMATS[name]
    columns -= columns % ((form.block or 1) * form.unit)
    w = draw(rows, max(columns, 64), dtype=dtype)[:, : columns or 256].to(kernel_device)
    w = w if columns else w.repeat(1, 4)
    scales = changed(form, w, 0.8) if given else None
    with poisoned_memory():
        ours = fake_quantise(w, name, scales)
    assert torch.equal(ours, reference_fake_quantise(w, name, scales))


@pytest.mark.parametrize("name", FORMATS)
def test_strided_and_empty_matrices(kernel_device, name):
    wide = draw(24, 768).to(kernel_device)
    for w in (wide[:, 256:512], wide[::3], wide.view(4, 6, 768).transpose(0, 1), wide[:0]):
        assert torch.equal(fake_quantise(w, name), reference_fake_quantise(w, name))


def straight_through(w, name, scales):
    """Return the definition in terms that autograd differentiates: rounding and storing scales have derivative 1."""
    form = FORMATS[name]
    snapped = form.snap(Scales(*(None if part is None else part.detach().float() for part in scales)))
    scale, minimum = (
        None if part is None else part + (stored.to(part.dtype) - part).detach()
        for part, stored in zip(scales, snapped, strict=True)
    )
    blocks = w.unflatten(-1, (-1, form.columns(w)))
    x = (blocks if minimum is None else blocks + minimum[..., None]) / scale[..., None]
    q = x + (form.codes.round(x) - x).detach()
    values = q.clamp(form.codes.low, form.codes.high) * scale[..., None]
    return (values if minimum is None else values - minimum[..., None]).flatten(-2)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_straight_through_definition(kernel_device, name):
    w = draw(33, 256, seed=3).double()
    first = changed(FORMATS[name], w, 0.7)
    given = [part.double().requires_grad_() for part in first if part is not None]
    w.requires_grad_()
    upstream = torch.randn(33, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(straight_through(w, name, Scales(*given)), [w, *given], upstream)
    assert 0 < (expected[0] == 0).sum() < expected[0].numel() / 2, "some numbers are clamped"
    ours = learned_gradients(
        w.detach().float().to(kernel_device),
        Scales(*(None if part is None else part.to(kernel_device) for part in first)),
        upstream.float().to(kernel_device),
        name,
    )
    for found, right in zip([ours[0], *(part for part in ours[1] if part is not None)], expected, strict=True):
        # a block of zeros has a scale of 0, by which the definition divides
        live = right.isfinite()
        assert live.double().mean() > 0.95
        torch.testing.assert_close(found.double().cpu()[live], right[live], rtol=2e-4, atol=5e-5)


@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize("name, dtype", [("int4_g32", torch.int4), ("int8", torch.int8)])
def test_integers_are_those_of_torchao_by_the_same_scales(name, dtype, factor):
    """Values, and gradients of weights and scales; the lowest code of 8 bits is -128 there, and -127 here."""
    qat = pytest.importorskip("torchao.quantization.qat")
    form, w = FORMATS[name], torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    scales = form.snap(Scales(form.first(w).scale.abs() * factor))
    group = {"group_size": form.block} if form.block else {"granularity": "per_channel"}
    theirs = qat.IntxFakeQuantizer(
        qat.IntxFakeQuantizeConfig(dtype, is_symmetric=True, is_dynamic=False, range_learning=True, **group)
    )
    theirs._initialized = True  # by `initialize_fake_quantizers`, which takes scales of its own
    theirs.scale = torch.nn.Parameter(scales.scale.clone())
    theirs.zero_point = torch.zeros_like(scales.scale, dtype=torch.int32)
    leaf, upstream = w.clone().requires_grad_(), torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
    values = theirs(leaf)
    values.backward(upstream)
    of_weight, of_scales = learned_gradients(w, scales, upstream, name)
    inside = (w / scales.scale.repeat_interleave(form.columns(w), -1)).round() >= form.codes.low
    assert inside.float().mean() > 0.9
    torch.testing.assert_close(fake_quantise(w, name, scales)[inside], values[inside], rtol=1e-6, atol=0)
    torch.testing.assert_close(of_weight[inside], leaf.grad[inside], rtol=1e-6, atol=0)
    assert (of_weight == 0).any() == (factor < 1 or name == "int4_g32")
    whole = (inside.unflatten(-1, (-1, form.columns(w)))).all(-1) | (form.codes.low == -8)
    torch.testing.assert_close(of_scales.scale[whole], theirs.scale.grad.view_as(whole)[whole], rtol=1e-4, atol=1e-3)


def test_groups_of_four_bits_err_less_by_the_scale_with_a_sign_than_by_torchaos():
    qat = pytest.importorskip("torchao.quantization.qat")
    w = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 0.05
    theirs = qat.IntxFakeQuantizer(qat.IntxFakeQuantizeConfig(torch.int4, is_symmetric=True, group_size=32))(w)
    ratio = (fake_quantise(w, "int4_g32") - w).square().mean() / (theirs - w).square().mean()
    assert 0.75 < ratio < 0.9, "(largest magnitude) / 8 with its sign, there largest magnitude / 7.5"


def test_errors_name_the_invalid_argument():
    with pytest.raises(
        ValueError, match="format: expected one of q4_0, q5_0, q8_0, q4_k, q6_k, int4_g32, int8, fp8, n"
    ):
        fake_quantise(torch.zeros(2, 64), "q5_1")
    with pytest.raises(ValueError, match=r"weight: expected .* K divisible by 32 for q4_0, got \(2, 40"):
        fake_quantise(torch.zeros(2, 40), "q4_0")
    with pytest.raises(ValueError, match=r"weight: expected .* K divisible by 256 for q4_k, got \(2, 64"):
        fake_quantise(torch.zeros(2, 64), "q4_k")
    with pytest.raises(ValueError, match=r"scales: expected float32 \(2, 2\), one for each block, got \(\(2, 1\)"):
        fake_quantise(torch.zeros(2, 64), "int4_g32", Scales(torch.ones(2, 1)))
    with pytest.raises(ValueError, match=r"scales: expected float32 \(2, 8\), one for each block, got None"):
        fake_quantise(torch.zeros(2, 256), "q4_k", Scales(torch.ones(2, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "rows, columns", [(8192, 2048), pytest.param(151_936, 1536, marks=pytest.mark.heavy_gpu), (4096, 14_336)]
)
def test_kernel_equals_the_reference_on_shapes_of_real_models(device, name, rows, columns):
    w = torch.randn(rows, columns, device=device) * 0.02
    form = FORMATS[name]
    if form.in_kernel:
        assert torch.equal(fake_quantise(w, name), reference_fake_quantise(w, name))
    scales = (
        form.snap(Scales(w.new_full((rows, columns // form.columns(w)), 0.004), None))
        if not form.has_minimum
        else (form.snap(Scales(*(w.new_full((rows, columns // 32), size) for size in (0.005, 0.04)))))
    )
    assert torch.equal(fake_quantise(w, name, scales), reference_fake_quantise(w, name, scales))
    g = torch.randn_like(w)
    ours, right = learned_gradients(w, scales, g, name), reference_learned_gradients(w, scales, g, name)
    assert torch.equal(ours[0], right[0])
    for found, expected in zip(ours[1], right[1], strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * columns**0.5)
