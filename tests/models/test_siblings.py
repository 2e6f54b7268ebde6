"""Layers that read the same activations, the first of which computes for all."""

import copy

import pytest
import torch
from distill_kernels.matmul.fp8 import swap_linears_for_fp8
from tiny import tiny_model

from distill.models.head import decoder_of
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch
from distill.models.patch.shared_input import GROUP
from distill.models.precision.fp8_student import compute_in_fp8


def attention_of(model):
    return decoder_of(model).layers[0].self_attn


def opened(model):
    patch(model, "student", attention=None)
    attention_of(model).__dict__[GROUP].is_open = True


ROUTES = {
    "one node": opened,
    "fp8 student": compute_in_fp8,
    "joined": join_projections,
    "fp8 teacher": swap_linears_for_fp8,
}


@pytest.mark.parametrize("changed", ["input", "weight"])
@pytest.mark.parametrize("route", ROUTES)
def test_outputs_are_recomputed_after_the_input_or_a_weight_changed(route, changed):
    model = tiny_model(hidden=64).train()
    ROUTES[route](model)
    attention, x = attention_of(model), torch.randn(5, 64)
    attention.q_proj(x)
    with torch.no_grad():
        x.mul_(-2) if changed == "input" else attention.k_proj.weight.copy_(-2 * attention.k_proj.weight.float())
    assert torch.equal(attention.k_proj(x), attention.k_proj(x.clone()))


@pytest.mark.parametrize("route", ["one node", "fp8 student"])
def test_outputs_without_a_graph_are_recomputed_with_one(route):
    model = tiny_model(hidden=64).train()
    ROUTES[route](model)
    attention, x = attention_of(model), torch.randn(5, 64)
    with torch.no_grad():
        attention.q_proj(x)
    attention.k_proj(x).sum().backward()
    assert attention.k_proj.weight.grad is not None


@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_has_its_own_outputs(route):
    """Also of outputs inside a graph, which cannot be copied."""
    model = tiny_model(hidden=64).train()
    ROUTES[route](model)
    attention, x = attention_of(model), torch.randn(5, 64)
    q, k = attention.q_proj(x), attention.k_proj(x.clone())
    attention.q_proj(x)
    copied = attention_of(copy.deepcopy(model))
    assert torch.equal(copied.q_proj(x), q) and torch.equal(copied.k_proj(x), k)


@pytest.mark.parametrize("route", ["joined", "fp8 teacher"])
def test_inference_tensors_are_accepted(route):
    model = tiny_model(hidden=64)
    expected = attention_of(model).k_proj(x := torch.randn(5, 64))
    ROUTES[route](model)
    with torch.inference_mode():
        x = x.clone()
        attention_of(model).q_proj(x)
        k = attention_of(model).k_proj(x)
    assert (k - expected).norm() < 0.1 * expected.norm()
