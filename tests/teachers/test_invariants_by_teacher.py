"""The invariants fail once a fault is put into a kind of teacher, or into the answers of a student that gives them.
That they hold without is in tests/teachers/test_conformance.py."""

import numpy as np
import pytest
import torch
from test_invariants import mean_of_means

from distill.doctor import invariants, invariants_runs
from distill.generation.on_policy import OnPolicyRollouts
from distill.objectives import hidden
from distill.objectives import top_k as cache_top_k
from distill.recipe.loss import Loss
from distill.teachers.backends import local as loaded
from distill.teachers.backends.stored import teacher as cache_teacher
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.combination.mixture import MixtureFormat, MixtureTeacher
from distill.teachers.rows.retokenised.data import CrossColumns
from distill.teachers.rows.retokenised.teacher import CrossTeacher, SpansFormat


@pytest.mark.plain("answering", "hidden")
@pytest.mark.parametrize("kind", ["answering", "several", "across", "bucket", "hidden"])
def test_hard_labels_alone_need_no_teacher(kind, subject_of):
    """A loss that does not ask the teacher; its divergences are examined all the same."""
    made = subject_of(kind)
    made.loss = Loss.model_validate({"terms": [{"type": "cross_entropy"}]})
    for check in (
        invariants.fused_equals_reference,
        invariants.divergence_of_equal_models_is_zero,
        invariants.models_read_the_same_tokens,
    ):
        finding = check(made)
        assert finding.passed, finding


# ------------------------------------------------------------------ faults: several teachers


def a_teacher_is_dropped(patch):
    """The first stands for all."""
    targets, make = MixtureTeacher.targets, MixtureFormat.__init__
    patch.setattr(MixtureTeacher, "targets", lambda self, batch: (targets(self, batch)[0],) * 2)
    patch.setattr(MixtureFormat, "__init__", lambda self, members, weights: make(self, members[:1] * 2, weights))


def weights_are_forgotten(patch):
    make = MixtureFormat.__init__
    patch.setattr(MixtureFormat, "__init__", lambda self, members, weights: make(self, members, [0.5, 0.5]))


def one_cap_for_all(patch):
    make = hidden.HiddenFormat.__init__
    patch.setattr(
        hidden.HiddenFormat,
        "__init__",
        lambda self, head, transform: make(self, head, transform._replace(softcap=None)),
    )


def logits_are_mixed(patch):
    """The mean of the teachers' logits, which is no mixture of their probabilities."""
    from distill.doctor import reference

    forward = reference.FusedDistillationLoss.forward

    def geometric(self, hidden, weight, *more, teachers=None, **settings):
        z = [torch.nn.functional.linear(t.hidden, t.weight, t.bias).log_softmax(-1) for t in teachers]
        mean = sum(t.share * z for t, z in zip(teachers, z, strict=True)) / sum(t.share for t in teachers)
        return forward(self, hidden, weight, mean, torch.eye(mean.shape[-1]), *more, **settings)

    patch.setattr(reference.FusedDistillationLoss, "forward", geometric)


def second_teacher_reads_other_ids(patch):
    read = loaded.last_hidden
    patch.setattr(
        loaded,
        "last_hidden",
        lambda model, inputs: read(
            model, {**inputs, "input_ids": inputs["input_ids"].roll(int(model.config.model_type == "gemma2"), dims=1)}
        ),
    )


def the_second_teacher_sees_all(patch):
    """Its packed documents are one text to it."""
    read = loaded.last_hidden

    def whole(model, inputs):
        if model.config.model_type == "gemma2":
            length = inputs["input_ids"].shape[1]
            inputs = {**inputs, "position_ids": torch.arange(length).expand_as(inputs["input_ids"])}
        return read(model, inputs)

    patch.setattr(loaded, "last_hidden", whole)


def a_teacher_is_patched_wrongly(patch):
    from distill.models.patch import patching

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
    collate = CrossColumns.__call__

    def shifted(self, *given):
        batch = collate(self, *given)
        batch["spans"][:-1, 2:] += 1  # there is nothing after the last
        return batch

    patch.setattr(CrossColumns, "__call__", shifted)


def shared_tokens_are_off_by_one(patch):
    make = SpansFormat.__init__
    patch.setattr(
        SpansFormat,
        "__init__",
        lambda self, inner, shared: make(self, inner, shared._replace(teacher=np.roll(shared.teacher, 1))),
    )


def the_student_reads_for_both(patch):
    targets = CrossTeacher.targets
    patch.setattr(
        CrossTeacher,
        "targets",
        lambda self, batch: targets(self, {**batch, "teacher_input_ids": batch["teacher_input_ids"].roll(1, dims=1)}),
    )


def distances_may_be_negative(patch):
    from distill.objectives import span_loss as loss

    whole = loss.span_figures
    patch.setattr(loss, "span_figures", lambda *given: whole(*given)._replace(divergence=whole(*given).divergence - 30))


def chunks_lose_a_span(patch):
    from distill.objectives import span_loss as loss

    cut = loss._chunks
    patch.setattr(loss, "_chunks", lambda *given: cut(*given)[: -1 if len(cut(*given)) > 1 else None])


def padding_moves_the_teacher(patch):
    """Spans forget the padding on the teacher's left."""
    collate = CrossColumns.__call__

    def unmoved(self, rows, plain, collator):
        batch = collate(self, rows, plain, collator)
        if collator.padding_side == "left":
            width = batch["teacher_input_ids"].shape[1]
            gaps = torch.tensor([width - len(row["teacher_input_ids"]) for row in rows])
            at = batch["spans"][:, 2] // width
            batch["spans"][:, 2:] -= gaps[at, None]
        return batch

    patch.setattr(CrossColumns, "__call__", unmoved)


def documents_of_the_teacher_leak(patch):
    collate = CrossColumns.__call__

    def one_text(self, *given):
        batch = collate(self, *given)
        batch["teacher_position_ids"] = torch.arange(batch["teacher_input_ids"].shape[1]).expand_as(
            batch["teacher_input_ids"]
        )
        return batch

    patch.setattr(CrossColumns, "__call__", one_text)


# ------------------------------------------------------------------ faults: a cache


def places_are_one_off(patch):
    joined = Store.joined
    patch.setattr(Store, "joined", lambda self, all: {k: v.roll(1, 0) for k, v in joined(self, all).items()})


def rows_are_spread_wrongly(patch):
    spread = cache_top_k.spread
    for module in (cache_teacher, cache_top_k):
        patch.setattr(module, "spread", lambda values, rows, shape: spread(values, rows, shape).roll(1, 1))


def the_tail_is_forgotten(patch):
    patch.setattr(cache_top_k, "normalised", lambda logprobs, tail: logprobs.float() + 0.3)


def another_head(patch):
    make = StoredTeacher.__init__

    def rolled(self, *given, **named):
        make(self, *given, **named)
        head = self.stored_head
        head.weights = head.weights._replace(weight=head.weights.weight.roll(1, 0))

    patch.setattr(StoredTeacher, "__init__", rolled)


def entropy_for_kl(patch):
    """Cross-entropy against the stored tokens in place of a divergence."""
    from distill_kernels import FusedTopKKLLoss

    forward = FusedTopKKLLoss.forward

    def with_entropy(self, hidden, weight, ids, logprobs, *more, **settings):
        found = forward(self, hidden, weight, ids, logprobs, *more, **settings)
        return found + 0.5

    patch.setattr(FusedTopKKLLoss, "forward", with_entropy)


def temperature_for_its_square(patch):
    """The loss over stored tokens times T where it should be T squared: the same at the T = 1 of this cache."""
    from distill_kernels import FusedTopKKLLoss

    forward = FusedTopKKLLoss.forward
    patch.setattr(
        FusedTopKKLLoss,
        "forward",
        lambda self, *args, **kwargs: forward(self, *args, **kwargs) / self.objective.temperature,
    )


# ------------------------------------------------------------------ faults: the student's own answers


def answers_depend_on_the_batch(patch):
    replace = OnPolicyRollouts.replace

    def by_place(self, batches, step, collate):
        self.seed += len(batches)
        return replace(self, batches, step, collate)

    patch.setattr(OnPolicyRollouts, "replace", by_place)


# what a run makes of the recipe's models, weights and caches
REMADE = {
    "several": lambda made: MixtureTeacher([member.model for member in made.teacher.members], made.weights),
    "across": lambda made: CrossTeacher(made.teacher.inner.model, made.reference.shared),
    "answering": lambda made: made.teacher,
}


@pytest.mark.plain(
    "several-fused_equals_reference-a_teacher_is_dropped",
    "several-accumulation_changes_nothing-mean_of_means",
    "across-fused_equals_reference-shared_tokens_are_off_by_one",
    "across-packing_changes_nothing-documents_of_the_teacher_leak",
    "across-models_read_the_same_tokens-the_student_reads_for_both",
    "hidden-fused_equals_reference-another_head",
    "answering-accumulation_changes_nothing-answers_depend_on_the_batch",
)
@pytest.mark.parametrize(
    "kind, check, fault",
    [
        ("several", invariants.fused_equals_reference, a_teacher_is_dropped),
        ("several", invariants.fused_equals_reference, weights_are_forgotten),
        ("several", invariants.fused_equals_reference, one_cap_for_all),
        ("several", invariants.divergence_of_equal_models_is_zero, logits_are_mixed),
        ("several", invariants.accumulation_changes_nothing, mean_of_means),
        ("several", invariants.packing_changes_nothing, the_second_teacher_sees_all),
        ("several", invariants.patching_changes_nothing, a_teacher_is_patched_wrongly),
        ("several", invariants.models_read_the_same_tokens, second_teacher_reads_other_ids),
        ("across", invariants.fused_equals_reference, spans_one_token_late),
        ("across", invariants.fused_equals_reference, shared_tokens_are_off_by_one),
        ("across", invariants.fused_equals_reference, the_student_reads_for_both),
        ("across", invariants.divergence_of_equal_models_is_zero, distances_may_be_negative),
        ("across", invariants.accumulation_changes_nothing, mean_of_means),
        ("across", invariants.packing_changes_nothing, documents_of_the_teacher_leak),
        ("across", invariants.padding_changes_nothing, padding_moves_the_teacher),
        ("across", invariants.workspace_changes_nothing, chunks_lose_a_span),
        ("across", invariants.models_read_the_same_tokens, spans_one_token_late),
        ("across", invariants.models_read_the_same_tokens, the_student_reads_for_both),
        ("bucket", invariants.fused_equals_reference, the_tail_is_forgotten),
        ("bucket", invariants.fused_equals_reference, temperature_for_its_square),
        ("renormalize", invariants.fused_equals_reference, rows_are_spread_wrongly),
        ("sampled", invariants.fused_equals_reference, rows_are_spread_wrongly),
        ("hidden", invariants.fused_equals_reference, another_head),
        ("bucket", invariants.divergence_of_equal_models_is_zero, entropy_for_kl),
        ("bucket", invariants.accumulation_changes_nothing, mean_of_means),
        ("bucket", invariants.models_read_the_same_tokens, places_are_one_off),
        ("answering", invariants.accumulation_changes_nothing, answers_depend_on_the_batch),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fails_where_its_fault_is_put_in(kind, check, fault, subject_of, monkeypatch):
    made = subject_of(kind)
    assert check(made).passed
    fault(monkeypatch)
    made.teacher = REMADE.get(kind, lambda made: StoredTeacher(made.teacher.store))(made)
    finding = check(made)
    assert not finding.passed and str(finding).startswith("FAIL  "), finding


@pytest.mark.parametrize("kind", ["several", "across"])
def test_a_teacher_that_is_not_finite_passes_nothing(kind, subject_of):
    made = subject_of(kind)
    model = made.models[-2]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[9:] = torch.nan
    finding = invariants.fused_equals_reference(made)
    assert not finding.passed and "the teacher is not finite (outputs of the teacher" in finding.detail, finding
    assert not invariants.divergence_of_equal_models_is_zero(made).passed


# ------------------------------------------------------------------ whole runs

RANKS = ["answering", "several", "across", "bucket", "hidden"]


@pytest.mark.full
def test_resume_check_fails_where_other_responses_are_sampled(subject_of, monkeypatch):
    """Answers drawn from a generator that no checkpoint keeps."""
    replace, calls = OnPolicyRollouts.replace, []

    def by_calls(self, batches, step, collate, following=0):
        calls.append(step)
        return replace(self, batches, len(calls), collate, following)

    monkeypatch.setattr(OnPolicyRollouts, "replace", by_calls)
    finding = invariants_runs.resume_is_exact(subject_of("answering"))
    assert not finding.passed and "logged losses" in finding.detail, finding


FAULTS = """
import sys
from pathlib import Path
from distill.doctor import invariants_runs, reference
from distill.teachers.backends.stored.store import Store
from distill.teachers.rows.retokenised.data import CrossColumns
from distill.training.trainer import DistillationTrainer

# several: the weights are lost on the way to the processes
mixture = reference.MixtureTeacher
reference.MixtureTeacher = lambda models, weights: mixture(models, [1.0] * len(models))
# across: only the first row's spans reach a process, counted as all
collate = CrossColumns.__call__
def fewer(self, *given):
    batch = collate(self, *given)
    return batch | {"spans": batch["spans"][: len(batch["spans"]) // 2]}
CrossColumns.__call__ = fewer
# caches: what was stored of another place
joined = Store.joined
Store.joined = lambda self, pieces: {n: v.roll(1, 0) for n, v in joined(self, pieces).items()}
# the student's own answers: every process counts its own tokens
DistillationTrainer.get_batch_samples = lambda self, *given: (
    (made := super(DistillationTrainer, self).get_batch_samples(*given))[0], made[1])
invariants_runs._main(Path(sys.argv[-1]))
"""


@pytest.mark.slow  # that ranks can fail is shown for one teacher by tests/teachers/test_invariants.py
def test_ranks_fail_where_the_processes_do_something_else(subject_of, tmp_path):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTS)
    findings = invariants_runs.check_ranks_of_setups([subject_of(kind) for kind in RANKS], program=[str(program)])
    assert not any(finding.passed for finding in findings), dict(zip(RANKS, findings, strict=True))
    assert all("differ by" in finding.detail for finding in findings)
