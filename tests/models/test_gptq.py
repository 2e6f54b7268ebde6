"""Rounding without training: GPTQ against its formula, its order on real activations, grids, calibration rows."""

import copy
import itertools

import pytest
import torch
from distill_kernels.quantisation.formats import FORMATS, reference_fake_quantise
from distill_kernels.quantisation.number_format import Scales
from tiny import tiny_model

from distill.models.precision.gptq import DAMPING, calibration_batches, compensate, round_weights
from distill.models.precision.quantised_formats import formats_of
from distill.recipe.quantise import Quantise


def draw(rows, columns, tokens, seed=0):
    """Return a matrix and the outer products of inputs with correlated columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix * torch.linspace(0.1, 3, columns)
    return torch.randn(rows, columns, generator=generator), x.t() @ x


def cost(weight, rounded, hessian):
    return float(torch.einsum("nk,kl,nl->", weight - rounded, hessian, weight - rounded))


@pytest.mark.parametrize("name", FORMATS)
def test_each_method_costs_less_than_the_one_before(name):
    weight, hessian = draw(24, 256, 400)
    form = FORMATS[name]
    scales = form.search(weight, hessian.diagonal())
    nearest = reference_fake_quantise(weight, name)
    importance = reference_fake_quantise(weight, name, scales)
    gptq = reference_fake_quantise(compensate(weight, hessian, form, scales), name, scales)
    costs = [cost(weight, rounded, hessian) for rounded in (nearest, importance, gptq)]
    weighed = [float(((weight - r).square() * hessian.diagonal()).sum()) for r in (nearest, importance)]
    assert weighed[1] < weighed[0], "scales are chosen by the diagonal alone"
    assert costs[2] < 0.8 * min(costs[:2])
    for values in (importance, gptq):
        assert torch.equal(reference_fake_quantise(values, name, scales), values), "the file's own scales give it back"


def test_compensation_is_the_optimal_update_of_the_columns_left():
    """Column by column, in fp64, by the inverse of what is left of H (Frantar et al., 2022, equations 2 and 3)."""
    weight, hessian = draw(5, 32, 200, seed=3)
    scale = FORMATS["q4_0"].first(weight).scale
    exact, h = weight.double(), hessian.double()
    h = h + DAMPING * h.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    step = scale.half().double().repeat_interleave(32, -1)
    order, before = hessian.diagonal().argsort(descending=True).tolist(), torch.empty_like(exact)
    for turn, j in enumerate(order):
        left = order[turn:]
        inverse = torch.linalg.inv(h[left][:, left])
        before[:, j] = exact[:, j]
        q = (exact[:, j] / step[:, j]).round().clamp(-8, 7) * step[:, j]
        exact[:, left] -= ((exact[:, j] - q) / inverse[0, 0])[:, None] * inverse[0]
    moved = compensate(weight, hessian, FORMATS["q4_0"], Scales(scale))
    torch.testing.assert_close(moved, before.float(), rtol=1e-3, atol=1e-3)


def test_columns_of_which_nothing_is_known_are_rounded_to_nearest():
    weight, hessian = draw(6, 64, 1)[0], torch.zeros(64, 64)
    form = FORMATS["int4_g32"]
    scales = form.first(weight)
    torch.testing.assert_close(compensate(weight, hessian, form, scales), weight)
    diagonal = torch.diag(torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.1)
    torch.testing.assert_close(compensate(weight, diagonal, form, scales), weight, msg="nothing to make up by")


@pytest.mark.plain("llama")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_model_is_rounded_layer_by_layer(kind):
    model = tiny_model(seed=1, hidden=64, kind=kind)
    formats = {
        name: form for name, form in formats_of(model, Quantise(format="q4_0")).by_name.items() if form == "q4_0"
    }
    ids = torch.randint(0, 250, (12, 48), generator=torch.Generator().manual_seed(0))
    held_out = torch.randint(0, 250, (8, 48), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": row[None], "position_ids": torch.arange(48)[None]} for row in ids]
    logs = model(input_ids=held_out).logits.log_softmax(-1)

    @torch.no_grad()
    def kl(other):
        return float((logs.exp() * (logs - other(input_ids=held_out).logits.log_softmax(-1))).sum(-1).mean())

    found = {}
    for method in ("importance", "gptq"):
        student = copy.deepcopy(model).train()
        rounded = round_weights(student, formats, batches, method)
        assert set(rounded) == set(formats) and student.training
        for name, parameter in student.named_parameters():
            if name in formats:
                assert torch.equal(parameter, rounded[name].values())
            else:
                assert torch.equal(parameter, dict(model.named_parameters())[name])
        found[method] = kl(student.eval())
    nearest = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in nearest.named_parameters():
            parameter.copy_(reference_fake_quantise(parameter, "q4_0") if name in formats else parameter)
    assert found["gptq"] < 0.85 * kl(nearest), found
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.modules())


def test_calibration_rows_are_spread_over_the_data():
    rows = [{"input_ids": [number] * 8, "labels": [0] * 8} for number in range(40)]
    found = calibration_batches(rows, 64, torch.device("cpu"))
    assert [int(batch["input_ids"][0, 0]) for batch in found] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert found[0]["input_ids"].shape == (1, 8) and "position_ids" not in found[0]
    every = calibration_batches(rows, 10_000, torch.device("cpu"))
    assert sorted(int(batch["input_ids"][0, 0]) for batch in every) == list(range(40))
    assert calibration_batches([], 64, torch.device("cpu")) == []


def test_models_that_are_no_sequence_of_layers_are_refused():
    model = tiny_model(seed=1, hidden=64)
    formats = formats_of(model, Quantise(format="int4_g32")).by_name
    with pytest.raises(ValueError, match="gptq needs rows of training data to calibrate on, got none"):
        round_weights(model, formats, [])
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1, *args[1:]), prepend=True)
    with pytest.raises(ValueError, match="needs decoder layers that hand hidden states from one to the next"):
        round_weights(model, formats, itertools.repeat({"input_ids": torch.arange(8)[None]}, 2))
