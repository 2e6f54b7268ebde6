"""Losses of the tokens that a student draws: log-probabilities without logits, and the policy gradient of them."""

import pytest
import torch
from distill_kernels import fused_log_probs
from helpers import ops_called
from subjects import answering, informed_answering, routed_answering
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from torch.nn import functional as F

from distill.core.labels import IGNORE_INDEX
from distill.doctor.invariants import CHECKS, fused_equals_reference
from distill.generation.on_policy import is_repetitive
from distill.objectives.policy_gradient import discounted, policy_gradient_loss
from distill.recipe import dump, parse
from distill.recipe.loss import Loss
from distill.teachers.registry import source_of

ALONE = {"terms": [{"type": "policy_gradient", "weight": 0.7}]}
BASE = (
    "teacher: {model: t}\nstudent: {model: s}\ntrain: {steps: 3}\n"
    "data: {source: x.jsonl, on_policy: {max_new_tokens: 8}}\nloss: {terms: [{type: policy_gradient}]}\n"
)


def operands(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 5, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (0.4 * torch.randn(37, 16, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, 37, (3, 5), generator=generator)
    labels[0, :2], labels[2, 4] = IGNORE_INDEX, IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("softcap, scale, bias", [(None, 1.0, False), (3.0, 0.5, True)])
def test_log_probs_are_those_of_the_logits(softcap, scale, bias):
    hidden, weight, labels = operands()
    own = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    z = scale * F.linear(hidden, weight, own)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    keep = labels != IGNORE_INDEX
    expected = torch.where(keep, z.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0], 0.0)
    given = [tensor for tensor in (hidden, weight, own) if tensor is not None]
    upstream = torch.randn(3, 5, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, given, upstream)
    rows = keep.flatten().nonzero().squeeze(1)
    for more in ({}, {"valid_rows": rows}):
        got = fused_log_probs(hidden, weight, labels, bias=own, softcap=softcap, logit_scale=scale, **more)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        for one, other in zip(torch.autograd.grad(got, given, upstream), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_log_probs_in_16_bits_miss_no_more_than_the_product():
    hidden, weight, labels = operands(torch.bfloat16)
    got = fused_log_probs(hidden, weight, labels)
    wide = F.linear(hidden.double(), weight.double()).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    plain = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    keep = labels != IGNORE_INDEX
    assert got.dtype == torch.float32 and not got[~keep].any()
    assert (got - wide)[keep].abs().max() <= 2 * (plain - wide)[keep].abs().max() + 1e-6


def test_log_probs_are_not_summed():
    hidden, weight, labels = operands()
    for name, value in (("reduction", "sum"), ("num_items", 3), ("label_smoothing", 0.1)):
        with pytest.raises(ValueError, match=name):
            fused_log_probs(hidden, weight, labels, **{name: value})
    with pytest.raises(ValueError, match="student_weight"):
        fused_log_probs(hidden, weight[:, :3], labels)


def test_expected_policy_gradient_is_the_gradient_of_the_reverse_kl():
    """Summed over every token that could be drawn, by how likely it is."""
    generator = torch.Generator().manual_seed(3)
    z_s = torch.randn(4, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    log_t = torch.randn(4, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_s = z_s.log_softmax(-1)
    (expected,) = torch.autograd.grad((log_s.exp() * (log_s - log_t)).sum(), z_s, retain_graph=True)
    losses = policy_gradient_loss(log_s, log_t)  # each token taken for the one that was drawn
    (got,) = torch.autograd.grad((log_s.detach().exp() * losses).sum(), z_s)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_importance_ratio_and_clipping_follow_their_definition():
    """Against the definition, a token at a time; what is clipped has no gradient."""
    log_p = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    drawn = torch.tensor([[-1.0, -1.5, -1.5, -0.5]], dtype=torch.float64)
    teacher = torch.tensor([[-0.5, -0.5, -2.0, -2.0]], dtype=torch.float64)
    got = policy_gradient_loss(log_p, teacher, drawn, clip=0.2)
    ratio, gain = (log_p - drawn).exp().detach(), (teacher - log_p).detach()
    expected = [
        -min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratio[0].tolist(), gain[0].tolist(), strict=True)
    ]
    assert got[0].tolist() == pytest.approx(expected)
    (slope,) = torch.autograd.grad(got.sum(), log_p)
    free = (-ratio * gain)[0].tolist()  # the second is beyond 1.2 with a gain, the last beneath 0.8 with a loss
    assert slope[0].tolist() == pytest.approx([free[0], 0.0, free[2], 0.0])


def test_the_recipes_ratio_is_that_of_the_models_that_drew():
    """Against logits: of tokens whose log-probabilities when they were drawn came with the batch."""
    loss = {"terms": [{"type": "policy_gradient", "weight": 0.7, "importance": True, "clip": 0.1, "discount": 0.5}]}
    subject = answering(loss)
    objective, batch = subject.objective(), subject.batch()
    generator = torch.Generator().manual_seed(5)
    batch["sampled_log_p"] = -4 - 2 * torch.rand(batch["labels"].shape, generator=generator)
    batch["sampled_log_p"][batch["labels"] == IGNORE_INDEX] = torch.nan
    got = subject.student(**objective.student_inputs(batch))["loss"]
    gradients = torch.autograd.grad(got, list(subject.student.parameters()))
    objective.detach()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    labels = batch["labels"][:, 1:]
    learned = labels != IGNORE_INDEX
    log_s, log_t = (
        model(**inputs, use_cache=False)
        .logits[:, :-1]
        .double()
        .log_softmax(-1)
        .gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        for model in (subject.student, subject.teacher.model)
    )
    total = 0
    for row, column in learned.nonzero().tolist():
        gain, share, at = 0.0, 1.0, column
        while at < labels.shape[1] and learned[row, at]:
            gain, share, at = gain + share * (log_t - log_s)[row, at].detach(), share * 0.5, at + 1
        ratio = (log_s[row, column] - batch["sampled_log_p"][row, column + 1]).exp()
        total = total - torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain)
    expected = 0.7 * total / learned.sum()
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected, list(subject.student.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_discounted_gains_stay_in_their_answer(length, discount):
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(5, length, generator=generator, dtype=torch.float64)
    learned = torch.rand(5, length, generator=generator) > 0.3
    values = values.masked_fill(~learned, 0.0)
    expected = values.clone()
    for at in range(length - 2, -1, -1):
        expected[:, at] += torch.where(learned[:, at] & learned[:, at + 1], discount * expected[:, at + 1], 0.0)
    got = discounted(values, learned, discount).masked_fill(~learned, 0.0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("make", [answering, informed_answering, routed_answering])
def test_every_invariant_holds_of_it_alone(make):
    """Teachers include one with privileged context, and routed ones (one model each)."""
    subject = make()
    if make is routed_answering:
        subject.teacher = type(subject.teacher)(list(subject.teacher.models.values())[:2], subject.teacher.routes)
        subject.weights, subject.tokenizers = (1.0, 1.0), subject.tokenizers[:3]
    subject.loss = Loss.model_validate(ALONE)
    for check in CHECKS:
        finding = check(subject)
        assert finding.passed, finding


@pytest.mark.plain("{}-2", "{'discount': 0.5}-3")
@pytest.mark.parametrize(
    "more, passes",
    [({}, 2), ({"importance": True, "clip": 0.1}, 2), ({"discount": 0.5}, 3), ({"teacher_weight": 0}, 1)],
)
def test_log_probabilities_are_computed_where_they_are_needed(more, passes):
    """The teacher's unless only a reward counts; the student's twice where advantages depend on later tokens."""
    term = {"type": "policy_gradient", "reward": "mine.py:right", **more}
    subject = answering({"terms": [term]})
    objective, batch = subject.objective(), subject.batch()
    batch["sampled_log_p"], batch["advantages"] = (torch.full(batch["labels"].shape, v) for v in (-5.0, 0.5))
    with ops_called("aten::mm") as products:
        subject.student(**objective.student_inputs(batch, statistics=False))["loss"].backward()
    vocabulary = subject.student.config.vocab_size
    assert sum(product.result.shape[1] == vocabulary for product in products) == passes
    batch["advantages"] = None
    loss = subject.student(**objective.student_inputs(batch, statistics=False))["loss"]
    objective.detach()
    assert loss.isfinite() and (loss == 0) == (more == {"teacher_weight": 0})


def found_by_doctor(fault, row_loss):
    """Return True where doctor finds fault with a run whose row losses are `row_loss(log_p, gain)`."""

    def from_log_probs(hidden, weight, labels, rewards, drawn, teacher_log_p, **named):
        given = {name.removeprefix("student_"): named[name] for name in ("student_bias", "student_lora", "valid_rows")}
        log_p = fused_log_probs(hidden, weight, labels, **given)
        rows = row_loss(log_p, teacher_log_p - log_p) * (labels != IGNORE_INDEX)
        return rows if named["reduction"] == "none" else rows.sum() / (labels != IGNORE_INDEX).sum()

    fault.setattr("distill.objectives.policy_gradient.fused_policy_gradient_loss", from_log_probs)
    return not fused_equals_reference(answering(ALONE)).passed


@pytest.mark.full
def test_a_gain_that_carries_a_gradient_is_found(fault):
    """The fault that makes it something else without a word: the advantage not held constant."""
    assert found_by_doctor(fault, lambda log_p, gain: -gain * (log_p - log_p.detach()).exp())
    assert not found_by_doctor(fault, lambda log_p, gain: -gain.detach() * (log_p - log_p.detach()).exp())


def test_a_gradient_of_zero_is_found(fault):
    assert found_by_doctor(fault, lambda log_p, gain: -gain.detach() + 0 * log_p)


def test_a_recipe_with_a_policy_gradient_is_read_back_as_it_is_dumped():
    recipe = parse(BASE)
    assert parse(dump(recipe)) == recipe


# ------------------------------------------------------------------ told to the person


def test_answers_that_repeat_themselves():
    assert is_repetitive([1, 2, 3] * 6) and is_repetitive([7] * 9)
    assert not is_repetitive(list(range(20))) and not is_repetitive([]) and not is_repetitive([5, 5, 5])
    assert not is_repetitive([*range(12), *range(12)]), "half of it is new"


def test_prompts_that_the_students_own_template_writes_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant: {% endif"))
    save_tiny(tmp_path / "t", tiny_model(tiny_tokenizer()), tiny_tokenizer())
    base = "teacher: {model: t}\ndata: {source: x.jsonl}\ntrain: {steps: 3}\nstudent: {model: "
    for name, tokenizer in (("same", tiny_tokenizer()), ("other", own)):
        save_tiny(tmp_path / name, tiny_model(tokenizer), tokenizer)
        vocabulary = source_of(parse(f"{base}{name}}}")).vocabulary()
        vocabulary.prepare()
        verdict = vocabulary.match([259], 259).vocabulary_note
        assert ("prompts differ after" in verdict) is (name == "other"), verdict
    assert "continue with '\\n' (which is trained on), the student's with ': '" in verdict
