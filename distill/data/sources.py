"""Where the rows come from: the built-in source, local files and folders, the hub.

Every source gives plain dictionaries, one a row, and a digest of its content. A row that cannot be read comes as a
`RowFault` in its place: one bad line never ends the reading of a file, and is counted. What is wrong with the source
as a whole is a `ValueError` of one line.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from distill.core.faults import first_line
from distill.core.files import near_path
from distill.recipe.shipped import shipped_folder

logger = logging.getLogger(__name__)

STDLIB = "python-stdlib"
STDLIB_BYTES = 4_000_000
TABLE_ROWS = 1024  # of a parquet file, read at once
STDLIB_LARGEST_FILE = 100_000  # larger ones are tables
STDLIB_SKIPPED = {
    "site-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "pydoc_data", "lib-dynload", "distutils",
}  # fmt: skip
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
BAD_BYTE = re.compile("[\udc80-\udcff]")  # what errors="surrogateescape" makes of bytes that are not UTF-8
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval")


class RowFault(ValueError):
    """One row that cannot be used; `reason` is what is counted, `detail` what is shown of the first such row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type[RowFault], tuple[str, str]]:
        return RowFault, (self.reason, self.detail)


Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Rows and what identifies them.

    Attributes:
        name: what a person calls it.
        digest: hash of the content; two sources with one digest give the same rows.
        rows: call it to read from the start.
        columns: the columns, where the source declares them.
        kind: `text` where the source can hold nothing but running text.
    """

    name: str
    digest: str
    rows: Callable[[], Iterator[Row | RowFault]]
    columns: tuple[str, ...] | None = None
    kind: str | None = None


def open_source(source: str, *, field: str = "data.source", subset: str | None = None, split: str = "train") -> Source:
    """Find what `source` names.

    Args:
        source: `python-stdlib`, a local file or folder, or a hub id.
        field: the recipe's field that holds it, for error messages.
        subset: the hub data set's configuration.
        split: which split of a hub data set or of a folder whose files are named by split.

    Raises:
        ValueError: nothing of that name can be read, in one line that says what would work.
    """
    if source == STDLIB:
        return _stdlib()
    path = local_path(source)
    if path.is_file():
        return _of_files(source, [path], field)
    if path.is_dir():
        saved = {"dataset_dict.json"}, {"state.json", "dataset_info.json"}  # by save_to_disk
        if any(all((path / name).is_file() for name in names) for names in saved):
            return _hub_layout(source, split, lambda: _load_saved(path, field))
        return _of_files(source, _files_of_folder(path, split, field), field)
    if path.exists():
        raise ValueError(f"{field}: expected a file or folder; {source!r} is neither (a pipe or a device)")
    if fault := missing_source(source, field):
        raise ValueError(fault)
    return _hub_layout(source, split, lambda: _load_hub(source, subset, split, field))


def local_path(source: str) -> Path:
    """The file or folder that `source` means if it is local; `recipes/data/FILE` that ships, from any folder."""
    path = Path(source).expanduser()
    shipped = shipped_folder() / "data" / path.name
    return shipped if path.parent == Path("recipes/data") and not path.exists() and shipped.exists() else path


def missing_source(source: str, field: str) -> str | None:
    """What is wrong with the name of a local file that does not exist; None for what exists or may be a hub id."""
    path = local_path(source)
    looks_local = path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") > 1
    if path.exists() or not looks_local:
        return None
    return (
        f"{field}: expected a local file or folder, {STDLIB} or a hub id; {source!r} does not exist "
        f"(looked in {Path.cwd()}){near_path(source)}"
    )


def _stdlib() -> Source:
    """The installed Python's own library, code and docstrings: some 4 MB of real text, in an order fixed by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED and not name.startswith("config-")]
        files += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    files.sort(key=lambda name: hashlib.sha256(name.encode()).digest())  # neighbours in the library are kept apart
    texts, total, digest = [], 0, hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        if not 200 <= len(content) <= STDLIB_LARGEST_FILE or total + len(content) > STDLIB_BYTES:
            continue
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:  # a few files of the library are written in Latin-1
            continue
        total += len(content)
        digest.update(content)
    if not texts:
        raise ValueError(f"data.source: {STDLIB} finds no source files in {root}; give a local file or folder instead")
    return Source(STDLIB, digest.hexdigest(), lambda: ({"text": text} for text in texts), ("text",), "text")


# local files


def _files_of_folder(folder: Path, split: str, field: str) -> list[Path]:
    """The data files of a folder; where names tell splits apart (train.jsonl, test/a.txt), those of `split`."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and _kind(path) in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"{field}: the folder {folder} holds no data files ({', '.join(SUFFIXES)})")
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    named = sorted({name for name in splits.values() if name})
    if not named:
        return files
    matching = [path for path in files if splits[path] == split]
    if not matching:
        raise ValueError(f"data.split: expected one of {', '.join(named)}, the splits in {folder}; got {split!r}")
    if unnamed := [path.name for path in files if splits[path] is None]:
        logger.warning(
            "%s: %d of %d files belong to no split by their names and are left out (%s, ...), since others do",
            folder, len(unnamed), len(files), unnamed[0],
        )  # fmt: skip
    return matching


def _split_of(path: Path) -> str | None:
    for part in (*path.parts[:-1], path.name.split(".")[0]):
        head = part.lower().replace("_", "-").split("-")[0]
        if head in SPLIT_NAMES:
            return head
    return None


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _of_files(name: str, files: list[Path], field: str) -> Source:
    digest = hashlib.sha256()
    for path in files:
        if _kind(path) not in SUFFIXES:
            raise ValueError(f"{field}: expected a file of {', '.join(SUFFIXES)}; got {str(path)!r}")
        digest.update(f"{_kind(path)}\0".encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ValueError(f"{field}: {path} cannot be read: {error.strerror or error}") from error

    def rows() -> Iterator[Row | RowFault]:
        for path in files:
            yield from _guarded(path)

    only_text = all(_kind(path) == ".txt" for path in files)
    return Source(name, digest.hexdigest(), rows, ("text",) if only_text else None, "text" if only_text else None)


def _open(path: Path) -> TextIO:
    """Open as UTF-8; bytes that are not become U+DC80 to U+DCFF, which `BAD_BYTE` finds."""
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="")


def _guarded(path: Path) -> Iterator[Row | RowFault]:
    """The rows of a file; one that is cut short or breaks off while being read counts as one fault."""
    try:
        yield from READERS[_kind(path)](path)
    except (OSError, EOFError, csv.Error, zlib.error) as error:
        yield RowFault("file breaks off", f"{path.name}: {error}")


def _read_lines(path: Path) -> Iterator[Row | RowFault]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, f"{path.name}, line {number}")


def _parsed(line: str, where: str) -> Row | RowFault:
    if BAD_BYTE.search(line):
        return RowFault("invalid UTF-8", where)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        return RowFault("invalid JSON", f"{where}: {error}")
    return row if isinstance(row, dict) else RowFault("not a JSON object", f"{where}: {type(row).__name__}")


def _read_json(path: Path) -> Iterator[Row | RowFault]:
    """A list of objects, an object that holds one such list, or one object a line."""
    with _open(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        first = text.lstrip().split("\n", 1)[0].strip()
        if first.startswith("{") and first.endswith("}"):
            yield from _read_lines(path)
            return
        raise ValueError(f"data.source: {path} is not valid JSON: {error}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list):
        raise ValueError(f"data.source: {path}: expected a list of objects; got {type(content).__name__}")
    for place, row in enumerate(content, 1):
        yield row if isinstance(row, dict) else RowFault("not a JSON object", f"{path.name}, item {place}: {row!r:.60}")


def _read_csv(path: Path) -> Iterator[Row | RowFault]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        reader = csv.DictReader(file, delimiter="\t" if _kind(path) == ".tsv" else ",", restkey="", strict=True)
        names = list(reader.fieldnames or ())
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"data.source: {path} has two columns called {twice!r}; rename one")
        for row in reader:
            where = f"{path.name}, line {reader.line_num}"
            if any(isinstance(value, str) and BAD_BYTE.search(value) for value in row.values()):
                yield RowFault("invalid UTF-8", where)
            elif isinstance(row.get(""), list):
                yield RowFault("more values than columns", where)
            else:
                yield dict(row)


def _read_text(path: Path) -> Iterator[Row | RowFault]:
    """A text file is one running text, however its lines are broken."""
    with _open(path) as file:
        text = file.read()
    bad = 0 if text.isascii() else len(BAD_BYTE.findall(text))
    if bad * 100 > len(text):
        yield RowFault("invalid UTF-8", f"{path.name}: {bad:,} bytes; convert the file to UTF-8")
        return
    yield {"text": text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if bad else text}


def _read_parquet(path: Path) -> Iterator[Row | RowFault]:
    from pyarrow import parquet

    with _opening(path, "parquet"):
        file = parquet.ParquetFile(path)
    with file:
        yield from _rows_of(file.iter_batches(TABLE_ROWS))


def _read_arrow(path: Path) -> Iterator[Row | RowFault]:
    """Arrow's stream, which the datasets library writes, or its file."""
    from pyarrow import ArrowInvalid, ipc

    with path.open("rb") as file:
        with _opening(path, "arrow"):
            try:
                reader = ipc.open_stream(file)
            except ArrowInvalid:
                reader = ipc.open_file(file)
        is_stream = hasattr(reader, "read_next_batch")
        yield from _rows_of(reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)))


def _rows_of(batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of a table's record batches, each checked: offsets that point elsewhere would be followed."""
    try:
        for batch in batches:
            batch.validate(full=True)
            yield from batch.to_pylist()
    except ValueError as error:  # which Arrow's errors are
        raise EOFError(_reason(error)) from error


@contextlib.contextmanager
def _opening(path: Path, kind: str) -> Iterator[None]:
    """A file that is no table at all is refused, unlike one that breaks off."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source: {path} cannot be read as {kind}: {_reason(error)}") from error


READERS = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}


# through the datasets library


def _hub_layout(name: str, split: str, load: Callable[[], Any]) -> Source:
    dataset = load()
    if hasattr(dataset, "keys"):  # a DatasetDict
        if split not in dataset:
            raise ValueError(f"data.split: expected one of {', '.join(dataset)}, the splits of {name}; got {split!r}")
        dataset = dataset[split]
    columns = tuple(dataset.column_names)

    def rows() -> Iterator[Row | RowFault]:
        yield from dataset

    return Source(name, str(dataset._fingerprint), rows, columns)


def _load_saved(path: Path, field: str) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{field}: {path} cannot be read as a saved data set: {_reason(error)}") from error


def _load_hub(name: str, subset: str | None, split: str, field: str) -> Any:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    local = "to use data of your own, give the path of a json, jsonl, csv, parquet or txt file, or a folder of them"
    with _silent():
        try:
            return datasets.load_dataset(name, subset, split=split)
        except datasets.exceptions.DatasetNotFoundError as error:
            raise ValueError(f"{field}: {_reason(error)}; {local}") from error
        except (ConnectionError, OfflineModeIsEnabled, HfHubHTTPError, TimeoutError) as error:
            raise ValueError(f"{field}: the hub cannot be reached for {name!r} ({_reason(error)}); {local}") from error
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            hint = "data.subset or data.split" if "onfig" in str(error) or "split" in str(error) else field
            raise ValueError(f"{hint}: {name!r} cannot be loaded: {_reason(error)}; {local}") from error


def _reason(error: BaseException) -> str:
    return first_line(error).rstrip(".")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep the datasets library's progress bars out of the way."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
