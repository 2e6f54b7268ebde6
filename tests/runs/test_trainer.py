"""DistillationTrainer: the mean over the whole step, resume bit for bit, checkpoints, figures and their files."""

import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from transformers import TrainingArguments

from distill.doctor.reference_loss import token_loss
from distill.models.flops import FlopCounts, count_flops
from distill.objectives.losses import STATISTICS
from distill.recipe import Loss
from distill.training.checkpoints import UNFINISHED, checkpoints
from distill.training.metrics import Meter
from distill.training.phases import KEYS
from distill.training.progress import MetricsFile, ProgressReport, read_metrics
from distill.training.trainer import DistillationTrainer


def rows(count=16, seed=0, ragged=True):
    """Rows of different lengths with different shares of trained tokens, two documents in each."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = 6 + number % 7 if ragged else 10
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        labels = [-100, *ids[1:]]
        labels[length // 2] = -100
        for masked in range(1, 1 + number % 4):
            labels[masked] = -100
        positions = [*range(length // 2), *range(length - length // 2)]
        made.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return Dataset.from_list(made)


def arguments(folder, **settings):
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **(defaults | settings))


def trainer(folder, *, student=None, callbacks=None, data=None, loss="forward_kl", dtype=torch.float32, **settings):
    return DistillationTrainer(
        student or tiny_model(dtype=dtype),
        tiny_model(seed=1, hidden=64, dtype=dtype),
        arguments(folder, **settings),
        loss=loss,
        train_dataset=rows() if data is None else data,
        eval_dataset=rows(8, seed=5),
        callbacks=callbacks,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def history(made, key):
    return [entry[key] for entry in made.state.log_history if key in entry and "loss" in entry]


@pytest.mark.plain("forward_kl")
@pytest.mark.parametrize("loss", ["forward_kl", {"terms": [{"type": "jsd"}, {"type": "cross_entropy", "weight": 0.3}]}])
def test_one_batch_of_eight_equals_eight_of_one(tmp_path, loss):
    runs = []
    for batch, accumulation in ((8, 1), (2, 4), (1, 8)):
        made = trainer(
            tmp_path,
            dtype=torch.float64,
            loss=loss,
            max_steps=2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=1.0,
        )
        made.train()
        runs.append((weights(made.model), history(made, "loss"), history(made, "agreement")))
    start = weights(tiny_model(dtype=torch.float64))
    assert any(not torch.equal(start[name], value) for name, value in runs[0][0].items())
    for other, losses, agreement in runs[1:]:
        for name, value in runs[0][0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)
        assert losses == pytest.approx(runs[0][1], rel=1e-6)
        assert agreement == pytest.approx(runs[0][2], rel=1e-9)


def _as_tensors(batch):
    """A collator of somebody else's: rows of one length as they are."""
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


@pytest.mark.plain("no labels")
@pytest.mark.parametrize("given", ["no labels", "labels", "own collator"])
def test_documents_in_a_row_do_not_predict_each_other(tmp_path, given):
    """A row whose positions restart learns what its documents alone do, however its labels came about."""
    packed = rows(4, ragged=False).remove_columns([] if given == "own collator" else ["labels"])
    if given != "no labels":
        packed = packed.map(lambda row: {"labels": row["input_ids"]})
    apart = [{"input_ids": row["input_ids"][half]} for row in packed for half in (slice(5), slice(5, None))]
    runs = []
    for data, size, collator in ((apart, 8, None), (packed, 4, _as_tensors if given == "own collator" else None)):
        made = DistillationTrainer(
            tiny_model(dtype=torch.float64),
            tiny_model(seed=1, hidden=64, dtype=torch.float64),
            arguments(tmp_path, max_steps=1, per_device_train_batch_size=size, optim="sgd", learning_rate=1.0),
            train_dataset=Dataset.from_list(list(data)),
            eval_dataset=Dataset.from_list(list(data)),
            data_collator=collator,
        )
        before = made.evaluate()
        made.train()
        runs.append((weights(made.model), {name: before[name] for name in ("eval_loss", "eval_cross_entropy")}, made))
    (one, held, first), (other, again, second) = runs
    assert again == pytest.approx(held, rel=1e-9)
    assert history(second, "trained_tokens") == history(first, "trained_tokens") == [8 * 4]
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)


def test_the_loss_is_the_mean_over_trained_tokens(tmp_path):
    data = rows(4)
    made = trainer(
        tmp_path,
        data=data,
        max_steps=1,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=1,
        learning_rate=0.0,
    )
    made.train()
    trained = sum(label != -100 for row in data for label in row["labels"][1:])
    assert history(made, "trained_tokens") == [trained]
    whole = made.objective.student_inputs(made.data_collator(list(data)))
    assert history(made, "loss")[0] == pytest.approx(made.model(**whole)["loss"].item(), rel=1e-5)
    assert history(made, "kl")[0] == pytest.approx(history(made, "loss")[0], rel=1e-5)


@pytest.mark.full
def test_learning_lowers_held_out_kl(tmp_path):
    made = trainer(tmp_path, max_steps=30, learning_rate=3e-3)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_kl"] < 0.9 * before["eval_kl"]
    assert after["eval_teacher_cross_entropy"] == pytest.approx(before["eval_teacher_cross_entropy"])


def test_evaluation_is_weighted_by_tokens_not_batches(tmp_path):
    figures = [trainer(tmp_path, per_device_eval_batch_size=size).evaluate() for size in (1, 3, 8)]
    for other in figures[1:]:
        assert other["eval_loss"] == pytest.approx(figures[0]["eval_loss"], rel=1e-5)
        assert other["eval_kl"] == pytest.approx(figures[0]["eval_kl"], rel=1e-5)


def test_the_held_out_loss_follows_the_definition(tmp_path):
    loss = {"temperature": 2.0, "terms": [{"type": "jsd"}, {"type": "cross_entropy", "weight": 0.3}]}
    made = trainer(tmp_path, loss=loss, per_device_eval_batch_size=3)
    teacher, parts = made.objective.teacher.models["teacher"], []
    for row in rows(8, seed=5):
        inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "position_ids")}
        labels = torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            z_s, z_t = (model.eval()(**inputs, use_cache=False).logits[0, :-1] for model in (made.model, teacher))
        parts.append([value[labels != -100] for value in (z_s, z_t, labels)])
    z_s, z_t, labels = map(torch.cat, zip(*parts, strict=True))
    exact = token_loss(z_s, [(1.0, z_t)], labels, Loss.model_validate(loss))
    assert made.evaluate()["eval_loss"] == pytest.approx(exact.item(), rel=1e-5)


def test_the_token_count_is_an_int64_and_never_zero(tmp_path):
    made = trainer(tmp_path)
    batches = [made.data_collator([row]) for row in rows(3)]
    count = made._get_num_items_in_batch(batches, torch.device("cpu"))
    assert count.dtype == torch.int64
    assert count == sum(batch["valid_rows"].numel() for batch in batches)
    masked = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
    assert made._get_num_items_in_batch([masked], torch.device("cpu")) == 1


def test_a_step_without_trained_tokens_is_harmless(tmp_path):
    data = Dataset.from_list([{**row, "labels": [-100] * len(row["labels"])} for row in rows(4)])
    made = trainer(tmp_path, data=data, max_steps=1)
    start = weights(made.model)
    made.train()
    assert history(made, "loss") == [0.0]
    for name, value in weights(made.model).items():
        assert torch.equal(value, start[name]), name


@pytest.mark.plain("False")
@pytest.mark.parametrize("lora", [False, True])
def test_resume_in_the_middle_of_an_epoch_is_exact(tmp_path, lora):
    def student():
        model = tiny_model(attention_dropout=0.1)
        if lora:
            torch.manual_seed(9)
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
        return model

    settings = {
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "cosine",
    }
    whole = trainer(
        tmp_path / "whole", student=student(), callbacks=[MetricsFile(tmp_path / "whole.jsonl")], **settings
    )
    whole.train()
    for path in checkpoints(tmp_path / "whole"):
        assert torch.load(path / "optimizer.pt", weights_only=True)
    again = trainer(
        tmp_path / "again", student=student(), callbacks=[MetricsFile(tmp_path / "again.jsonl")], **settings
    )
    (tmp_path / "again.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes() + b'{"step": 9, "lo')
    again.train(resume_from_checkpoint=str(checkpoints(tmp_path / "whole")[0]))
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], value), name
    timing = ("seconds", "tokens_per_second", "trained_tokens_per_second", "peak_memory_gib", "tokens_seen", *KEYS)
    plain = [
        [{key: value for key, value in row.items() if key not in timing} for row in read_metrics(path)]
        for path in (tmp_path / "whole.jsonl", tmp_path / "again.jsonl")
    ]
    assert plain[0] == plain[1]
    assert [row["step"] for row in plain[1]] == [1, 2, 3, 4, 5, 6, 7]


def test_only_complete_checkpoints_have_their_name(tmp_path, monkeypatch):
    made = trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=3)
    made.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    assert not (tmp_path / UNFINISHED).exists()

    def dies(*_):
        raise KeyboardInterrupt

    made = trainer(tmp_path, save_strategy="steps", save_steps=4, max_steps=5)
    monkeypatch.setattr(made, "_save_rng_state", dies)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    (tmp_path / "checkpoint-9").mkdir()
    assert checkpoints(tmp_path)[-1].name == "checkpoint-3"


def test_rows_may_be_plain(tmp_path):
    made = trainer(tmp_path, data=Dataset.from_list([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}]), max_steps=1)
    made.train()
    assert history(made, "trained_tokens") == [4]


def test_figures_of_one_step(tmp_path):
    made = trainer(tmp_path, max_steps=2, data=rows(4, ragged=False), gradient_accumulation_steps=2)
    made.train()
    entry = made.state.log_history[0]
    assert entry["tokens_per_second"] * entry["seconds"] == pytest.approx(40)
    assert 0 <= entry["agreement"] <= 1 and entry["peak_memory_gib"] > 0
    assert "mfu" not in entry  # no peak is known for a CPU
    assert not [key for key, value in entry.items() if isinstance(value, torch.Tensor)]


def test_flops_of_a_model_by_hand():
    model = tiny_model(layers=2, hidden=32)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32
    body = 2 * layer + 32
    ends = 2 * ((32 + 32) * 2 + (32 + 16) * 2 + 3 * (32 + 64))  # numbers that go into and come out of products
    assert count_flops(model, trains=False) == FlopCounts(2 * body, 2 * 259 * 32, 4 * 2 * 32, 4 * ends, 4 * (259 + 32))
    assert count_flops(model, trains=True) == FlopCounts(
        6 * body, 6 * 259 * 32, 12 * 2 * 32, 12 * ends, 12 * (259 + 32)
    )
    lora = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    rank = 2 * ((32 + 2) + (2 + 32))
    assert count_flops(lora, trains=True) == FlopCounts(
        4 * body + 6 * 2 * 2 * (32 + 32), 4 * 259 * 32, 12 * 2 * 32, 8 * ends + 12 * rank, 8 * (259 + 32)
    )


def test_mfu_equals_the_value_computed_by_hand(monkeypatch):
    meter = Meter(torch.device("cpu"), {"": FlopCounts(2.0, 1.0, 0.5)}, FlopCounts(6.0, 3.0, 1.5))
    meter.peak = 1e6
    batch = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "labels": torch.tensor([[-100, 5, 6], [-100, -100, 7]]),
        "position_ids": torch.tensor([[0, 1, 2], [0, 0, 1]]),
    }
    meter.add(batch, torch.arange(len(STATISTICS), dtype=torch.float32))
    figures = meter.read(lambda values: values)
    pairs = 1 + 2 + 3 + 1 + 1 + 2
    available = 1e6 * figures["seconds"]
    assert figures["mfu_teacher"] == pytest.approx((2 * 6 + 1 * 3 + 0.5 * pairs) / available)
    assert figures["mfu_student"] == pytest.approx(3 * (2 * 6 + 1 * 3 + 0.5 * pairs) / available)
    assert figures["mfu"] == pytest.approx(figures["mfu_teacher"] + figures["mfu_student"])
    assert figures["trained_tokens"] == 3
    assert figures["agreement"] == pytest.approx(STATISTICS.index("agreement") / 3)


def test_metrics_file_joins_evaluation_to_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    made = trainer(
        tmp_path, callbacks=[MetricsFile(path)], eval_strategy="steps", eval_steps=2, logging_steps=2, max_steps=4
    )
    made.evaluate()
    made.train()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == [0, 2, 4]
    assert all(row["eval_kl"] > 0 for row in found) and all(row["loss"] > 0 for row in found[1:])


def test_metrics_file_writes_valid_json_of_nan(tmp_path):
    class State:
        is_world_process_zero, global_step = True, 5

    MetricsFile(tmp_path / "m.jsonl").on_log(None, State, None, {"loss": math.nan, "kl": 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 5, "loss": None, "kl": 1.0}]


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path):
    from rich.console import Console

    with (tmp_path / "out.txt").open("w") as file:
        trainer(tmp_path, callbacks=[ProgressReport(Console(file=file, width=80))], max_steps=2).train()
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/2  loss ") and " kl " in lines[0] and "tokens/s" in lines[0]


def test_progress_bar_on_a_terminal(tmp_path):
    from rich.console import Console

    with (tmp_path / "out.txt").open("w") as file:
        console = Console(file=file, width=120, force_terminal=True)
        trainer(tmp_path, callbacks=[ProgressReport(console)], max_steps=2).train()
    text = Path(tmp_path / "out.txt").read_text()
    assert "2/2" in text and "agreement" in text


def test_rows_that_are_only_iterated_are_learned_whole(tmp_path):
    """accelerate would cut every tensor of such a batch to as many entries as it has rows, `valid_rows` too."""

    class InOrder(DistillationTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def made(data):
        return InOrder(tiny_model(), tiny_model(seed=1), arguments(tmp_path), train_dataset=data)

    plain, streamed = made(rows()), made(rows().to_iterable_dataset())
    plain.train(), streamed.train()
    assert history(streamed, "loss") == history(plain, "loss")
    assert history(streamed, "trained_tokens") == history(plain, "trained_tokens")


def test_several_sets_are_evaluated_under_their_names(tmp_path):
    made = trainer(tmp_path, eval_strategy="steps", eval_steps=4)
    sets = {"long": rows(8, seed=5), "short": rows(3, seed=6)}
    made.eval_dataset = sets
    made.train()
    found = made.evaluate()
    for name, data in sets.items():
        assert found[f"eval_{name}_kl"] == made.evaluate(data)["eval_kl"]
        assert [entry for entry in made.state.log_history if f"eval_{name}_kl" in entry]


@pytest.mark.plain("1")
@pytest.mark.parametrize("limit", [1, 2, None])
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, limit):
    settings = {"load_best_model_at_end": True, "metric_for_best_model": "kl", "greater_is_better": False}
    each_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    made = trainer(tmp_path, max_steps=2, learning_rate=0.3, save_total_limit=limit, **settings, **each_step)
    made.train()
    seen = [entry["eval_kl"] for entry in made.state.log_history if "eval_kl" in entry]
    best = tmp_path / f"checkpoint-{1 + seen.index(min(seen))}"
    assert min(seen) < seen[-1] and made.state.best_model_checkpoint == str(best) and best.is_dir()
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)
    assert made.evaluate()["eval_kl"] == pytest.approx(min(seen))
