"""Sibling projections whose weights lie after each other: one product each way, the same gradients, safe to move."""

import copy
import types

import pytest
import torch
from distill_kernels import FusedAdamW
from distill_kernels.launch import FAMILIES, interpreted
from distill_kernels.layers.glu import reference_glu, swiglu
from distill_kernels.layers.rope import reference_rope, rope
from distill_kernels.matmul.shared_input import gradient_slots, reference_shared_linear, shared_linear
from distill_kernels.operands import adjacent_as_one
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny import tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from distill.models import gpu_specs
from distill.models.head import decoder_of
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch, unpatch
from distill.models.patch.snapshot import Snapshot
from distill.models.precision.fp8_student import compute_in_fp8

IDS = torch.arange(3, 17).view(2, 7)


def joined(*sizes, inputs=16, dtype=torch.float32):
    whole = torch.randn(sum(sizes), inputs, dtype=dtype) / inputs**0.5
    return [torch.nn.Parameter(part) for part in whole.split(sizes)]


def products(function):
    """Return the number of GEMMs of a call, and its result."""
    with torch.profiler.profile() as profiler:
        result = function()
    return sum(event.name in ("aten::mm", "aten::addmm", "aten::addmm_") for event in profiler.events()), result


# ---- kernels


def test_gradients_are_adjacent_in_memory():
    """Gradients of q and k (rotation), v (copy), gate and up (activation) are adjacent: one GEMM each."""
    torch.manual_seed(0)
    heads, projections, gates = 8, joined(32, 16, 16), joined(40, 40)
    biases = list(torch.randn(64).split([32, 16, 16]))
    x = torch.randn(2, 6, 16, requires_grad=True)
    angles = torch.rand(1, 6, heads), torch.rand(1, 6, heads)

    def run(linear, rotate, glu):
        q, k, v = (y.view(2, 6, -1, heads).transpose(1, 2) for y in linear(x, projections, biases))
        q, k = rotate(q, k, *angles)
        outputs = [q, k, v, glu(*linear(x, gates, [None, None]))]
        loss = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sin().sum() for y in outputs)
        made, gradients = products(lambda: torch.autograd.grad(loss, [x, *projections, *gates]))
        return made, [*outputs, *gradients]

    with interpreted():
        made, ours = run(shared_linear, rope, swiglu)
    _, exact = run(reference_shared_linear, reference_rope, lambda *parts: reference_glu(*parts, "silu"))
    assert made == 4
    for got, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5 * float(right.detach().abs().max()))
    assert adjacent_as_one(ours[5:8]) is not None and adjacent_as_one(ours[8:]) is not None


def test_gradient_slots_are_returned_once_and_only_to_siblings():
    x = torch.randn(3, 16, requires_grad=True)
    gate, up = shared_linear(x, joined(8, 8), [None, None])
    other, _ = shared_linear(x, joined(8, 8), [None, None])
    apart, _ = shared_linear(x, [w.detach().clone().requires_grad_() for w in joined(8, 8)], [None, None])
    for outputs in ((gate, other), (apart,), (gate * 1.0, up), (x,)):
        assert gradient_slots(*outputs) is None
    assert gradient_slots(gate.view(3, 2, 4).transpose(0, 1), up) is not None
    assert gradient_slots(gate, up) is None


def test_an_output_that_is_used_twice():
    """Its gradients are added on their way, so that the sum is not what was written."""
    torch.manual_seed(0)
    weights, x = joined(8, 8), torch.randn(3, 16, requires_grad=True)

    def run(linear, glu):
        gate, up = linear(x, weights, [None, None])
        return torch.autograd.grad((glu(gate, up) + glu(gate, 2 * up) + gate.square()).sum(), [x, *weights])

    with interpreted():
        ours = run(shared_linear, swiglu)
    exact = run(reference_shared_linear, lambda *parts: reference_glu(*parts, "silu"))
    for got, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["order", "another", "copied", "transposed", "dtype"])
def test_tensors_that_are_not_adjacent(change):
    first, second = joined(4, 6)
    pairs = {
        "order": (second, first),
        "another": (first, torch.randn(6, 16)),
        "copied": (first, second.detach().clone()),
        "transposed": (first, torch.randn(16, 6).t()),
        "dtype": (first, second.detach().double()),
    }
    assert adjacent_as_one([first, second]).shape == (10, 16)
    assert adjacent_as_one(pairs[change]) is None


# ---- models


def ready(role="student", *, join=True, dtype=torch.float32, **more):
    model = tiny_model(hidden=64, dtype=dtype, **more)
    model.train() if role == "student" else model.requires_grad_(False)
    patch(model, role, attention="triton")
    count = join_projections(model, trains=True) if join else 0
    return model, count


def run(model, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), interpreted():
        hidden = decoder_of(model)(input_ids=IDS, use_cache=False).last_hidden_state
        # its rows' norms are those of the last norm, so that the mean of squares would be a constant
        slope = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view(hidden.shape)
        (hidden.double() * slope).square().sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, right, tolerance):
    (hidden, gradients), (expected, exact) = got, right
    assert gradients.keys() == exact.keys()
    for a, b in [(hidden, expected), *((gradients[name], exact[name]) for name in exact)]:
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("autocast, bias", [(False, False), (True, True)], ids=["plain", "autocast, biases"])
def test_a_student_has_the_gradients_of_separate_weights(autocast, bias):
    model, count = ready(attention_bias=bias)
    assert count == 4
    made, ours = products(lambda: run(model, autocast))
    plain, exact = products(lambda: run(ready(join=False, attention_bias=bias)[0], autocast))
    assert plain - made >= 2 * (3 + 6)  # forward 2 + 1, backward (2 + 1) twice, of each layer
    assert_same(ours, exact, 2e-2 if autocast else 1e-5)
    assert_same(run(model, autocast), ours, 0)  # again
    again = copy.deepcopy(model)  # whose weights lie apart
    assert_same(run(again, autocast), exact, 2e-2 if autocast else 1e-5)
    unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.full
def test_a_teacher_computes_sibling_layers_by_one_gemm():
    """And none of stale weights where they have been moved."""
    with interpreted(), torch.no_grad():
        model, count = ready("teacher")
        assert count == 4
        plain, _ = ready("teacher", join=False)
        made, hidden = products(lambda: decoder_of(model)(input_ids=IDS, use_cache=False).last_hidden_state)
        usual, expected = products(lambda: decoder_of(plain)(input_ids=IDS, use_cache=False).last_hidden_state)
        assert usual - made == 2 * 3
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
        for each in (model, plain):
            weight = each.model.layers[0].self_attn.k_proj.weight
            weight.data = -2 * weight.data
        hidden, expected = (
            decoder_of(each)(input_ids=IDS, use_cache=False).last_hidden_state for each in (model, plain)
        )
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
        with torch.inference_mode():
            assert torch.equal(decoder_of(model)(input_ids=IDS, use_cache=False).last_hidden_state, hidden)


@pytest.mark.full
def test_an_optimizers_steps_and_files_are_those_of_separate_weights(tmp_path):
    models = [ready(join=join)[0] for join in (True, False)]
    optimizers = [FusedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0) for model in models]
    for _ in range(3):
        run(models[0])
        for own, theirs in zip(*(model.parameters() for model in models), strict=True):
            theirs.grad = own.grad.clone()
        for optimizer in optimizers:
            with interpreted():
                optimizer.step()
    states = [model.state_dict() for model in models]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    models[0].save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in states[0].items())
    folder = tmp_path / "model" / "model.safetensors"
    assert folder.stat().st_size < 1.1 * sum(p.numel() * 4 for p in models[0].parameters()) + 20_000
    save_file(dict(models[0].named_parameters()), tmp_path / "plain.safetensors")
    run(models[0])
    optimizers[0].step()
    models[0].load_state_dict(models[1].state_dict())
    mlp = models[0].model.layers[0].mlp
    assert torch.equal(adjacent_as_one([mlp.gate_proj.weight, mlp.up_proj.weight])[:128], mlp.gate_proj.weight)
    assert torch.equal(mlp.up_proj.weight, models[1].model.layers[0].mlp.up_proj.weight)


@pytest.mark.full
def test_a_copy_of_a_joined_student_has_its_own_joined_weights(hardware):
    hardware.setattr("distill.models.patch.snapshot.runs_our_kernels", lambda device: True)
    model, _ = ready()
    snapshot = Snapshot(model)

    def hidden(of):
        with interpreted(), torch.no_grad():
            return decoder_of(of)(input_ids=IDS, use_cache=False).last_hidden_state

    for weight in (1.0, -2.0):
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(weight)
        snapshot.copy_from(model)
        made, answer = products(lambda: hidden(snapshot.model))
        assert made == 2 * 4
        torch.testing.assert_close(answer, hidden(model), rtol=0, atol=1e-5)


def test_layers_that_are_not_joined():
    assert ready(kind="qwen3")[1] == 2  # norms between projection and rotation: the MLPs alone
    fp8 = tiny_model(hidden=64).train()
    patch(fp8, "student", attention=None)
    compute_in_fp8(fp8)
    assert join_projections(fp8) == 0
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
    adapted = get_peft_model(tiny_model(hidden=64), config).train()
    patch(adapted, "student", attention=None)
    assert join_projections(adapted, trains=True) == 0
    tied = ready(join=False)[0]
    shared = tied.model.layers[0].mlp
    shared.up_proj.weight = shared.gate_proj.weight
    before = [p.clone() for p in tied.parameters()]
    join_projections(tied)
    assert all(torch.equal(*pair) for pair in zip(before, tied.parameters(), strict=True))
    x = torch.randn(4, 64)
    assert torch.equal(shared.up_proj(x), F.linear(x, shared.gate_proj.weight))


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_join_layers_on_measured_families(hardware, family):
    hardware.setattr(gpu_specs, "device_facts", lambda device: types.SimpleNamespace(family=family))
    assert gpu_specs.joins_on(torch.device("cuda")) == (family == "sm_90")
    assert not gpu_specs.joins_on(torch.device("cpu"))
