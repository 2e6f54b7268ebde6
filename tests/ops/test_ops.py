"""Every op equals its reference: the kernel, forward and backward, against the reference in fp64, a case an example.

The cases are those of `distill doctor --machine`, named after the op and its setting.
"""

import distill_kernels as ours
import pytest
import torch
from distill_kernels.examples import EXAMPLES
from distill_kernels.launch import device_facts

from distill.doctor.machine_checks import check_kernel

# GEMMs of PyTorch with their gradients, and integers
OF_PYTORCH = {"cu_seqlens_from_position_ids", "lora_linear", "shared_linear"}


@pytest.mark.plain(
    "BiasGELU",
    "FusedDistillationLoss",
    "FusedStudentTopKKLLoss",
    "RMSNorm",
    "call_inside",
    "flash_attention",
    "fused_kl_loss",
    "fused_top_k_kl_loss",
    "jsd",
    "quantize_rows",
    "softmax",
    "tvd",
    "fused_distillation_loss: jsd",
    "distillation_loss: skew_reverse_kl",
    "fused_kl_loss: soft caps and scales",
    "cross_entropy: smoothing and z-loss",
    "fused_student_top_k_kl_loss: reverse, bucket",
    "fused_policy_gradient_loss: KL by k3",
    "flash_attention: not causal, sinks",
    "flash_attention: window on both sides, sinks",
    "flash_attention: scale, sinks",
    "decode_attention: one token",
    "learned_gradients: q5_0",
    "learned_gradients: q6_k",
    "fake_quantise_into: nvfp4",
    "geglu: tanh",
    "split_k_linear: few rows",
    "fp8_rms_norm",
    "relation_divergence",
    "route: sigmoid, bias, groups",
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_op_equals_its_reference(device, name):
    pytest.importorskip("triton")
    if not EXAMPLES[name].needs(device_facts(device)):
        pytest.skip("this device, or Triton's interpreter, cannot compute it")
    result = check_kernel(name, device)
    assert result.passed, f"{name}: {result.detail}"
    if device.type == "cpu":
        assert ("Triton in its interpreter" in result.detail) is (name not in OF_PYTORCH), result.detail


def test_divergences_are_multiplied_by_the_temperature_squared(where):
    """Hinton et al. (2015): gradients keep their size as the temperature grows. By the definition, without our code."""
    z_s, z_t = (torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)).to(where) for seed in (0, 1))
    log_s, log_t = ((z / 2.0).log_softmax(-1) for z in (z_s, z_t))
    expected = 4.0 * (log_t.exp() * (log_t - log_s)).sum(-1).mean()
    assert ours.kl_div(z_s, z_t, temperature=2.0).item() == pytest.approx(expected.item(), rel=1e-5)
    unscaled = ours.kl_div(z_s, z_t, temperature=2.0, scale_by_temperature_squared=False)
    assert unscaled.item() == pytest.approx(expected.item() / 4.0, rel=1e-5)
