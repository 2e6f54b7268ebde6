"""Experts in fp8 against the definition in fp64, and the fused passes against separate ones, bit for bit."""

import copy
import io

import pytest
import torch
from distill_kernels.layers import experts as plain_passes
from distill_kernels.layers.experts import experts, permutation
from distill_kernels.matmul import fp8_experts
from distill_kernels.matmul.fp8 import FP8, quantize_rows
from distill_kernels.matmul.fp8_experts import Fp8Experts, reference_fp8_experts
from helpers import relative_error
from layer_checks import check_compiles, draw, poisoned_memory
from test_fp8 import _interpreter_rounds_to_fp8  # noqa: F401

CASES = {  # tokens, choices, experts, hidden, intermediate
    "odd rows": (37, 3, 5, 48, 80),
    "one token": (1, 2, 4, 16, 32),
    "more experts than tokens": (5, 2, 70, 16, 16),
}
FORMS = {
    "silu": {},
    "gelu, biases": {"activation": "gelu", "bias": True},
    "gelu_tanh, transposed": {"activation": "gelu_tanh", "transposed": True},
    "gpt-oss": {
        "activation": "clamped_silu",
        "interleaved": True,
        "transposed": True,
        "alpha": 1.702,
        "limit": 1.5,
        "bias": True,
    },
}


def make(device, case, form, dtype):
    """Return x, index, weights, the experts' tensors in `dtype` and their settings."""
    tokens, k, count, hidden, inner = CASES[case]
    settings = dict(FORMS[form])
    has_bias = settings.pop("bias", False)
    transposed = settings.get("transposed", False)
    first = (count, hidden, 2 * inner) if transposed else (count, 2 * inner, hidden)
    second = (count, inner, hidden) if transposed else (count, hidden, inner)
    generator = torch.Generator().manual_seed(2)
    # the last expert gets no token where there are others
    index = torch.rand(tokens, max(count - 1, k), generator=generator).topk(k).indices.to(device)
    x = draw(tokens, hidden, dtype=dtype, device=device, seed=0)
    # rows and outputs of very different sizes: a scale for all would lose most of them
    x *= 10 ** torch.linspace(-2, 1, tokens, device=device)[:, None].to(dtype)
    weights = draw(tokens, k, dtype=torch.float32, device=device, seed=1).softmax(-1)
    held = [
        draw(*first, dtype=dtype, device=device, seed=3, scale=hidden**-0.5),
        draw(*second, dtype=dtype, device=device, seed=4, scale=inner**-0.5),
    ]
    outputs = 10 ** torch.linspace(-1, 1, hidden, device=device).to(dtype)
    held[1] *= outputs if transposed else outputs[:, None]
    if has_bias:
        held.append(draw(count, 2 * inner, dtype=dtype, device=device, seed=5))
        held.append(draw(count, hidden, dtype=dtype, device=device, seed=6))
    return x, index, weights, held, settings


def rounded(rows):
    """Return rows [M, K] in fp64, each element an e4m3 number times its row's scale."""
    scale = rows.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (rows / scale).float().to(FP8).double() * scale


def exact(x, index, weights, held, activation="silu", interleaved=False, transposed=False, alpha=1.0, limit=0.0):
    """Return the definition, slot by slot in fp64: quantised rows times quantised outputs."""
    gate_up, down = (tensor.double().transpose(1, 2) if transposed else tensor.double() for tensor in held[:2])
    biases = [tensor.double() for tensor in held[2:]] or [None, None]
    y = torch.zeros_like(x, dtype=torch.float64)
    for token in range(len(x)):
        row = rounded(x[token : token + 1].double())
        for choice, expert in enumerate(index[token].tolist()):
            hidden = row @ rounded(gate_up[expert]).T
            hidden = hidden.to(x.dtype).double()  # GEMMs write the dtype of x
            if biases[0] is not None:
                hidden = hidden + biases[0][expert]
            pairs = hidden.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1) if interleaved else hidden
            gate, up = pairs.chunk(2, -1)
            if activation == "clamped_silu":
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                value = (up + 1) * gate * torch.sigmoid(alpha * gate)
            elif activation == "silu":
                value = gate * torch.sigmoid(gate) * up
            else:
                how = "tanh" if activation == "gelu_tanh" else "none"
                value = torch.nn.functional.gelu(gate, approximate=how) * up
            out = (rounded(value.to(x.dtype).double()) @ rounded(down[expert]).T).to(x.dtype).double()
            if biases[1] is not None:
                out = out + biases[1][expert]
            y[token] += weights[token, choice].double() * out[0]
    return y


def row_errors(given, right):
    """Return each row's relative error in norm."""
    return (given.double() - right).norm(dim=1) / right.norm(dim=1)


def of(held, settings):
    return Fp8Experts(*held[:2], *held[2:], **settings)


@pytest.mark.plain(
    "kernel-one token-silu-torch.bfloat16",
    "specification-odd rows-gpt-oss-torch.float32",
    "specification-more experts than tokens-silu-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case, form", [*[(c, "silu") for c in CASES], *[("odd rows", f) for f in FORMS if f != "silu"]]
)
def test_values_are_those_of_the_definition(where, case, form, dtype):
    if where.type == "cuda" and dtype == torch.float32:
        pytest.skip("fp8 GEMMs of a GPU write bfloat16")
    x, index, weights, held, settings = make(where, case, form, dtype)
    ours = of(held, settings)
    with poisoned_memory():
        y = ours(x, index, weights)
    expected = exact(x, index, weights, held, **settings)
    # what rounds to bf16 otherwise may be another number of e4m3; without quantisation all rows would be off
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.dtype == dtype
    errors = row_errors(y, expected)
    assert errors.mean() < bound and errors.max() < 4 * bound
    unquantised = row_errors(experts(x, index, weights.to(dtype), *held, **settings), expected)
    assert 2e-2 < unquantised.mean() < 8e-2
    residual = torch.randn_like(x)
    assert torch.allclose(ours(x, index, weights, residual), y + residual, rtol=0.02, atol=0.02)


@pytest.mark.plain("specification")
def test_the_reference_is_what_is_computed(where):
    x, index, weights, held, settings = make(where, "odd rows", "gelu, biases", torch.bfloat16)
    ours = of(held, settings)
    quantised = (ours.gate_up, ours.gate_up_scale, ours.down, ours.down_scale, ours.gate_up_bias, ours.down_bias)
    expected = reference_fp8_experts(x, index, weights, *quantised, activation="gelu")
    assert relative_error(ours(x, index, weights).double(), expected.double()) < 1.5e-2


@pytest.mark.plain("gpt-oss")
@pytest.mark.parametrize("form", ["silu", "gelu, biases", "gpt-oss"])
def test_fused_quantisation_equals_separate_passes(kernel_device, form):
    """The gather and the activation write the bits of `quantize_rows` of what the 16-bit passes write."""
    x, index, _, held, settings = make(kernel_device, "odd rows", form, torch.bfloat16)
    k = index.shape[1]
    index = index.contiguous()
    row, slot, _ = permutation(index, CASES["odd rows"][2])
    with poisoned_memory():
        gathered, scale = fp8_experts._gather_quantised(x, row, k)
    expected, expected_scale = quantize_rows(plain_passes._gather(x, row, k))
    assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale.flatten())
    bias = held[2] if len(held) > 2 else None
    hidden = draw(len(slot), 160, dtype=torch.bfloat16, device=kernel_device, seed=7)
    activation = settings.get("activation", "silu")
    numbers = (settings.get("alpha", 1.0), settings.get("limit", 0.0))
    with poisoned_memory():
        quantised, scale = fp8_experts._activation_quantised(hidden, slot, index, bias, activation, *numbers)
    whole = plain_passes._activation(hidden, slot, index, bias, plain_passes.GateForm(activation, False, *numbers))
    expected, expected_scale = quantize_rows(whole)
    assert torch.equal(scale, expected_scale.flatten())
    assert torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))


def test_weights_keep_their_bytes_and_dtypes(device):
    x, index, weights, held, settings = make(device, "odd rows", "gpt-oss", torch.bfloat16)
    ours = of(held, settings)
    assert sum(b.numel() * b.element_size() for b in (ours.gate_up, ours.down)) * 2 == sum(
        tensor.numel() * tensor.element_size() for tensor in held[:2]
    )
    before = ours(x, index, weights)
    moved = copy.deepcopy(ours).float().bfloat16()
    assert moved.gate_up.dtype == moved.down.dtype == FP8 and moved.gate_up_scale.dtype == torch.float32
    assert torch.equal(moved(x, index, weights), before)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = of([tensor.roll(1, 0) for tensor in held], settings)
    assert not torch.equal(other(x, index, weights), before)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x, index, weights), before)


@pytest.mark.full
def test_op_passes_opcheck_and_compiles(kernel_device):
    x, index, weights, held, settings = make(kernel_device, "odd rows", "gelu, biases", torch.bfloat16)
    ours = of(held, settings)
    quantised = (ours.gate_up, ours.gate_up_scale, ours.down, ours.down_scale, ours.gate_up_bias, ours.down_bias)
    arguments = (x, index, weights, *quantised, x, "gelu", 1.0, 0.0)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # no schema test of e4m3
    torch.library.opcheck(torch.ops.distill.fp8_experts.default, arguments, test_utils=utilities)
    check_compiles(lambda x: ours(x, index, weights), [x], [False])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (32, 4, 2880, 2880)], ids=["qwen3-30b-a3b", "gpt-oss-20b"])
def test_real_shapes_are_captured_in_a_graph(shape):
    """Groups of odd sizes, one expert without tokens; nothing waits for the host, and a replay gives the same bits."""
    count, k, hidden, inner = shape
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1021, hidden, generator=generator, device="cuda").bfloat16()
    logits = torch.randn(1021, count, generator=generator, device="cuda")
    logits[:, 0] = -torch.inf
    weights, index = logits.softmax(-1).topk(k, -1)
    held = [
        torch.randn(count, 2 * inner, hidden, generator=generator, device="cuda").bfloat16() * hidden**-0.5,
        torch.randn(count, hidden, inner, generator=generator, device="cuda").bfloat16() * inner**-0.5,
    ]
    ours = Fp8Experts(*held)
    y = ours(x, index, weights)
    reference = reference_fp8_experts(x, index, weights, ours.gate_up, ours.gate_up_scale, ours.down, ours.down_scale)
    # bf16 steps of plain PyTorch: see above; wrong scales or rows would be off by far more
    errors = row_errors(y, reference.double())
    assert errors.mean() < 2e-2 and errors.max() < 8e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ours(x, index, weights)
    graph.replay()
    assert torch.equal(replayed, y)


def test_wrong_arguments_are_named():
    x, index, weights, held, _ = make("cpu", "odd rows", "silu", torch.float32)
    with pytest.raises(ValueError, match=r"^down: expected sizes divisible by 16, got \(5, 48, 72\)"):
        Fp8Experts(held[0][:, :144], held[1][..., :72])
    with pytest.raises(ValueError, match=r"^gate_up: expected shape \(5, 160, 48\), got \(5, 80, 48\)"):
        Fp8Experts(held[0][:, :80], held[1])
    with pytest.raises(ValueError, match=r"^activation: expected one of silu, "):
        Fp8Experts(*held, activation="relu")
    with pytest.raises(ValueError, match=r"^x: expected no gradient to be asked for"):
        Fp8Experts(*held)(x.requires_grad_(), index, weights)
