"""Doctor's invariants over a served teacher, and that each fails once its fault is put in; others are in
tests/serving/test_server_teacher.py."""

import contextlib
import json

import pytest
from served import engine_in, from_server, recipe_in, serving, write_models
from test_invariants import kl_without_a_gradient
from tiny import tiny_tokenizer

from distill.doctor import examine, invariants, invariants_runs
from distill.training.trainer import DistillationTrainer

CHAT = {"messages": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "It is so."}]}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_models(tmp_path_factory.mktemp("place"), kind="gemma2", final_logit_softcapping=5.0)
    (folder / "chat.jsonl").write_text("\n".join([json.dumps(CHAT)] * 20))
    (folder / "other.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(place):
    return engine_in(place, f"data.source={place}/chat.jsonl")


@pytest.fixture
def subject_of(place, engine):
    """A subject as `distill doctor` makes it of a recipe with this teacher behind HTTP."""
    with serving(engine) as address, contextlib.ExitStack() as opened:

        def made(*overrides):
            chat = [f"data.source={place}/chat.jsonl", "data.max_length=96", *from_server(address), *overrides]
            return examine.prepare(recipe_in(place, *chat), opened)

        yield made


@pytest.mark.full
def test_a_kl_without_a_gradient_fails(subject_of, monkeypatch):
    made = subject_of()
    assert invariants.fused_equals_reference(made).passed
    kl_without_a_gradient(monkeypatch)
    assert not invariants.fused_equals_reference(made).passed


def test_another_tokenizer_or_template_fails(place, subject_of):
    made = subject_of()
    assert invariants.models_read_the_same_tokens(made).passed
    made.tokenizers = (made.tokenizers[0], tiny_tokenizer(specials=("<|fin|>", "<|start|>", "<|pad|>")))
    finding = invariants.models_read_the_same_tokens(made)
    assert finding.passed is False and "<|fin|>" in finding.detail
    finding = invariants.models_read_the_same_tokens(subject_of(f"data.chat_template={place}/other.jinja"))
    assert finding.passed is False and "the template differs from the server's" in finding.detail


@pytest.mark.full
def test_a_teacher_that_changes_under_its_name_on_resume_fails(subject_of, engine, monkeypatch, fault):
    made = subject_of()
    assert invariants_runs.resume_is_exact(made).passed
    load, alone = DistillationTrainer._load_optimizer_and_scheduler, engine._alone

    def changed(trainer, checkpoint):
        load(trainer, checkpoint)
        if checkpoint is not None:
            monkeypatch.setattr(engine, "_alone", lambda job: alone(job).flip(-1))

    fault.setattr(DistillationTrainer, "_load_optimizer_and_scheduler", changed)
    finding = invariants_runs.resume_is_exact(made)
    assert not finding.passed and "weights" in finding.detail
