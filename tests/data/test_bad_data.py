"""Data that lies, through `distill run` itself: counted and reported; what is refused is in tests/refusals/rows.yaml.

An exception that the command lets through fails the test by itself; what is held here is the exit code, how many lines
are on standard error and what they and the report say. Every run that goes on must end with a student.
"""

import gzip
import json

import pytest
from tiny import save_models, tiny_tokenizer

from distill.cli import run_command

RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: rows.jsonl, max_length: 64, cache: false, validation: {fraction: 0.2, max_rows: 2}}
train: {steps: 1, batch_size: 1, log_every: 1, device: cpu}
generate: {prompts: []}
"""
GOOD = [{"text": f"Row {number} is as it should be, and it is learned."} for number in range(6)]
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
DEEP = "[" * 100_000
DIGITS = "9" * 5_000


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, teacher={"seed": 1})
    return folder


@pytest.fixture
def workplace(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE.replace("model: teacher", f"model: {models / 'teacher'}"))
    return tmp_path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def distil(workplace, name, content, *overrides):
    """Write the data, run, and return the exit code."""
    (workplace / name).write_bytes(content)
    return run_command(["run", "r.yaml", f"data.source={name}", *overrides])


def dropped(out):
    """Reason to count, as the run's opening lines report them."""
    found = [line.strip() for line in out.splitlines() if line.strip().startswith("dropped ")]
    return {line.split(": ", 1)[1].split(" (")[0]: int(line.split()[1].rstrip(":")) for line in found}


# ------------------------------------------------------------------ rows that are counted while the rest is learned


def test_rows_of_every_kind_of_fault_are_counted_by_reason(workplace, capsys):
    bad = [
        b'{"text": ""}',
        b'{"text": " \\t "}',
        b'{"text": null}',
        b"{}",
        b'{"text": 7}',
        b'{"text": ["a"]}',
        b"[1]",
        b"7",
        b"null",
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\ud800"}',
        b"nonsense",
        b'{"text": ' + DIGITS.encode() + b"}",
        DEEP.encode(),
        b'{"text": NaN}',
        b"\0\0",
        b'{"text": "cut off in the mid',
    ]
    assert distil(workplace, "a.jsonl", lines(GOOD) + b"\n".join(bad)) == 0
    out, err = capsys.readouterr()
    assert dropped(out) == {
        "empty": 2,
        "null": 1,
        "no value": 1,
        "wrong type": 3,
        "not a JSON object": 3,
        "invalid UTF-8": 1,
        "invalid Unicode": 1,
        "invalid JSON": 5,
    }
    assert "23 rows read" in out and err == "" and (workplace / "runs/r/student/model.safetensors").exists()


def test_chats_of_every_kind_of_fault_are_counted_by_reason(workplace, capsys):
    bad = [
        {"messages": None},
        {"messages": []},
        {"messages": [None]},
        {"messages": 7},
        {"messages": "hello"},
        {"messages": '[{"role": "user"'},
        {"messages": DEEP},
        {"messages": [{"role": None, "content": "x"}]},
        {"messages": [{"role": "user", "content": None}, TURNS[1]]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [TURNS[0], {"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
        {"messages": TURNS[:1]},
        {"messages": TURNS, "tools": DEEP},
        {"messages": TURNS, "tools": 7},
        {"messages": [TURNS[0], {"role": "assistant", "content": " "}]},
        {"messages": [{**TURNS[0], "deep": json.loads("[" * 900 + "]" * 900)}, TURNS[1]]},
    ]
    assert distil(workplace, "a.jsonl", lines([*({"messages": TURNS} for _ in range(4)), *bad])) == 0
    assert dropped(capsys.readouterr().out) == {
        "null": 2,
        "empty": 2,
        "wrong type": 6,
        "invalid JSON": 3,
        "not text": 1,
        "no assistant turn": 1,
        "nested too deeply": 1,
    }


def test_nulls_that_a_table_puts_into_every_message_are_no_fault(workplace, capsys):
    filled = [{**turn, "tool_calls": None, "name": None, "from": None, "value": None} for turn in TURNS]
    assert distil(workplace, "a.jsonl", lines([{"messages": filled, "tools": None}] * 4)) == 0
    out, err = capsys.readouterr()
    assert "4 rows read" in out and not dropped(out) and err == ""


def test_unknown_roles_reach_the_template_and_are_reported(workplace, capsys):
    rows = [chat(("User", "a"), (" GPT", "b")), chat(("wizard", "a"), ("assistant", "b"))] * 3
    assert distil(workplace, "a.jsonl", lines(rows)) == 0
    out = capsys.readouterr().out
    assert "unusual roles, passed to the chat template unchanged: 'wizard' in 3 rows" in out and not dropped(out)


def test_content_in_parts_is_text_not_python(workplace, capsys):
    from distill.data.load import load_data
    from distill.recipe import Data

    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    rows = [chat(("user", parts), ("assistant", [{"type": "text", "text": f"three {n}"}])) for n in range(4)]
    (workplace / "a.jsonl").write_bytes(lines(rows))
    tokenizer = tiny_tokenizer()
    splits = load_data(Data(source="a.jsonl", max_length=128, cache=False, packing=False), tokenizer, seed=0)
    texts = {tokenizer.decode(row["input_ids"]) for row in splits.train}
    assert all("user\none two<|end|>" in text and "type" not in text for text in texts)


@pytest.mark.full
def test_a_line_of_a_million_characters(workplace, capsys):
    rows = lines([*GOOD, {"text": "word " * 200_000}]) + b'{"text": "' + b"x" * 1_000_000  # and one cut off, as long
    assert distil(workplace, "a.jsonl", rows, "data.max_length=512") == 0
    out = capsys.readouterr().out
    assert dropped(out) == {"invalid JSON": 1} and max(map(len, out.splitlines())) < 400


def test_marks_that_editors_leave_are_no_fault(workplace, capsys):
    content = b"\xef\xbb\xbf" + lines(GOOD).replace(b"\n", b"\r\n") + b"\r\n\r\n"
    assert distil(workplace, "a.jsonl", content) == 0
    out = capsys.readouterr().out
    assert "text (text), 6 rows read" in out and not dropped(out)


def test_a_table_of_one_column_may_hold_any_mark(workplace, capsys):
    assert distil(workplace, "a.csv", b"text\n" + b'"one; two, three | four"\n' * 3 + b"five; six\n" * 3) == 0
    assert "text (text), 6 rows read" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.csv", b"text\n" + b"a row of a table\n" * 6 + b'"a quote that never ends\n', "file breaks off"),
        ("a.csv", b"text,n\n" + b"a row of a table,1\n" * 6 + b"x,2,3\n", "more values than columns"),
        ("a.csv", b"text\n" + b"a row of a table\n" * 6 + b"\xff\xff\n", "invalid UTF-8"),
        ("a.json", b'[{"text": "\xff"}, ' + lines(GOOD).replace(b"\n", b", ")[:-2] + b"]", "invalid Unicode"),
    ],
    ids=["quote", "values", "bytes", "json"],
)
def test_dropped_rows_of_tables_and_lists_are_counted(workplace, name, content, reason, capsys):
    assert distil(workplace, name, content) == 0
    assert dropped(capsys.readouterr().out) == {reason: 1}


def test_a_compressed_file_that_is_cut_short(workplace, capsys):
    rows = lines([{"text": f"Row {number}: {number * 7919 % 10007}."} for number in range(600)])
    assert distil(workplace, "a.jsonl.gz", gzip.compress(rows)[:-2000]) == 0
    assert dropped(capsys.readouterr().out) == {"file breaks off": 1}


def test_nulls_and_empty_texts_of_a_parquet_file_are_counted(workplace, capsys):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [*(row["text"] for row in GOOD), None, ""]})
    pyarrow.parquet.write_table(table, workplace / "a.parquet")
    assert distil(workplace, "a.parquet", (workplace / "a.parquet").read_bytes()) == 0
    assert dropped(capsys.readouterr().out) == {"null": 1, "empty": 1}


def test_what_is_not_read_is_said_by_the_run_and_its_result(workplace, capsys):
    rows = [{"text": "word " * 40, "category": "a"}] * 3 + [{"text": f"word {n} " * 40} for n in range(3)]
    assert distil(workplace, "a.jsonl", lines(rows)) == 0
    assert "columns not read: category in 3 rows; data.unread=[category] silences this" in capsys.readouterr().out
    result = json.loads((workplace / "runs/r/result.json").read_text())
    assert result["data"]["unread"] == {"category": 3} and result["data"]["rows_read"] == 6
