"""Fields of rows beside their text: turns that are not trained on, system prompts, columns that are not read."""

import json
import logging

import numpy as np
import pytest
from tiny import tiny_tokenizer

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import load_template
from distill.data.load import load_data
from distill.generation.prompts import read_prompts
from distill.recipe import Data

QUESTION = {"role": "user", "content": "Again?"}


def loaded(folder, rows, **settings):
    """Return text and trained text of each training row."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"source": str(folder / "rows.jsonl"), "max_length": 256, "cache": False, "packing": False}
    tokenizer = tiny_tokenizer()
    splits = load_data(Data.model_validate(section | {"validation": {"fraction": 0.3}} | settings), tokenizer, seed=0)
    pairs = [(np.array(row["input_ids"]), np.array(row["labels"])) for row in splits.train]
    texts = [(tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE_INDEX])) for ids, labels in pairs]
    return texts, splits.report


def chats(*turns):
    return [{"messages": [{"role": "user", "content": f"Question {n}?"}, *turns]} for n in range(4)]


@pytest.mark.parametrize("train_on", ["all", "each", "last"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}])
def test_a_turn_that_its_message_excludes_is_not_trained_on(tmp_path, mark, train_on):
    wrong, right = ({"role": "assistant", "content": text} for text in ("Wrong", "Right"))
    texts, _ = loaded(tmp_path, chats(wrong | mark, QUESTION, right | {"weight": 1}), train_on=train_on)
    assert texts and all("Wrong" in text and "Wrong" not in trained and "Right" in trained for text, trained in texts)
    texts, _ = loaded(tmp_path, chats(right, QUESTION, wrong | mark), train_on=train_on)
    assert texts and all("Wrong" not in trained and "Right" in trained for _, trained in texts)


@pytest.mark.parametrize(
    ("mark", "reason"),
    [({"weight": 0}, "no assistant turn is trained on"), ({"weight": 0.5}, "expected weight of 0 or 1, got 0.5")],
)
def test_rows_with_nothing_to_train_on_and_other_weights_are_dropped_with_the_reason(tmp_path, mark, reason):
    with pytest.raises(ValueError, match=f"no trainable tokens in .*{reason}"):
        loaded(tmp_path, chats({"role": "assistant", "content": "Yes."} | mark))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Yes."}]},
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]},
        {"instruction": "Hello", "output": "Yes."},
        {"prompt": [{"role": "user", "content": "Hello"}], "completion": [{"role": "assistant", "content": "Yes."}]},
    ],
    ids=["sharegpt", "messages", "alpaca", "chat pairs"],
)
def test_a_column_of_system_prompts_comes_before_the_chat(tmp_path, row):
    texts, report = loaded(tmp_path, [{**row, "system": f"Be brief, {number}."} for number in range(4)])
    assert all("system\nBe brief, " in text and text.index("Be brief") < text.index("Hello") for text, _ in texts)
    assert all("Yes." in trained and "Be brief" not in trained for _, trained in texts)
    assert "system" in report.format


def test_a_system_prompt_of_the_messages_is_kept(tmp_path):
    rows = [{**row, "system": "Other."} for row in chats({"role": "assistant", "content": "Yes."})]
    rows = [{**row, "messages": [{"role": "system", "content": "Own."}, *row["messages"]]} for row in rows]
    texts, _ = loaded(tmp_path, rows)
    assert all("Own." in text and "Other." not in text for text, _ in texts)


@pytest.mark.parametrize(("column", "value"), [("history", [["old?", "old."]]), ("label", False)])
def test_columns_of_pairs_that_are_not_read_are_named(tmp_path, caplog, column, value):
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path, [{"prompt": f"Question {n}?", "completion": "Yes.", column: value} for n in range(4)])
    assert f"the column {column!r} is not read" in caplog.text


def test_prompts_to_respond_to_have_the_system_prompt_too(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hello", "system": "Be brief."}) + "\n")
    tokenizer, data = tiny_tokenizer(), Data(source="none")
    template = load_template("tokenizer", tokenizer)
    (prompt,) = read_prompts(str(tmp_path / "prompts.jsonl"), tokenizer, template, data.fields, max_length=99).prompts
    assert "system\nBe brief." in tokenizer.decode(prompt.ids)
    assert [message["role"] for message in prompt.row["messages"]] == ["system", "user"]
