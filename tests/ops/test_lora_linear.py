"""The fused LoRA layer against its formula and against PEFT's own: numbers, memory, and everything around it."""

import pytest
import torch
from distill_kernels.matmul.lora import lora_linear, lora_linear_recomputed, reference_lora_linear
from grids import pairwise
from helpers import assert_as_good_as_torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from distill.models.adapters import merged
from distill.models.patch import patching
from distill.models.patch.lora_forward import LORA_LINEAR
from distill.models.patch.patching import patch, unpatch

WITHOUT_LORA = tuple(tuple(swap for swap in line if swap is not LORA_LINEAR) for line in patching.SWAPS)
SHAPES = [(7, 5, 3, 1), (64, 48, 80, 4), (33, 130, 17, 16)]


def draw(n, i, o, r, dtype, bias, device="cpu"):
    generator = torch.Generator(device=device).manual_seed(0)
    values = [torch.randn(*shape, generator=generator, device=device) for shape in ((n, i), (o, i), (r, i), (o, r))]
    x, w, a, b = values[0], values[1] / i**0.5, values[2] / i**0.5, values[3] / r**0.5
    c = torch.randn(o, generator=generator, device=device).to(dtype) if bias else None
    return x.to(dtype).requires_grad_(), w.to(dtype), c, a.requires_grad_(), b.requires_grad_()


def with_gradients(function, x, w, c, a, b, upstream, scale=0.5):
    leaves = [t.detach().requires_grad_() for t in (x, a, b)]
    out = function(leaves[0], w, c, leaves[1], leaves[2], scale)
    return out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


@pytest.mark.plain("7-5-3-1-torch.float32-False", "64-48-80-4-torch.bfloat16-True", "33-130-17-16-torch.float16-False")
@pytest.mark.parametrize(
    *pairwise({"n, i, o, r": SHAPES, "dtype": [torch.float32, torch.bfloat16, torch.float16], "bias": [False, True]})
)
def test_error_is_within_that_of_torch(n, i, o, r, dtype, bias, device):
    x, w, c, a, b = draw(n, i, o, r, dtype, bias, device)
    upstream = torch.randn(n, o, generator=torch.Generator(device=device).manual_seed(1), device=device)
    exact_inputs = [None if t is None else t.double() for t in (x, w, c, a, b)]
    exact = with_gradients(reference_lora_linear, *exact_inputs, upstream.to(dtype).double())
    eager = with_gradients(reference_lora_linear, x, w, c, a, b, upstream)
    ours = with_gradients(lora_linear, x, w, c, a, b, upstream)
    for name, got, torchs, right in zip(("y", "dx", "dA", "dB"), ours, eager, exact, strict=True):
        assert_as_good_as_torch(got, torchs, right, dtype, name)
    assert ours[1].dtype == dtype and ours[2].dtype == ours[3].dtype == torch.float32


def test_gradients_equal_finite_differences():
    x, w, _, a, b = draw(4, 5, 3, 2, torch.float64, False)
    assert torch.autograd.gradcheck(
        lambda x, a, b: lora_linear(x[None], w, None, a, b, 0.7), (x, a.double(), b.double())
    )
    assert torch.autograd.gradcheck(lambda x: lora_linear(x[0], w, None, a, b, 0.7), (x,))  # a single row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recomputed_input_gives_the_same(dtype, device):
    from distill_kernels.layers.glu import swiglu

    _, w, c, a, b = draw(1, 48, 20, 4, dtype, True, device)
    gate, up = (torch.randn(2, 9, 48, device=device).to(dtype) for _ in range(2))
    upstream = torch.randn(2, 9, 20, device=device).to(dtype)
    results = []
    for function in (
        lambda g, u, a, b: lora_linear(swiglu(g, u), w, c, a, b, 0.5),
        lambda g, u, a, b: lora_linear_recomputed(swiglu, (g, u), w, c, a, b, 0.5),
    ):
        leaves = [t.detach().clone().requires_grad_() for t in (gate, up, a, b)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_second_backward_raises():
    x, w, _, a, b = draw(4, 5, 3, 2, torch.float32, False)
    loss = lora_linear(x, w, None, a, b, 1.0).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.full
def test_layer_compiles_as_one_graph():
    torch._dynamo.reset()
    x, w, c, a, b = draw(6, 8, 4, 2, torch.float32, True)
    ours = torch.compile(lora_linear, fullgraph=True, backend="aot_eager")
    upstream = torch.ones(6, 4)
    for got, right in zip(
        with_gradients(ours, x, w, c, a, b, upstream), with_gradients(lora_linear, x, w, c, a, b, upstream), strict=True
    ):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, a, b: (x[:, 1:], w, a, b), r"expected x \[\.\.\., I\]"),
        (lambda x, w, a, b: (x, w, a, b.t()), r"got \[4, 5\]"),
        (lambda x, w, a, b: (x.double(), w, a, b), "expected x in the weight's dtype"),
        (lambda x, w, a, b: (x, w.requires_grad_(), a, b), "expected a frozen weight"),
    ],
)
def test_misuse_is_refused(change, message):
    x, w, _, a, b = draw(4, 5, 3, 2, torch.float32, False)
    x, w, a, b = change(x, w, a, b)
    with pytest.raises(ValueError, match=message):
        lora_linear(x, w, None, a, b, 1.0)


# ---- inside PEFT


def student(dtype=torch.float32, dropout=0.0, **more):
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", exclude_modules=["lm_head"], **more
    )
    model = get_peft_model(tiny_model(dtype=dtype, attention_bias=True), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def answer(model, autocast=None):
    model.zero_grad()
    ids = torch.arange(3, 15)[None]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = model(input_ids=ids, use_cache=False).logits
    (out.float() ** 2).mean().backward()
    return {"out": out.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patched_student_computes_what_peft_does(dtype):
    model, exact = student(dtype), student(torch.float32)
    exact.load_state_dict(model.state_dict())
    exact.double()
    autocast = None if dtype == torch.float32 else dtype
    with pytest.MonkeyPatch.context() as without:  # our other kernels in both
        without.setattr(patching, "SWAPS", WITHOUT_LORA)
        patch(model, "student", attention=None)
    plain = answer(model, autocast)
    unpatch(model)
    report = patch(model, "student", attention=None)
    assert report.swapped["lora"] == 2 * 7
    ours, right = answer(model, autocast), answer(exact)
    assert ours.keys() == plain.keys() == right.keys() and len(ours) == 1 + 2 * 7 * 2
    assert all(value.dtype == plain[name].dtype for name, value in ours.items())
    gradients = [
        torch.cat([v.double().flatten() for n, v in sorted(r.items()) if n != "out"]) for r in (ours, plain, right)
    ]
    assert_as_good_as_torch(*gradients, dtype, "gradients")
    assert_as_good_as_torch(ours["out"], plain["out"], right["out"], dtype, "logits")
    unpatch(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def kept_bytes(model, autocast, tokens=256):
    """Bytes of the distinct tensors that autograd keeps, parameters left out."""
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", autocast):
        model(input_ids=torch.arange(tokens)[None].fmod(200), use_cache=False)
    return sum(size for size, _ in storages.values())


def test_activations_are_kept_once():
    """PEFT keeps a copy of the input for each layer; q, k and v share one here, gate and up too, and down has none."""
    model = student(torch.bfloat16)
    config = model.get_base_model().config
    patch(model, "student", attention=None)
    ours = kept_bytes(model, torch.bfloat16)
    unpatch(model)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(patching, "SWAPS", WITHOUT_LORA)
        patch(model, "student", attention=None)
    theirs = kept_bytes(model, torch.bfloat16)
    fewer = 3 * config.hidden_size + config.intermediate_size
    assert theirs - ours >= 256 * 2 * fewer * config.num_hidden_layers


@pytest.mark.full
def test_other_adapters_are_left_to_peft():
    model = student(dropout=0.5)
    patch(model, "student", attention=None)
    torch.manual_seed(0)
    ours = answer(model)["out"]
    unpatch(model)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, answer(model)["out"])
    model = student()
    plain = tiny_model(attention_bias=True)
    patch(model, "student", attention=None)
    with model.disable_adapter():
        torch.testing.assert_close(answer_only(model), answer_only(plain))
    torch.testing.assert_close(answer_only(merged(model)), answer_only(model), rtol=1e-4, atol=1e-5)
    model.merge_adapter()
    torch.testing.assert_close(answer_only(model), answer_only(merged(student())), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def answer_only(model):
    return model.eval()(input_ids=torch.arange(3, 15)[None], use_cache=False).logits
