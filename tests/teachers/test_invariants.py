"""Each invariant holds for tiny models, and is shown to fail once its fault is put in."""

from dataclasses import replace

import pytest
import torch
from distill_kernels import FusedDistillationLoss
from helpers import Coarse
from peft import LoraConfig, get_peft_model
from subjects import rows
from tiny import tiny_model, tiny_tokenizer
from torch.nn import functional as F

from distill.data import collator
from distill.data.collator import Collator
from distill.doctor import invariants, reference_loss
from distill.doctor.check_setup import CheckSetup
from distill.doctor.invariants import CHECKS
from distill.doctor.rows import join_rows, split_row
from distill.models import head
from distill.objectives import hidden
from distill.recipe.loss import Loss
from distill.teachers import objective
from distill.teachers.backends.local import LoadedTeacher
from distill.training.trainer import DistillationTrainer

SUM = {
    "temperature": 2.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "terms": [
        {"type": "forward_kl"},
        {"type": "skew_reverse_kl", "alpha": 0.2},
        {"type": "jsd", "beta": 0.3},
        {"type": "cross_entropy", "weight": 0.5},
    ],
}


def mean_of_means(fault):
    """A fault: each micro-batch is divided by its own tokens and by the number of micro-batches."""
    compute = DistillationTrainer.compute_loss

    def each_by_its_own(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        own = (inputs["labels"][:, 1:] != -100).sum()
        return compute(self, model, inputs, return_outputs, own * self.args.gradient_accumulation_steps)

    fault.setattr(DistillationTrainer, "compute_loss", each_by_its_own)


def subject(loss=None, *, student=None, dtype=torch.float32, tokenizers=True, **model):
    tokenizer = tiny_tokenizer()
    return CheckSetup(
        student if student is not None else tiny_model(tokenizer, dtype=dtype, **model),
        tiny_model(tokenizer, hidden=64, seed=1, dtype=dtype, **model),
        rows(),
        Loss.model_validate(loss or {}),
        tokenizers=(tokenizer, tokenizer) if tokenizers else None,
    )


def with_lora_head(**model):
    torch.manual_seed(5)
    student = get_peft_model(tiny_model(**model), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return student


SUBJECTS = {
    "forward kl": lambda: subject(),
    "a sum of terms": lambda: subject(SUM),
    "float64": lambda: subject(SUM, dtype=torch.float64),
    "lora on the head": lambda: subject(student=with_lora_head(tie=False)),
    "gemma2": lambda: subject(kind="gemma2", final_logit_softcapping=5.0),
}


@pytest.mark.plain(
    "forward kl-fused_equals_reference",
    "forward kl-packing_changes_nothing",
    "forward kl-models_read_the_same_tokens",
    "a sum of terms-divergence_of_equal_models_is_zero",
    "a sum of terms-patching_changes_nothing",
    "a sum of terms-every_loss_has_a_gradient",
    "float64-accumulation_changes_nothing",
    "float64-workspace_changes_nothing",
    "lora on the head-fused_equals_reference",
    "lora on the head-packing_changes_nothing",
    "lora on the head-models_read_the_same_tokens",
    "gemma2-divergence_of_equal_models_is_zero",
    "gemma2-patching_changes_nothing",
    "gemma2-every_loss_has_a_gradient",
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", SUBJECTS)
def test_every_check_holds(kind, check):
    finding = check(SUBJECTS[kind]())
    assert finding.passed, finding
    assert str(finding).startswith("pass  ")


@pytest.mark.full
def test_a_check_leaves_the_models_as_they_were():
    made = SUBJECTS["lora on the head"]()
    made.student.train()
    before = {name: p.detach().clone() for name, p in made.student.named_parameters()}
    frozen = {name for name, p in made.student.named_parameters() if not p.requires_grad}
    for check in CHECKS:
        check(made)
        assert made.student.training, check.__name__
    for name, p in made.student.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None, name
    assert frozen == {name for name, p in made.student.named_parameters() if not p.requires_grad}
    assert "forward" not in head.unwrap_peft(made.student).__dict__


# ------------------------------------------------------------------ faults


def head_without_lora(fault):
    call = objective.call_head
    fault.setattr(
        objective, "call_head", lambda h, x, compute: call(h, x, lambda x, w: compute(x, w._replace(lora=None)))
    )


def shift_by_two(fault):
    fault.setattr(objective, "shift_labels", lambda labels: F.pad(labels[..., 2:], (0, 2), value=-100))


def cap_forgotten(fault):
    build = hidden.build_loss
    fault.setattr(hidden, "build_loss", lambda loss, transforms: build(loss, {**transforms, "student_softcap": None}))


def temperature_for_its_square(fault):
    """The loss times T where it should be T squared: the same at T = 1."""
    forward = FusedDistillationLoss.forward
    fault.setattr(
        FusedDistillationLoss,
        "forward",
        lambda self, *args, **kwargs: forward(self, *args, **kwargs) / self.objective.temperature,
    )


def positions_are_dropped(fault):
    """Every row of the trainer's batches passes for one document."""
    fault.setattr(collator, "_is_one_document", lambda row: True)


def cross_entropy_for_kl(fault):
    forward = FusedDistillationLoss.forward

    def with_entropy(self, student_hidden, student_weight, teacher_hidden, teacher_weight, *args, **kwargs):
        found = forward(self, student_hidden, student_weight, teacher_hidden, teacher_weight, *args, **kwargs)
        p = torch.softmax(F.linear(teacher_hidden, teacher_weight), -1)
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return found + (entropy.sum() if self.reduction != "none" else entropy)

    fault.setattr(FusedDistillationLoss, "forward", with_entropy)


def cache_in_the_teacher(fault):
    """Call the teacher with a cache, by which packed documents see each other."""

    def targets(self, batch):
        with torch.inference_mode():
            ones = torch.ones_like(batch["input_ids"])
            return head.decoder_of(self.model)(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=ones, use_cache=False
            ).last_hidden_state

    fault.setattr(LoadedTeacher, "targets", targets)


def padding_joins_the_text(fault):
    collate = Collator.__call__

    def without_positions(self, given):
        batch = collate(self, given)
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).clone()
        return batch

    fault.setattr(Collator, "__call__", without_positions)


def masked_token_counts(fault):
    fault.setattr(
        invariants,
        "with_masked_end",
        lambda row, token: {
            "input_ids": [token, *row["input_ids"]],
            "labels": [-100, *row["labels"]],
            "position_ids": [0, *(p + 1 for p in row["position_ids"])],
        },
    )


def a_norm_that_is_off(fault):
    from distill.models.patch import patching

    put = patching.patch

    def wrong(model, role, **settings):
        report = put(model, role, **settings)
        norm = head.decoder_of(model).norm
        forward = norm.forward
        norm.forward = lambda *args, **kwargs: 1.01 * forward(*args, **kwargs)
        return report

    fault.setattr(patching, "patch", wrong)


def kl_without_a_gradient(fault):
    """The figure is right, and nothing is learned from it."""
    loss_of = objective.DistillationObjective.loss_of
    fault.setattr(
        objective.DistillationObjective,
        "loss_of",
        lambda self, hidden, *more: loss_of(self, hidden, *more).detach() + 0 * hidden.sum(),
    )


def last_chunk_lost(fault):
    forward = FusedDistillationLoss.forward

    def lossy(self, hidden, *args, **kwargs):
        found = forward(self, hidden, *args, **kwargs)
        return found * 0.99 if self.workspace else found

    fault.setattr(FusedDistillationLoss, "forward", lossy)


def teacher_reads_ids_shifted(fault):
    targets = LoadedTeacher.targets
    fault.setattr(
        LoadedTeacher,
        "targets",
        lambda self, batch: targets(self, {**batch, "input_ids": batch["input_ids"].roll(1, dims=1)}),
    )


@pytest.mark.parametrize(
    "check, put_in, kind",
    [
        (invariants.fused_equals_reference, head_without_lora, "lora on the head"),
        (invariants.fused_equals_reference, shift_by_two, "forward kl"),
        (invariants.fused_equals_reference, kl_without_a_gradient, "forward kl"),
        (invariants.fused_equals_reference, cap_forgotten, "gemma2"),
        (invariants.fused_equals_reference, temperature_for_its_square, "forward kl"),
        (invariants.divergence_of_equal_models_is_zero, cross_entropy_for_kl, "forward kl"),
        (invariants.accumulation_changes_nothing, mean_of_means, "forward kl"),
        (invariants.accumulation_changes_nothing, positions_are_dropped, "forward kl"),
        (invariants.packing_changes_nothing, cache_in_the_teacher, "forward kl"),
        (invariants.padding_changes_nothing, padding_joins_the_text, "forward kl"),
        (invariants.padding_changes_nothing, masked_token_counts, "forward kl"),
        (invariants.patching_changes_nothing, a_norm_that_is_off, "forward kl"),
        (invariants.workspace_changes_nothing, last_chunk_lost, "forward kl"),
        (invariants.models_read_the_same_tokens, teacher_reads_ids_shifted, "forward kl"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fails_where_its_fault_is_put_in(check, put_in, kind, monkeypatch, hardware):
    made = SUBJECTS[kind]()
    assert check(made).passed
    made.rounding = 1.0  # the widest bounds that a machine's own rounding may ask for
    if check is invariants.fused_equals_reference:  # which measures it
        hardware.setattr(reference_loss, "F", Coarse())
    put_in(monkeypatch)
    finding = check(made)
    assert not finding.passed and str(finding).startswith("FAIL  "), finding


@pytest.mark.parametrize("documents", [1, 2])
def test_a_mean_of_means_shows_on_rows_that_learn_equally_many_tokens(documents, monkeypatch):
    made = subject()
    made.rows = [
        join_rows([{n: v[:5] for n, v in d.items()} for d in split_row(row)][:documents])
        for row in rows()
        if row["labels"][1] != -100
    ]
    assert len({sum(label != -100 for label in row["labels"]) for row in made.rows}) == 1 < len(made.rows)
    assert invariants.accumulation_changes_nothing(made).passed
    mean_of_means(monkeypatch)
    assert not invariants.accumulation_changes_nothing(made).passed


@pytest.mark.full
def test_rows_of_one_document_need_not_keep_documents_apart():
    """OPT's attention is told of no positions: packed it is trained wrongly, with a document a row it is not."""
    checks = (invariants.packing_changes_nothing, invariants.padding_changes_nothing)
    documents = [document for row in rows() for document in split_row(row)]
    opt = replace(subject(kind="opt", ffn_dim=64, word_embed_proj_dim=32), rows=documents)
    for made, packed, alone in ((opt, [False, False], [None, True]), (subject(), [True, True], [True, True])):
        assert [check(made).passed for check in checks] == packed
        assert [check(replace(made, packs=False)).passed for check in checks] == alone
    assert replace(opt, packs=False).packed_rows() == documents and opt.packed_rows() != documents


def test_a_vocabulary_that_means_something_else_fails():
    made = subject()
    other = tiny_tokenizer(specials=("<|fin|>", "<|start|>", "<|pad|>"))
    made.tokenizers = (made.tokenizers[0], other)
    finding = invariants.models_read_the_same_tokens(made)
    assert not finding.passed and "<|fin|>" in finding.detail


# ------------------------------------------------------------------ whole runs


def test_bounds_follow_what_pytorchs_own_loss_is_off_by(hardware):
    made = subject()
    finding = invariants.fused_equals_reference(made)
    assert finding.passed and 0 < made.rounding < 1e-5 and made.tolerance == 2e-4
    assert f"the error of PyTorch's loss on them is {made.rounding:.1e}" in finding.detail
    hardware.setattr(reference_loss, "F", Coarse())
    finding = invariants.fused_equals_reference(made)
    assert finding.passed and 1e-4 < made.rounding < 1e-2 and made.tolerance == 2 * made.rounding > 2e-4
    assert f"(bound {made.tolerance:.0e})" in finding.detail
    made.rounding = 1.0
    assert made.tolerance == pytest.approx(1e-2), "a machine that is worse fails"
