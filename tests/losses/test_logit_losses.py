"""Losses over logits that exist, against plain PyTorch formulas differentiated by autograd."""

import warnings

import pytest
import torch
from distill_kernels import cross_entropy, distillation_loss, jsd, kl_div, skew_kl, tvd
from distill_kernels.launch import DeviceFacts
from distill_kernels.losses.logit_row_kernel import MAX_REGISTER_COLUMNS, STEPS, launch_shape
from distill_kernels.losses.terms import LossTerm
from grids import pairwise
from helpers import assert_as_good_as_torch, realistic_logits, relative_error
from torch.nn import functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def divergence(name, s, t):
    """One divergence from log-probabilities, as a person would write it."""
    p_s, p_t = s.exp(), t.exp()

    def kl(log_p, log_q):
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if name == "forward":
        return kl(t, s)
    if name == "reverse":
        return kl(s, t)
    if name == "tvd":
        return (p_s - p_t).abs().sum(-1) / 2
    if name == "jsd":
        m = (0.3 * p_t + 0.7 * p_s).log()
        return 0.3 * kl(t, m) + 0.7 * kl(s, m)
    if name == "skew_forward":
        return kl(t, (0.2 * p_t + 0.8 * p_s).log())
    return kl(s, (0.2 * p_s + 0.8 * p_t).log())


OURS = {
    "forward": lambda *a, **k: kl_div(*a, **k),
    "reverse": lambda *a, **k: kl_div(*a, direction="reverse", **k),
    "jsd": lambda *a, **k: jsd(*a, beta=0.3, **k),
    "skew_forward": lambda *a, **k: skew_kl(*a, alpha=0.2, **k),
    "skew_reverse": lambda *a, **k: skew_kl(*a, alpha=0.2, direction="reverse", **k),
    "tvd": lambda *a, **k: tvd(*a, **k),
}


def plain(name, student, teacher, labels, temperature):
    s, t = (F.log_softmax(z / temperature, -1) for z in (student, teacher))
    rows = divergence(name, s, t) * temperature**2
    kept = labels != -100
    return torch.where(kept, rows, 0).sum() / kept.sum()


def loss_and_gradient(function, student, *rest, **settings):
    student = student.clone().requires_grad_()
    loss = function(student, *rest, **settings)
    (3 * loss).backward()
    return loss.detach(), student.grad


@pytest.mark.plain(
    "forward-torch.float32-515",
    "reverse-torch.bfloat16-8200",
    "jsd-torch.float16-515",
    "skew_forward-torch.float32-8200",
    "skew_reverse-torch.bfloat16-515",
    "tvd-torch.float16-8200",
)
@pytest.mark.parametrize(*pairwise({"name": OURS, "dtype": DTYPES, "vocab": [515, 8192 + 8]}))
def test_divergences_and_gradients_equal_the_reference(kernel_device, limit, name, dtype, vocab):
    if vocab > 8192:  # also rows in several blocks, on a vocabulary that the interpreter can manage
        limit.setattr("distill_kernels.losses.logit_row_kernel.MAX_REGISTER_COLUMNS", 4096)
    student, teacher = (z.to(dtype) for z in realistic_logits(5, vocab, device=kernel_device))
    labels = torch.tensor([1, -100, 2, 3, 0], device=kernel_device)
    temperature = 2.0 if vocab == 515 else 1.0
    exact = loss_and_gradient(plain_of(name), student.double(), teacher.double(), labels, temperature)
    eager = loss_and_gradient(plain_of(name), student, teacher, labels, temperature)
    ours = loss_and_gradient(OURS[name], student, teacher, labels, temperature=temperature)
    assert_as_good_as_torch(ours[0], eager[0], exact[0], dtype, "loss")
    assert_as_good_as_torch(ours[1], eager[1], exact[1], dtype, "gradient")
    assert not ours[1][1].any(), "an ignored row got a gradient"


@pytest.mark.parametrize("name", ["forward", "jsd"])
def test_gradients_do_not_underflow_in_fp16_before_the_gradient_scaler(kernel_device, name):
    """A mean over many tokens is small; raised by a scaler, its gradient is as exact as that of a few."""
    student, teacher = (z.half() for z in realistic_logits(4, 515, device=kernel_device))
    labels = torch.zeros(4, dtype=torch.int64, device=kernel_device)

    def raised(function, *logits, **settings):
        return loss_and_gradient(lambda *z, **more: 2.0**16 * function(*z, **more), *logits, labels, **settings)

    exact = raised(plain_of(name), student.double(), teacher.double(), temperature=1.0)
    ours = raised(OURS[name], student, teacher, num_items=2**18)
    assert relative_error(ours[0] * 2**16, exact[0]) < 1e-5
    assert relative_error(ours[1].double() * 2**16, exact[1]) < 1e-3


def plain_of(name):
    return lambda student, teacher, labels, temperature: plain(name, student, teacher, labels, temperature)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 1e-3)])
def test_cross_entropy_equals_torchs(kernel_device, dtype, smoothing, z_loss):
    student = realistic_logits(6, 700, device=kernel_device)[0].to(dtype)
    labels = torch.tensor([699, 0, -100, 5, 300, 7], device=kernel_device)

    def plain_loss(z):
        kept = z[labels != -100]
        extra = z_loss * kept.logsumexp(-1).square().mean()
        return F.cross_entropy(z, labels, label_smoothing=smoothing) + extra

    exact = loss_and_gradient(plain_loss, student.double())
    eager = loss_and_gradient(plain_loss, student)
    ours = loss_and_gradient(lambda z: cross_entropy(z, labels, label_smoothing=smoothing, z_loss=z_loss), student)
    assert_as_good_as_torch(ours[0], eager[0], exact[0], dtype, "loss")
    assert_as_good_as_torch(ours[1], eager[1], exact[1], dtype, "gradient")


def test_several_terms_in_one_pass_are_their_sum(kernel_device):
    student, teacher = (z.float() for z in realistic_logits(4, 300, device=kernel_device))
    labels = torch.tensor([5, 6, -100, 7], device=kernel_device)
    terms = [LossTerm("forward_kl", 0.5), LossTerm("reverse_kl", 0.25), LossTerm("cross_entropy", 2.0)]

    def together(z):
        return distillation_loss(z, teacher, labels, terms=terms, temperature=2.0)

    def apart(z):
        soft = (
            plain("forward", z, teacher.double(), labels, 2.0) / 2
            + plain("reverse", z, teacher.double(), labels, 2.0) / 4
        )
        return soft + 2 * F.cross_entropy(z, labels)

    ours, exact = loss_and_gradient(together, student), loss_and_gradient(apart, student.double())
    assert relative_error(ours[0], exact[0]) < 1e-5 and relative_error(ours[1], exact[1]) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_weights_and_items(kernel_device, reduction):
    student, teacher = (z.float().view(2, 3, 200) for z in realistic_logits(6, 200, device=kernel_device))
    labels = torch.tensor([[1, -100, 2], [3, 4, 5]], device=kernel_device)
    weights = torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 3.0]], device=kernel_device)
    upstream = torch.rand(2, 3, device=kernel_device)

    def combine(rows):
        return (rows * upstream).sum() if reduction == "none" else rows

    def expected(z):
        rows = divergence("forward", F.log_softmax(z, -1), F.log_softmax(teacher.double(), -1))
        rows = torch.where(labels != -100, rows * weights.double(), 0)
        return combine(rows if reduction == "none" else rows.sum() / (7 if reduction == "mean" else 1))

    def actual(z):
        items = torch.tensor(7, device=kernel_device)
        return combine(kl_div(z, teacher, labels, reduction=reduction, token_weights=weights, num_items=items))

    ours, exact = loss_and_gradient(actual, student), loss_and_gradient(expected, student.double())
    assert relative_error(ours[0], exact[0]) < 1e-5 and relative_error(ours[1], exact[1]) < 1e-5


def test_shifted_views_are_read_without_a_copy(kernel_device):
    student, teacher = (z.float().view(2, 4, 130) for z in realistic_logits(8, 130, device=kernel_device))
    ours = loss_and_gradient(lambda z: kl_div(z[:, :-1, :128], teacher[:, 1:, :128]), student)
    copied = loss_and_gradient(lambda z: kl_div(z[:, :-1, :128].clone(), teacher[:, 1:, :128].clone()), student)
    assert torch.equal(ours[0], copied[0]) and torch.equal(ours[1], copied[1])
    assert not ours[1][:, -1].any() and not ours[1][..., 128:].any()


@pytest.mark.parametrize("name", ["forward", "jsd"])
def test_gradient_in_place_overwrites_the_logits(kernel_device, name):
    student, teacher = (z.bfloat16() for z in realistic_logits(3, 400, device=kernel_device))
    expected = loss_and_gradient(OURS[name], student, teacher)
    leaf = student.clone().requires_grad_()
    logits = leaf * 1.0
    loss = OURS[name](logits, teacher, in_place=True)
    memory = logits.data_ptr()
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    (3 * loss).backward()
    assert torch.equal(leaf.grad, expected[1]) and torch.equal(loss.detach(), expected[0])
    assert seen == [memory], "the gradient was made in other memory"


def test_gradient_in_place_raises_where_it_would_be_wrong(kernel_device):
    student, teacher = (z.float() for z in realistic_logits(3, 40, device=kernel_device))
    leaf = student.clone().requires_grad_()
    with pytest.raises(ValueError, match="in_place"):
        kl_div(leaf, teacher, in_place=True)
    capped = torch.tanh(leaf)  # whose backward reads its output, which is overwritten
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kl_div(capped, teacher, in_place=True).backward()
    with pytest.raises(ValueError, match="no row expanded, got strides"):
        kl_div((leaf * 1)[:1].expand(3, 40), teacher, in_place=True)  # three gradients for one place
    with torch.no_grad():
        kept = student.clone()
        kl_div(kept, teacher, in_place=True)
        assert torch.equal(kept, student), "logits were overwritten although no gradient was asked for"


@pytest.mark.plain(
    "forward-torch.float32",
    "forward-torch.float16",
    "reverse-torch.bfloat16",
    "jsd-torch.float32",
    "jsd-torch.float16",
    "skew_forward-torch.float16",
    "skew_reverse-torch.bfloat16",
    "tvd-torch.float32",
    "tvd-torch.float16",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OURS)
def test_extreme_logits_give_finite_losses(kernel_device, name, dtype):
    student, teacher = (z.to(dtype) for z in realistic_logits(4, 300, device=kernel_device))
    student[0, 3], teacher[0, 4] = 1e4, 1e4
    student[1, 5] = teacher[1, 5] = -float("inf")
    student[2, 6] = -1e4
    loss, gradient = loss_and_gradient(lambda s, t: OURS[name](s, t, reduction="none").sum(), student, teacher)
    assert not gradient.isnan().any() and not loss.isnan() and loss >= 0
    student[3, 7] = -float("inf")  # the teacher has probability where the student has none
    loss = OURS[name](student, teacher, reduction="none")
    assert not loss.isnan().any() and (loss >= 0).all()
    if name == "forward":
        assert loss[3] == float("inf")


@pytest.mark.parametrize("name", OURS)
def test_divergence_of_a_model_from_itself_is_zero(kernel_device, name):
    logits = realistic_logits(3, 333, device=kernel_device)[0].bfloat16()
    loss, gradient = loss_and_gradient(OURS[name], logits, logits)
    if name in ("forward", "reverse", "tvd"):
        assert loss == 0
    assert 0 <= loss < 1e-6 and gradient.abs().max() < 1e-6  # a mixture's logarithm rounds


def test_all_ignored_and_empty(kernel_device):
    student, teacher = (z.float() for z in realistic_logits(3, 40, device=kernel_device))
    loss, gradient = loss_and_gradient(kl_div, student, teacher, torch.full((3,), -100, device=kernel_device))
    assert loss == 0 and not gradient.any()
    for dtype in (torch.float32, torch.float16):
        loss, gradient = loss_and_gradient(kl_div, student[:0].to(dtype), teacher[:0].to(dtype))
        assert loss == 0 and gradient.shape == (0, 40)


def test_labels_of_small_integer_dtypes(kernel_device):
    student, teacher = (z.float() for z in realistic_logits(3, 200, device=kernel_device))
    labels = torch.tensor([1, 156, 199], device=kernel_device)  # 156 is -100 as an unsigned byte
    for dtype in (torch.uint8, torch.int16, torch.int32):
        loss = kl_div(student, teacher, labels.to(dtype))
        assert torch.equal(loss, kl_div(student, teacher, labels))
        assert torch.equal(cross_entropy(student, labels.to(dtype)), cross_entropy(student, labels))


def test_second_backward_raises(kernel_device):
    student, teacher = (z.float() for z in realistic_logits(3, 40, device=kernel_device))
    loss = kl_div(student.requires_grad_(), teacher)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        loss.backward()


def test_mistakes_name_the_argument(device):
    logits = torch.randn(3, 10, device=device)
    for call, name in [
        (lambda: kl_div(logits, logits[:2]), "teacher_logits"),
        (lambda: kl_div(logits, logits, torch.zeros(2, dtype=torch.long, device=device)), "labels"),
        (lambda: kl_div(logits, logits, reduction="batchmean"), "reduction"),
        (lambda: kl_div(logits, logits, direction="sideways"), "direction"),
        (lambda: kl_div(logits, logits, temperature=0.0), "temperature"),
        (lambda: cross_entropy(logits, None), "labels"),
        (lambda: kl_div(logits.long(), logits), "student_logits"),
    ]:
        with pytest.raises(ValueError, match=name):
            call()


def test_op_passes_opcheck(kernel_device):
    student, teacher = (z.float().view(1, 3, 40) for z in realistic_logits(3, 40, device=kernel_device))
    objective = kl_objective()
    scale = torch.ones(3, device=kernel_device)
    arguments = (student.requires_grad_(), teacher, None, scale, objective, True)
    torch.library.opcheck(torch.ops.distill.logit_divergence.default, arguments)


def kl_objective():
    from distill_kernels.losses.terms import make_objective

    return make_objective([LossTerm("reverse_kl", 1.0)], temperature=2.0).encode()


def test_compiles_without_graph_breaks(device):
    student, teacher = (z.float() for z in realistic_logits(4, 60, device=device))
    labels = torch.tensor([1, 2, -100, 3], device=device)

    def step(z):
        return jsd(z * 1.5, teacher, labels, beta=0.5, temperature=2.0)

    eager = loss_and_gradient(step, student)
    with warnings.catch_warnings(action="error"):  # as of a cache that dynamo would look through
        compiled = loss_and_gradient(torch.compile(step, fullgraph=True, backend="aot_eager"), student)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("soft", [True, False])
def test_launch_shapes_of_all_row_lengths(soft):
    h200 = DeviceFacts(132, "sm_90", 227 << 10, 50 << 20, 141 << 30)
    vocabularies = (5, 2048, MAX_REGISTER_COLUMNS, MAX_REGISTER_COLUMNS + 1, 32_000, 128_256, 262_144)
    shapes = [launch_shape(vocab, 4096, h200, soft=soft) for vocab in vocabularies]
    assert [whole for whole, *_ in shapes] == [True, True, True, False, False, False, False]
    for vocab, (whole, lanes, warps, programs) in zip(vocabularies, shapes, strict=True):
        assert not whole or lanes * STEPS >= vocab, "a whole row is one block"
        assert lanes * STEPS <= 32 * 32 * warps, "32 logits of each model a thread"
        assert warps * programs <= 132 * 64 and warps * min(programs, 4096) >= min(132 * 64, 4096 * 4), "a full GPU"


def tvd_gradient(student, teacher, labels, temperature, made):
    """The gradient of `3 * tvd` by its formula, `p_s (sign - sum(p_s sign)) / 2`, sign that of `p_s - p_t`.

    It jumps where both are equal. Where fp32 cannot tell which is larger (rounding log-probabilities of size 16 to 25
    moves each by 1e-6), -1, 0 and 1 are all right, and the one is taken that `made` took.
    """
    log_s, log_t = (F.log_softmax(z / temperature, -1) for z in (student, teacher))
    kept = (labels != -100)[:, None]
    p, unclear = log_s.exp(), (log_s - log_t).abs() < 4e-6
    unit = 3 * p * temperature / 2 / kept.sum()
    sign = (log_s - log_t).sign()
    taken = (made.double() / unit + (p * sign).sum(-1, keepdim=True)).round().clamp(-1, 1)
    sign = torch.where(unclear & kept, taken, sign)
    return torch.where(kept, unit * (sign - (p * sign).sum(-1, keepdim=True)), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [151_936, 128_257, 16_384, 16_392, 32_000])
def test_full_vocabularies_equal_the_reference(device, name, dtype, vocab):
    student, teacher = (z.to(dtype) for z in realistic_logits(64, vocab, device=device))
    labels = torch.arange(64, device=device)
    labels[::3] = -100
    exact = loss_and_gradient(plain_of(name), student.double(), teacher.double(), labels, 2.0)
    eager = loss_and_gradient(plain_of(name), student, teacher, labels, 2.0)
    ours = loss_and_gradient(OURS[name], student, teacher, labels, temperature=2.0)
    assert_as_good_as_torch(ours[0], eager[0], exact[0], dtype, "loss")
    if name == "tvd" and dtype == torch.float32:
        by_sign = [tvd_gradient(student.double(), teacher.double(), labels, 2.0, made[1]) for made in (ours, eager)]
        assert relative_error(ours[1], by_sign[0]) <= 1.5 * relative_error(eager[1], by_sign[1]) + 2e-6
    else:
        assert_as_good_as_torch(ours[1], eager[1], exact[1], dtype, "gradient")
    again = loss_and_gradient(OURS[name], student, teacher, labels, temperature=2.0)
    assert torch.equal(ours[0], again[0]) and torch.equal(ours[1], again[1])
