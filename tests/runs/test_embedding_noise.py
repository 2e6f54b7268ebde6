"""NEFTune: how large the noise on each document is, where there is none, and runs that resume with it."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_resume import RECIPE, WHOLE, figures, resume
from tiny import tiny_model
from transformers import TrainingArguments

from distill.cli import run_command
from distill.core.eval_mode import eval_mode
from distill.models.head import decoder_of
from distill.models.patch.document_rope import document_lengths
from distill.recipe import parse
from distill.training.embedding_noise import EmbeddingNoise
from distill.training.trainer import DistillationTrainer

ALPHA = 5.0
# rows of two and of three documents, the last one of padding
POSITIONS = torch.tensor([[*range(300), *range(100)], [*range(50), *range(250), *range(100)]])
LENGTHS = torch.tensor([[300] * 300 + [100] * 100, [50] * 50 + [250] * 250 + [100] * 100])
NOISY = RECIPE.replace("schedule: constant", "schedule: linear, min_lr: 10%, neftune_alpha: 8, tokens_per_step: 128")
pytestmark = pytest.mark.place(**WHOLE | {"files": {"r.yaml": NOISY}})


def test_the_length_of_a_tokens_document_is_read_from_positions():
    assert torch.equal(document_lengths(POSITIONS), LENGTHS)
    left = torch.tensor([[0, 1, 2, 0, 1]])  # padded on the left, and positions that begin anew
    assert document_lengths(left).tolist() == [[3, 3, 3, 2, 2]]


def embeddings(model, positions, **more):
    """What the decoder's first layer reads in a call of the model."""
    read = []
    first = decoder_of(model).layers[0]
    handle = first.register_forward_pre_hook(lambda _, args, kwargs: read.append(args[0]), with_kwargs=True)
    ids = torch.arange(positions.numel()).reshape(positions.shape) % 259
    model(input_ids=ids, position_ids=positions, use_cache=False, **more)
    handle.remove()
    return read[0]


def test_a_document_gets_noise_by_its_own_length_and_only_in_training_forwards():
    model = tiny_model()
    plain = embeddings(model, POSITIONS)
    with EmbeddingNoise(model, ALPHA).training():
        assert torch.equal(embeddings(model, POSITIONS), plain), "the model is in eval mode"
        model.train()
        with torch.no_grad():
            assert torch.equal(embeddings(model, POSITIONS), plain), "as a teacher that shares the modules"
        with eval_mode(model):
            assert torch.equal(embeddings(model, POSITIONS), plain)
        noise = (embeddings(model, POSITIONS) - plain).double()
        again = (embeddings(model, POSITIONS) - plain).double()
    assert torch.equal(embeddings(model, POSITIONS), plain), "the hooks are gone after training"
    assert not torch.equal(noise, again)
    bound = (ALPHA / (LENGTHS.double() * 32).sqrt()).unsqueeze(-1)
    assert (noise.abs() <= bound * (1 + 1e-3)).all()
    # uniform: mean 0, variance of a third, in each document alike; 1,600 entries and more, 5 standard errors
    for length in (50, 100, 250, 300):
        share = (noise / bound)[length == LENGTHS].flatten()
        assert abs(share.mean().item()) < 5 / math.sqrt(3 * len(share)), length
        assert share.square().mean().item() == pytest.approx(1 / 3, abs=5 * math.sqrt(4 / 45 / len(share))), length


def test_a_trainer_puts_its_noise_in_place_of_transformers_own(tmp_path):
    student, teacher = tiny_model(), tiny_model(seed=1)
    args = TrainingArguments(
        str(tmp_path), max_steps=1, neftune_noise_alpha=ALPHA, use_cpu=True, report_to="none", save_strategy="no"
    )
    rows = [{"input_ids": list(range(1, length))} for length in (9, 14)]
    trainer = DistillationTrainer(student, teacher, args, train_dataset=rows)
    batch = trainer.data_collator(rows)
    assert document_lengths(batch["position_ids"]).tolist() == [[8] * 8 + [5] * 5, [13] * 13]
    seen = []

    def note(module, inputs, output):
        seen.append(len(module._forward_hooks))

    student.get_input_embeddings().register_forward_hook(note)
    teacher.get_input_embeddings().register_forward_hook(note)
    trainer.train()
    assert sorted(seen) == [1, 2], "the teacher's embedding has the hook of this test alone, the student's one more"
    assert len(student.get_input_embeddings()._forward_hooks) == 1


def test_the_noise_may_be_set_by_transformers_name():
    same = RECIPE.replace("steps: 4", "steps: 4, arguments: {neftune_noise_alpha: 5}")
    assert parse(same).train.arguments == {"neftune_noise_alpha": 5}, "recipes that have it are read on"


@pytest.mark.full
def test_a_resumed_run_draws_the_same_noise_at_the_same_rates(workplace, finished):
    shutil.rmtree(workplace / "runs/whole/checkpoint-4")
    for name in ("result.json", "student"):
        path = workplace / "runs/whole" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert resume() == 0
    assert figures(workplace / "runs/whole") == figures(finished / "runs/whole")
    rates = [row["learning_rate"] for row in figures(finished / "runs/whole") if "learning_rate" in row]
    assert rates == pytest.approx([3e-3 * (1 - 0.9 * step / 4) for step in range(4)])
    ours, theirs = (load_file(path / "runs/whole/student/model.safetensors") for path in (workplace, finished))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_noise_changes_training_and_no_evaluation(workplace):
    assert run_command(["run", "r.yaml", "train.neftune_alpha=null", "--name", "without"]) == 0
    noisy, plain = (figures(workplace / "runs" / name) for name in ("whole", "without"))
    assert noisy[0]["loss"] != plain[0]["loss"]
    before = [json.loads((workplace / "runs" / name / "before.json").read_text()) for name in ("whole", "without")]
    measured = [{name: each[name] for name in each if name not in ("started", "command", "summary")} for each in before]
    assert measured[0] == measured[1] and measured[0]
