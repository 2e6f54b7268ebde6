"""Fields of rows beside their text: turns that are not trained on, system prompts, columns that are not read."""

import json

import numpy as np
import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer

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


def pairs(count=4, **more):
    return [{"prompt": f"Question {n}?", "completion": "Yes.", **more} for n in range(count)]


def test_columns_and_keys_that_are_not_read_are_in_the_report_with_their_rows(tmp_path):
    rows = chats({"role": "assistant", "content": "Yes.", "stamp": 7, "none": None})
    _, report = loaded(tmp_path, [{**row, "id": n, "empty": ""} for n, row in enumerate(rows)])
    assert report.unread == {"id": 4, "messages.stamp": 4} and not report.unread_words
    assert "columns not read: id in 4 rows; data.unread=[id] silences this" in str(report)
    assert "keys not read: messages.stamp in 4 rows; data.unread=[messages.stamp] silences this" in str(report)
    assert report.as_dict()["unread"] == {"id": 4, "messages.stamp": 4}
    _, report = loaded(tmp_path, rows, unread=["messages.stamp", "id"])
    assert not report.unread and "not read" not in str(report)


@pytest.mark.parametrize("name", ["documents", "choices", "input", "weight", "question", "system_message"])
def test_a_column_that_changes_what_is_trained_on_stops_the_run_until_the_recipe_says(tmp_path, name):
    with pytest.raises(
        ValueError, match=rf"columns that change .* not read: '{name}' in 4 of 4 rows .*unread=\[{name}\]"
    ):
        loaded(tmp_path, pairs(**{name: "The bridge."}))
    texts, report = loaded(tmp_path, pairs(**{name: "The bridge."}), unread=[name])
    assert texts and all("bridge" not in text for text, _ in texts) and not report.unread
    assert loaded(tmp_path, pairs(**{name: ""}))[0], "an empty column says nothing"


@pytest.mark.parametrize(("field", "order"), [("context", ["bridge", "Question"]), ("input", ["Question", "bridge"])])
def test_a_column_of_another_name_is_read_where_the_recipe_says(tmp_path, field, order):
    texts, report = loaded(tmp_path, pairs(documents="The bridge."), fields={field: "documents"})
    assert texts and all(text.index(order[0]) < text.index(order[1]) for text, _ in texts) and not report.unread
    assert all("bridge" not in trained for _, trained in texts)


def test_a_column_that_repeats_the_prompt_stops_nothing(tmp_path):
    rows = [{**row, "question": row["prompt"]} for row in pairs()]
    assert loaded(tmp_path, rows)[1].unread == {"question": 4}


def test_columns_that_only_later_rows_have_are_read_or_stop_the_run(tmp_path):
    texts, _ = loaded(tmp_path, [*pairs(300), *pairs(40, system="Be brief.")], validation={"max_rows": 2})
    assert sum("Be brief." in text for text, _ in texts) >= 38
    with pytest.raises(ValueError, match="'choices' in 40 of 340 rows"):
        loaded(tmp_path, [*pairs(300), *pairs(40, choices=["a", "b"])])


def test_what_only_the_teacher_reads_is_not_read_by_the_student(tmp_path):
    from distill.recipe import Context
    from distill.recipe.teachers import TeacherPrompt
    from distill.teachers.rows.context.data import load_context_data

    rows = [{"question": f"When {n}?", "context": f"The bridge opened in {n}.", "answer": "Then."} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source=str(tmp_path / "rows.jsonl"), cache=False, packing=False, validation={"fraction": 0.3})
    tokenizer = tiny_tokenizer()
    splits = load_context_data(data, tokenizer, TeacherPrompt(Context(template="{context}"), {}, True), seed=0)
    assert not splits.report.unread
    for row in splits.train:
        assert "bridge" not in tokenizer.decode(row["input_ids"])
        assert "bridge" in tokenizer.decode(row["teacher_input_ids"])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_only_tables_lose_nulls_of_arguments_and_schemas(tmp_path, suffix):
    from test_row_layouts import written

    from distill.data.formats import RowFormat
    from distill.data.source_rows import store_rows
    from distill.data.sources import open_source

    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "Oslo", "unit": None}}}
    other = {"type": "function", "function": {"name": "look", "arguments": {"place": "Rome", "unit": "C"}}}
    chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call, other]}]
    source = open_source(str(written(json.dumps({"messages": chat}), suffix, tmp_path)))
    (row,) = source.rows()
    expected = {"place": "Oslo"} if suffix == "parquet" else {"place": "Oslo", "unit": None}
    for one in (row, store_rows(source, max_rows=None, cache=False)[0]):  # as it is read, and as a reward's row is kept
        message = RowFormat("chat", {"messages": "messages"}).sample(one).messages[-1]
        assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_prompts_to_respond_to_have_the_system_prompt_too(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Hello", "system": "Be brief."}) + "\n")
    tokenizer, data = tiny_tokenizer(), Data(source="none")
    template = load_template("tokenizer", tokenizer)
    (prompt,) = read_prompts(str(tmp_path / "prompts.jsonl"), tokenizer, template, data.fields, max_length=99).prompts
    assert "system\nBe brief." in tokenizer.decode(prompt.ids)
    assert [message["role"] for message in prompt.row["messages"]] == ["system", "user"]


def test_a_system_prompt_beside_another_one_is_in_the_report(tmp_path):
    rows = [{**row, "system": "Other."} for row in chats({"role": "assistant", "content": "Yes."})]
    own = [{**row, "messages": [{"role": "system", "content": "Own."}, *row["messages"]]} for row in rows]
    assert loaded(tmp_path, own)[1].unread == {"system": 4}
    assert not loaded(tmp_path, rows)[1].unread


def test_documents_that_are_several_texts_are_read_one_after_another(tmp_path):
    texts, _ = loaded(tmp_path, pairs(documents=["The bridge.", "The river."]), fields={"context": "documents"})
    assert texts and all("The bridge.\n\nThe river.\n\nQuestion" in text for text, _ in texts)


@pytest.mark.parametrize("reads", [True, False])
def test_what_the_chat_template_reads_itself_is_left_to_it(tmp_path, reads):
    shown = "{{ message.stamp }}{{ message.tools | tojson if message.tools else '' }}" if reads else ""
    beside = "" if reads else "{{ tools | tojson if tools else '' }}"
    text = beside + CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}" + shown)
    (tmp_path / "mine.jinja").write_text(text)
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    system = {"role": "system", "content": "Use tools.", "tools": [tool]}
    rows = chats({"role": "assistant", "content": "Yes.", "stamp": "at noon"})
    rows = [{"messages": [system, *row["messages"]]} for row in rows]
    texts, report = loaded(tmp_path, rows, chat_template=str(tmp_path / "mine.jinja"))
    assert texts and all(text.count('"look"') == 1 and ("at noon" in text) == reads for text, _ in texts)
    assert report.unread == ({} if reads else {"messages.stamp": 4})
