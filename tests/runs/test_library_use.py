"""Trainer and objective in scripts of their users: arguments without effect, padded rows, teachers that others own."""

import pytest
import torch
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from transformers import TrainingArguments

from distill.teachers.objective import DistillationObjective
from distill.training.trainer import DistillationTrainer

LENGTH = 14


def arguments(folder, **settings):
    return TrainingArguments(str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **settings)


@pytest.mark.parametrize(
    "given",
    [
        {"label_smoothing_factor": 0.1},
        {"bf16_full_eval": True},
        {"enable_jit_checkpoint": True},
        {"compute_metrics": lambda prediction: {}},
        {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs["loss"]},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits},
    ],
)
def test_arguments_that_only_plain_trainers_read_are_refused(tmp_path, given):
    """Each had no effect: training and metrics were those without it."""
    (name,) = given
    more = {key: value for key, value in given.items() if callable(value)}
    settings = {} if more else given
    with pytest.raises(ValueError, match=rf"^{name}: expected none, since DistillationTrainer does not read it; use "):
        DistillationTrainer(tiny_model(), tiny_model(seed=1), arguments(tmp_path, **settings), **more)


def test_predictions_are_refused(tmp_path):
    made = DistillationTrainer(tiny_model(), tiny_model(seed=1), arguments(tmp_path))
    with pytest.raises(ValueError, match=r"^predict: no logits are computed; .* evaluate"):
        made.predict([{"input_ids": [5, 6, 7]}])


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 259, (6 + number,), generator=generator).tolist() for number in range(8)]


def padded(side):
    """Rows as tokenizers pad them, with a mask and without labels."""
    for ids in texts():
        gap, ones = [0] * (LENGTH - len(ids)), [1] * len(ids)
        mask, filled = [*ones, *gap], [*ids, *(2 for _ in gap)]
        yield (
            {"input_ids": filled, "attention_mask": mask}
            if side == "right"
            else {
                "input_ids": [*(2 for _ in gap), *ids],
                "attention_mask": [*gap, *ones],
            }
        )


def language_model_batch(rows):
    """A batch as transformers' collator for language models makes it, which masks the labels of padding alone."""
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("collator", [None, language_model_batch])
def test_masked_padding_of_rows_changes_nothing(tmp_path, side, collator):
    """Padding is neither attended to nor trained on, and no token is predicted from it."""
    found = []
    for data, own in (([{"input_ids": ids} for ids in texts()], None), (list(padded(side)), collator)):
        models = tiny_model(dtype=torch.float64), tiny_model(seed=1, hidden=64, dtype=torch.float64)
        made = DistillationTrainer(*models, arguments(tmp_path), eval_dataset=data, data_collator=own)
        found.append(made.evaluate())
    assert found[1] == pytest.approx(found[0], rel=1e-6)  # statistics and rotary embeddings are fp32


def test_a_teacher_with_weights_that_the_student_trains_is_refused():
    """Freezing it would end their training without a word."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    with pytest.raises(ValueError, match=r"^teacher: expected weights of its own, got .* use copy\.deepcopy"):
        DistillationObjective(student, student)
    student.set_input_embeddings(teacher.get_input_embeddings())
    with pytest.raises(ValueError, match=r"got 1 that the student trains \(model\.embed_tokens\.weight\)"):
        DistillationObjective(teacher, student)
    assert all(parameter.requires_grad for parameter in student.parameters())
    student.get_input_embeddings().requires_grad_(False)  # frozen in both by choice
    DistillationObjective(teacher, student)


def test_a_teacher_is_queried_in_eval_mode_whatever_contains_it():
    """LightningModule.train(), as that of any module, reaches a teacher that is an attribute."""
    student, teacher = tiny_model(), tiny_model(seed=1, attention_dropout=0.5)
    objective, both = DistillationObjective(teacher, student), nn.ModuleList([student, teacher])
    batch = {"input_ids": torch.arange(3, 23)[None], "labels": torch.arange(3, 23)[None]}
    expected = student(**objective.student_inputs(batch))["loss"]
    both.train()
    assert student(**objective.student_inputs(batch))["loss"] == expected
    assert student.training and not teacher.training


# ------------------------------------------------------------------ models by name


def test_models_by_name_are_trained_as_the_same_models_given_whole(tmp_path):
    tokenizer = save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"layers": 1})
    rows = [{"input_ids": ids} for ids in texts()]

    def trained(student, teacher):
        settings = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "seed": 3}
        made = DistillationTrainer(student, teacher, arguments(tmp_path / "out", **settings), train_dataset=rows)
        made.train()
        return made

    by_name = trained(str(tmp_path / "student"), str(tmp_path / "teacher"))
    whole = trained(tiny_model(tokenizer, layers=1).train(), tiny_model(tokenizer, layers=3, seed=1))
    (teacher,) = by_name.objective.teacher.models.values()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert len(by_name.processing_class) == len(tokenizer) and whole.processing_class is None
    ours, theirs = (made.model.state_dict() for made in (by_name, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    by_name.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved/tokenizer_config.json").is_file()


def test_a_name_may_stand_beside_a_model_and_mistakes_are_those_of_a_recipe(tmp_path):
    tokenizer = save_models(tmp_path, teacher={"layers": 2, "seed": 1})
    one = DistillationTrainer(tiny_model(tokenizer), str(tmp_path / "teacher"), arguments(tmp_path / "out"))
    assert one.processing_class is not None
    with pytest.raises(ValueError, match=r"^student\.model: .*nowhere does not exist"):
        DistillationTrainer(str(tmp_path / "nowhere"), str(tmp_path / "teacher"), arguments(tmp_path / "out"))
    other = tiny_tokenizer(300, specials=("<|a|>", "<|b|>", "<|c|>"))
    save_tiny(tmp_path / "other", tiny_model(other), other)
    with pytest.raises(ValueError, match="token"):
        DistillationTrainer(str(tmp_path / "other"), str(tmp_path / "teacher"), arguments(tmp_path / "out"))
