"""The student's own words in training: what is replaced, what trains; ranks, batches and resumes change nothing."""

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from test_trainer import arguments, weights
from tiny import tiny_model, tiny_tokenizer
from transformers import TrainingArguments
from two_ranks import run_as_two

from distill.core.ranks import exit_process
from distill.data.chat import load_template
from distill.data.collator import Collator
from distill.data.report import DataReport
from distill.generation.decode_loop import DecodeEngine, DecodeLoop, EngineSettings, Generated
from distill.generation.documents import as_row, documents_of
from distill.generation.from_recipe import rollouts_from_recipe
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import GREEDY, Sampling
from distill.models.patch.patching import patch
from distill.recipe import parse
from distill.teachers.objective import DistillationObjective
from distill.training.checkpoints import checkpoints
from distill.training.progress import MetricsFile, read_metrics
from distill.training.step_listeners import RolloutBatches
from distill.training.trainer import DistillationTrainer

COLLATE = Collator(2, omit_plain_positions=True)


def pairs(count=16, seed=0):
    """Rows of one document: a prompt of 1 to 6 tokens, then an answer."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        prompt, answer = 1 + number % 6, 2 + number % 5
        ids = torch.randint(3, 259, (prompt + answer,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "position_ids": list(range(len(ids)))})
    return rows


def packed(rows, size=3):
    """The same, some documents a row."""
    found = []
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        found.append({key: [token for row in group for token in row[key]] for key in group[0]})
    return found


def loop(model):
    return DecodeLoop(model, EngineSettings(2, [0]))


def on_policy(model, **settings):
    defaults = {"fraction": 1.0, "max_new_tokens": 5, "sampling": Sampling(1.0), "seed": 3, "max_length": 40}
    return OnPolicyRollouts(loop(model), **(defaults | settings))


def trainer(folder, *, student=None, teacher=None, data=None, own=None, callbacks=None, loss="reverse_kl", **settings):
    student = student or tiny_model(dtype=torch.float64)
    made = DistillationTrainer(
        student,
        teacher or tiny_model(seed=1, hidden=64, dtype=torch.float64),
        arguments(folder, **{"max_steps": 3} | settings),
        loss=loss,
        train_dataset=Dataset.from_list(pairs() if data is None else data),
        callbacks=callbacks,
    )
    made.add_callback(RolloutBatches(on_policy(student, **(own or {})), made))
    return made


def test_documents_are_taken_apart_and_put_together():
    rows = packed(pairs(6))
    batch = COLLATE(rows)
    found = documents_of(batch)
    assert [document.ids for document in found] == [row["input_ids"] for row in pairs(6)]
    assert [document.row for document in found] == [0, 0, 0, 1, 1, 1]
    assert [len(document.prompt) for document in found] == [1 + number % 6 for number in range(6)]
    again = COLLATE([as_row(found[:3]), as_row(found[3:])])
    assert all(torch.equal(again[name], batch[name]) for name in batch)
    plain = COLLATE(pairs(6))
    assert "position_ids" not in plain
    assert [document.ids for document in documents_of(plain)] == [row["input_ids"] for row in pairs(6)]  # unpadded
    talk = {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, -100, -100, 9, 10], "position_ids": list(range(6))}
    assert documents_of(COLLATE([talk]))[0].prompt == [5, 6, 7, 8]


@pytest.mark.parametrize("shape", ["plain", "packed"])
def test_only_generated_tokens_train(shape):
    model = tiny_model(dtype=torch.float64)
    rows = pairs(6) if shape == "plain" else packed(pairs(6))
    own = on_policy(model, sampling=GREEDY)
    (batch,) = own.replace([COLLATE(rows)], 0, COLLATE)
    prompts = [row["input_ids"][: row["labels"].count(-100)] for row in pairs(6)]
    answers = loop(model).generate(prompts, max_new_tokens=5).tokens
    found = {tuple(document.ids): document for document in documents_of(batch)}
    assert set(found) == {(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)}
    for prompt, answer in zip(prompts, answers, strict=True):
        assert found[(*prompt, *answer)].labels == [-100] * len(prompt) + answer
    assert int((batch["labels"] != -100).sum()) == sum(map(len, answers))
    assert batch["valid_rows"].numel() == sum(map(len, answers))


def test_the_step_counts_generated_tokens(tmp_path):
    made = trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2, own={"sampling": GREEDY})
    seen = []
    replace = made.listeners.find(RolloutBatches).rollouts.replace
    made.listeners.find(RolloutBatches).rollouts.replace = lambda *a: seen.append(replace(*a)) or seen[-1]
    made.train()
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    for entry, batches in zip(logged, seen, strict=True):
        assert entry["trained_tokens"] == sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert entry["loss"] == pytest.approx(entry["kl"], rel=1e-5)  # a mean over exactly these tokens
        assert entry["rollouts"] == 4 and entry["rollout_length"] * 4 == entry["trained_tokens"]
        assert 0 <= entry["rollout_truncated"] <= 1 and entry["rollouts_per_second"] > 0
        assert entry["rollouts_left_out"] == 0


def two_steps_of_eight(folder, batch, accumulation):
    """Weights, and of each step how many answers are the student's and how many tokens train."""
    made = trainer(
        folder,
        max_steps=2,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=1.0,
        own={"fraction": 0.5, "max_new_tokens": 3},
    )
    made.train()
    logged = [entry for entry in made.state.log_history if "rollouts" in entry]
    counts = [[entry[key] for key in ("rollouts", "trained_tokens", "rollout_truncated")] for entry in logged]
    return weights(made.accelerator.unwrap_model(made.model)), counts


def same_run(expected, got):
    assert got[1] == expected[1]
    for name, value in expected[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_batches_accumulation_and_ranks_change_neither_metrics_nor_weights(tmp_path):
    expected = two_steps_of_eight(tmp_path, 8, 1)
    assert 0 < sum(count for count, *_ in expected[1]) < 16
    for batch, accumulation in ((2, 4), (1, 8)):
        same_run(expected, two_steps_of_eight(tmp_path, batch, accumulation))
    run_as_two(__file__, tmp_path, timeout=300)
    same_run(expected, torch.load(tmp_path / "two.pt", weights_only=True))


def test_a_seed_reproduces_responses_and_steps_differ():
    model = tiny_model(dtype=torch.float64)
    batch = COLLATE(pairs(8))
    (first,), (again,) = (on_policy(model).replace([batch], 4, COLLATE) for _ in range(2))
    assert torch.equal(first["input_ids"], again["input_ids"])
    (later,) = on_policy(model).replace([batch], 5, COLLATE)
    (other,) = on_policy(model, seed=4).replace([batch], 4, COLLATE)
    assert documents_of(later) != documents_of(first) != documents_of(other)


def test_the_fraction_is_a_share_of_documents():
    class Echo(DecodeEngine):
        def run(self, request):
            return Generated([[7]] * len(request.prompts), [False] * len(request.prompts))

    own = OnPolicyRollouts(Echo(), fraction=0.3, max_new_tokens=4, sampling=Sampling(1.0), seed=1, max_length=40)
    batches = [COLLATE(pairs(8, seed=seed)) for seed in range(60)]
    own.replace(batches, 0, COLLATE)
    figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
    assert abs(figures["rollouts"] - 0.3 * 480) < 4 * (0.21 * 480) ** 0.5
    none = OnPolicyRollouts(Echo(), fraction=0.0, max_new_tokens=4, sampling=Sampling(1.0), seed=1, max_length=40)
    assert none.replace(batches, 0, COLLATE)[5] is batches[5]
    assert own.pop_metrics(lambda values: values, torch.device("cpu"))["rollouts"] == 0


def test_packed_rows_never_grow():
    class Long(DecodeEngine):
        def run(self, request):
            return Generated([[7] * limit for limit in request.limits], [True] * len(request.prompts))

    rows = packed(pairs(18))
    longest = max(len(row["input_ids"]) for row in rows)
    left_out = set()
    for step in range(6):
        own = OnPolicyRollouts(
            Long(), fraction=1.0, max_new_tokens=12, sampling=Sampling(1.0), seed=1, max_length=longest
        )
        (batch,) = own.replace([COLLATE(rows)], step, COLLATE)
        assert batch["input_ids"].shape[0] <= len(rows) and batch["input_ids"].shape[1] <= longest
        kept = documents_of(batch)
        figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
        assert len(kept) + figures["rollouts_left_out"] == 18 and figures["rollouts_left_out"] > 0
        assert figures["rollout_truncated"] == 1
        left_out.add(frozenset(tuple(document.prompt) for document in kept))
    assert len(left_out) > 1  # chance decides, not the order


@pytest.mark.parametrize("multiple, length", [(16, 32), (64, 60)])
def test_packed_rows_of_few_lengths(multiple, length):
    """Padding is masked from the loss and belongs to no document; no row exceeds its maximum length."""
    model, batch = tiny_model(), COLLATE(packed(pairs(3)))
    (plain,), (padded,) = (
        on_policy(model, max_length=60, multiple=number).replace([batch], 0, COLLATE) for number in (1, multiple)
    )
    assert 16 < plain["input_ids"].shape[1] < 32 and padded["input_ids"].shape[1] == length
    assert documents_of(padded) == documents_of(plain)
    assert torch.equal(padded["valid_rows"], plain["valid_rows"])
    added = padded["position_ids"][0, plain["input_ids"].shape[1] :]
    assert torch.equal(added, torch.arange(len(added)))


@pytest.mark.plain("1-plain", "2-plain")
@pytest.mark.parametrize("shape", ["plain", "packed"])
@pytest.mark.parametrize("samples", [1, 2])
def test_one_row_holds_all_documents(shape, samples):
    """The same answers, end to end, that would stand in several rows: nothing is padding, and nothing else changes."""
    model, rows = tiny_model(dtype=torch.float64), pairs(6) if shape == "plain" else packed(pairs(6))
    found = []
    for one_row in (False, True):
        own = on_policy(model, samples=samples, one_row=one_row, log_probs=True)
        own.engine.settings = own.engine.settings._replace(log_probs=True)
        (batch,) = own.replace([COLLATE(rows)], 0, COLLATE)
        documents = documents_of(batch)
        lengths = [len(document.ids) - len(document.prompt) for document in documents]
        drawn = batch.pop("sampled_log_p").flatten()[batch["valid_rows"] + 1].split(lengths)
        student, teacher = tiny_model(dtype=torch.float64), tiny_model(seed=1, hidden=64, dtype=torch.float64)
        loss = student(**DistillationObjective(teacher, student, "reverse_kl").student_inputs(batch))["loss"]
        loss.backward()
        said = sorted((document.ids, log_p.tolist()) for document, log_p in zip(documents, drawn, strict=True))
        found.append((batch["input_ids"].shape, said, [loss.detach(), *(p.grad for p in student.parameters())]))
    (padded, expected, theirs), (shape, got, ours) = found
    assert padded[0] > 1 and shape == (1, sum(len(ids) for ids, _ in got))
    assert got == expected
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_one_row_of_few_lengths_is_no_longer_than_the_rows_were():
    model, batch = tiny_model(), COLLATE(packed(pairs(6)))
    lengths = {}
    for multiple in (1, 32, 64, 256):
        own = on_policy(model, max_length=60, multiple=multiple, one_row=True)
        (made,) = own.replace([batch], 0, COLLATE)
        lengths[multiple] = made["input_ids"].shape[1]
    assert lengths[32] == -(-lengths[1] // 32) * 32 and lengths[64] == 64 and lengths[256] == 2 * 60, lengths


@pytest.mark.full
def test_rows_and_buffers_follow_from_attention_and_data(kernel_device):
    """One row where both models' attention is ours, of lengths for which kernels are compiled once."""
    student, teacher = tiny_model().to(kernel_device), tiny_model(seed=1).to(kernel_device)
    template = load_template("tokenizer", tiny_tokenizer())
    more = {"template": template, "report": DataReport(format="chat (messages)", longest=20), "vocab_size": 259}

    def made(*overrides, models=(student, teacher), **other):
        recipe = parse(RECIPE, ["data.on_policy.max_new_tokens=8", *overrides])
        own = rollouts_from_recipe(recipe, student, tiny_tokenizer(), models=models, **more | other)
        return own.one_row, own.multiple, own.engine.settings.max_length

    patch(student, log_it=False)
    assert made() == (False, 1 if kernel_device.type == "cpu" else 64, 28)
    patch(teacher, "teacher", log_it=False)
    assert made("train.cuda_graph=false") == (True, 64, 28)
    assert made("train.cuda_graph=false", models=())[0] is False
    assert made("data.packing=false")[0] is False
    assert made(report=DataReport(format="chat (messages)", longest=60))[2] == 64  # data.max_length


@pytest.mark.full
def test_a_resumed_run_samples_the_same_responses(tmp_path):
    def student():
        return tiny_model(attention_dropout=0.1)

    settings = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "own": {"fraction": 0.7},
        "data": packed(pairs(24), 2),
    }

    def run(name, **more):
        model = student()
        made = DistillationTrainer(
            model,
            tiny_model(seed=1, hidden=64),
            TrainingArguments(
                str(tmp_path / name),
                per_device_train_batch_size=2,
                learning_rate=1e-3,
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                seed=3,
                **{k: v for k, v in settings.items() if k not in ("own", "data")},
            ),
            loss="reverse_kl",
            train_dataset=Dataset.from_list(settings["data"]),
            callbacks=[MetricsFile(tmp_path / f"{name}.jsonl")],
        )
        made.add_callback(RolloutBatches(on_policy(model, **settings["own"]), made))
        made.train(**more)
        return made

    whole = run("whole")
    (tmp_path / "again.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes())
    again = run("again", resume_from_checkpoint=str(checkpoints(tmp_path / "whole")[0]))
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(again.model)[name], value), name
    for key in ("loss", "rollouts", "rollout_length", "rollout_truncated"):
        rows = [[row[key] for row in read_metrics(tmp_path / f"{name}.jsonl")] for name in ("whole", "again")]
        assert rows[0] == rows[1], key


@pytest.mark.full
def test_training_on_rollouts_lowers_their_reverse_kl(tmp_path):
    made = trainer(tmp_path, max_steps=24, learning_rate=5e-3, per_device_train_batch_size=8, own={"max_new_tokens": 3})
    made.train()
    kl = [entry["kl"] for entry in made.state.log_history if "kl" in entry]
    assert sum(kl[-5:]) < 0.8 * sum(kl[:5]), kl


RECIPE = """
teacher: {model: teacher}
student: {model: student}
data:
    source: pairs.jsonl
    max_length: 64
    packing: true
    cache: false
    validation: {fraction: 0.2}
    on_policy: {fraction: 0.5, max_new_tokens: 8}
loss: {terms: [{type: jsd, beta: 0.5}]}
train: {steps: 3, batch_size: 2, learning_rate: 1e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: []}
"""


if __name__ == "__main__":  # one of two processes
    torch.set_num_threads(1)
    result = two_steps_of_eight(Path(sys.argv[1]), 2, 2)
    if torch.distributed.get_rank() == 0:
        torch.save(result, Path(sys.argv[1]) / "two.pt")
    torch.distributed.barrier()
    exit_process(0)
