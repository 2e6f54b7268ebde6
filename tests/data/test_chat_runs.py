"""Runs on chats whose template rewrites history: every turn after the prompt of inference, whatever the teacher."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from test_chat import CLOSES_THE_LAST, DROPS_REASONING
from test_chat_data import write
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from distill.cli import run_command
from distill.core.labels import IGNORE_INDEX
from distill.recipe import dump, parse
from distill.run import run
from distill.teachers.registry import source_of
from distill.training.progress import read_metrics

THOUGHT = "<think>\n\n</think>\n\n"
HINTS = ("Remember that the answer is known.", "Remember nothing of the kind, please.")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer(chat_template=DROPS_REASONING)
    save_tiny(tmp_path / "teacher", tiny_model(tokenizer, seed=1), tokenizer)
    rows = [
        {
            "messages": [
                turn
                for k in range(3)
                for turn in (
                    {"role": "user", "content": f"Is it {n}{k}?"},
                    {"role": "assistant", "content": f"Yes, {n}{k}."},
                )
            ],
            "hint": HINTS[n % 2],
        }
        for n in range(12)
    ]
    write(tmp_path / "a.jsonl", rows)
    return tokenizer


def recipe_of(*overrides, teacher="model: teacher", student="from_teacher: {layers: 1}"):
    text = (
        f"{{teacher: {{{teacher}}}, student: {{{student}}}, train: {{steps: 4, batch_size: 2, learning_rate: 1.e-3}}, "
        "data: {source: a.jsonl, max_length: 192}}"
    )
    return parse(text, ["train.device=cpu", "train.eval_every=4", "train.save_every=2", *overrides], name="chats")


def learned_texts(splits, tokenizer, ids="input_ids"):
    """Return each document's prompt and the text trained on."""
    found = []
    for row in [*splits.train, *splits.validation]:
        starts = [n for n, position in enumerate(row["position_ids"]) if position == 0] + [len(row["position_ids"])]
        for start, end in itertools.pairwise(starts):
            labels = row["labels"][start:end]
            first = next(n for n, label in enumerate(labels) if label != IGNORE_INDEX)
            assert all(label != IGNORE_INDEX for label in labels[first:]), "one stretch, at the end"
            found.append(
                (
                    tokenizer.decode(row["input_ids"][start : start + first]),
                    tokenizer.decode(row["input_ids"][start + first : end]),
                )
            )
    return found


def losses(folder):
    names = ("step", "loss", "forward_kl", "eval_loss", "eval_forward_kl")
    return [[row.get(name) for name in names] for row in read_metrics(folder / "metrics.jsonl")]


def test_packed_rows_hold_each_turn_after_the_prompt_of_inference(own_folder):
    recipe = recipe_of()
    splits = source_of(recipe).vocabulary().read(recipe.data, 0)
    texts = learned_texts(splits, own_folder)
    assert len(texts) == 36 and len(splits.train) < 30 and splits.report.rewritten == 12
    for prompt, answer in texts:
        assert prompt.endswith("<|start|>assistant\n") and THOUGHT not in prompt
        assert answer.startswith(f"{THOUGHT}Yes, ") and answer.endswith(".<|end|>")


def test_a_teacher_with_a_context_reads_the_same_turns_after_it(own_folder):
    recipe = recipe_of(teacher="model: teacher, context: {template: 'Know: {hint}', place: before}")
    splits = source_of(recipe).vocabulary().read(recipe.data, 0)
    assert len(learned_texts(splits, own_folder)) == 36
    for row in splits.train:
        theirs = own_folder.decode(row["teacher_input_ids"])
        assert theirs.count("Know: Remember") == sum(position == 0 for position in row["teacher_position_ids"])
        assert "Remember" not in own_folder.decode(row["input_ids"])


def test_two_tokenizers_compare_each_turn_though_one_template_rewrites(own_folder, tmp_path):
    other = tiny_tokenizer(300, specials=("<|end|>", "<|start|>"), chat_template=CHAT_TEMPLATE)
    save_tiny(tmp_path / "student", tiny_model(other, layers=1), other)
    own_folder.chat_template = CLOSES_THE_LAST
    own_folder.save_pretrained(tmp_path / "teacher")
    recipe = recipe_of(student="model: student, vocabulary: cross")
    splits = source_of(recipe).vocabulary().read(recipe.data, 0)
    total = splits.report.documents + splits.report.validation_documents
    assert total == 36 and splits.report.rewritten == 12 and not splits.report.dropped


@pytest.mark.full
@pytest.mark.parametrize("overrides", [["data.on_policy.max_new_tokens=8"], []], ids=["on-policy", "the data's"])
def test_a_run_on_turns_of_their_own_resumes_to_the_same_losses(own_folder, overrides):
    text = dump(recipe_of("train.log_every=1", "data.cache=false", *overrides))
    Path("r.yaml").write_text(text)
    assert run_command(["run", "r.yaml", "--name", "whole"]) == 0
    folder = Path("runs/whole")
    whole = losses(folder)
    shutil.rmtree(folder / "checkpoint-4")
    shutil.rmtree(folder / "student")
    (folder / "result.json").unlink()
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
    assert len(whole) >= 4 and losses(folder) == whole


@pytest.mark.full
def test_a_student_stops_where_its_turns_end(own_folder, tmp_path, capsys):
    own_folder.eos_token = "<|pad|>"
    own_folder.save_pretrained(tmp_path / "teacher")
    config = json.loads((tmp_path / "teacher/generation_config.json").read_text()) | {"eos_token_id": 2}
    (tmp_path / "teacher/generation_config.json").write_text(json.dumps(config))
    folder = run(recipe_of("train.steps=1")).folder
    assert GenerationConfig.from_pretrained(folder / "student").eos_token_id == [2, 0]
    assert "generation stops at <|end|> too" in " ".join(capsys.readouterr().out.split())


def test_inspect_reports_rewritten_turns_in_one_line(own_folder, capsys, tmp_path):
    (tmp_path / "r.yaml").write_text(
        "{teacher: {model: teacher}, student: {from_teacher: {layers: 1}}, data: {source: a.jsonl, max_length: 192}, "
        "train: {steps: 1}}"
    )
    run_command(["inspect", "r.yaml", "--rows", "1"])
    out = " ".join(capsys.readouterr().out.split())
    assert "the chat template rewrites earlier turns: one example a turn (data.train_on: each) of 12 chats" in out
