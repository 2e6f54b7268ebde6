"""Readers of data files, one per file type; all but that of JSON lists hold only a few rows in memory.

A row that cannot be read is yielded as a `RowFault`: one bad line never ends the reading of a file, and is counted. A
fault of the whole file is a `ValueError` of one line. A small file may unpack to a very large one: lines longer than
`MOST_BYTES` are refused. Parquet and Arrow files are read by pyarrow, a batch of rows at a time.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from distill.core.errors import first_line
from distill.data.rows import MOST_BYTES, TOO_LONG, RawRow, RowFault, Rows, TableRow

MOST_SKIPPED = 1 << 30  # characters of a too long line after which the rest of its file is not read
CHUNK = 1 << 20
TABLE_ROWS = 1024  # largest number of rows in a batch of a parquet file
TEXT_PART = MOST_BYTES // 4  # characters, of at most four bytes each
BAD_BYTE = re.compile("[\udc80-\udcff]")  # errors="surrogateescape" maps bytes that are not UTF-8 to these
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}


def kind_of_file(path: Path) -> str:
    """Return the suffix that decides the reader, such as `.jsonl` for a.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_file(path: Path, field: str) -> Rows:
    """Yield the rows of a file; one that is truncated or breaks off counts as one fault.

    Args:
        field: The recipe's field that names the file, for error messages.

    Raises:
        ValueError: It is not a file of its type.
    """
    try:
        yield from READERS[kind_of_file(path)](path)
    except (OSError, EOFError, csv.Error, zlib.error) as error:
        yield RowFault("file breaks off", f"{path.name}: {error}")
    except ValueError as error:
        raise ValueError(f"{field}: {path} {error}") from error


# text


def _open(path: Path) -> TextIO:
    """Open a file as UTF-8; other bytes become U+DC80 to U+DCFF, which `BAD_BYTE` matches.

    Raises:
        ValueError: It is UTF-16 or UTF-32.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as file:
        encoding = _wide_encoding(file)
        if encoding:
            raise ValueError(f"is {encoding}, expected UTF-8; convert it: {_conversion(path, encoding)}")
    return opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="")


def _conversion(path: Path, encoding: str) -> str:
    name = shlex.quote(str(path))
    plain = path.name.removesuffix(".gz")
    convert = f"iconv -f {encoding} -t UTF-8"
    convert = f"zcat {name} | {convert}" if path.suffix.lower() == ".gz" else f"{convert} {name}"
    return f"{convert} > {shlex.quote(f'utf8-{plain}')}"


def _wide_encoding(file: BinaryIO) -> str | None:
    """Return UTF-16 or UTF-32 from a file's byte order mark, or from zeros in every second byte; else None."""
    try:
        head = file.read(4096)
    except (OSError, EOFError, zlib.error):  # reported by the reader
        return None
    marks = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
    marked = next((name for mark, name in marks.items() if head.startswith(mark)), None)
    if marked:
        return marked
    even = head[::2].count(0)
    odd = head[1::2].count(0)
    if max(even, odd) * 4 > len(head) and min(even, odd) * 40 < len(head):
        return "UTF-16LE" if odd > even else "UTF-16BE"
    return None


def _is_long(text: str) -> bool:
    return len(text) > MOST_BYTES // 4 and len(text.encode("utf-8", "surrogateescape")) > MOST_BYTES


def _lines(file: TextIO, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield each line with its place, and None for a too long line.

    Raises:
        EOFError: A line does not end.
    """
    for number in itertools.count(1):
        line = file.readline(MOST_BYTES + 1)
        if not line:
            return
        where = f"{name}, line {number}"
        skipped = len(line)
        long = _is_long(line)
        if long:
            while line and line[-1] not in "\r\n":
                line = file.readline(CHUNK)
                skipped += len(line)
                if skipped > MOST_SKIPPED:
                    raise EOFError(f"line {number}: {TOO_LONG} in a line; the rest of the file is not read")
        yield where, None if long else line


def _read_lines(path: Path) -> Rows:
    with _open(path) as file:
        for where, line in _lines(file, path.name):
            if line is None:
                yield RowFault("line too long", f"{where}: {TOO_LONG}")
            elif line.strip():
                yield _parsed(line, where)


def _parsed(line: str, where: str) -> RawRow | RowFault:
    if BAD_BYTE.search(line):
        return RowFault("invalid UTF-8", where)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        return RowFault("invalid JSON", f"{where}: {error}")
    return row if isinstance(row, dict) else RowFault("not a JSON object", f"{where}: {type(row).__name__}")


def _read_json(path: Path) -> Rows:
    """Yield the rows of a JSON list of objects, an object that holds one such list, or one object per line.

    The whole file is in memory; large data have one object per line (.jsonl).
    """
    with _open(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        # a .json file may hold one object per line: its first line is then an object by itself
        first = text.lstrip().split("\n", 1)[0].strip()
        if first.startswith("{") and first.endswith("}"):
            yield from _read_lines(path)
            return
        raise ValueError(f"is not valid JSON: {error}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list):
        raise ValueError(f"is no list: expected a list of objects; got {type(content).__name__}")
    for place, row in enumerate(content, 1):
        fault = RowFault("not a JSON object", f"{path.name}, item {place}: {row!r:.60}")
        yield row if isinstance(row, dict) else fault


def _read_csv(path: Path) -> Rows:
    csv.field_size_limit(MOST_BYTES)
    delimiter = "\t" if kind_of_file(path) == ".tsv" else ","
    with _open(path) as file:
        reader = csv.DictReader(_lines_of_table(file), delimiter=delimiter, restkey="", strict=True)
        names = list(reader.fieldnames or ())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"has two columns called {twice!r}; rename one")
        for number, row in enumerate(reader):
            other = _other_delimiter(names, row, delimiter) if number == 0 else None
            if other:
                cure = {"tabs": "name the file .tsv", "commas": "name the file .csv"}.get(other, "save it with commas")
                raise ValueError(f"separates its columns by {other}, expected {DELIMITERS[delimiter]}; {cure}")
            yield _table_row(row, f"{path.name}, line {reader.line_num}")


def _lines_of_table(file: TextIO) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(MOST_BYTES + 1)
        if not line:
            return
        if len(line) > MOST_BYTES:
            raise EOFError(f"line {number}: {TOO_LONG} a line; the rest of the file is not read")
        yield line


def _table_row(row: dict[Any, Any], where: str) -> RawRow | RowFault:
    if any(isinstance(value, str) and BAD_BYTE.search(value) for value in row.values()):
        return RowFault("invalid UTF-8", where)
    return RowFault("more values than columns", where) if isinstance(row.get(""), list) else dict(row)


def _other_delimiter(names: list[str], row: dict[Any, Any], delimiter: str) -> str | None:
    """Return the actual delimiter of a table whose header is one name, if header and first row agree in it."""
    if len(names) != 1:
        return None
    values = ",".join(str(value) for value in (row.get(names[0]), *(row.get("") or ())))
    for mark, name in DELIMITERS.items():
        columns = [column.strip("\"' ") for column in names[0].split(mark)]
        plain = len(columns) > 1 and all(re.fullmatch(r"[\w .-]{1,64}", column) for column in columns)
        if mark != delimiter and plain and values.count(mark) >= len(columns) - 1:
            return name
    return None


def _read_text(path: Path) -> Rows:
    """Yield a text file as one running text, a very long one as several."""
    with _open(path) as file:
        rest = ""
        for number in itertools.count():
            text = rest + file.read(TEXT_PART - len(rest))
            is_last = len(text) < TEXT_PART
            cut = len(text) if is_last else text.rfind("\n") + 1 or len(text)
            text, rest = text[:cut], text[cut:]
            if text or number == 0:
                yield _part_of_text(text, path.name)
            if is_last:
                return


def _part_of_text(text: str, name: str) -> RawRow | RowFault:
    bad = 0 if text.isascii() else len(BAD_BYTE.findall(text))
    if (bad + text.count("\0")) * 100 > len(text):
        return RowFault("invalid UTF-8", f"{name}: {bad + text.count(chr(0)):,} bytes; convert the file to UTF-8")
    return {"text": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if bad else text}


def _read_parquet(path: Path) -> Rows:
    from pyarrow import parquet  # 0.3 s

    with _opening("parquet"):
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        # bytes a row in the widest row group: of wide rows a batch has fewer
        widest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    with file:
        yield from _rows_of(file.iter_batches(min(TABLE_ROWS, max(1, MOST_BYTES // max(widest, 1)))))


def _read_arrow(path: Path) -> Rows:
    """Yield the rows of an Arrow stream, as the datasets library writes it, or of an Arrow file."""
    from pyarrow import ArrowInvalid, ipc, memory_map  # 0.3 s

    with _opening("arrow"):
        file = memory_map(str(path))
    with file:
        with _opening("arrow"):
            try:
                batches: Iterable[Any] = ipc.open_stream(file)
            except ArrowInvalid:
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from _rows_of(batches)


def _rows_of(batches: Iterable[Any]) -> Rows:
    """Yield the rows of a table's record batches, validated: wrong offsets would read outside of the buffers."""
    try:
        for batch in batches:
            batch.validate(full=True)
            yield from map(TableRow, batch.to_pylist())
    except (ValueError, NotImplementedError) as error:  # base classes of Arrow's errors
        raise EOFError(first_line(error).rstrip(".")) from error


@contextlib.contextmanager
def _opening(kind: str) -> Iterator[None]:
    """Raise a ValueError for a file that is no table at all, unlike one that breaks off."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read as {kind}: {first_line(error).rstrip('.')}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
