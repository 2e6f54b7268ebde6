"""Projections that read the same activations as one node: exact, taken once, and only where they are what they seem."""

import copy

import pytest
import torch
from distill_kernels.matmul.shared_input import reference_shared_linear, shared_linear
from helpers import assert_as_good_as_torch
from peft import LoraConfig, get_peft_model
from test_lora_linear import kept_bytes
from tiny import tiny_model
from torch.nn import functional as F

from distill.models.patch import residual_norms
from distill.models.patch.patching import patch, unpatch
from distill.models.patch.shared_input import GROUP
from distill.models.shape import model_sizes
from distill.planning.memory import layer_activations


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(dtype=torch.float64, inputs=12):
    """x, three weights, and biases of which the second is missing."""
    x = draw(2, 5, inputs, dtype=dtype)
    weights = [draw(size, inputs, seed=size, dtype=dtype) / inputs**0.5 for size in (8, 4, 6)]
    return x, weights, [draw(8, seed=1, dtype=dtype), None, draw(6, seed=2, dtype=dtype)]


def with_gradients(function, x, weights, biases, *, trained="xwwwbb", used=(0, 1, 2)):
    """Outputs and gradients of every operand; `trained` has a dot for each that is frozen."""
    given = [x, *weights, *biases]
    kinds = iter(trained)
    given = [None if t is None else t.detach().requires_grad_(next(kinds) != ".") for t in given]
    outputs = function(given[0], given[1:4], given[4:])
    sum((outputs[i].double() * draw(*outputs[i].shape, seed=9 + i)).sum() for i in used).backward()
    return outputs, [None if t is None else t.grad for t in given]


@pytest.mark.parametrize(
    "more",
    [{}, {"trained": ".wwwbb"}, {"trained": "x.w...", "used": (0, 2)}, {"trained": "x....."}, {"used": (1,)}],
    ids=["all", "no-input", "one-weight", "frozen", "unused"],
)
@pytest.mark.parametrize("layout", ["rows", "columns", "joined"])
def test_joined_layers_equal_separate_ones(more, layout):
    x, weights, biases = operands()
    if layout == "joined":
        weights = torch.cat(weights).split([8, 4, 6])
    if layout == "columns":  # of a wider tensor, every second one
        x = draw(2, 5, 24)[..., ::2]
        weights = [w.t().contiguous().t() for w in weights]
    outputs, gradients = with_gradients(shared_linear, x, weights, biases, **more)
    right, exact = with_gradients(reference_shared_linear, x, weights, biases, **more)
    for got, expected in zip([*outputs, *gradients], [*right, *exact], strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()
    if layout != "joined":
        assert all(torch.equal(*pair) for pair in zip(outputs, right, strict=True))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_layers_under_autocast_round_no_more(x_dtype, dtype):
    """One rounding fewer in each gradient of an fp32 weight; gradients in the dtypes of what they belong to."""
    x, weights, biases = operands(dtype, 96)
    x = x.to(x_dtype)
    exact = with_gradients(
        reference_shared_linear,
        *((t.double() if t is not None else t) for t in (x,)),
        [w.double() for w in weights],
        [b if b is None else b.double() for b in biases],
    )
    with torch.autocast("cpu", torch.bfloat16):
        ours = with_gradients(shared_linear, x, weights, biases)
        plain = with_gradients(reference_shared_linear, x, weights, biases)
        again = F.linear(x, weights[0].requires_grad_(), biases[0])  # not a copy of ours out of autocast's cache
        assert again.requires_grad
    assert all(torch.equal(*pair) for pair in zip(ours[0], plain[0], strict=True))
    for got, torchs, right in zip(ours[1], plain[1], exact[1], strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            assert got.dtype == torchs.dtype
            assert_as_good_as_torch(got, torchs, right, torch.bfloat16, "gradient")


def test_errors_name_the_misuse():
    x, weights, biases = operands()
    with pytest.raises(ValueError, match=r"expected x \[\.\.\., I\]"):
        shared_linear(x[..., 1:], weights, biases)
    with pytest.raises(ValueError, match="2 biases"):
        shared_linear(x, weights, biases[:2])
    loss = shared_linear(x.requires_grad_(), weights, biases)[0].sum()
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


# ---- in a model

IDS = torch.arange(3, 43).view(2, 20)


def model_of(dtype=torch.float64, **more):
    return tiny_model(dtype=dtype, attention_bias=True, **more).train()


def run(model, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.get_decoder()(input_ids=IDS, use_cache=False).last_hidden_state
    shared = nodes(hidden.grad_fn)
    hidden.double().square().mean().backward()
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, shared


def nodes(function):
    """Return the number of autograd nodes that are several projections."""
    seen, waiting = {function}, [function]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return sum(node.name() == "_SharedLinearBackward" for node in seen)


def assert_same_run(actual, expected, shared, tolerance=1e-12):
    (hidden, gradients, found), (right, exact, _) = actual, expected
    assert found == shared
    assert gradients.keys() == exact.keys()
    for got, reference in [(hidden, right), *((gradients[name], exact[name]) for name in exact)]:
        assert (got - reference).abs().max() <= tolerance * reference.abs().max()


def freeze(model, *parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def hook(model):
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)


def replace(model):
    layer = model.model.layers[1].mlp
    layer.up_proj = copy.deepcopy(layer.gate_proj)


CASES = {  # what is done to a model, before and after patching, and how many nodes of its four are left
    "plain": (None, None, 4),
    "frozen query, trained key": (lambda m: freeze(m, "q_proj"), None, 4),
    "all frozen but the embedding": (lambda m: freeze(m, "proj"), None, 4),
    "frozen below": (lambda m: freeze(m, "embed", "layers.0"), None, 2),
    "a hook on one": (None, hook, 3),
    "checkpointed": (None, lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}), 4),
    "checkpointed, reentrant": (None, lambda m: m.gradient_checkpointing_enable({"use_reentrant": True}), 0),
    "replaced": (None, replace, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_models_gradients_are_unchanged(case):
    before, after, shared = CASES[case]
    model, plain = model_of(), model_of()
    for each in (model, plain):
        if before is not None:
            before(each)
    report = patch(model, "student", attention=None)
    assert report.swapped["shared_input"] == 4
    for each in (model, plain):
        if after is not None:
            after(each)
    assert_same_run(run(model), run(plain), shared)
    assert_same_run(run(copy.deepcopy(model)), run(plain), shared)
    if case == "plain":
        unpatch(model)
        assert run(model)[2] == 0 and not any(GROUP in module.__dict__ for module in model.modules())


def test_adapters_on_the_projections():
    """q and v adapted after patching: base layers compute their own, the MLP's projections are one."""
    results = []
    for patched in (True, False):
        model = model_of()
        if patched:
            patch(model, "student", attention=None)
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        results.append(run(get_peft_model(model, config).double()))
    assert_same_run(*results, 2)


def attention_of(model):
    return model.model.layers[0].self_attn


def test_outputs_belong_to_the_given_tensor():
    """Within one call of the attention: another tensor, the same one changed, called twice, one left out."""
    model = model_of()
    patch(model, "student", attention=None)
    attention = attention_of(model)
    group = attention.__dict__[GROUP]
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    x, y = (draw(2, 5, q.in_features, seed=seed).requires_grad_() for seed in (0, 1))

    def exact(layer, given):
        return F.linear(given, layer.weight, layer.bias)

    assert (
        torch.equal(q(x), exact(q, x)) and not group.outputs._outputs
    )  # outside of the attention's call nothing is left
    group.is_open = True
    changed = x * 1.0
    assert torch.equal(q(changed), exact(q, changed))
    assert torch.equal(k(y), exact(k, y))
    assert torch.equal(q(changed), exact(q, changed))  # a second time
    assert torch.equal(k(changed), exact(k, changed)) and set(group.outputs._outputs) == {v}
    with torch.no_grad():
        changed.mul_(2.0)
    assert torch.equal(v(changed), exact(v, changed))
    group.close(returned=True)
    assert group.wasted and not group.outputs._outputs
    expected, *_ = run(model_of())
    hidden, _, shared = run(model)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)
    assert shared == 3  # a module that left one is not asked again


@pytest.mark.full
@pytest.mark.parametrize("autocast", [True, False])
def test_nothing_is_kept_without_gradients_or_while_compiling(autocast):
    model = model_of(torch.float32)
    patch(model, "student", attention=None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    layer = model.model.layers[0]
    layer.compile(backend="aot_eager", fullgraph=True)
    hidden, _, shared = run(model, autocast)
    assert shared == 2 and torch.equal(hidden, expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_norms_that_write_what_autocast_casts_to_keep_the_bits(kind, without):
    model = tiny_model(kind=kind, **({"query_pre_attn_scalar": 8} if kind == "gemma3_text" else {})).train()
    report = patch(model, "student", attention=None)
    assert "casts" in report.trial_results.values()
    seen = []
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda *a: seen.append(a[2][0].dtype))
    hidden, gradients, shared = run(model, autocast=True)
    assert shared == 4
    without.setattr(residual_norms, "cast_dtype", lambda *_: None)
    wide, exact, _ = run(model, autocast=True)
    assert seen == [torch.bfloat16, torch.float32]
    assert torch.equal(hidden, wide)
    assert all(torch.equal(gradients[name], exact[name]) for name in exact)


def test_a_norm_whose_output_is_read_by_more_than_projections_keeps_its_dtype():
    model = tiny_model(dtype=torch.float32)
    kind = type(model.model.layers[0].mlp)

    class Reads(kind):
        def forward(self, x):
            return super().forward(x) + 0.1 * x.sin()

    for layer in model.model.layers:
        layer.mlp.__class__ = Reads
    expected, *_ = run(copy.deepcopy(model), autocast=True)
    report = patch(model, "student", attention=None)
    assert "as it is" in report.trial_results.values() and "casts" not in report.trial_results.values()
    assert torch.equal(run(model, autocast=True)[0], expected)


@pytest.mark.full
def test_activations_are_kept_once(kernel_device):
    """A layer keeps one copy of each norm's output, as the plan counts, without copies of weights."""
    if kernel_device.type == "cuda":
        pytest.skip("counted through the interpreter")
    models = [tiny_model(hidden=64, layers=layers).train() for layers in (1, 2)]
    for model in models:
        patch(model, "student")
    one, two = (kept_bytes(model, torch.bfloat16, tokens=48) for model in models)
    shape = model_sizes(models[0])
    planned = layer_activations(shape, compute=2, residual=4, autocast=True)
    assert planned == pytest.approx((two - one - 2 * shape.linear / shape.layers) / 48, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("weights_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(576, 192, 192), (1536, 1536), (896, 128, 128)])
def test_kernel_equals_the_reference_on_shapes_of_real_models(sizes, weights_in, device):
    inputs = 896 if 896 in sizes else 576
    x = draw(8, 1024, inputs).to(device, torch.bfloat16)
    weights = [draw(size, inputs, seed=size).to(device, weights_in) / inputs**0.5 for size in sizes]
    biases = [draw(size, seed=size + 1).to(device, weights_in) for size in sizes]
    upstream = [draw(8, 1024, size, seed=5).to(device, torch.bfloat16) for size in sizes]
    results = []
    for function, cast in ((shared_linear, None), (reference_shared_linear, None), (reference_shared_linear, "exact")):
        given = [t.detach().to(torch.float64 if cast else t.dtype).requires_grad_() for t in (x, *weights, *biases)]
        with torch.autocast("cuda", torch.bfloat16, enabled=cast is None):
            outputs = function(given[0], given[1 : 1 + len(sizes)], given[1 + len(sizes) :])
        gradients = torch.autograd.grad(outputs, given, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
        results.append((outputs, gradients))
    (ours, theirs, exact) = results
    assert all(torch.equal(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    for got, torchs, right in zip(ours[1], theirs[1], exact[1], strict=True):
        assert got.dtype == torchs.dtype
        assert_as_good_as_torch(got, torchs, right, torch.bfloat16, "gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_on_a_gpu_keeps_the_bits(device, without, checkpointed):
    """Under autocast: norms that write bf16, and one node of several projections, against each by itself."""
    model = tiny_model(kind="qwen2", hidden=256, dtype=torch.float32).to(device).train()
    assert "casts" in patch(model, "student").trial_results.values()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 259, (2, 256), device=device)

    def step():
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().square().mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return hidden.detach(), gradients, nodes(hidden.grad_fn)

    hidden, gradients, shared = step()
    without.setattr(residual_norms, "cast_dtype", lambda *_: None)
    for module in model.modules():
        if GROUP in module.__dict__:
            module.__dict__[GROUP].wasted = True
    apart, exact, none = step()
    assert (shared, none) == (4, 0) and torch.equal(hidden, apart)
    assert (gradients - exact).norm() <= 1e-2 * exact.norm()
