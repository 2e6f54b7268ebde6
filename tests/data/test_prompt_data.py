"""Prompts without responses as training data (`data.format: prompts`): files, chats, stored rollouts."""

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from distill.data.chat import load_template
from distill.data.collator import Collator
from distill.data.load import load_data
from distill.generation.documents import documents_of
from distill.recipe import parse
from distill.run import run
from distill.training import rollout_files
from distill.training.progress import read_metrics

RECIPE = (
    "teacher: {model: teacher}\nstudent: {model: student}\nloss: {terms: [{type: reverse_kl}]}\n"
    "data:\n  source: prompts.jsonl\n  format: prompts\n  max_length: 96\n  cache: false\n"
    "  validation: {source: held-out.jsonl}\n  on_policy: {max_new_tokens: 8, store_every: 1}\n"
    "train: {steps: 2, log_every: 1, batch_size: 2, learning_rate: 1e-2}\ngenerate: {prompts: []}\n"
)
QUESTIONS = [f"Say {number}?" for number in range(12)]


CHATS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Never used."}]}
    for text in QUESTIONS
]
FILES = {
    "prompts.jsonl": [{"prompt": text} for text in QUESTIONS],
    "questions.jsonl": [{"question": text, "id": number} for number, text in enumerate(QUESTIONS)],
    "chats.jsonl": CHATS,
    "held-out.jsonl": [{"prompt": f"Say it {n}?", "completion": f"It is {n}."} for n in range(4)],
    "lines.txt": "\n".join(QUESTIONS) + "\n\n",
}
pytestmark = pytest.mark.place(files=FILES, student={"seed": 0}, teacher={"seed": 1})


def prompts_of(recipe, tokenizer):
    splits = load_data(recipe.data, tokenizer, seed=0)
    return [document.prompt for document in documents_of(Collator(2)(list(splits.train)))]


@pytest.mark.parametrize("source", ["prompts.jsonl", "questions.jsonl", "chats.jsonl", "lines.txt"])
def test_prompts_are_those_that_inference_would_have(workplace, source):
    tokenizer = tiny_tokenizer()
    template = load_template("tokenizer", tokenizer)
    found = prompts_of(parse(RECIPE, [f"data.source={source}"]), tokenizer)
    expected = [template.prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    assert sorted(map(tokenizer.decode, found)) == sorted(expected)


def test_an_instruction_keeps_its_input_and_a_line_loses_its_end(workplace):
    tokenizer = tiny_tokenizer(chat_template=None)
    rows = [{"instruction": f"Add {number}.", "input": "1 and 2"} for number in range(4)]
    Path("instructions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("lines.txt").write_bytes("\r\n".join(QUESTIONS).encode())
    found = prompts_of(parse(RECIPE, ["data.source=instructions.jsonl"]), tokenizer)
    assert sorted(map(tokenizer.decode, found)) == [f"Add {number}.\n\n1 and 2\n" for number in range(4)]
    found = prompts_of(parse(RECIPE, ["data.source=lines.txt"]), tokenizer)
    assert sorted(map(tokenizer.decode, found)) == sorted(f"{text}\n" for text in QUESTIONS)


def test_prompts_without_a_template_are_continued_as_text(workplace):
    tokenizer = tiny_tokenizer(chat_template=None)
    found = prompts_of(parse(RECIPE), tokenizer)
    assert sorted(map(tokenizer.decode, found)) == sorted(f"{text}\n" for text in QUESTIONS)


@pytest.mark.full
def test_a_run_on_prompts_and_another_on_its_stored_rollouts(workplace):
    first = run(parse(RECIPE), name="first").folder
    stored = [row for file in rollout_files.files(first) for row in rollout_files.read(file)]
    assert all(row["rollouts"] > 0 and row["rollout_gap"] < 1e-5 for row in read_metrics(first / "metrics.jsonl"))
    recipe = parse(RECIPE, [f"data.source={first / 'rollouts'}"])
    found = prompts_of(recipe, tiny_tokenizer())
    assert sorted(found) == sorted(row["prompt_ids"] for row in stored)
    assert run(recipe, name="second").steps == 2
