"""Dtypes of the layers' results, with kernels and without."""

import pytest
import torch
from distill_kernels import (
    add_rms_norm,
    bias_gelu,
    geglu,
    kl_probabilities,
    layer_norm,
    rms_norm,
    rope,
    softmax,
    swiglu,
)

CALLS = {
    "softmax": softmax,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "swiglu": swiglu,
    "geglu": geglu,
    "add_rms_norm": lambda x: add_rms_norm(x, x),
    "bias_gelu": lambda x: bias_gelu(x, x[0]),
    "kl_probabilities": lambda x: kl_probabilities(x, x),
    "rope": lambda x: rope(x[None, None], x[None, None], x[None], x[None]),
}


@pytest.mark.parametrize("name", CALLS)
def test_integer_inputs_are_refused_on_the_cpu_as_well(name, device):
    """They were computed with in fp32 and cut back to integers: a softmax of zeros."""
    with pytest.raises(ValueError, match=r"expected dtype .* got torch\.int64"):
        CALLS[name](torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("name", CALLS)
def test_fp64_runs_only_on_the_reference(name, device):
    out = CALLS[name](torch.rand(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert (out[0] if isinstance(out, tuple) else out).dtype == torch.float64
