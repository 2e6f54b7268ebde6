"""A NaN in a head or in hidden states is a NaN in the loss: none is left out as a token of probability 0."""

import distill_kernels as ours
import pytest
import torch

N, V, H, G = 5, 700, 16, 24
TEACHERS = {"forward KL", "reverse KL", "JSD", "TVD", "skew KL", "student's top k", "mixture"}


def losses(student, teacher, labels):
    """Each loss of these hidden states and heads, by its name."""
    ids = torch.arange(8, device=labels.device).expand(N, 8).contiguous()
    logprobs = torch.full((N, 8), -2.5, device=labels.device)
    return {
        "forward KL": lambda: ours.FusedKLLoss("forward")(*student, *teacher),
        "reverse KL": lambda: ours.FusedKLLoss("reverse")(*student, *teacher),
        "JSD": lambda: ours.FusedJSDLoss()(*student, *teacher),
        "TVD": lambda: ours.FusedTVDLoss()(*student, *teacher),
        "skew KL": lambda: ours.FusedSkewKLLoss()(*student, *teacher),
        "student's top k": lambda: ours.FusedStudentTopKKLLoss(k=8)(*student, *teacher),
        "mixture": lambda: ours.FusedKLLoss()(*student, teachers=[ours.TeacherHead(*teacher)] * 2),
        "cross-entropy": lambda: ours.FusedCrossEntropyLoss()(*student, labels),
        "log-probabilities": lambda: ours.fused_log_probs(*student, labels).sum(),
        "top k": lambda: ours.FusedTopKKLLoss()(*student, ids, logprobs),
        "policy gradient": lambda: ours.FusedPolicyGradientLoss()(
            *student, labels, torch.ones(N, device=labels.device), old_logprobs=torch.full_like(logprobs[:, 0], -6.5)
        ),
    }


@pytest.mark.plain("student hidden-bf16", "student head-fp32", "teacher head-bf16", "teacher hidden-fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("place", ["student head", "student hidden", "teacher head", "teacher hidden"])
def test_a_nan_stays_a_nan(kernel_device, place, dtype):
    shapes = {"student hidden": (N, H), "student head": (V, H), "teacher hidden": (N, G), "teacher head": (V, G)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(kernel_device, dtype) for name, shape in shapes.items()}
    # a row of a head: the token of one column, which no label and no top k names
    tensors[place][333 if "head" in place else 2] = float("nan")
    student = (tensors["student hidden"].requires_grad_(), tensors["student head"].requires_grad_())
    labels = torch.arange(N, device=kernel_device)
    found = losses(student, (tensors["teacher hidden"], tensors["teacher head"]), labels)
    read = found if "student" in place else {name: found[name] for name in TEACHERS}
    finite = [name for name, loss in read.items() if not loss().isnan()]
    assert not finite
