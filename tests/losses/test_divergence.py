"""Row arithmetic: the PyTorch specification against definitions in fp64, and the row kernel against both."""

import math

import pytest
import torch
from dense_loss import ALL_TERMS, UNBOUNDED, dense_rows, softcap
from distill_kernels import LossTerm, skew_kl
from distill_kernels.losses.divergence import RowRequest, log_softmax, reference_rows
from distill_kernels.losses.operands import RowCall
from distill_kernels.losses.projection import TILE, ChunkLogits
from distill_kernels.losses.row_kernel import launch_row_loss
from distill_kernels.losses.terms import Objective, TokenStats, make_objective
from helpers import assert_as_good_as_torch, realistic_logits, relative_error

names = lambda term: term.type  # noqa: E731


def relative_logits(z, temperature=1.0, dtype=torch.float32):
    """Return relative logits as projection.py stores them, computed by PyTorch."""
    n, vocab = z.shape
    tiles = -(-vocab // TILE)
    padded = torch.nn.functional.pad(z.float(), (0, tiles * TILE - vocab), value=-math.inf).view(n, tiles, TILE)
    shift = padded.amax(-1)
    shift = torch.where(shift == -math.inf, 0.0, shift)
    relative = padded - shift[:, :, None]
    totals = [(relative / t).exp().sum(-1).contiguous() for t in (temperature, 1.0)]
    return ChunkLogits(relative.view(n, -1)[:, :vocab].to(dtype).contiguous(), shift, *totals)


def run_kernel(z, z_teacher, objective, labels=None, row_scale=None, rows=None, stats=False, gradient=True):
    """The row kernel over dense fp32 logits, all outputs poisoned."""
    n = z.shape[0]
    nan = float("nan")
    scale = torch.ones(n, device=z.device) if row_scale is None else row_scale
    loss = torch.full((scale.shape[0],), nan, device=z.device)
    figures = torch.full((7, scale.shape[0]), nan, device=z.device) if stats else None  # all but those of caps
    grad = torch.full_like(z, nan, dtype=torch.float32) if gradient else None
    launch_row_loss(
        relative_logits(z, objective.temperature),
        None if z_teacher is None else relative_logits(z_teacher, objective.temperature),
        objective,
        RowCall(labels, scale, rows, loss, figures, grad),
    )
    return loss, grad, figures


def exact_rows(z, z_teacher, terms, labels=None, *, scale=1.0, cap=None, **settings):
    z = z.double().detach().clone().requires_grad_()
    loss = dense_rows(softcap(z, scale, cap), z_teacher.double(), terms, labels, **settings)
    loss.sum().backward()
    return loss.detach(), z.grad


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("term", ALL_TERMS, ids=names)
def test_specification_equals_the_definitions(term, temperature):
    z, z_teacher = realistic_logits(5, 33)
    labels = torch.randint(0, 33, (5,))
    hard = {"label_smoothing": 0.1, "z_loss": 0.01} if term.type == "cross_entropy" else {}
    loss, grad = exact_rows(z, z_teacher, [term], labels, temperature=temperature, scale=0.7, cap=9.0, **hard)
    objective = make_objective([term], temperature=temperature, student_logit_scale=0.7, student_softcap=9.0, **hard)
    ours = reference_rows(z, z_teacher, objective, RowRequest(labels, torch.ones(5, dtype=torch.float64)))
    assert relative_error(ours.loss, loss) < 1e-12
    assert relative_error(ours.gradient, grad) < 1e-11


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 3000])
def test_any_size_gives_the_reference(kernel_device, vocab):
    terms = [LossTerm("reverse_kl", 0.5), LossTerm("cross_entropy", 0.5)]
    z, z_teacher = realistic_logits(3, vocab, device=kernel_device)
    labels = torch.randint(0, vocab, (3,), device=kernel_device)
    exact, exact_grad = exact_rows(z, z_teacher, terms, labels)
    loss, grad, _ = run_kernel(z.float(), z_teacher.float(), make_objective(terms), labels)
    assert relative_error(loss, exact) < 2e-6
    assert relative_error(grad, exact_grad) < 5e-6


@pytest.mark.plain(
    "forward_kl-1.0",
    "reverse_kl-1.0",
    "jsd-1.0",
    "skew_forward_kl-1.0",
    "skew_reverse_kl-2.5",
    "tvd-2.5",
    "cross_entropy-2.5",
)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("term", ALL_TERMS, ids=names)
def test_kernel_error_is_within_that_of_eager(kernel_device, term, temperature):
    z, z_teacher = realistic_logits(4, 700, device=kernel_device)
    labels = torch.randint(0, 700, (4,), device=kernel_device)
    hard = {"label_smoothing": 0.1, "z_loss": 0.01} if term.type == "cross_entropy" else {}
    exact, exact_grad = exact_rows(z, z_teacher, [term], labels, temperature=temperature, **hard)
    eager_z = z.float().requires_grad_()
    eager = dense_rows(eager_z, z_teacher.float(), [term], labels, temperature=temperature, **hard)
    eager.sum().backward()
    objective = make_objective([term], temperature=temperature, **hard)
    teacher = None if term.type == "cross_entropy" else z_teacher.float()
    loss, grad, _ = run_kernel(z.float(), teacher, objective, labels if term.type == "cross_entropy" else None)
    assert_as_good_as_torch(loss, eager.detach(), exact, torch.float32, "loss")
    assert_as_good_as_torch(grad, eager_z.grad, exact_grad, torch.float32, "gradient")
    without, none, _ = run_kernel(z.float(), teacher, objective, labels, gradient=False)
    assert none is None
    assert relative_error(without, exact) < 2e-6


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kernel_statistics_equal_the_specification(kernel_device, temperature):
    terms = [LossTerm("jsd", 0.5, beta=0.5), LossTerm("cross_entropy", 0.5)]
    z, z_teacher = realistic_logits(6, 300, device=kernel_device)
    z[1] = z_teacher[1]
    labels = torch.randint(0, 300, (6,), device=kernel_device)
    row_scale = torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0, 1.0], device=kernel_device)
    objective = make_objective(terms, temperature=temperature)
    expected = reference_rows(z, z_teacher, objective, RowRequest(labels, row_scale.double(), with_stats=True)).stats
    _, _, figures = run_kernel(z.float(), z_teacher.float(), objective, labels, row_scale, stats=True)
    for name, ours, right in zip(TokenStats._fields[:7], figures, expected[:7], strict=True):
        assert relative_error(ours, right) < 5e-6, name
    assert expected.agreement[1] == 1 and expected.divergence[1] == 0 and expected.divergence[2] == 0


def test_probabilities_over_a_large_vocabulary_add_up_to_1():
    """PyTorch's float32 log_softmax on a CPU lacks 1e-5 in all rows alike, which biases the mean loss."""
    torch.manual_seed(0)
    z = torch.randn(32, 49_152) * 2 + torch.where(torch.rand(32, 49_152) < 1e-3, 8.0, 0.0)
    totals = log_softmax(z).double().exp().sum(-1)
    assert (totals - 1).abs().max() < 2e-6 and (totals.mean() - 1).abs() < 2e-7
    z.requires_grad_()
    log_softmax(z)[:, 0].sum().backward()
    assert relative_error(z.grad[:, 1:], -z.double().softmax(-1)[:, 1:]) < 1e-4


@pytest.mark.parametrize("path", ["specification", "kernel"])
def test_a_tie_at_the_top_is_no_agreement(kernel_device, path):
    z, z_teacher = (torch.randn(7, 300, device=kernel_device).clamp_max(3) for _ in range(2))
    z[0, 7] = z_teacher[0, 7] = 5.0  # one and the same top token
    z[1], z_teacher[1, 0] = 0.0, 5.0  # a collapsed student
    z[2] = z_teacher[2] = 0.0
    z[3, [7, 299]], z_teacher[3, 7] = 5.0, 5.0
    z[4, 7], z_teacher[4, [7, 8]] = 5.0, 5.0
    z[5, [7, 8]], z_teacher[5, [7, 8]] = 5.0, 5.0
    z[6, 7], z_teacher[6, 8] = 5.0, 5.0
    objective = make_objective([LossTerm("forward_kl", 1.0)])
    if path == "kernel":
        agreement = run_kernel(z, z_teacher, objective, stats=True)[2][TokenStats._fields.index("agreement")]
    else:
        ones = torch.ones(7, device=kernel_device)
        stats = reference_rows(z, z_teacher, objective, RowRequest(None, ones, with_stats=True)).stats
        agreement = stats.agreement
    assert agreement.tolist() == [1, 0, 0, 0, 0, 0, 0]


def of_every_divergence(test):
    """Run a test for each divergence, by the specification and by the kernel."""
    test = pytest.mark.parametrize("term", ALL_TERMS[:-1], ids=names)(test)
    test = pytest.mark.parametrize("path", ["specification", "kernel"])(test)
    plain = ["forward_kl-specification", "reverse_kl-specification", "jsd-specification"]
    return pytest.mark.plain(*plain, "skew_forward_kl-kernel", "skew_reverse_kl-kernel", "tvd-kernel")(test)


def loss_and_gradient(path, z, z_teacher, objective):
    """Losses of rows and the gradient, which may take the place of the logits."""
    if path == "kernel":
        return run_kernel(z, z_teacher, objective)[:2]
    rows = reference_rows(z, z_teacher, objective, RowRequest(None, torch.ones(len(z), device=z.device)))
    return rows.loss, rows.gradient


@of_every_divergence
def test_equal_distributions_give_zero_and_nothing_is_negative(kernel_device, term, path):
    objective = make_objective([term])
    z = realistic_logits(4, 300, device=kernel_device)[0].float()
    assert loss_and_gradient(path, z.clone(), z, objective)[0].abs().max() == 0
    close = z * (1 + 1e-4)
    assert (loss_and_gradient(path, close, z, objective)[0] >= 0).all()


@of_every_divergence
def test_extreme_logits_give_no_nan(kernel_device, term, path):
    z, z_teacher = (t.float() for t in realistic_logits(4, 300, device=kernel_device))
    z[0, 5], z_teacher[0, 7] = 1e4, -1e4
    z[1], z_teacher[1] = z[1] * 1e3, z_teacher[1] * 1e3
    z[2, :5] = z_teacher[2, :5] = -math.inf  # both: the term is 0
    objective = make_objective([term])
    loss, grad = loss_and_gradient(path, z.clone(), z_teacher, objective)
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
    z[3, 9] = -math.inf  # the student alone: forward KL is infinite, the others are not
    loss, grad = loss_and_gradient(path, z, z_teacher, objective)
    assert (loss[3] == math.inf) if term.type in UNBOUNDED else torch.isfinite(loss[3])
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("gap", [8.0, 16.0])
@pytest.mark.parametrize("path", ["specification", "kernel", "logits"])
def test_skewed_kl_where_the_student_is_certain_of_another_token(kernel_device, path, gap):
    """Its gradient is what is left of two numbers near 1, and was lost to 5.5e-3 at a gap of 16 in fp32."""
    term = LossTerm("skew_forward_kl", 1.0, alpha=0.1)
    z, z_teacher = (0.1 * t for t in realistic_logits(4, 300, device=kernel_device))
    z[:, 3] += gap
    z_teacher[:, 7] += 3.0
    leaf = z.clone().requires_grad_()
    (exact,) = torch.autograd.grad(dense_rows(leaf, z_teacher, [term]).sum(), leaf)
    z, z_teacher, objective = z.float(), z_teacher.float(), make_objective([term])
    if path == "kernel":
        grad = run_kernel(z, z_teacher, objective)[1]
    elif path == "specification":
        scale = torch.ones(4, device=z.device)
        grad = reference_rows(z, z_teacher, objective, RowRequest(None, scale)).gradient
    else:
        leaf = z.requires_grad_()
        (grad,) = torch.autograd.grad(skew_kl(leaf, z_teacher, alpha=0.1, reduction="sum"), leaf)
    assert relative_error(grad, exact) < 2e-5


def test_rows_of_scale_zero_give_zero_even_with_nan_inputs(kernel_device):
    z, z_teacher = (t.float() for t in realistic_logits(3, 300, device=kernel_device))
    z[1] = float("nan")
    labels = torch.tensor([1, -100, 2], device=kernel_device)
    row_scale = torch.tensor([1.0, 0.0, 2.0], device=kernel_device)
    terms = [LossTerm("forward_kl", 1.0), LossTerm("cross_entropy", 1.0)]
    loss, grad, figures = run_kernel(z, z_teacher, make_objective(terms), labels, row_scale, stats=True)
    assert loss[1] == 0 and (grad[1] == 0).all() and (figures[:, 1] == 0).all()
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()


def test_results_of_gathered_rows_land_at_their_indices(kernel_device):
    z, z_teacher = (t.float() for t in realistic_logits(2, 300, device=kernel_device))
    rows = torch.tensor([4, 1], device=kernel_device)
    scale = torch.arange(1.0, 6.0, device=kernel_device)
    loss, _, _ = run_kernel(z, z_teacher, make_objective([ALL_TERMS[0]]), row_scale=scale, rows=rows)
    plain, _, _ = run_kernel(z, z_teacher, make_objective([ALL_TERMS[0]]))
    assert torch.equal(loss[rows], plain * scale[rows])
    assert loss[[0, 2, 3]].isnan().all()  # not this launch's to write


def test_objective_encode_decode_round_trip():
    objective = make_objective([*ALL_TERMS], temperature=2.0, z_loss=1e-4, teacher_softcap=30.0)
    assert Objective.decode(objective.encode()) == objective


@pytest.mark.parametrize(
    "terms, settings, field",
    [
        ([LossTerm("kl", 1.0)], {}, "terms[0].type"),
        ([LossTerm("forward_kl", -1.0)], {}, "terms[0].weight"),
        ([LossTerm("forward_kl", float("nan"))], {}, "terms[0].weight"),
        ([LossTerm("forward_kl", 0.0)], {}, "terms"),
        ([LossTerm("forward_kl", 1.0, beta=0.5)], {}, "beta"),
        ([LossTerm("jsd", 1.0, beta=1.5)], {}, "jsd.beta"),
        ([LossTerm("jsd", 1.0, alpha=0.5)], {}, "alpha"),
        ([LossTerm("skew_forward_kl", 1.0, alpha=1.0)], {}, "skew_forward_kl.alpha"),
        ([LossTerm("forward_kl", 1.0)], {"temperature": 0.0}, "temperature"),
        ([LossTerm("forward_kl", 1.0)], {"temperature": math.inf}, "temperature"),
        ([LossTerm("forward_kl", 1.0)], {"label_smoothing": 0.1}, "label_smoothing"),
        ([LossTerm("cross_entropy", 1.0)], {"label_smoothing": 1.1}, "label_smoothing"),
        ([LossTerm("cross_entropy", 1.0)], {"z_loss": -1.0}, "z_loss"),
        ([LossTerm("forward_kl", 1.0)], {"student_softcap": 0.0}, "student_softcap"),
        ([LossTerm("forward_kl", 1.0)], {"teacher_logit_scale": -1.0}, "teacher_logit_scale"),
    ],
)
def test_mistakes_are_named(terms, settings, field):
    with pytest.raises(ValueError, match=field.replace("[", r"\[").replace("]", r"\]")):
        make_objective(terms, **settings)


def test_mixture_parameters_at_their_limits_give_plain_divergences():
    for term, plain in (
        (LossTerm("jsd", 1.0, beta=0.0), "forward_kl"),
        (LossTerm("jsd", 1.0, beta=1.0), "reverse_kl"),
        (LossTerm("skew_forward_kl", 1.0, alpha=0.0), "forward_kl"),
        (LossTerm("skew_reverse_kl", 1.0, alpha=0.0), "reverse_kl"),
    ):
        assert make_objective([term]) == make_objective([LossTerm(plain, 1.0)])
