"""The reverse KL over the student's top K tokens: against logits in fp64, and in recipes."""

import itertools
import math

import pytest
import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from helpers import PROMISED_GRADIENT, no_syncs, ops_called, realistic_heads, relative_error
from subjects import one
from torch.nn import functional as F

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives import hidden
from distill.objectives.student_top_k import StudentTopKLoss
from distill.objectives.targets import HeadForward, StepInputs, VocabularyAlignment
from distill.recipe import dump, parse
from distill.recipe.layer_terms import LAYERED
from distill.recipe.loss import SEPARATE, Loss
from distill.training.loss_schedule import LossSchedule

V, H, HT, K = 37, 16, 12, 5
PLAIN = LogitTransform()
TAILS = ("bucket", "renormalize")


def operands(dtype=torch.float64, seed=0, extra=False):
    """Hidden states, heads and labels; with `extra` biases, a LoRA and more columns for the student."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    labels = torch.randint(0, V, (3, 5), generator=generator)
    labels[0, :2], labels[2, 4] = IGNORE_INDEX, IGNORE_INDEX
    rows, more = V + 4 * extra, {}
    if extra:
        more = {"bias": draw(rows), "a": draw(2, H, scale=0.3), "b": draw(rows, 2)}
    student = {"hidden": draw(3, 5, H), "weight": draw(rows, H, scale=0.4), **more}
    teacher = {"hidden": draw(3, 5, HT), "weight": draw(V, HT, scale=0.5), "bias": draw(V) if extra else None}
    return {name: value.requires_grad_() for name, value in student.items()}, teacher, labels


def logits_of(side, transform=PLAIN, columns=V):
    z = F.linear(side["hidden"], side["weight"], side.get("bias"))
    if "a" in side:
        z = z + 0.5 * side["hidden"] @ side["a"].T @ side["b"].T
    z = z * transform.scale
    return (z if transform.softcap is None else transform.softcap * torch.tanh(z / transform.softcap))[..., :columns]


def dense(z_s, z_t, tail="bucket", k=K, temperature=1.0):
    """Each token's loss, from the definition, with a graph; `k` below the number of columns."""
    p, q = (torch.softmax(z / temperature, -1) for z in (z_s, z_t))
    own = p.detach().sort(-1, descending=True).indices[..., :k]
    rest = torch.ones_like(p, dtype=torch.bool).scatter(-1, own, False)
    parts = []
    for x in (p, q):
        kept, others = x.gather(-1, own), (x * rest).sum(-1, keepdim=True)
        parts.append(torch.cat([kept, others], -1) if tail == "bucket" else kept / kept.sum(-1, keepdim=True))
    p, q = parts
    return temperature**2 * (p * (p.log() - q.log())).sum(-1)


def loss_of(k=K, tail="bucket", alignment=None, transform=PLAIN, temperature=1.0, weight=1.0):
    section = Loss.model_validate(
        {"temperature": temperature, "terms": [{"type": "top_k_reverse_kl", "k": k, "tail": tail, "weight": weight}]}
    )
    return StudentTopKLoss(
        section.terms[0], section, alignment or VocabularyAlignment(LogitTransform(), V, None), transform
    )


def called(loss, student, teacher, labels, rows=None, items=None):
    lora = (student["a"], student["b"], 0.5) if "a" in student else None
    head = HeadWeights(student["weight"], student.get("bias"), lora)
    call = HeadForward(student["hidden"], head, StepInputs(teacher["hidden"], items, False), labels, rows)
    return loss(call, HeadWeights(teacher["weight"], teacher.get("bias"), None))


def valid(labels):
    return (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]


def assert_same(got, expected, student, rtol=1e-9):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=1e-12)
    leaves = list(student.values())
    for name, one_, other in zip(
        student, torch.autograd.grad(got, leaves, retain_graph=True), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert other.abs().max() > 1e-6, name
        torch.testing.assert_close(one_, other, rtol=rtol, atol=1e-12, msg=name)


# ------------------------------------------------------------------ against logits


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("told", [False, True], ids=["labels", "valid rows"])
@pytest.mark.parametrize("extra", [False, True], ids=["plain", "bias, LoRA, scale, soft cap, T = 2, columns cut"])
def test_loss_and_gradients_are_those_of_the_definition(tail, told, extra):
    student, teacher, labels = operands(extra=extra)
    own, theirs, t = LogitTransform(), LogitTransform(), 1.0
    if extra:
        own, theirs, t = LogitTransform(0.7, 3.0), LogitTransform(1.3, 4.0), 2.0
    alignment = VocabularyAlignment(own, V, V if extra else None)
    each = dense(logits_of(student, own), logits_of(teacher, theirs), tail, temperature=t)
    expected = 0.6 * each[labels != IGNORE_INDEX].sum() / 11
    loss = loss_of(tail=tail, alignment=alignment, transform=theirs, temperature=t, weight=0.6)
    got = called(loss, student, teacher, labels, valid(labels) if told else None, torch.tensor(11))
    assert_same(got, expected, student)
    mean = called(loss, student, teacher, labels, valid(labels) if told else None)
    torch.testing.assert_close(mean, expected * 11 / len(valid(labels)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("tail", TAILS)
def test_loss_per_token_equals_the_dense_definition(tail):
    student, teacher, labels = operands()
    expected = dense(logits_of(student), logits_of(teacher), tail).masked_fill(labels == IGNORE_INDEX, 0)
    upstream = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for rows in (None, valid(labels)):
        loss = loss_of(tail=tail)
        loss.reduction = "none"
        got = called(loss, student, teacher, labels, rows)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        assert_same((got * upstream).sum(), (expected * upstream).sum(), student)
        expected = dense(logits_of(student), logits_of(teacher), tail).masked_fill(labels == IGNORE_INDEX, 0)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("k", [V, V + 100])
@pytest.mark.parametrize("t", [1.0, 2.0])
def test_k_equal_to_the_vocabulary_is_the_reverse_kl(k, tail, t):
    student, teacher, labels = operands()
    full = FusedDistillationLoss([LossTerm("reverse_kl", 1.0)], temperature=t)
    expected = full(student["hidden"], student["weight"], teacher["hidden"], teacher["weight"], labels)
    assert_same(called(loss_of(k, tail, temperature=t), student, teacher, labels), expected, student)


def test_smaller_k_gives_a_smaller_divergence():
    """The bucket's loss grows with K up to that of all columns; one less is enough: the bucket is a token."""
    student, teacher, labels = operands()
    values = [called(loss_of(k), student, teacher, labels) for k in (1, 2, 5, 20, V - 1, V)]
    assert all(0 < a < b for a, b in itertools.pairwise(values[:5]))
    torch.testing.assert_close(values[-2], values[-1], rtol=1e-9, atol=0)


def test_hidden_states_that_are_not_contiguous():
    student, teacher, labels = operands()
    wide = torch.randn(5, 3, 2 * H, dtype=torch.float64)
    wide[..., ::2] = student["hidden"].detach().transpose(0, 1)
    view = wide[..., ::2].transpose(0, 1).requires_grad_()
    assert not view.is_contiguous()
    other = student | {"hidden": view}
    for rows in (None, valid(labels)):
        got = called(loss_of(), other, teacher | {"hidden": teacher["hidden"].mT.contiguous().mT}, labels, rows)
        assert_same(got, dense(logits_of(other), logits_of(teacher))[labels != IGNORE_INDEX].mean(), other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_not_read(reduction):
    """They may hold anything, and where the valid rows are told, no logits are made of them."""
    student, teacher, labels = operands()
    rows, found, seen = valid(labels), [], set()
    for filler in (0.0, torch.nan):
        ignored = (labels == IGNORE_INDEX)[..., None]
        own = student | {"hidden": student["hidden"].detach().masked_fill(ignored, filler).requires_grad_()}
        other = teacher | {"hidden": teacher["hidden"].masked_fill(ignored, filler)}
        for told in (None, rows):
            loss = loss_of()
            loss.reduction = reduction
            with ops_called("aten::mm") as products:
                got = called(loss, own, other, labels, told)
            seen |= {len(product.result) for product in products if product.result.shape[1] == V}
            found.append([got.detach(), *torch.autograd.grad(got.sum(), list(own.values()))])
    assert seen == {len(rows)}  # without valid rows the loss finds those that count
    for one_, other in itertools.product(found[1:], found[:1]):
        torch.testing.assert_close(one_, other, rtol=1e-12, atol=1e-15)
    assert not found[0][1][labels == IGNORE_INDEX].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_rows_ignored_gives_zero(reduction):
    student, teacher, labels = operands()
    labels = torch.full_like(labels, IGNORE_INDEX)
    for rows in (None, valid(labels)):
        loss = loss_of()
        loss.reduction = reduction
        got = called(loss, student, teacher, labels, rows)
        assert not got.any() and not got.isnan().any()
        assert not any(g.any() for g in torch.autograd.grad(got.sum(), list(student.values())))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_token_impossible_under_the_teacher_costs_infinity(tail, dtype):
    """At the tokens whose K hold such a one, also where all are; an ignored token costs nothing, and nothing is NaN."""
    student, teacher, labels = operands(dtype)
    likeliest = logits_of(student).topk(K).indices
    for without, everywhere in ((likeliest[1, 2, -1:], False), (torch.arange(V), True)):
        bias = torch.zeros(V, dtype=dtype)
        bias[without] = -torch.inf
        bias[V - 1] = 0.0  # some token is possible
        holds = (bias[likeliest] == -torch.inf).any(-1) & (labels != IGNORE_INDEX)
        assert holds.any() and (everywhere or not holds.all())
        loss = loss_of(tail=tail)
        loss.reduction = "none"
        got = called(loss, student, teacher | {"bias": bias}, labels)
        assert torch.equal(got.isinf(), holds) and not got.isnan().any()
        loss.reduction = "mean"
        assert called(loss, student, teacher | {"bias": bias}, labels) == torch.inf
    labels = torch.full_like(labels, IGNORE_INDEX)
    assert called(loss, student, teacher | {"bias": bias}, labels) == 0


@pytest.mark.parametrize("mass", [1 - 1e-9, 1 - 1e-5, 0.5, 1e-5, 1e-9])
def test_teachers_with_all_or_no_mass_in_the_tail(mass):
    """Results follow the teacher's mass on the K in fp32, a tail of any size."""
    generator = torch.Generator().manual_seed(1)
    z_s = 2 * torch.randn(6, V, generator=generator, dtype=torch.float64)
    q = torch.rand(6, V, generator=generator, dtype=torch.float64)
    own = torch.zeros_like(q, dtype=torch.bool).scatter(-1, z_s.topk(K).indices, True)

    def teacher(mass):
        return torch.where(own, mass * q / (q * own).sum(-1, keepdim=True), (1 - mass) * q / (q * ~own).sum(-1, True))

    eye = torch.eye(V)
    student = {"hidden": z_s.float()[None].requires_grad_(), "weight": eye}
    labels = torch.zeros(1, 6, dtype=torch.int64)
    got = called(loss_of(), student, {"hidden": teacher(mass).log().float()[None], "weight": eye}, labels)
    z = z_s.clone().requires_grad_()
    expected = dense(z, teacher(mass).log()).mean()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    (slope,), (right,) = torch.autograd.grad(got, student["hidden"]), torch.autograd.grad(expected, z)
    assert relative_error(slope[0], right) < 1e-5


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("k", [K, V])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, PROMISED_GRADIENT)])
def test_kernel_gradients_equal_fp64(dtype, allowed, k, tail):
    """Gradients; 16 bits against what fp64 makes of the same numbers."""
    student, teacher, labels = operands(dtype, seed=6)
    wide = {name: value.detach().double().requires_grad_() for name, value in student.items()}
    exact = {name: None if value is None else value.double() for name, value in teacher.items()}
    each = dense(logits_of(wide), logits_of(exact), tail if k < V else "renormalize", k)
    expected = each[labels != IGNORE_INDEX].mean()
    got = called(loss_of(k, tail), student, teacher, labels, valid(labels))
    assert relative_error(got, expected) < allowed
    slopes = torch.autograd.grad(got, list(student.values()))
    for mine, right in zip(slopes, torch.autograd.grad(expected, list(wide.values())), strict=True):
        assert mine.dtype == dtype and relative_error(mine, right) < allowed


# ------------------------------------------------------------------ as part of a loss


@pytest.mark.parametrize(
    "others, called_, weight",
    [
        ([], "kl", 1.0),
        ([("cross_entropy", 0.5)], "kl", 1.0),
        ([("reverse_kl", 0.3)], "kl", 0.3),
        ([("jsd", 0.3), ("cross_entropy", 0.5)], "divergence", 0.3),
    ],
)
def test_term_adds_to_others_and_metrics_are_of_whole_distributions(others, called_, weight):
    """Alone, or with hard labels alone, those of the forward KL; the log divides by the weight."""
    term = {"type": "top_k_reverse_kl", "k": 8, "weight": 0.7}
    rest = [{"type": name, "weight": weight} for name, weight in others]

    def outcome(terms):
        subject = one({"temperature": 2.0, "terms": terms})
        objective = subject.objective()
        with_figures = subject.student(**objective.student_inputs(subject.batch()))
        without = subject.student(**objective.student_inputs(subject.batch(), statistics=False))
        assert torch.equal(with_figures["loss"], without["loss"]) and "statistics" not in without
        gradients = torch.autograd.grad(without["loss"], list(subject.student.parameters()))
        objective.detach()
        return with_figures["loss"], gradients, with_figures["statistics"], objective

    loss, gradients, figures, objective = outcome([*rest, term])
    assert objective.divergence == (called_, weight)
    assert {(t.type, t.weight) for t in objective.terms} == {*others, ("top_k_reverse_kl", 0.7)}
    parts = [outcome(each) for each in (rest, [term]) if each]
    torch.testing.assert_close(loss, sum(part[0] for part in parts))
    for got, *expected in zip(gradients, *(part[1] for part in parts), strict=True):
        torch.testing.assert_close(got, sum(expected), rtol=1e-4, atol=1e-7)
    soft = [each for each in rest if each["type"] != "cross_entropy"]
    torch.testing.assert_close(figures, outcome(rest if soft else [{"type": "forward_kl"}])[2])


def test_scheduled_weight_of_zero_queries_no_teacher():
    """Down to 0, where hard labels are all that is left and the teacher is not asked."""
    section = Loss.model_validate(
        {
            "terms": [{"type": "top_k_reverse_kl", "k": 8}, {"type": "cross_entropy", "weight": 0.5}],
            "schedule": [{"setting": "terms.0.weight", "steps": [0, 4], "values": [1.0, 0.0]}],
        }
    )
    subject = one()
    subject.loss = section
    objective = subject.objective()
    schedule, values = LossSchedule(objective, section), []
    for step in range(5):
        schedule.begin_step(step)
        values.append(subject.student(**objective.student_inputs(subject.batch(), statistics=False))["loss"].item())
        assert objective.needs_targets is (step < 4)
    objective.detach()
    steps = [a - b for a, b in itertools.pairwise(values)]
    assert steps == pytest.approx([steps[0]] * 4, rel=1e-4) and steps[0] > 1e-3


BASE = "teacher: {model: t}\nstudent: {model: s}\ntrain: {steps: 3}\ndata: {source: x.jsonl}\n"
TERM = "loss: {temperature: 2, terms: [{type: top_k_reverse_kl}]}\n"


def test_recipes_with_this_loss():
    recipe = parse(BASE + TERM)
    assert parse(dump(recipe)) == recipe and recipe.loss.terms[0].model_dump() == {
        "type": "top_k_reverse_kl",
        "weight": 1.0,
        "k": 64,
        "tail": "bucket",
        "clip": None,
    }
    parse(BASE + TERM, ["data.on_policy={fraction: 0.5, temperature: 0.7}"])
    parse(BASE + TERM, ["teacher={type: cache, path: there}"])  # which may hold hidden states
    parse(BASE + TERM, ["loss.plugin={file: p.py, sha256: " + "0" * 64 + "}"])
    assert hidden.TERM_LOSSES.keys() == {*SEPARATE, *LAYERED}


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("tail", TAILS)
def test_full_vocabulary_matches_fp32_without_a_host_sync(device, tail):
    """Against fp32 logits of the same 16-bit operands, chunk by chunk; without a wait, within 3 GiB."""
    shape, k = (4096, 151936, 896, 1536), 64
    x, w, x_t, w_t = realistic_heads(*shape, dtype=torch.bfloat16, device=device)
    student = {"hidden": x[None].requires_grad_(), "weight": w.requires_grad_()}
    labels = torch.randint(0, shape[1], (1, shape[0]), device=device)
    labels[:, ::5] = IGNORE_INDEX
    rows, teacher = valid(labels), {"hidden": x_t[None], "weight": w_t}
    loss, items = (
        loss_of(k, tail, VocabularyAlignment(LogitTransform(), shape[1], None)),
        torch.tensor(len(rows), device=device),
    )
    torch.autograd.grad(called(loss, student, teacher, labels, rows, items), list(student.values()))  # kernels compile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_syncs():
        got = called(loss, student, teacher, labels, rows, items)
        gradients = torch.autograd.grad(got, list(student.values()))
    assert torch.cuda.max_memory_allocated() - before < 3 << 30
    total, dx, dw = 0.0, torch.zeros(shape[0], shape[2], device=device), torch.zeros(shape[1], shape[2], device=device)
    for here in rows.split(256):
        leaves = [t.detach().float().requires_grad_() for t in (x[here], w)]
        part = dense(leaves[0] @ leaves[1].T, x_t[here].float() @ w_t.float().T, tail, k).sum() / len(rows)
        total += part.item()
        dx[here], more = torch.autograd.grad(part, leaves)
        dw += more
    assert math.isclose(got.item(), total, rel_tol=1e-3)
    assert relative_error(gradients[0][0], dx) < 3e-3 and relative_error(gradients[1], dw) < 3e-3
