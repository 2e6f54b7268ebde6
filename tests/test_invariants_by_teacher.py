"""The invariants for every kind of teacher: several, one with another tokenizer, one on disk; and for students that
answer while they train. Each holds, and fails once its fault is put in."""

import numpy as np
import pytest
import torch
from subjects import CACHED, SUBJECTS, Caches, mean_of_means

from distill.doctor import invariants
from distill.doctor.invariants import CHECKS
from distill.generation.on_policy import OnPolicy
from distill.recipe.loss import Loss
from distill.teachers import mixture
from distill.teachers.cache.read import TeacherCache
from distill.teachers.cross.data import CrossCollator
from distill.teachers.cross.objective import CrossObjective
from distill.teachers.mixture import MixtureObjective, TeacherGroup


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture
def subject_of(caches):
    return lambda kind: caches.subject(kind) if kind in CACHED else SUBJECTS[kind]()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [*SUBJECTS, *CACHED])
def test_holds(kind, check, subject_of):
    made = subject_of(kind)
    finding = check(made)
    assert finding.passed, finding
    assert not any(p.grad is not None for p in made.student.parameters())
    assert "forward" not in made.student.__dict__


@pytest.mark.parametrize("kind", ["answering", "several", "across", "bucket", "hidden"])
def test_hard_labels_alone(kind, subject_of):
    """A loss that does not ask the teacher; its divergences are examined all the same."""
    made = subject_of(kind)
    made.loss = Loss.model_validate({"terms": [{"type": "cross_entropy"}]})
    for check in (invariants.fused_equals_reference, invariants.divergence_is_one, invariants.both_read_the_same):
        finding = check(made)
        assert finding.passed, finding


# ------------------------------------------------------------------ faults: several teachers


def a_teacher_is_dropped(patch):
    """The first stands for all."""
    signal = MixtureObjective.signal
    patch.setattr(MixtureObjective, "signal", lambda self, inputs: (signal(self, inputs)[0],) * 2)
    patch.setattr(mixture, "find_head", _always_of_the_first(mixture.find_head))


def _always_of_the_first(find):
    first = []

    def found(model):
        if model.config.model_type == "gemma2":
            return first[-1]
        first.append(find(model))
        return first[-1]

    return found


def weights_are_forgotten(patch):
    make = TeacherGroup.__init__

    def equal(self, members, shares):
        make(self, members, [1.0] * len(members))

    patch.setattr(TeacherGroup, "__init__", equal)


def one_cap_for_all(patch):
    probe = mixture.probe_logits
    patch.setattr(mixture, "probe_logits", lambda model, role: probe(model, role)._replace(softcap=None))


def logits_are_mixed(patch):
    """The mean of the teachers' logits, which is no mixture of their probabilities."""
    from distill.doctor import subject_several

    forward = subject_several.FusedDistillationLoss.forward

    def geometric(self, hidden, weight, *more, teachers=None, **settings):
        z = [torch.nn.functional.linear(t.hidden, t.weight, t.bias).log_softmax(-1) for t in teachers]
        mean = sum(t.share * z for t, z in zip(teachers, z, strict=True)) / sum(t.share for t in teachers)
        return forward(self, hidden, weight, mean, torch.eye(mean.shape[-1]), *more, **settings)

    patch.setattr(subject_several.FusedDistillationLoss, "forward", geometric)


def second_teacher_reads_other_ids(patch):
    read = mixture.last_hidden
    patch.setattr(
        mixture, "last_hidden",
        lambda model, inputs: read(model, {**inputs, "input_ids": inputs["input_ids"].roll(
            int(model.config.model_type == "gemma2"), dims=1)}),
    )  # fmt: skip


def the_second_teacher_sees_all(patch):
    """Its packed documents are one text to it."""
    read = mixture.last_hidden

    def whole(model, inputs):
        if model.config.model_type == "gemma2":
            length = inputs["input_ids"].shape[1]
            inputs = {**inputs, "position_ids": torch.arange(length).expand_as(inputs["input_ids"])}
        return read(model, inputs)

    patch.setattr(mixture, "last_hidden", whole)


def a_teacher_is_patched_wrongly(patch):
    from distill.models import patching

    put = patching.patch

    def wrong(model, role, **settings):
        report = put(model, role, **settings)
        if model.config.model_type == "gemma2":
            norm = model.model.norm
            forward = norm.forward
            norm.forward = lambda *args, **kwargs: 1.1 * forward(*args, **kwargs)
        return report

    patch.setattr(patching, "patch", wrong)


# ------------------------------------------------------------------ faults: another tokenizer


def spans_one_token_late(patch):
    collate = CrossCollator.__call__

    def shifted(self, given):
        batch = collate(self, given)
        batch["spans"][:-1, 2:] += 1  # there is nothing behind the last
        return batch

    patch.setattr(CrossCollator, "__call__", shifted)


def shared_tokens_are_off_by_one(patch):
    make = CrossObjective.__init__

    def off(self, *given, shared, **more):
        make(self, *given, shared=shared._replace(teacher=np.roll(shared.teacher, 1)), **more)

    patch.setattr(CrossObjective, "__init__", off)


def the_student_reads_for_both(patch):
    signal = CrossObjective.signal
    patch.setattr(
        CrossObjective, "signal",
        lambda self, inputs: signal(self, {**inputs, "teacher_input_ids": inputs["teacher_input_ids"].roll(1, dims=1)}),
    )  # fmt: skip


def distances_may_be_negative(patch):
    from distill.teachers.cross import loss

    whole = loss.span_figures
    patch.setattr(loss, "span_figures", lambda *given: whole(*given)._replace(divergence=whole(*given).divergence - 30))


def chunks_lose_a_span(patch):
    from distill.teachers.cross import loss

    cut = loss._chunks
    patch.setattr(loss, "_chunks", lambda *given: cut(*given)[: -1 if len(cut(*given)) > 1 else None])


def padding_moves_the_teacher(patch):
    """Spans forget the padding on the teacher's left."""
    collate = CrossCollator.__call__

    def unmoved(self, given):
        batch = collate(self, given)
        if self.padding_side == "left":
            width = batch["teacher_input_ids"].shape[1]
            gaps = torch.tensor([width - len(row["teacher_input_ids"]) for row in given])
            rows = batch["spans"][:, 2] // width
            batch["spans"][:, 2:] -= gaps[rows, None]
        return batch

    patch.setattr(CrossCollator, "__call__", unmoved)


def documents_of_the_teacher_leak(patch):
    collate = CrossCollator.__call__

    def one_text(self, given):
        batch = collate(self, given)
        batch["teacher_position_ids"] = torch.arange(batch["teacher_input_ids"].shape[1]).expand_as(
            batch["teacher_input_ids"]
        )
        return batch

    patch.setattr(CrossCollator, "__call__", one_text)


# ------------------------------------------------------------------ faults: a cache


def places_are_one_off(patch):
    said = TeacherCache.said
    patch.setattr(TeacherCache, "said", lambda self, given: {k: v.roll(1, 0) for k, v in said(self, given).items()})


def rows_are_spread_wrongly(patch):
    from distill.teachers.cache import objective

    spread = objective.spread
    patch.setattr(objective, "spread", lambda values, at, count: spread(values, at, count).roll(1, 0))


def the_tail_is_forgotten(patch):
    from distill.teachers.cache import objective

    patch.setattr(objective, "normalised", lambda logprobs, tail: logprobs.float() + 0.3)


def another_head(patch):
    from distill.teachers.cache import objective

    read = objective.read_stored_head
    patch.setattr(
        objective, "read_stored_head", lambda *given: read(*given)._replace(weight=read(*given).weight.roll(1, 0))
    )


def entropy_for_kl(patch):
    """Cross-entropy against the stored tokens in place of a divergence."""
    from distill_kernels import FusedTopKKLLoss

    forward = FusedTopKKLLoss.forward

    def with_entropy(self, hidden, weight, ids, logprobs, *more, **settings):
        found = forward(self, hidden, weight, ids, logprobs, *more, **settings)
        return found + 0.5

    patch.setattr(FusedTopKKLLoss, "forward", with_entropy)


# ------------------------------------------------------------------ faults: the student's own words


def answers_depend_on_the_batch(patch):
    replace = OnPolicy.replace

    def by_place(self, batches, step, collate):
        self.seed += len(batches)
        return replace(self, batches, step, collate)

    patch.setattr(OnPolicy, "replace", by_place)


@pytest.mark.parametrize(
    "kind, check, fault",
    [
        ("several", invariants.fused_equals_reference, a_teacher_is_dropped),
        ("several", invariants.fused_equals_reference, weights_are_forgotten),
        ("several", invariants.fused_equals_reference, one_cap_for_all),
        ("several", invariants.divergence_is_one, logits_are_mixed),
        ("several", invariants.accumulation_changes_nothing, mean_of_means),
        ("several", invariants.packing_changes_nothing, the_second_teacher_sees_all),
        ("several", invariants.patching_changes_nothing, a_teacher_is_patched_wrongly),
        ("several", invariants.both_read_the_same, second_teacher_reads_other_ids),
        ("across", invariants.fused_equals_reference, spans_one_token_late),
        ("across", invariants.fused_equals_reference, shared_tokens_are_off_by_one),
        ("across", invariants.fused_equals_reference, the_student_reads_for_both),
        ("across", invariants.divergence_is_one, distances_may_be_negative),
        ("across", invariants.accumulation_changes_nothing, mean_of_means),
        ("across", invariants.packing_changes_nothing, documents_of_the_teacher_leak),
        ("across", invariants.padding_changes_nothing, padding_moves_the_teacher),
        ("across", invariants.workspace_changes_nothing, chunks_lose_a_span),
        ("across", invariants.both_read_the_same, spans_one_token_late),
        ("across", invariants.both_read_the_same, the_student_reads_for_both),
        ("bucket", invariants.fused_equals_reference, the_tail_is_forgotten),
        ("renormalize", invariants.fused_equals_reference, rows_are_spread_wrongly),
        ("sampled", invariants.fused_equals_reference, rows_are_spread_wrongly),
        ("hidden", invariants.fused_equals_reference, another_head),
        ("bucket", invariants.divergence_is_one, entropy_for_kl),
        ("bucket", invariants.accumulation_changes_nothing, mean_of_means),
        ("bucket", invariants.both_read_the_same, places_are_one_off),
        ("answering", invariants.accumulation_changes_nothing, answers_depend_on_the_batch),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fails_where_its_fault_is_put_in(kind, check, fault, subject_of, monkeypatch):
    made = subject_of(kind)
    assert check(made).passed
    fault(monkeypatch)
    if kind == "several":  # what a run makes of the recipe's teachers and weights
        made.teacher = TeacherGroup(list(made.teacher.members), made.weights)
    finding = check(made)
    assert not finding.passed and str(finding).startswith("FAIL  "), finding


@pytest.mark.parametrize("kind", ["several", "across"])
def test_a_teacher_that_is_not_finite_passes_nothing(kind, subject_of):
    made = subject_of(kind)
    model = made.teachers[-1]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[9:] = torch.nan
    finding = invariants.fused_equals_reference(made)
    assert not finding.passed and "the teacher is not finite (what the teacher" in finding.detail, finding
    assert not invariants.divergence_is_one(made).passed
