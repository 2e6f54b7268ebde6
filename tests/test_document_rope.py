"""Rotary embeddings that depend on length give a document what it gets alone: packed, padded, beside a longer one."""

import copy
import itertools

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import TrainingArguments

from distill.data.collator import Collator
from distill.models.load.loading import load_student, load_teacher
from distill.models.patch.document_rope import document_lengths, follows_length, rope_by_document
from distill.models.patch.packed import packing_problem
from distill.recipe import parse
from distill.training.trainer import DistillationTrainer

LIMIT = 16  # tokens that the short set is for
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 3.0, 9.0, 27.0],
}
KINDS = {
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": LIMIT},
    "phimoe": {
        "rope_parameters": LONG | {"short_mscale": 1.0, "long_mscale": 1.3},
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}
LENGTHS = (LIMIT - 5, LIMIT + 9, LIMIT)


def make(kind, seed=0):
    return tiny_model(kind=kind, seed=seed, **KINDS[kind])


def documents():
    return [torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def rows():
    return [{"input_ids": ids, "labels": ids, "position_ids": list(range(len(ids)))} for ids in documents()]


def logits(model, batch):
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_each_document_is_rotated_as_alone(kind):
    model, plain = make(kind), make(kind)
    rope_by_document(model)
    rope_by_document(model)  # once is enough
    alone = [plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in documents()]
    padded = Collator(2)(rows())
    packed = Collator(2)([{key: [*itertools.chain(*(row[key] for row in rows()))] for key in rows()[0]}])
    for expected, row, part in zip(alone, logits(model, padded), logits(model, packed)[0].split(LENGTHS), strict=True):
        assert torch.allclose(row[: len(expected)], expected, atol=1e-5)
        assert torch.allclose(part, expected, atol=1e-5)
    # and the test can fail: the longest row decides for all of them
    assert not torch.allclose(logits(copy.deepcopy(plain), padded)[0, : LENGTHS[0]], alone[0], atol=1e-2)
    assert packing_problem(model) is None


def test_lengths_of_documents_follow_from_positions_that_restart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [1, 1, 0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 0, 0, 0, 1, 2]])
    expected = [[3, 3, 3, 2, 2, 4, 4, 4, 4], [2, 2, 7, 7, 7, 7, 7, 7, 7], [8, 8, 8, 8, 1, 1, 3, 3, 3]]
    assert document_lengths(positions).tolist() == expected
    assert document_lengths(torch.tensor([[17]])).tolist() == [[18]]  # the newest token, over a cache


def test_loaded_models_and_the_trainers_batches_go_by_documents(tmp_path):
    save_tiny(tmp_path / "teacher", make("phi3", seed=1), tiny_tokenizer())
    recipe = parse(
        f"{{teacher: {{model: {tmp_path}/teacher}}, student: {{from_teacher: {{layers: 1}}}}, "
        "data: {source: a, max_length: 32, packing: false}, train: {steps: 1, batch_size: 2, device: cpu}}"
    )
    teacher = load_teacher(recipe.teacher)
    student = load_student(recipe.student, teacher=teacher)
    for model in (teacher, student):
        assert follows_length(model) and all(
            "forward" in m.__dict__ for m in model.modules() if hasattr(m, "rope_type")
        )
    with torch.no_grad():
        arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
        trainer = DistillationTrainer(model=student, teacher=teacher, loss=recipe.loss, args=arguments)
        batch = trainer.data_collator(rows())
        padded = logits(teacher, batch)
        alone = teacher(input_ids=torch.tensor([documents()[0]]), use_cache=False).logits[0]
    assert torch.allclose(padded[0, : LENGTHS[0]], alone, atol=1e-5)
    assert not follows_length(tiny_model())
