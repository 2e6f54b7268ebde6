"""A teacher that reads more than the student: the same answers after two prompts, and nothing of it leaks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from subjects import informed
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import TrainingArguments

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.collator import Collator
from distill.doctor.rows import split_row
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.documents import RolloutDocument, as_row, documents_of
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import Sampling
from distill.recipe import Context, dump, load, parse
from distill.run import run
from distill.teachers.backends.served.teacher import query_column
from distill.teachers.backends.student import AveragedTeacher
from distill.teachers.combination.mixture import MixtureColumns
from distill.teachers.registry import source_of
from distill.teachers.rows.context.data import LEAK, ContextColumns
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.training.checkpoints import checkpoints
from distill.training.trainer import DistillationTrainer

HINT = "The sum of four and five is nine, since five and four are nine."
COLLATE = Collator(0, columns=[ContextColumns()])
BASE = "student: {model: student}\ndata: {source: chat.jsonl, max_length: 192, cache: false}\ntrain: {steps: 2}\n"


def chat(number, **more):
    turns = [
        {"role": "user", "content": f"What is it, for the time {number}?"},
        {"role": "assistant", "content": f"It is {'so ' * (number % 4)}nine."},
    ]
    return {"messages": turns, "hint": f"{HINT} {number}"} | more


def data_of(tmp_path, rows, monkeypatch, context="{template: 'Know that {hint}'}", *overrides):
    """Splits, tokenizer and source of a recipe over `rows`."""
    tokenizer = tiny_tokenizer()
    monkeypatch.chdir(tmp_path)
    if not (tmp_path / "student").exists():
        save_tiny(tmp_path / "student", tiny_model(tokenizer), tokenizer)
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = source_of(parse(f"teacher: {{model: student, context: {context}}}\n" + BASE, overrides))
    vocabulary = source.vocabulary()
    return vocabulary.read(source.recipe.data, 0), vocabulary.tokenizer, source


def texts(row, tokenizer):
    """Each document as the student and as the teacher read it, and what is learned, as text."""
    learned = [label for label in row["labels"] if label != IGNORE_INDEX]
    own, other = (
        [tokenizer.decode(row[f"{who}input_ids"][a:b]) for a, b in document_bounds(row[f"{who}position_ids"])]
        for who in ("", "teacher_")
    )
    return own, other, tokenizer.decode(learned)


@pytest.mark.parametrize("place", ["system", "before", "after"])
def test_the_teacher_reads_more_and_answers_are_the_same(tmp_path, monkeypatch, place):
    splits, tokenizer, _ = data_of(
        tmp_path,
        [chat(n) for n in range(12)],
        monkeypatch,
        f"{{template: 'Know that {{hint}}', place: {place}}}",
        "data.max_length=384",
    )
    assert len(splits.train) < splits.report.documents, "several documents share a row"
    for row in splits.train:
        for own, other in zip(*texts(row, tokenizer)[:2], strict=True):
            assert HINT not in own and other.count(HINT) == 1
            assert own.split("assistant\n")[-1] == other.split("assistant\n")[-1]
            question = own.split("user\n")[1].split("<|end|>")[0]
            text = other.split("<|end|>")[0] if place == "system" else other.split("user\n")[1].split("<|end|>")[0]
            hint = f"Know that {HINT}"
            assert {
                "system": text.startswith(f"<|start|>system\n{hint}"),
                "before": text.endswith(f"\n\n{question}"),
                "after": text.startswith(f"{question}\n\n{hint}"),
            }[place]
    assert "tokens per document in the teacher's rows" in str(splits.report)


def test_system_prompts_are_joined_and_documents_follow_each_other(tmp_path, monkeypatch):
    rows = [chat(n) | {"hint": ["One fact.", "Another fact."]} for n in range(6)]
    for row in rows:
        row["messages"] = [{"role": "system", "content": "Be brief."}, *row["messages"]]
    splits, tokenizer, _ = data_of(tmp_path, rows, monkeypatch, "{template: '{hint}'}")
    own, other, _ = texts(splits.train[0], tokenizer)
    assert own[0].startswith("<|start|>system\nBe brief.<|end|>")
    assert other[0].startswith("<|start|>system\nBe brief.\n\nOne fact.\n\nAnother fact.<|end|>")


def test_turns_of_a_long_chat(tmp_path, monkeypatch):
    """The context stands before the first answer that is learned, and later turns are the same to both."""
    rows = [chat(n) for n in range(6)]
    for row in rows:
        row["messages"] += [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Ten."}]
    for train_on, at in (("all", "What is it"), ("last", "And now?")):
        splits, tokenizer, _ = data_of(
            tmp_path, rows, monkeypatch, "{template: 'Know: {hint}', place: before}", f"data.train_on={train_on}"
        )
        _, other, learned = texts(splits.train[0], tokenizer)
        assert f"\n\n{at}" in other[0] and other[0].count(HINT) == 1
        assert ("nine" in learned) is (train_on == "all") and "Ten." in learned


def test_pairs_without_a_template(tmp_path, monkeypatch):
    rows = [{"prompt": f"Question {n}?", "completion": "Nine.", "hint": HINT} for n in range(6)]
    for place, begins in (("before", "Know: " + HINT + "\n\nQuestion"), ("after", "Question")):
        context = f"{{template: 'Know: {{hint}}', place: {place}}}"
        splits, tokenizer, _ = data_of(tmp_path, rows, monkeypatch, context, "data.chat_template=none")
        own, other, learned = texts(splits.train[0], tokenizer)
        assert (
            other[0].startswith(begins) and other[0].endswith("\nNine.<|end|>") and own[0].endswith("?\nNine.<|end|>")
        )
        assert learned.startswith("Nine.<|end|>")


def test_privileged_context_never_reaches_the_students_prompt(tmp_path, monkeypatch):
    """A row whose prompt holds it too is dropped and counted; of nothing but such rows nothing is trained."""
    rows = [chat(n) for n in range(8)]
    rows[3]["messages"][0]["content"] += f" {rows[3]['hint']}"
    splits, _, _ = data_of(tmp_path, rows, monkeypatch)
    assert splits.report.dropped == {LEAK: 1}
    with pytest.raises(ValueError, match="no trainable tokens"):
        data_of(tmp_path, [rows[3]] * 3, monkeypatch)
    same = "{template: 'You are a calm and patient teacher.'}"
    rows[0]["messages"].insert(0, {"role": "system", "content": "You are a calm and patient teacher."})
    assert data_of(tmp_path, rows, monkeypatch, same)[0].report.dropped == {LEAK: 1}


def test_rows_that_cannot_be_used_are_counted(tmp_path, monkeypatch):
    long = chat(1, hint="word " * 200)
    rows = [*(chat(n) for n in range(6)), chat(6, hint=None), chat(7, hint=" "), long]
    dropped = data_of(tmp_path, rows, monkeypatch)[0].report.dropped
    reason = "prompt longer than data.max_length, the teacher's or the student's"
    assert dropped == {"nothing for the teacher's context": 2, reason: 1}


def test_both_readings_end_at_the_same_token(tmp_path, monkeypatch):
    rows = [chat(n) for n in range(6)]
    for row in rows:
        row["messages"][1]["content"] = "nine " * 40
    splits, tokenizer, _ = data_of(tmp_path, rows, monkeypatch)
    assert splits.report.truncated == 6
    for row in splits.train:
        (own,), (other,), learned = texts(row, tokenizer)
        assert len(row["teacher_input_ids"]) == 192 > len(row["input_ids"])
        assert own.endswith(learned) and other.endswith(learned)


def test_a_template_that_writes_answers_by_what_stands_before(tmp_path, monkeypatch):
    """The rows are dropped: what the teacher says of another text would be taken for what it says of this one."""
    twisted = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if messages[0]['role'] == 'system' and m['role'] == 'assistant' %}!{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (tmp_path / "twisted.jinja").write_text(twisted)
    with pytest.raises(ValueError, match="renders the response differently"):
        data_of(
            tmp_path, [chat(n) for n in range(3)], monkeypatch, "{template: Calm.}", "data.chat_template=twisted.jinja"
        )


# ------------------------------------------------------------------ batches


def test_targets_are_the_teachers_after_its_own_prompt():
    """At every learned position what a forward over that document alone gives, whatever is padded or packed."""
    subject = informed()
    (model,) = subject.teacher.models.values()
    for side in ("right", "left"):
        batch = subject.batch(padding_side=side, pad_to_multiple_of=32)
        got = subject.teacher.targets(batch).flatten(0, 1)[batch["valid_rows"]]
        expected = []
        for document in subject.documents():
            ids = torch.tensor([document["teacher_input_ids"]])
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            later = ids.shape[1] - len(document["labels"])
            expected += [hidden[at - 1 + later] for at, label in enumerate(document["labels"]) if at and label != -100]
        torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_answers_that_are_others_are_refused():
    row = informed().rows[0]
    wrong = row | {"teacher_input_ids": [*row["teacher_input_ids"][:-1], 7]}
    with pytest.raises(ValueError, match="expected the same response tokens for teacher and student"):
        COLLATE([wrong])
    with pytest.raises(ValueError, match="expected teacher_input_ids"):
        COLLATE([{name: row[name] for name in ("input_ids", "labels", "position_ids")}])


def test_documents_keep_the_teachers_reading():
    rows = [dict(row) for row in informed().rows]
    for omit in (False, True):
        alone = [part for row in rows for part in split_row(row)]
        for given in (rows, alone):
            collate = replace(COLLATE, omit_plain_positions=omit)
            batch = collate(given)
            documents = documents_of(batch)
            assert [d.teacher_ids for d in documents] == [
                part["teacher_input_ids"] for row in given for part in split_row(row)
            ]
            again = collate([as_row([d for d in documents if d.row == number]) for number in range(len(given))])
            assert all(torch.equal(again[name], batch[name]) for name in batch)


def test_a_custom_collators_batch_gets_the_teachers_columns():
    rows = informed().rows
    plain = Collator(0)(rows)
    del plain["valid_rows"]
    batch, expected = replace(COLLATE, custom=lambda given: plain)(rows), COLLATE(rows)
    assert batch.keys() == expected.keys() and all(torch.equal(batch[name], expected[name]) for name in batch)


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_a_mixtures_member_is_queried_for_is_padded_as_its_batch(side):
    columns = [ContextColumns(), MixtureColumns([[ContextColumns([query_column])]])]
    batch = Collator(0, padding_side=side, columns=columns)(informed().rows)
    assert np.array_equal(batch["member0_teacher_served"].ids, batch["teacher_input_ids"])


def test_new_answers_follow_the_teachers_prompt():
    """Earlier turns of a conversation stay in the teacher's prompt."""
    ids, labels = [5, 6, 7, 8, 9, 10], [-100, -100, 7, 8, -100, 10]
    document = RolloutDocument(ids, labels, 0, [5, 99, 98, 6, 7, 8, 9, 10])
    made = document.with_response(document.prompt, [50, 51])
    assert made.ids == [5, 6, 7, 8, 9, 50, 51] and made.teacher_ids == [5, 99, 98, 6, 7, 8, 9, 50, 51]
    assert (document.length, document.prompt_length) == (8, 7)


def test_rows_hold_the_teachers_longer_answers():
    """Rows are packed by the longer reading: neither exceeds the room."""
    subject = informed()
    batch = subject.batch()
    rows = OnPolicyRollouts(
        DecodeLoop(subject.student, EngineSettings(2, [0])),
        fraction=1.0,
        max_new_tokens=9,
        sampling=Sampling(1.0),
        seed=3,
        max_length=24,
    ).replace([batch], 0, lambda rows: rows)[0]
    assert rows and all(len(row["teacher_input_ids"]) <= 24 for row in rows)
    COLLATE(rows)


# ------------------------------------------------------------------ doctor's mutations


# ------------------------------------------------------------------ the student as teacher


def test_running_average_follows_the_student(tmp_path):
    """The average matches its definition in float64; 16-bit weights get a copy of a float32 average."""
    for dtype in (torch.float64, torch.bfloat16):
        model, other = tiny_model(seed=1, dtype=dtype), tiny_model(seed=2, dtype=dtype)
        wide = {
            name: p.detach().clone().to(max(dtype, torch.float32, key=lambda d: d.itemsize))
            for name, p in model.named_parameters()
        }
        average = AveragedTeacher(model, 0.9)
        for _ in range(3):
            average.update_ema(other)
            for name, p in other.named_parameters():
                wide[name] = 0.9 * wide[name] + 0.1 * p.detach().to(wide[name].dtype)
        for name, p in model.named_parameters():
            torch.testing.assert_close(average.average[name], wide[name], rtol=1e-6, atol=1e-7)
            assert torch.equal(p, average.average[name].to(dtype))
        average.save(tmp_path)
        fresh = tiny_model(seed=1, dtype=dtype)
        restored = AveragedTeacher(fresh, 0.9)
        restored.restore(tmp_path)
        average.update_ema(other), restored.update_ema(other)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"teacher\.ema"):
        AveragedTeacher(tiny_model(), 0.9).update_ema(tiny_model(layers=3))


def test_a_resumed_run_continues_the_moving_average(tmp_path):
    subject = informed(ema=0.5)
    rows = Dataset.from_list([{name: list(row[name]) for name in row} for row in subject.rows])

    def trainer(folder):
        torch.manual_seed(0)
        student = tiny_model(tiny_tokenizer())
        teacher = ContextTeacher(AveragedTeacher(tiny_model(tiny_tokenizer()), 0.5))
        arguments = TrainingArguments(
            str(folder),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            seed=1,
        )
        return DistillationTrainer(student, teacher, arguments, loss="reverse_kl", train_dataset=rows)

    straight = trainer(tmp_path / "a")
    straight.train()
    resumed = trainer(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(checkpoints(tmp_path / "a")[0]))
    for of in (lambda t: t.model, lambda t: t.objective.teacher.inner.model):
        pairs = list(zip(of(straight).parameters(), of(resumed).parameters(), strict=True))
        assert pairs and all(torch.equal(*pair) for pair in pairs)
    first, last = (straight.state.log_history[at]["loss"] for at in (0, 3))
    assert first > 0 and last > 0
    average = straight.objective.teacher.inner.model
    moved = zip(average.parameters(), tiny_model(tiny_tokenizer()).parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in moved), "the teacher follows"


# ------------------------------------------------------------------ recipes


def test_recipes_with_a_context():
    recipe = parse("teacher: {type: student, ema: 0.999, context: {template: 'Know {a} and {b c}'}}\n" + BASE)
    assert recipe.teacher.context.columns == ["a", "b c"] and parse(dump(recipe)) == recipe
    assert Context(template="Braces {{}}, {column}").parts == [("Braces {", None), ("}", None), (", ", "column")]


def test_running_text_has_no_answers(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"teacher\.context: expected prompts, with responses or without, got text"):
        data_of(tmp_path, [{"text": "Some text."}] * 3, monkeypatch, "{template: Calm.}")


@pytest.mark.plain("False")
@pytest.mark.parametrize("own", [False, True])
def test_a_run_learns_from_its_own_prompted_self(tmp_path, monkeypatch, own):
    """The divergence from the teacher, which knows the hint, becomes smaller; on the data's answers and on its own."""
    data_of(tmp_path, [chat(n) for n in range(16)], monkeypatch)
    recipe = parse(
        "teacher: {type: student, ema: 0.99, context: {template: 'Know that {hint}'}}\n" + BASE,
        [
            "train={steps: 6, batch_size: 2, tokens_per_step: 768, learning_rate: 3e-3, device: cpu, log_every: 1}",
            "loss.terms=[{type: reverse_kl}]",
            "generate={prompts: [Hello], max_new_tokens: 3}",
            *["data.on_policy={max_new_tokens: 8}"] * own,
        ],
    )
    result = run(recipe)
    assert result.before.reverse_kl > 0 and result.after.reverse_kl < result.before.reverse_kl
    answers = json.loads((result.folder / "result.json").read_text())["answers"]
    assert "teacher" not in answers or answers["teacher"], "no row, no hint: the teacher is not asked"
    assert load(result.folder / "recipe.yaml").teacher.context.columns == ["hint"]
