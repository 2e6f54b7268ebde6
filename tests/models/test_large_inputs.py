"""Small files that unpack to large ones: the fault names file, line and limit, and the memory stays within bounds."""

import gzip
import json
import subprocess
import sys

import pytest
from tiny import tiny_tokenizer

from distill.data import readers
from distill.data.documents import row_batches
from distill.data.load import load_data
from distill.data.rows import row_size
from distill.data.sources import open_source
from distill.recipe import Data

MIB = 1 << 20
GOOD = [{"text": f"Row {number} is as it should be, and it is learned."} for number in range(20)]
LINES = [json.dumps(row).encode() + b"\n" for row in GOOD]
READ = """
import json, resource, sys
from distill.data.sources import RowFault, open_source
rows, faults, told = 0, [], ""
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for row in open_source(sys.argv[1]).rows():
        rows += not isinstance(row, RowFault)
        faults += [str(row)] if isinstance(row, RowFault) else []
except ValueError as error:
    told = str(error)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([rows, faults, told, peak // 1024]))
"""


def packed(path, parts):
    """A gzip file of several members: what comes 500 times is compressed once."""
    members = {part: gzip.compress(part, 1) for part in set(parts)}
    with path.open("wb") as file:
        for part in parts:
            file.write(members[part])
    assert path.stat().st_size < 8 * MIB


def read_apart(path):
    """Usable rows, faults and refusal of a file, and the MiB that reading it took in a process of its own."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, before, unit, after, rows, told",
    [
        ("a.jsonl", [*LINES, b'{"text": "'], b"x", [b'"}\n', *LINES], 40, "line too long: a.jsonl.gz, line 21: "),
        ("a.jsonl", LINES, b"\xff", [b"\n", *LINES], 40, "line too long: a.jsonl.gz, line 21: "),
        ("a.csv", [b"text\na row\n"], b"x", [b"\n"], 1, "file breaks off: a.csv.gz: line 3: "),
        (
            "a.csv",
            [b'text\na row\n"'],
            b"x" * 999 + b"\n",
            [],
            1,
            "file breaks off: a.csv.gz: field larger than field limit",
        ),
        ("a.csv", [b"text\na row\n"], b",", [b"\n"], 1, "file breaks off: a.csv.gz: line 3: "),
    ],
    ids=["line", "bytes", "field", "quote", "columns"],
)
def test_a_line_of_half_a_gibibyte_is_named_and_takes_little_memory(tmp_path, name, before, unit, after, rows, told):
    path = tmp_path / f"{name}.gz"
    packed(path, [*before, *[unit * (MIB // len(unit))] * 500, *after])
    found, faults, refusal, peak = read_apart(path)
    (fault,) = [*faults, *filter(None, [refusal])]
    assert told in fault and ("expected at most 64 MiB" in fault or str(64 * MIB) in fault)
    assert "\n" not in fault and found == rows
    assert peak < 400, "MiB; a line of 500 MiB was held as a whole"


@pytest.mark.full
def test_a_text_of_half_a_gibibyte_comes_in_parts(tmp_path):
    packed(tmp_path / "a.txt.gz", [b"word " * (MIB // 5)] * 500)
    found, _, _, peak = read_apart(tmp_path / "a.txt.gz")
    assert found == 32 and peak < 400


def table(path, column, compression="zstd"):
    import pyarrow
    import pyarrow.parquet

    made = pyarrow.table({"text": column})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(made, path, compression=compression)
        return
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, made.schema, options=options) as writer:
        writer.write_table(made)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_encoded_columns_of_tables_are_plain_values(tmp_path, name):
    import pyarrow

    words = [f"word number {number % 7}" for number in range(3000)]
    table(tmp_path / name, pyarrow.array(words).dictionary_encode())
    assert [row["text"] for row in open_source(str(tmp_path / name)).rows()] == words


def test_a_list_of_json_is_read_item_by_item(tmp_path, limit):
    """Whatever the chunks that are read: as json.loads has it."""
    items = [{"text": "a ] , [ \\" * n, "n": n, "more": [{}, [n, -n / 7, True, None]]} for n in range(12)]
    whole = json.dumps(items, indent=1)
    path = tmp_path / "a.json"
    for chunk in (1, 2, 7, 64, 1 << 20):
        limit.setattr(readers, "CHUNK", chunk)
        path.write_text(f" \n{whole}\n ")
        assert list(open_source(str(path)).rows()) == items
        for cut in range(1, len(whole), 97):
            path.write_text(whole[:cut])
            with pytest.raises(ValueError, match=r"data\.source: .*a\.json is not valid JSON: [^\n]*$"):
                list(open_source(str(path)).rows())
        for wrong in ("[1 2]", "[{},]", "[{}] x", "[,]", "[1}", "[{} {}]", "[[]", '["a]'):
            path.write_text(wrong)
            with pytest.raises(ValueError, match="is not valid JSON"):
                list(open_source(str(path)).rows())
        path.write_text("[12345, 678]")
        assert [row.detail for row in open_source(str(path)).rows()] == ["a.json, item 1: 12345", "a.json, item 2: 678"]


def test_a_text_in_parts_loses_nothing(tmp_path, limit):
    limit.setattr(readers, "TEXT_PART", 100)
    text = "".join(f"Line {number} of a text.\r\n" for number in range(60)) + "x" * 250 + " and an end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    parts = [row["text"] for row in open_source(str(tmp_path / "a.txt")).rows()]
    assert "".join(parts) == text and max(map(len, parts)) <= 100 and sum(part.endswith("\n") for part in parts) > 10


def test_batches_are_bounded_by_all_their_rows_hold():
    assert row_size({"text": "abc", "n": [1, 2]}) == 3 + 2 * 16 + 2 * 16
    chat = {"messages": [{"role": "user", "content": "x" * MIB}]}
    assert [len(batch) for batch in row_batches(enumerate([chat] * 10))] == [4, 4, 2]


@pytest.mark.full
def test_a_line_that_is_too_long_is_counted_and_the_rest_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    packed(tmp_path / "a.jsonl.gz", [*LINES, b'{"text": "', *[b"x" * MIB] * 65, b'"}\n', *LINES])
    splits = load_data(Data(source=str(tmp_path / "a.jsonl.gz"), max_length=64), tiny_tokenizer(), seed=0)
    assert splits.report.rows_read == 41 and splits.report.dropped == {"line too long": 1}
    assert "a.jsonl.gz, line 21: expected at most 64 MiB" in splits.report.examples["line too long"]
