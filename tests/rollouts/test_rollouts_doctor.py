"""The doctor of on-policy runs: each invariant holds, and fails where its fault is put in."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from subject_recipes import RECIPES
from subjects import answering, informed_answering, one, routed_answering
from tiny import save_models

from distill.doctor import rollouts
from distill.doctor.examine import prepare
from distill.doctor.invariants import (
    accumulation_changes_nothing,
    every_loss_has_a_gradient,
    fused_equals_reference,
    packing_changes_nothing,
    padding_changes_nothing,
)
from distill.doctor.invariants_rollouts import ROLLOUT_CHECKS, rollouts_end, rollouts_follow_the_weights
from distill.doctor.invariants_runs import check_ranks_of_setups, resume_is_exact
from distill.generation import engines
from distill.generation.documents import RolloutDocument
from distill.recipe import parse
from distill.recipe.loss import Loss
from distill.teachers.objective import DistillationObjective

ALONE = {"terms": [{"type": "policy_gradient"}]}
MADE = {
    "answering": answering,
    "informed": informed_answering,
    "routed": routed_answering,
    "one": one,
    "drawing": lambda: answering(ALONE),
}


@pytest.mark.plain(
    "answering-rollouts_follow_the_weights",
    "informed-rollouts_follow_the_weights",
    "routed-rollouts_follow_the_weights",
    "one-rollouts_follow_the_weights",
    "drawing-rollouts_follow_the_weights",
)
@pytest.mark.parametrize("check", ROLLOUT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", MADE)
def test_rollout_invariants_hold(kind, check):
    finding = check(MADE[kind]())
    assert finding.passed is (None if kind == "one" else True), finding


def test_stale_weights_in_the_engine(monkeypatch):
    """The engine was made of a copy of the student, which nobody brings up to date."""
    make = rollouts.engine_for
    monkeypatch.setattr(
        rollouts, "engine_for", lambda name, model, settings, **more: make(name, copy.deepcopy(model), settings, **more)
    )
    finding = rollouts_follow_the_weights(answering())
    assert finding.passed is False and "after its weights changed" in finding.detail


def test_an_engine_that_draws_from_something_else(monkeypatch):
    """Its logits are sharpened: before any weight has changed, its log-probabilities are not the student's."""
    wide = engines.at_least_float32
    monkeypatch.setattr("distill.generation.sequence_slots.at_least_float32", lambda scores: 1.1 * wide(scores))
    assert rollouts_follow_the_weights(answering()).passed is False


def ended(subject):
    """The subject with one answer that ends, at the end of its first row."""
    rows = copy.deepcopy(list(subject.rows))
    for name, value in (("input_ids", 0), ("labels", 0), ("position_ids", rows[0]["position_ids"][-1])):
        rows[0][name] = [*rows[0][name][:-1], value]
    return replace(subject, rows=rows, last_tokens=[0, 0])


def test_the_end_of_a_turn_that_is_not_learned():
    """The student's responses are cut off at the end of turn; the data's end with another token."""
    subject = ended(answering())
    assert rollouts_end(subject).passed
    lost = copy.deepcopy(list(subject.rows))
    lost[0]["labels"][-1] = -100
    finding = rollouts_end(replace(subject, rows=lost))
    assert finding.passed is False and "rollouts end without one" in finding.detail
    finding = rollouts_end(replace(subject, last_tokens=[0, 17]))
    assert finding.passed is False and "1 of 2 complete responses" in finding.detail


def test_an_answer_without_its_end(monkeypatch):
    """The fault where answers are made: what ends them is dropped."""
    subject = answering()
    documents = subject.documents()
    plain = RolloutDocument(documents[0]["input_ids"], documents[0]["labels"], 0)
    end, made = subject.rollouts.ends[0], []
    for keep in (True, False):
        answer = plain.with_response(plain.prompt, [5, 6, end] if keep else [5, 6])
        made.append({"input_ids": answer.ids, "labels": answer.labels, "position_ids": list(range(answer.length))})
    assert [rollouts_end(replace(subject, rows=[row] * 2)).passed for row in made] == [True, False]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 4, "seed": 1})
    lines = [
        {"messages": [{"role": "user", "content": f"Line {n}?"}, {"role": "assistant", "content": "It does."}]}
        for n in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return parse(RECIPES["answering"])


@pytest.mark.full
def test_a_template_whose_end_the_engine_does_not_know(place, monkeypatch):
    """The expected end tokens come from the recipe's own data and tokenizer."""
    subject = prepare(place)
    assert len(subject.last_tokens) > 10 and rollouts_end(subject).passed
    monkeypatch.setattr(engines, "end_tokens", lambda tokenizer, model, template: [258])
    assert rollouts_end(prepare(place)).passed is False


def without_mixture(make):
    """The subject; of a routed one, each route has one teacher."""
    subject = make()
    if make is routed_answering:
        subject.teacher = type(subject.teacher)(list(subject.teacher.models.values())[:2], subject.teacher.routes)
        subject.weights, subject.tokenizers = (1.0, 1.0), subject.tokenizers[:3]
    return subject


@pytest.mark.plain("informed_answering")
@pytest.mark.parametrize("make", [answering, informed_answering, routed_answering])
def test_a_discount_is_held_to_its_definition(make, monkeypatch):
    """Settings of the ratio change nothing for fresh samples."""
    subject = without_mixture(make)
    term = {"type": "policy_gradient", "weight": 0.7, "discount": 0.5, "importance": True, "clip": 0.2}
    subject.loss = Loss.model_validate({"terms": [term]})
    assert fused_equals_reference(subject).passed
    monkeypatch.setattr("distill.objectives.policy_gradient.discounted", lambda values, learned, discount: values)
    assert fused_equals_reference(subject).passed is False


REWARDED = {"type": "policy_gradient", "weight": 0.7, "teacher_weight": 0.5, "discount": 0.5, "reward": "mine.py:right"}


def rewarded(make):
    subject = without_mixture(make)
    subject.loss = Loss.model_validate({"terms": [{"type": "reverse_kl", "weight": 0.5}, REWARDED]})
    subject.rollouts = replace(subject.rollouts, reward_scale="group")
    return subject


@pytest.mark.plain("answering")
@pytest.mark.parametrize("make", [answering, informed_answering, routed_answering])
def test_a_reward_is_held_to_its_definition(make, monkeypatch):
    """A reward that is dropped, of the wrong sign, or of the token before, shows in the fused loss."""
    subject = rewarded(make)
    others = (accumulation_changes_nothing, packing_changes_nothing, padding_changes_nothing)
    for check in (fused_equals_reference, *others):
        finding = check(subject)
        assert finding.passed, finding
    compare = DistillationObjective.student_inputs
    for fault in (lambda given: None, lambda given: -given, lambda given: given.roll(1, 1)):

        def faulty(self, *values, fault=fault, **more):
            made = compare(self, *values, **more)
            step = made["step_inputs"]
            step.value = replace(step.value, advantages=fault(step.value.advantages))
            return made

        with monkeypatch.context() as patch:
            patch.setattr(DistillationObjective, "student_inputs", faulty)
            assert fused_equals_reference(subject).passed is False


@pytest.mark.full
def test_training_runs_of_a_rewarded_loss_resume_and_are_shared(forked_ranks):
    """They need rewards of their own: the recipe's function is code."""
    subject = rewarded(answering)
    for finding in (resume_is_exact(subject), *check_ranks_of_setups([subject])):
        assert finding.passed, finding


def test_a_recipe_with_a_reward_is_examined_without_its_code(place):
    terms = json.dumps([REWARDED])
    recipe = parse(
        RECIPES["answering"],
        [f"loss.terms={terms}", "data.on_policy={samples: 2, max_new_tokens: 6}", "train.batch_size=2"],
    )
    subject = prepare(recipe)
    assert subject.rollouts.reward_scale == "group"
    batch = subject.batch()
    assert batch["advantages"].shape == batch["labels"].shape and batch["advantages"].unique().numel() > 2
    assert fused_equals_reference(subject).passed


@pytest.mark.plain("{'terms': [{'type': 'policy_gradient'}]}")
@pytest.mark.parametrize("loss", [None, ALONE])
def test_a_gradient_that_is_zero_where_the_loss_is_not(loss, monkeypatch):
    """At the last of all tokens alone."""
    from distill.objectives.hidden import HiddenFormat

    apply = HiddenFormat.apply

    def without_the_last(self, loss, alignment, call):
        keep = torch.ones((*call.hidden.shape[:2], 1), dtype=call.hidden.dtype)
        keep.view(-1)[call.valid_rows[-1]] = 0
        return apply(
            self, loss, alignment, call._replace(hidden=keep * call.hidden + ((1 - keep) * call.hidden).detach())
        )

    assert every_loss_has_a_gradient(answering(loss)).passed
    monkeypatch.setattr(HiddenFormat, "apply", without_the_last)
    finding = every_loss_has_a_gradient(answering(loss))
    assert finding.passed is False and finding.detail.startswith("1 of")
