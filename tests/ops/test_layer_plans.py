"""Launch plans of the layers: a replay starts the launcher's kernels with the same inputs and its own buffers."""

import random

import pytest
import torch
from distill_kernels import sampling
from distill_kernels.attention import flash, flash_backward
from distill_kernels.decoding import experts as decode_experts
from distill_kernels.extras import probability_kl, row_softmax
from distill_kernels.launch import HAS_TRITON, device_facts
from distill_kernels.layers import bias_gelu, column_sums, glu, layer_norm, rms_norm, rope, router
from distill_kernels.matmul import fp8
from distill_kernels.quantisation import fake_quantise
from distill_kernels.quantisation.formats import FORMATS
from distill_kernels.quantisation.number_format import Scales
from gpus import two_gpus
from helpers import assert_captures

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from stand_in_gpu import Compiled, Kernel, PyCUtensorMap, stand_in_gpu

MODULES = (bias_gelu, column_sums, glu, layer_norm, rms_norm, rope, probability_kl, row_softmax, flash, flash_backward)
MODULES += (fake_quantise, sampling, router, decode_experts, fp8)


def address(value):
    if isinstance(value, tuple):
        return tuple(map(address, value))
    if hasattr(value, "block_shape"):
        return value.base.data_ptr(), *value.shape, *value.strides
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def started(monkeypatch):
    """Kernels started so far, by the look-up and by plans alike: name, grid, arguments with addresses for tensors."""

    class Noted(Kernel):
        def compile(self, grid, values):
            started.append((self.fn.__name__, (*grid, 1, 1)[:3], tuple(map(address, values))))
            name = self.fn.__name__

            class Native:
                def __call__(_, *handed):
                    given, left = [], list(handed[-1])
                    while left:
                        value = left.pop(0)
                        if isinstance(value, PyCUtensorMap):  # shape and strides follow it
                            rank = len(value.description[4])
                            value = (value.address, *left[: 2 * rank])
                            del left[: 2 * rank]
                        given.append(value)
                    started.append((name, handed[:3], tuple(given)))

            return Compiled(values, Native())

    started = []
    for module in MODULES:
        for name in ("_forward_op", "_backward_op", "_add_forward_op", "_op", "_in_place_op"):
            if hasattr(module, name):
                op = getattr(module, name)
                monkeypatch.setattr(op, "plans", None)
    for launcher in (fake_quantise._forward, fake_quantise._backward):
        monkeypatch.setattr(launcher, "plans", None)
    with stand_in_gpu(*MODULES, make=Noted) as kernels:
        started.clear()
        yield started, kernels


def rows(dtype, strided, columns=48):
    wide = torch.randn(6, columns + 16, dtype=dtype)
    return wide[:, :columns] if strided else wide[:, :columns].contiguous()


def heads(dtype, strided):
    wide = torch.randn(2, 9, 4, 32, dtype=dtype)
    return wide.transpose(1, 2) if strided else wide.transpose(1, 2).contiguous()


def vector(dtype):
    return torch.randn(48, dtype=dtype)


def mixture(dtype):
    return torch.rand(6, 4).argsort(1)[:, :2].contiguous(), torch.rand(6, 2, dtype=dtype)


CALLS = {
    "rms_norm": (rms_norm.rms_norm, lambda d, s: (rows(d, s), vector(torch.float32))),
    "rms_norm, gemma": (lambda x, w: rms_norm.rms_norm(x, w, 1e-5, "gemma"), lambda d, s: (rows(d, s), vector(d))),
    "rms_norm without weight": (rms_norm.rms_norm, lambda d, s: (rows(d, s),)),
    "add_rms_norm": (rms_norm.add_rms_norm, lambda d, s: (rows(d, s), rows(d, not s), vector(d))),
    "rms_norm_and_input": (rms_norm.rms_norm_and_input, lambda d, s: (rows(d, s), vector(d))),
    "layer_norm": (layer_norm.layer_norm, lambda d, s: (rows(d, s), vector(d), vector(d))),
    "layer_norm without bias": (layer_norm.layer_norm, lambda d, s: (rows(d, s), vector(d))),
    "swiglu": (glu.swiglu, lambda d, s: (rows(d, s), rows(d, s))),
    "geglu, packed": (glu.geglu, lambda d, s: (rows(d, s),)),
    "bias_gelu": (bias_gelu.bias_gelu, lambda d, s: (rows(d, s), vector(d))),
    "rope": (
        lambda q, k, cos, sin: rope.rope(q, k, cos.detach(), sin.detach()),
        lambda d, s: (heads(d, s), heads(d, s), torch.randn(1, 9, 32), torch.randn(1, 9, 32)),
    ),
    "softmax": (row_softmax.softmax, lambda d, s: (rows(d, s),)),
    "kl_probabilities": (
        lambda x, t: probability_kl.kl_probabilities(x, t, "sum"),
        lambda d, s: (rows(d, False), rows(d, False)),
    ),
    "route": (lambda logits: router.route(logits, 3)[0], lambda d, s: (rows(d, s, 16),)),
    "route, groups and bias": (
        lambda logits, bias: router.route(logits, 2, bias.detach(), "sigmoid", groups=4, kept_groups=2)[0],
        lambda d, s: (rows(d, s, 16), torch.randn(16)),
    ),
    "sample_tokens": (
        lambda logits, seeds, draws: sampling.sample_tokens(logits, seeds, draws, 0.7),
        lambda d, s: (rows(d, s), torch.randint(0, 9, (6,)), torch.randint(0, 9, (6,))),
    ),
    "quantize_rows": (lambda x: fp8.quantize_rows(x.detach()), lambda d, s: (rows(d, s),)),
    "decode_experts": (
        torch.no_grad()(decode_experts.decode_experts),
        lambda d, s: (rows(d, False), *mixture(d), torch.randn(4, 64, 48, dtype=d), torch.randn(4, 48, 32, dtype=d)),
    ),
    "flash_attention": (flash.flash_attention, lambda d, s: (heads(d, s), heads(d, s), heads(d, s))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_starts_what_the_launcher_does(name, started):
    log, kernels = started
    call, draw = CALLS[name]
    generator = random.Random(name)
    planned = 0
    for _ in range(6):
        dtype = generator.choice([torch.float32, torch.bfloat16])
        inputs = draw(dtype, generator.random() < 0.5)
        wanted = [x.is_floating_point() and generator.random() < 0.7 for x in inputs]
        inputs = [x.requires_grad_(wants) for x, wants in zip(inputs, wanted, strict=True)]
        known = {x.data_ptr() for x in inputs}
        upstream = None
        for turn in range(3):
            log.clear()
            looked_up = sum(kernel.looked_up for kernel in kernels)
            outputs = call(*inputs)
            several = as_tuple(outputs)
            leaves = [x for x, y in zip(inputs, wanted, strict=True) if y and x.requires_grad]
            made = list(several)
            if any(y.requires_grad for y in several):
                upstream = upstream or [torch.randn_like(y) for y in several]
                pairs = [(y, dy) for y, dy in zip(several, upstream, strict=True) if y.requires_grad]
                ends, starts = zip(*pairs, strict=True)
                made += torch.autograd.grad(ends, leaves, starts, allow_unused=True)
            now = list(log)
            if turn == 0:
                first, first_made = now, made
        replayed = sum(kernel.looked_up for kernel in kernels) == looked_up
        planned += replayed
        assert [(kernel, grid) for kernel, grid, _ in now] == [(kernel, grid) for kernel, grid, _ in first]
        known |= {dy.data_ptr() for dy in upstream or ()}
        buffers = {}
        for (_, _, before), (_, _, after) in zip(first, now, strict=True):
            compare(before, after, known, buffers)
        assert len(set(buffers.values())) == len(buffers)
        for before, after in zip(first_made, made, strict=True):
            assert (before is None) == (after is None)
            if before is not None:
                assert (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)
                assert before.data_ptr() in known or buffers.get(before.data_ptr()) == after.data_ptr()
    assert planned >= 2, "nothing was replayed"


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def compare(before, after, known, buffers):
    """Inputs are the same, numbers too; the address of a buffer stands for one other address in all kernels."""
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        if isinstance(one, tuple):
            compare(one, other, known, buffers)
        elif isinstance(one, int) and one > 1 << 32:
            assert one == other if one in known else buffers.setdefault(one, other) == other
        else:
            assert one == other and type(one) is type(other)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "int4_g32", "nvfp4", "q8_0"])
def test_matrices_of_one_shape_are_rounded_by_one_plan(name, in_place, started):
    log, kernels = started
    form = FORMATS[name]

    def drawn_scales():
        return Scales(*(torch.rand(8, 256 // form.block) for _ in range(1 + form.has_minimum)))

    for turn in range(4):
        log.clear()
        looked_up = sum(kernel.looked_up for kernel in kernels)
        weight, out, upstream = (torch.randn(8, 256) for _ in range(3))
        dw = upstream if in_place else torch.randn(8, 256)
        scales, gradients = drawn_scales(), drawn_scales()
        fake_quantise.fake_quantise_into(out, weight, form, scales)
        fake_quantise.learned_gradients(weight, scales, upstream, form, (dw, gradients))
        read = (weight, scales.scale, weight if scales.minimum is None else scales.minimum)
        written = (dw, gradients.scale, gradients.scale if gradients.minimum is None else gradients.minimum)
        for (_, _, given), tensors in zip(log, ((*read, out), (*read, upstream, *written)), strict=True):
            assert given[0] == tuple(tensor.data_ptr() for tensor in tensors)
        assert (sum(kernel.looked_up for kernel in kernels) == looked_up) == (turn > 1)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_has_no_gradient(used, started):
    x, residual = (rows(dtype, False).requires_grad_() for dtype in (torch.float32, torch.bfloat16))
    weight = vector(torch.float32).requires_grad_()
    for _ in range(5):
        outputs = rms_norm.add_rms_norm(x, residual, weight)
        gradients = torch.autograd.grad(outputs[used], (x, residual, weight), torch.randn(6, 48), allow_unused=True)
        assert [gradient is None for gradient in gradients] == [False, False, used == 1]


@pytest.mark.gpu
def test_replays_are_captured_and_keep_to_their_stream():
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight, dy = torch.randn_like(x[0]).detach().requires_grad_(), torch.randn_like(x)
    for _ in range(3):
        torch.autograd.grad(rms_norm.rms_norm(x, weight), (x, weight), dy)
    plan, _ = rms_norm._forward_op.plans.planned.find((x, None, weight, 1e-6, "llama", None))
    assert plan.replay is not None and all(each.replay for each in plan.gradient.planned.plans())
    other = torch.randn_like(x).requires_grad_()
    right = rms_norm.rms_norm(other, weight)
    gradients = torch.autograd.grad(right, (other, weight), dy)
    right = right.detach()  # its graph holds nodes of the leaves that belong to this stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm.rms_norm(x, weight)
        made = torch.autograd.grad(y, (x, weight), dy)
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    assert torch.equal(y, right) and all(map(torch.equal, made, gradients))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = (2 * other).requires_grad_()
        y = rms_norm.rms_norm(late, weight)
    stream.synchronize()
    assert torch.equal(y, rms_norm.rms_norm(late, weight))


REPLAYED = {  # by the name in CALLS
    "route": router._forward_op,
    "route, groups and bias": router._forward_op,
    "sample_tokens": sampling._op,
    "quantize_rows": fp8._op,
    "decode_experts": decode_experts._op,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_replays_have_the_launchers_bits_and_are_captured(name, monkeypatch):
    if name == "quantize_rows" and not device_facts(torch.device("cuda")).fp8:
        pytest.skip("this family of GPUs has no products of e4m3")
    call, draw = CALLS[name]
    op = REPLAYED[name]
    monkeypatch.setattr(op, "plans", None)
    held = [[x.cuda() for x in draw(torch.bfloat16, False)] for _ in range(2)]
    upstream = torch.randn(6, 3, device="cuda")

    def step(inputs):
        outputs = call(*inputs)
        made = [y.view(torch.uint8) if y.itemsize == 1 else y.detach() for y in as_tuple(outputs)]
        if inputs[0].requires_grad:
            made += torch.autograd.grad(outputs, inputs[0], upstream[:, : outputs.shape[1]].contiguous())
        return made

    for inputs in held:
        inputs[0].requires_grad_(name.startswith("route"))
    launched = [step(inputs) for inputs in held]
    replayed = [step(inputs) for inputs in held]
    (plan,) = op.plans.planned.plans()
    assert plan.replay is not None
    if plan.gradient is not None:
        assert all(each.replay is not None for each in plan.gradient.planned.plans())
    for before, after in zip(launched, replayed, strict=True):
        assert all(map(torch.equal, before, after))
    assert_captures(lambda: step(held[0]))


@pytest.mark.gpu
@two_gpus
def test_each_device_has_plans_of_its_own():
    x, weight = torch.randn(64, 2048, dtype=torch.bfloat16), torch.randn(2048, dtype=torch.bfloat16)
    for _ in range(4):
        made = []
        for index in range(2):
            with torch.cuda.device(index):
                made.append(rms_norm.rms_norm(x.cuda(index), weight.cuda(index)))
            assert made[-1].device.index == index
        assert torch.equal(made[0].cpu(), made[1].cpu())
