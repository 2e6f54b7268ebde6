"""Data with bad rows, settings that contradict it, and sources that cannot be found: counted, or one clear line."""

import json

import pytest
from test_data import all_rows, load, own_cache, texts, write  # noqa: F401
from tiny import tiny_tokenizer


def test_bad_rows_are_counted_by_reason_and_the_good_ones_stay(tmp_path, tokenizer):
    good = [json.dumps({"text": f"good {n}"}) for n in range(3)]
    bad = ['{"text": ""}', '{"text": " \\n "}', '{"text": null}', '{"text": 7}', '{"other": "x"}', "[1]"]
    bad += ['{"text": "cut', '{"text": "\\ud800"}']
    content = "\n".join([*good, *bad]).encode() + b'\n{"text": "\xff\xfe bytes"}\n\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    report = load(str(tmp_path / "a.jsonl"), tokenizer).report
    assert report.rows_read == 12
    assert report.dropped == {
        "empty": 2,
        "null": 1,
        "wrong type": 1,
        "no value": 1,
        "not a JSON object": 1,
        "invalid JSON": 1,
        "invalid Unicode": 1,
        "invalid UTF-8": 1,
    }
    assert report.documents + report.validation_documents == 3
    assert "row 7: column 'text': expected text, got int" in str(report)


def test_a_line_of_a_million_characters_is_cut_like_any_text(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 1_000_000}, {"text": "short"}])
    splits = load(path, tokenizer, max_length=1024, validation={"fraction": 0.5})
    assert sum(splits.report.as_dict()[name] for name in ("tokens", "validation_tokens")) > 900_000 / 4
    joined = "".join(tokenizer.decode(row["input_ids"]) for row in all_rows(splits))
    assert joined.count("x") == 1_000_000


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b'{"text": ""}\n{"text": null}\n', r"no trainable tokens.*2 rows read, 2 dropped: 1 empty"),
        (b"nonsense\n", "no usable rows .*invalid JSON"),
        (b'{"text": "only one"}\n', r"data\.validation: expected at least two documents to hold one out"),
        (b'{"x": "a", "y": "b"}\n', r"data\.fields: expected a column text.*columns of .* are 'x', 'y'"),
    ],
)
def test_data_of_no_use_is_one_clear_line(content, message, tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path / "a.jsonl"), tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, content, more, message",
    [
        ("a.jsonl", '{"text": "x"}', {"fields": {"text": "body"}}, r"data\.fields\.text: no column 'body'.*'text'"),
        ("a.jsonl", '{"text": "x"}', {"format": "chat"}, r"expected a column messages.*'text'"),
        ("a.json", '[{"text": "x"', {}, "not valid JSON"),
        ("a.parquet", "PAR1 cut short", {}, "cannot be read as parquet"),
        ("a.bin", "x", {}, "expected a file of"),
    ],
)
def test_mistakes_name_their_field(name, content, more, message, tmp_path, tokenizer):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / name), tokenizer, **more)


def test_sources_that_cannot_be_found(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"data\.source: expected a local file.*does not exist"):
        load(str(tmp_path / "gone.jsonl"), tokenizer)
    with pytest.raises(
        ValueError, match=r"data\.source: the hub cannot be reached for 'nobody/nothing'.*local|path of"
    ):
        load("nobody/nothing", tokenizer)
    with pytest.raises(ValueError, match="expected data files"):
        load(str(tmp_path), tokenizer)
    with pytest.raises(ValueError, match="only synthetic needs none"):
        load("python-stdlib", None)
    chats = write(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ValueError, match=r"data\.chat_template: expected a chat template"):
        load(chats, tiny_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="1 no assistant turn"):
        load(chats, tokenizer)
    pairs = {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}
    with pytest.raises(ValueError, match=r"2 a chat without a chat template \(.*data\.chat_template"):
        load(write(tmp_path / "p.jsonl", [pairs] * 2), tiny_tokenizer(chat_template=None))
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (saved / name).write_text("{")
    with pytest.raises(ValueError, match=r"data\.source: .*cannot be read as a saved data set"):
        load(str(saved), tokenizer)
    folder = tmp_path / "splits"
    folder.mkdir()
    texts(folder / "test.jsonl")
    with pytest.raises(ValueError, match=r"data\.split: expected one of test.*'train'"):
        load(str(folder), tokenizer)
