"""Data with bad rows: what can be used stays, the others are counted by their reason."""

import json

import pytest
from test_data import all_rows, load, own_cache, texts, write  # noqa: F401


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


@pytest.mark.full
def test_a_line_of_a_million_characters_is_cut_like_any_text(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 1_000_000}, {"text": "short"}])
    splits = load(path, tokenizer, max_length=1024, validation={"fraction": 0.5})
    assert sum(splits.report.as_dict()[name] for name in ("tokens", "validation_tokens")) > 900_000 / 4
    joined = "".join(tokenizer.decode(row["input_ids"]) for row in all_rows(splits))
    assert joined.count("x") == 1_000_000


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="only synthetic needs none"):
        load("python-stdlib", None)
