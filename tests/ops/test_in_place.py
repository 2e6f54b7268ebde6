"""Outputs of public functions can be modified in place, as torch.nn.functional's; what has no gradient says so."""

import pytest
import torch
from distill_kernels.examples import PUBLIC as CALLS
from distill_kernels.examples import VALUE_TYPES

# outputs that a backward pass reads again, as torch.softmax and scaled_dot_product_attention read theirs
READ_AGAIN = {("softmax", 0), ("flash_attention", 0), ("add_rms_norm", 1), ("RMSNorm", 1)}
INFERENCE = {"Fp8Linear", "KVCache", "decode_attention", "fp8_linear", "quantize_rows", "triton_linear"}
# an optimizer, what returns integers, and what computes under no_grad in the call here
NO_GRADIENT = {"FusedAdamW", "cu_seqlens_from_position_ids", "sample_tokens", "swap_linears_for_fp8"}


@pytest.fixture(params=["kernels", "references"])
def where(request):
    """Device with kernels, and a CPU without them."""
    return request.getfixturevalue("kernel_device") if request.param == "kernels" else torch.device("cpu")


def outputs_of(name, tensors):
    made = CALLS[name].run(**tensors)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def tensors_of(name, learned, device):
    dtypes = CALLS[name].dtypes
    dtype = torch.float32 if torch.float32 in dtypes and device.type == "cpu" else dtypes[0]
    tensors = {key: value.to(device) for key, value in CALLS[name].tensors().items()}
    for key, value in tensors.items():
        if value.is_floating_point():
            tensors[key] = value if key in CALLS[name].fixed else value.to(dtype)
    return {key: value.requires_grad_(key in learned) for key, value in tensors.items()}


def gradients(name, place, double, device):
    tensors = tensors_of(name, CALLS[name].learned, device)
    outputs = outputs_of(name, tensors)
    assert all(out.requires_grad for out in outputs)
    out = double(outputs[place])
    outputs[place] = out
    weighed = [
        (each * torch.linspace(0.5, 1.5, each.numel(), device=device).view(each.shape)).sum() for each in outputs
    ]
    torch.stack(weighed).sum().backward()
    return out.detach(), {key: tensors[key].grad for key in CALLS[name].learned}


def learning():
    return [
        (name, place)
        for name, call in CALLS.items()
        if call.learned
        for place in range(2 if name in ("RMSNorm", "add_rms_norm", "rope") else 1)
    ]


@pytest.mark.parametrize("name, place", learning())
def test_an_output_that_is_doubled_in_place_has_the_right_gradients(where, name, place):
    out, expected = gradients(name, place, lambda out: out * 2, where)
    if (name, place) in READ_AGAIN:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(name, place, lambda out: out.mul_(2), where)
        return
    doubled, found = gradients(name, place, lambda out: out.mul_(2), where)
    torch.testing.assert_close(doubled, out)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


def test_every_public_name_is_tried():
    learned = {name for name, _ in learning()}
    assert learned | INFERENCE | NO_GRADIENT == set(CALLS) and not learned & (INFERENCE | NO_GRADIENT)
    assert not VALUE_TYPES & set(CALLS)


@pytest.mark.parametrize("name", sorted(INFERENCE))
def test_inference_ops_refuse_tensors_that_require_gradients(where, name):
    floats = {key for key, value in CALLS[name].tensors().items() if value.is_floating_point()}
    with pytest.raises(ValueError, match="expected no gradient to be asked for"):
        outputs_of(name, tensors_of(name, floats, where))
    with torch.no_grad():
        assert not any(out.requires_grad for out in outputs_of(name, tensors_of(name, floats, where)))
