"""Quantised students whose weights begin at zero, and weights that no file can hold."""

import copy

import pytest
import torch
from distill_kernels.quantisation.fake_quantise import fake_quantise_into
from distill_kernels.quantisation.formats import FORMATS, reference_fake_quantise, reference_quantise
from tiny import tiny_model

from distill.models.adapters import add_lora
from distill.models.head import unwrap_peft
from distill.models.precision.gptq import compensate, round_weights
from distill.models.precision.quantised_adapters import use_merged
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe import Lora
from distill.recipe.quantise import Quantise

IDS = torch.arange(3, 67).view(2, 32)
ZERO = "model.layers.1.self_attn.o_proj.weight"
LEARNED = [name for name, form in FORMATS.items() if form.is_learned]


def quantised(name, model, *, lora=False):
    """Return the weights of a model whose output projection is zero, and an eighth of every matrix's blocks."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        parameters[ZERO].zero_()
        for weight in parameters.values():
            if weight.dim() == 2:
                weight[::8] = 0.0
    adapters = None
    found = formats_of(model, Quantise(format=name))
    if lora:
        model = add_lora(model, Lora(r=4))
        found = formats_of(model, Quantise(format=name))
        adapters = use_merged(unwrap_peft(model), set(found.by_name))
    return model, quantise_student(model, found, learned=True, adapters=adapters)


def train(model, weights, steps, optimizer=None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        weights.before_step(1e-2)
        optimizer.step()
        weights.after_step()
    return optimizer


@pytest.mark.plain("True-q4_0")
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("lora", [False, True])
def test_a_matrix_that_begins_at_zero_trains(name, lora):
    model, weights = quantised(name, tiny_model(seed=1, hidden=256 if name.endswith("_k") else 64), lora=lora)
    matrix = weights.matrices[ZERO]
    assert not matrix.parameter.any()
    train(model, weights, 4)
    master, rounded = matrix.master, matrix.parameter
    blocks = matrix.form.blocks(master).abs().amax(-1) > 1e-3
    assert blocks.any() and matrix.form.blocks(rounded).abs().amax(-1)[blocks].all()
    gap = (master - rounded).abs().amax()
    assert gap <= 0.6 * master.abs().amax(), f"{gap:.3g} of {master.abs().amax():.3g}"


@pytest.mark.full
def test_blocks_without_negative_weights_get_some():
    """Their minima begin at 0, which a learned one, a product, never leaves: 56 % of such blocks stayed at 0."""
    model = tiny_model(seed=1, hidden=256)
    matrix_of = dict(model.named_parameters())
    names = [name for name, weight in matrix_of.items() if weight.dim() == 2 and "proj" in name]
    with torch.no_grad():
        for name in names:
            matrix_of[name].abs_()
    weights = quantise_student(model, formats_of(model, Quantise(format="q4_k")), learned=True)
    minima = [part.minimum for part in (weights.matrices[name].scales for name in names) if part.minimum is not None]
    assert sum(int((part == 0).sum()) for part in minima) > 1000
    train(model, weights, 6)
    grown = left = 0
    for name in names:
        matrix = weights.matrices[name]
        if matrix.form.has_minimum:
            negative = matrix.form.blocks(matrix.master).amin(-1) < -0.01
            grown += int(negative.sum())
            left += int((negative & (matrix.form.blocks(matrix.parameter).amin(-1) >= 0)).sum())
    assert grown > 5000 and left <= 0.06 * grown, f"{left} of {grown} blocks with negative weights round to none"


def test_a_resumed_student_that_began_at_zero_goes_on_with_the_same_bits(tmp_path):
    model, weights = quantised("q4_0", tiny_model(seed=1, hidden=64))
    optimizer = train(model, weights, 2)
    weights.save(tmp_path)
    other, again = quantised("q4_0", tiny_model(seed=2, hidden=64))
    other.load_state_dict(model.state_dict())
    again.restore(tmp_path)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, weights, 3, optimizer)
    train(other, again, 3, resumed)
    assert torch.equal(again.scales.following, weights.scales.following) and again.scales.following.any()
    for (key, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), key


def test_a_student_without_zero_blocks_looks_for_none():
    model = tiny_model(seed=1, hidden=64)
    weights = quantise_student(model, formats_of(model, Quantise(format="q4_0")), learned=True)
    assert weights.scales.following is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("given", [False, True])
def test_no_format_makes_an_infinite_weight_finite(name, value, given):
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    form = FORMATS[name]
    scales = form.snap(form.first(weight)) if given else None
    weight[3, 17] = value
    out = torch.empty_like(weight)
    fake_quantise_into(out, weight, form, scales)
    assert not out[3, 17].isfinite() and not reference_fake_quantise(weight, form, scales)[3, 17].isfinite()
    with pytest.raises(ValueError, match="expected finite numbers for a file, got 1 of 2048"):
        reference_quantise(weight, form, scales)


@pytest.mark.parametrize("name", ["q4_0", "nvfp4", "int8"])
def test_a_student_with_an_infinite_weight_is_refused_by_name(name):
    model = tiny_model(seed=1, hidden=64)
    with torch.no_grad():
        dict(model.named_parameters())[ZERO][0, 0] = float("inf")
    with pytest.raises(ValueError, match=f"expected finite weights, got NaN or infinity in {ZERO}"):
        formats_of(model, Quantise(format=name))


@pytest.mark.parametrize(
    "place, value, message",
    [
        (
            "layers.0.post_attention_layernorm",
            float("inf"),
            r"infinity in model\.layers\.0\.post_att",
        ),
        ("layers.1.mlp.up_proj", float("nan"), r"infinity in model\.layers\.1\.mlp\.up_proj\.weight"),
        ("layers.0.post_attention_layernorm", 3e38, "infinity from decoder layer 0"),
        (
            "layers.1.post_attention_layernorm",
            3e38,
            r"inputs of model\.layers\.1\.mlp\.gate_proj\.weight, got",
        ),
    ],
)
def test_gptq_names_what_is_not_finite(place, value, message):
    """The damping of a matrix of inputs with NaN was multiplied for ever."""
    model = tiny_model(seed=1, hidden=64)
    formats = formats_of(model, Quantise(format="q4_0")).by_name
    with torch.no_grad():
        model.model.get_submodule(place).weight.view(-1)[3] = value
    with pytest.raises(ValueError, match=message):
        round_weights(model, formats, [{"input_ids": IDS}])


def test_a_matrix_without_inverse_is_an_error_and_no_loop():
    weight, form = torch.randn(4, 32), FORMATS["q4_0"]
    with pytest.raises(ValueError, match="its matrix of inputs has no inverse"):
        compensate(weight, torch.full((32, 32), float("nan")), form, form.first(weight))
