"""The weight gradient's sum over groups of rows, in scaled fp16 where there are many."""

import pytest
import torch
from distill_kernels import FusedKLLoss
from distill_kernels.losses import accumulate
from distill_kernels.losses import plan as planning
from distill_kernels.losses.accumulate import PLAIN_GROUPS, WeightGradient
from helpers import no_syncs, realistic_heads, relative_error


def summed(groups, rows, weight, vocab, *, fp32=False):
    """The sum of random groups by `WeightGradient`, and in fp64."""
    generator = torch.Generator(weight.device).manual_seed(3)
    total, exact = WeightGradient(weight, vocab, groups, fp32=fp32), 0.0
    # columns of very different sizes, as those of frequent and rare tokens
    sizes = torch.logspace(-9, 0, vocab, device=weight.device)
    for _ in range(groups):
        g, x = (torch.randn(rows, n, device=weight.device, generator=generator) for n in (vocab, weight.shape[1]))
        g, x = (g * sizes).to(torch.bfloat16), x.to(torch.bfloat16)
        buffer = torch.empty(rows, -(-vocab // 64) * 64, dtype=torch.bfloat16, device=weight.device)
        buffer[:, :vocab] = g
        total.add(buffer[:, :vocab], x)
        exact = exact + g.double().t() @ x.double()
    return total.total, exact


@pytest.mark.plain("300-64-torch.float16", "257-136-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab, hidden", [(300, 64), (128, 256), (257, 136)])
def test_many_groups_round_as_one(kernel_device, dtype, vocab, hidden):
    """The error is the last rounding's, in every row, as far as fp16 is finer than the dtype."""
    weight = torch.empty(vocab + 6, hidden, dtype=dtype, device=kernel_device)
    made, exact = summed(12, 24, weight, vocab)
    assert made.dtype == dtype and not made[vocab:].any()
    made, exact = made[-66:-6], exact[-60:]  # rows that fp16 can represent
    least, error = ((each.double() - exact).norm(dim=1) / exact.norm(dim=1) for each in (exact.to(dtype), made))
    if dtype == torch.bfloat16:
        assert (error < 1.3 * least.max()).all() and error.mean() < 1.15 * least.mean()
    else:
        assert error.max() < 1e-3


def test_rare_tokens_keep_their_digits(kernel_device):
    """Rows a thousand million times smaller than others have the same relative error."""
    made, exact = summed(12, 24, torch.empty(300, 64, dtype=torch.bfloat16, device=kernel_device), 300)
    error = (made.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert exact.norm(dim=1)[0] < 1e-8 * exact.norm(dim=1)[-1] and error[:50].mean() < 1.1 * error[-50:].mean()


def test_plain_sums_round_every_time(kernel_device, limit):
    """The measure of what the scaled sum saves, and proof that it is what runs."""
    weight = torch.empty(300, 64, dtype=torch.bfloat16, device=kernel_device)
    scaled, exact = summed(12, 24, weight, 300)
    few, right = summed(PLAIN_GROUPS, 24, weight, 300)
    limit.setattr(accumulate, "PLAIN_GROUPS", 100)
    plain, _ = summed(12, 24, weight, 300)
    assert torch.equal(few, summed(PLAIN_GROUPS, 24, weight, 300)[0])
    assert relative_error(few, right) > 1.2 * relative_error(scaled, exact)
    assert relative_error(plain, exact) > 1.8 * relative_error(scaled, exact)


def test_a_row_that_is_not_finite_stays_alone(kernel_device):
    weight = torch.empty(300, 64, dtype=torch.bfloat16, device=kernel_device)
    total = WeightGradient(weight, 300, 6, fp32=False)
    for number in range(6):
        g = torch.ones(8, 320, dtype=torch.bfloat16, device=kernel_device)[:, :300]
        g[0, 7] = torch.inf if number == 2 else 1.0
        total.add(g, torch.ones(8, 64, dtype=torch.bfloat16, device=kernel_device))
    wrong = ~total.total.isfinite().any(1)
    assert wrong.nonzero().flatten().tolist() == [7] and (total.total[~wrong] == 48).all()


@pytest.mark.full
def test_a_small_workspace_keeps_the_error_of_a_large_one(kernel_device, limit):
    limit.setattr(planning, "ROW_MULTIPLE", 16)
    x, w, x_t, w_t = realistic_heads(400, 300, 32, 48, dtype=torch.bfloat16, device=kernel_device)
    exact = [t.double().requires_grad_() for t in (x, w)]
    FusedKLLoss()(*exact, x_t.double(), w_t.double()).backward()
    errors = []
    for mib in (None, 3 * 16 * 320 * 2 / 2**20):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        FusedKLLoss(max_workspace_mib=mib)(*leaves, x_t, w_t).backward()
        errors.append([relative_error(leaf.grad, right.grad) for leaf, right in zip(leaves, exact, strict=True)])
    assert errors[1][0] < 3e-3 and errors[1][1] < 1.1 * errors[0][1] < 3e-3


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("mib", [128, 256, 512])
def test_full_size_keeps_the_error_bounds_without_a_host_sync(device, mib):
    """Errors as promised, whatever the workspace; no wait for the device."""
    x, w, x_t, w_t = realistic_heads(4096, 128_256, 1024, 1536, dtype=torch.bfloat16, device=device)
    leaves = [t.requires_grad_() for t in (x, w)]
    loss = FusedKLLoss(max_workspace_mib=mib)
    made = torch.autograd.grad(loss(*leaves, x_t, w_t), leaves)
    with no_syncs():
        again = torch.autograd.grad(loss(*leaves, x_t, w_t), leaves)
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    dx, dw = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(w, dtype=torch.float32)
    for here in torch.arange(4096, device=device).split(512):
        z, z_t = x[here].detach().float() @ w.detach().float().T, x_t[here].float() @ w_t.float().T
        g = (z.softmax(-1) - z_t.softmax(-1)) / 4096
        dx[here] = g @ w.detach().float()
        dw += g.T @ x[here].detach().float()
    assert relative_error(made[0], dx) < 3e-3 and relative_error(made[1], dw) < 3e-3
