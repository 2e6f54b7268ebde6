"""Rotary embeddings that depend on length give a document what it gets alone: packed, padded, beside a longer one."""

import copy
import itertools

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import TrainingArguments

import distill
from distill.data.collator import Collator
from distill.models.loading import load_student, load_teacher
from distill.models.patch.document_rope import document_lengths, follows_length, rope_by_document
from distill.models.patch.packed import packing_problem
from distill.recipe import parse
from distill.teachers.objective import DistillationObjective
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


def losses_alone(model, teacher=None):
    """Return the sum of each document's loss, computed one document at a time by models as transformers has them."""
    total = 0.0
    for ids in documents():
        given = torch.tensor([ids])
        logits = model(input_ids=given, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        if teacher is None:
            total -= logits.gather(1, given[0, 1:, None]).sum().item()
            continue
        target = teacher(input_ids=given, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        total += (target.exp() * (target - logits)).sum().item()
    return total


def padded_with_mask(side):
    """Return a batch of a custom loop: a tokenizer's padding, its mask, labels; no positions."""
    width = max(LENGTHS)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for ids in documents():
        padding = width - len(ids)
        before, after = (padding, 0) if side == "left" else (0, padding)
        batch["input_ids"].append([2] * before + ids + [2] * after)
        batch["attention_mask"].append([0] * before + [1] * len(ids) + [0] * after)
        # the first token of a document is predicted from nothing
        batch["labels"].append([-100] * (before + 1) + ids[1:] + [-100] * after)
    return {name: torch.tensor(values) for name, values in batch.items()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_alone_gives_each_document_its_loss(kind, side):
    expected = losses_alone(make(kind), make(kind, seed=1))
    student, teacher = make(kind), make(kind, seed=1)
    objective = DistillationObjective(teacher, student)
    given = objective.student_inputs(padded_with_mask(side), num_items=1)
    assert student(**given)["loss"].item() == pytest.approx(expected, rel=1e-4)
    packed = Collator(2)([{key: [*itertools.chain(*(row[key] for row in rows()))] for key in rows()[0]}])
    assert student(**objective.student_inputs(packed, num_items=1))["loss"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.plain("phi3-True-right", "phi3-False-right", "phimoe-True-right", "phimoe-False-right")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_patch_alone_gives_each_document_its_loss(kind, layers, side):
    expected, model, plain = losses_alone(make(kind)), make(kind), make(kind)
    distill.patch(model, layers=layers)
    batch = padded_with_mask(side)
    count = int((batch["labels"] != -100).sum())
    assert model(**batch).loss.item() * count == pytest.approx(expected, rel=1e-4)
    assert plain(**batch).loss.item() * count != pytest.approx(expected, rel=1e-4), "and the test can fail"
    distill.unpatch(model)
    assert torch.equal(model(**batch).logits, plain(**batch).logits), "unpatch gives transformers' own back"


def test_padding_that_nothing_tells_of_is_named(caplog):
    model = make("phi3")
    rope_by_document(model)
    ids = padded_with_mask("right")["input_ids"]
    for _ in range(2):
        model(input_ids=ids)
    assert caplog.text.count("without position_ids or attention_mask") == 1
