"""The reverse KL over K tokens with a sampled tail: no bias over 10,000 draws, and what full logits give."""

import pytest
import torch
from subjects import answering
from test_student_top_k_term import HT, H, V, assert_same, called, logits_of, loss_of, operands, valid

from distill.core.labels import IGNORE_INDEX
from distill.doctor.invariants import CHECKS
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.losses import measured_terms
from distill.objectives.sampled_tail import generalised_kl
from distill.objectives.student_top_k import StudentTopKTailLoss
from distill.objectives.targets import HeadForward, StepInputs, VocabularyAlignment
from distill.objectives.top_k import TopKFormat, TopKTargets
from distill.recipe.loss import Loss

DRAWS, K = 10_000, 5


def tail_loss(k=K, temperature=1.0, weight=1.0, alignment=None, transform=LogitTransform()):  # noqa: B008
    term = {"type": "top_k_reverse_kl", "tail": "sampled", "k": k, "weight": weight}
    section = Loss.model_validate({"temperature": temperature, "terms": [term]})
    return StudentTopKTailLoss(
        section.terms[0], section, alignment or VocabularyAlignment(LogitTransform(), V, None), transform
    )


def exact(z_s, z_t, temperature=1.0):
    """The full reverse KL, times T^2."""
    log_s, log_t = ((z / temperature).log_softmax(-1) for z in (z_s, z_t))
    return temperature**2 * (log_s.exp() * (log_s - log_t)).sum(-1)


def one_position(seed=3):
    """A student and a teacher that differ, at one position: hidden states [1, 1, .] and heads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = {"hidden": draw(1, 1, H), "weight": (0.3 * draw(V, H)).requires_grad_()}
    return student, {"hidden": draw(1, 1, HT), "weight": 0.3 * draw(V, HT)}, generator


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("stale", [False, True], ids=["drawn by the student", "drawn by older weights"])
def test_value_and_gradient_have_no_bias(stale, temperature):
    """Over 10,000 draws within 4 standard errors of the exact reverse KL; without the tail the same test fails."""
    student, teacher, generator = one_position()
    z_s, z_t = logits_of(student)[0, 0], logits_of(teacher)[0, 0]
    older = z_s.detach() + 0.5 * stale * torch.randn(V, generator=generator, dtype=torch.float64)
    log_q = older.log_softmax(-1)
    y = torch.multinomial(log_q.exp(), DRAWS, replacement=True, generator=generator)
    inputs = StepInputs(teacher["hidden"].expand(1, DRAWS, HT), None, False, log_q[y][None])
    own = HeadWeights(student["weight"], None, None)
    many = HeadForward(student["hidden"].expand(1, DRAWS, H), own, inputs, y[None], None)
    head = HeadWeights(teacher["weight"], None, None)
    loss = tail_loss(temperature=temperature)
    loss.reduction = "none"
    each = loss(many, head).flatten()
    expected = exact(z_s, z_t, temperature)
    assert (each >= 0).all()  # each draw's own

    def off(values, truth):
        """Distance of the mean from the truth in standard errors."""
        return ((values.mean() - truth).abs() / (values.std() / DRAWS**0.5)).item()

    assert off(each, expected.detach()) < 4
    inside = (z_s.detach().topk(K).indices == y[:, None]).any(-1)
    log_s, log_t = ((z / temperature).log_softmax(-1).detach() for z in (z_s, z_t))
    top = z_s.detach().topk(K).indices
    truncated = temperature**2 * generalised_kl(log_s[top], log_t[top]).sum()
    assert 0.2 < (~inside).double().mean() < 0.9
    assert abs(truncated - expected) > 10 * each.std() / DRAWS**0.5, "without the tail it would be biased"
    torch.testing.assert_close(each[inside], truncated.expand(int(inside.sum())))  # the mutation: no tail

    loss.reduction = "mean"
    direction = torch.randn(V, H, generator=generator, dtype=torch.float64)
    (got,) = torch.autograd.grad(loss(many, head), student["weight"])
    (truth,) = torch.autograd.grad(expected, student["weight"])
    # of each draw the slope along a direction, from the definition
    z = z_s.detach().requires_grad_()
    step = direction @ student["hidden"][0, 0]
    slopes = []
    for token in range(V):
        log_p = (z / temperature).log_softmax(-1)
        total = generalised_kl(log_p[top], log_t[top]).sum()
        if token not in top:
            total = total + generalised_kl(log_p[token], log_t[token], log_q[token])
        slopes.append((torch.autograd.grad(temperature**2 * total, z)[0] * step).sum())
    slopes = torch.stack(slopes)[y]
    torch.testing.assert_close((got * direction).sum(), slopes.mean(), rtol=1e-9, atol=1e-12)
    assert off(slopes, (truth * direction).sum()) < 4
    without = torch.stack([s for s, t in zip(slopes, y, strict=True) if t in top])[0]
    assert abs(without - (truth * direction).sum()) > 4 * slopes.std() / DRAWS**0.5


@pytest.mark.parametrize("told", [False, True], ids=["labels", "valid rows"])
@pytest.mark.parametrize("extra", [False, True], ids=["plain", "bias, LoRA, scale, soft cap, T = 2, columns cut"])
def test_loss_and_gradients_are_those_of_the_definition(told, extra):
    student, teacher, labels = operands(extra=extra)
    own, theirs, t = LogitTransform(), LogitTransform(), 1.0
    if extra:
        own, theirs, t = LogitTransform(0.7, 3.0), LogitTransform(1.3, 4.0), 2.0
    z_s, z_t = logits_of(student, own), logits_of(teacher, theirs)
    log_s, log_t = ((z / t).log_softmax(-1) for z in (z_s, z_t))
    top = z_s.detach().topk(K).indices
    y = labels.clamp_min(0)[..., None]
    p, q = log_s.exp(), log_t.exp()
    g = p * (log_s - log_t) - p + q
    outside = (top != y).all(-1)
    tail = g.gather(-1, y)[..., 0] / z_s.detach().softmax(-1).gather(-1, y)[..., 0] * outside
    each = t**2 * (g.gather(-1, top).sum(-1) + tail)
    learned = labels != IGNORE_INDEX
    assert 0 < outside[learned].sum() < learned.sum()
    loss = tail_loss(
        temperature=t, weight=0.6, alignment=VocabularyAlignment(own, V, V if extra else None), transform=theirs
    )
    got = called(loss, student, teacher, labels, valid(labels) if told else None, torch.tensor(11))
    assert_same(got, 0.6 * each[learned].sum() / 11, student)


@pytest.mark.parametrize("k", [V, V + 100])
@pytest.mark.parametrize("t", [1.0, 2.0])
def test_of_all_columns_it_is_the_reverse_kl(k, t):
    student, teacher, labels = operands()
    expected = exact(logits_of(student), logits_of(teacher), t)[labels != IGNORE_INDEX].mean()
    assert_same(called(tail_loss(k, t), student, teacher, labels), expected, student)


def test_loss_is_never_negative_and_zero_at_the_teacher():
    student, _, labels = operands()
    same = {"hidden": student["hidden"].detach(), "weight": student["weight"].detach(), "bias": None}
    assert called(tail_loss(), student, same, labels).abs() < 1e-12
    assert called(loss_of(), student, same, labels).abs() < 1e-12


def test_a_token_that_the_teacher_rules_out_is_infinite():
    """The token is one of the K or was sampled; other tokens play no part."""
    student, teacher, labels = operands()
    learned = labels != IGNORE_INDEX
    top = logits_of(student).detach().topk(K).indices[learned]
    seen = {*top.flatten().tolist(), *labels[learned].tolist()}
    free = next(token for token in range(V) if token not in seen)
    for token, is_infinite in ((int(labels[1, 0]), True), (int(top[0, 0]), True), (free, False)):
        bias = torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.tensor([token]), -torch.inf)
        got = called(tail_loss(), student, teacher | {"bias": bias}, labels)
        assert got.isinf().item() is is_infinite and not got.isnan()


# ------------------------------------------------------------------ over a teacher's K tokens


def stored(tail="bucket", temperature=1.0, **section):
    """A format of K tokens of a teacher, and the loss that it makes of a recipe's section."""
    format = TopKFormat(
        {
            "tail": tail,
            "temperature": temperature,
            "scale": 1.0,
            "softcap": None,
            "vocabulary": V,
            "k": K,
            "kind": "top_k",
        }
    )
    alignment = VocabularyAlignment(LogitTransform(), V, None)
    terms = [{"type": "top_k_reverse_kl", "tail": "sampled", "weight": 0.6}]
    return format, alignment, format.loss(Loss.model_validate({"terms": terms} | section), alignment)


@pytest.mark.parametrize("told", [False, True], ids=["labels", "valid rows"])
def test_over_the_teachers_tokens(told):
    """The K are the teacher's (MOPD), the drawn token's probability comes with them, and the figures are there."""
    student, teacher, labels = operands()
    format, alignment, loss = stored()
    z_s, log_t = logits_of(student), logits_of(teacher).log_softmax(-1)
    top, y = log_t.topk(K).indices, labels.clamp_min(0)[..., None]
    learned = labels != IGNORE_INDEX
    targets = TopKTargets(
        top.int(),
        log_t.gather(-1, top),
        torch.zeros(15),
        log_t.gather(-1, y)[..., 0].masked_fill(~learned, 0).flatten(),
    )
    drawn = torch.randn(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 3
    inputs = StepInputs(targets, torch.tensor(11), True, drawn.masked_fill(~learned, torch.nan))
    head = HeadWeights(student["weight"], None, None)
    got, statistics = format.apply(
        loss, alignment, HeadForward(student["hidden"], head, inputs, labels, valid(labels) if told else None)
    )
    log_s = z_s.log_softmax(-1)
    g = log_s.exp() * (log_s - log_t) - log_s.exp() + log_t.exp()
    outside = (top != y).all(-1)
    assert 0 < outside[learned].sum() < learned.sum()
    each = g.gather(-1, top).sum(-1) + outside * g.gather(-1, y)[..., 0] / drawn.exp()
    assert_same(got, 0.6 * each[learned].sum() / 11, student)
    torch.testing.assert_close(statistics.teacher_label_logprob, targets.label_logprob)
    assert statistics.divergence.sum() > 0 and measured_terms(loss)[0].type == "forward_kl"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"temperature": 2.0}, "loss.temperature: expected 1 with tail: sampled"),
        ({"tail": "sampled"}, "expects the teacher's top K tokens, got sampled ones"),
        (
            {"terms": [{"type": "top_k_reverse_kl", "tail": "sampled"}, {"type": "reverse_kl"}]},
            "alone, since the teacher",
        ),
        ({"terms": [{"type": "top_k_reverse_kl"}]}, "use top_k_reverse_kl with tail: sampled"),
    ],
)
def test_what_k_tokens_cannot_give_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        stored(**given)


@pytest.mark.full
def test_invariants_hold_with_a_sampled_tail():
    subject = answering()
    subject.loss = Loss.model_validate({"terms": [{"type": "top_k_reverse_kl", "k": 8, "tail": "sampled"}]})
    for check in CHECKS:
        finding = check(subject)
        assert finding.passed, finding
