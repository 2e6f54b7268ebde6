"""Sources of rows: the built-in one, local files and folders, the hub.

Every source yields plain dictionaries, one per row, and has a digest of its content. A row that cannot be read is
yielded as a `RowFault`: one bad line never ends the reading of a file, and is counted. A fault of the whole source is a
`ValueError` of one line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from distill.core.errors import first_line
from distill.core.files import suggest_path
from distill.data.readers import READERS, kind_of_file, read_file
from distill.data.rows import RowFault, Rows, TableRow

logger = logging.getLogger(__name__)

STDLIB = "python-stdlib"
STDLIB_BYTES = 4_000_000
STDLIB_LARGEST_FILE = 100_000  # larger files are data tables
STDLIB_SKIPPED = {
    "site-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "encodings",
    "pydoc_data",
    "lib-dynload",
    "distutils",
}
SUFFIXES = tuple(READERS)
END_BYTES = 1 << 16
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval")


@dataclass(frozen=True)
class DataSource:
    """Rows and their identity.

    Attributes:
        digest: Hash of the content; sources with equal digests have equal rows.
        rows: Function that reads the rows from the start.
        columns: Columns, where the source declares them.
        kind: `text` where the source can only hold running text.
        shards: Functions that read its parts, whose rows are `rows` one after the other; empty for one part.
    """

    name: str
    digest: str
    rows: Callable[[], Rows]
    columns: tuple[str, ...] | None = None
    kind: str | None = None
    shards: tuple[Callable[[], Rows], ...] = ()

    @property
    def parts(self) -> tuple[Callable[[], Rows], ...]:
        return self.shards or (self.rows,)


def open_source(
    source: str,
    *,
    field: str = "data.source",
    subset: str | None = None,
    split: str = "train",
    streaming: bool = False,
) -> DataSource:
    """Open the source that `source` names.

    Args:
        source: `python-stdlib`, a local file or folder, or a hub id.
        field: The recipe's field that holds it, for error messages.
        subset: Configuration of a hub data set.
        split: Split of a hub data set, or of a folder whose files are named by split.
        streaming: Read nothing but what is iterated: files are identified by name, size, beginning and end, and a data
            set of the hub is not downloaded whole.

    Raises:
        ValueError: Nothing of that name can be read; the message names alternatives.
    """
    if source == STDLIB:
        return _stdlib()
    path = local_path(source)
    if path.is_file():
        return _of_files(source, [path], field, whole=not streaming)
    if path.is_dir():
        saved = {"dataset_dict.json"}, {"state.json", "dataset_info.json"}  # by save_to_disk
        if any(all((path / name).is_file() for name in names) for names in saved):
            return _hub_layout(source, split, lambda: _load_saved(path, field))
        return _of_files(source, _files_of_folder(path, split, field), field, whole=not streaming)
    if path.exists():
        raise ValueError(f"{field}: expected a file or folder, got a pipe or a device: {source!r}")
    fault = missing_file(source, field)
    if fault:
        raise ValueError(fault)
    if streaming:
        return _stream_hub(source, subset, split, field)
    return _hub_layout(source, split, lambda: _load_hub(source, subset, split, field))


def prompt_lines(source: DataSource, name: str) -> DataSource:
    """Return a source of prompts: of a text file each line is one, other sources stay as they are."""
    path = local_path(name)
    if source.kind != "text" or not path.is_file():
        return source

    def rows() -> Rows:
        for row in source.rows():
            if isinstance(row, RowFault):
                yield row
            else:
                yield from ({"prompt": line} for line in _lines_of(str(row["text"])))

    return DataSource(source.name, f"{source.digest}-lines", rows, ("prompt",))


def _lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank; `splitlines` would split at more characters."""
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def local_path(source: str) -> Path:
    """Return the path of a local source; a shipped `recipes/data/FILE` is found from any folder."""
    path = Path(source).expanduser()
    if path.parent == Path("recipes/data") and not path.exists():
        from distill.recipe.shipped import shipped_folder

        shipped = shipped_folder() / "data" / path.name
        return shipped if shipped.exists() else path
    return path


def missing_file(source: str, field: str) -> str | None:
    """Return an error for the name of a local file that does not exist; None if it exists or may be a hub id."""
    path = local_path(source)
    looks_local = path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") > 1
    if path.exists() or not looks_local:
        return None
    return (
        f"{field}: expected a local file or folder, {STDLIB} or a hub id; {source!r} does not exist "
        f"(looked in {Path.cwd()}){suggest_path(source)}"
    )


def _stdlib() -> DataSource:
    """Return the installed Python's standard library as text, some 4 MB, in an order fixed by name hash."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED and not name.startswith("config-")]
        files += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    files.sort(key=lambda name: hashlib.sha256(name.encode()).digest())  # separates files of one package
    texts = []
    total = 0
    digest = hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        if not 200 <= len(content) <= STDLIB_LARGEST_FILE or total + len(content) > STDLIB_BYTES:
            continue
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:  # a few files of the library are in Latin-1
            continue
        total += len(content)
        digest.update(content)
    if not texts:
        raise ValueError(f"data.source: {STDLIB} found no source files in {root}; use a local file or folder instead")
    return DataSource(STDLIB, digest.hexdigest(), lambda: ({"text": text} for text in texts), ("text",), "text")


# local files


def _files_of_folder(folder: Path, split: str, field: str) -> list[Path]:
    """Return the data files of a folder; if names tell splits (train.jsonl, test/a.txt), those of `split`."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and kind_of_file(path) in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"{field}: expected data files ({', '.join(SUFFIXES)}) in the folder {folder}, got none")
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    named = sorted({name for name in splits.values() if name})
    if not named:
        return files
    matching = [path for path in files if splits[path] == split]
    if not matching:
        raise ValueError(f"data.split: expected one of {', '.join(named)}, the splits in {folder}; got {split!r}")
    unnamed = [path.name for path in files if splits[path] is None]
    if unnamed:
        logger.warning(
            "%s: %d of %d files are ignored (%s, ...): their names belong to no split, while those of others do",
            folder,
            len(unnamed),
            len(files),
            unnamed[0],
        )
    return matching


def _split_of(path: Path) -> str | None:
    for part in (*path.parts[:-1], path.name.split(".")[0]):
        head = part.lower().replace("_", "-").split("-")[0]
        if head in SPLIT_NAMES:
            return head
    return None


def _of_files(name: str, files: list[Path], field: str, *, whole: bool) -> DataSource:
    digest = hashlib.sha256()
    for path in files:
        if kind_of_file(path) not in SUFFIXES:
            raise ValueError(f"{field}: expected a file of {', '.join(SUFFIXES)}; got {str(path)!r}")
        # the suffix chooses the reader: the same bytes under another one are other rows
        digest.update(f"{kind_of_file(path)}\0".encode())
        try:
            with path.open("rb") as file:
                if whole:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
                else:
                    digest.update(_ends_of(file))
        except OSError as error:
            raise ValueError(f"{field}: {path} cannot be read: {error.strerror or error}") from error

    shards = tuple(functools.partial(read_file, path, field) for path in files)

    def rows() -> Rows:
        for shard in shards:
            yield from shard()

    only_text = all(kind_of_file(path) == ".txt" for path in files)
    columns = ("text",) if only_text else None
    return DataSource(name, digest.hexdigest(), rows, columns, "text" if only_text else None, shards)


def _ends_of(file: BinaryIO) -> bytes:
    """Return what tells a file of a stream from another without reading it whole: its size, beginning and end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    beginning = file.read(END_BYTES)
    file.seek(max(0, size - END_BYTES))
    return size.to_bytes(8, "little") + beginning + file.read(END_BYTES)


# through the datasets library


def _hub_layout(name: str, split: str, load: Callable[[], Any]) -> DataSource:
    dataset = load()
    if hasattr(dataset, "keys"):  # a DatasetDict
        if split not in dataset:
            raise ValueError(f"data.split: expected one of {', '.join(dataset)}, the splits of {name}; got {split!r}")
        dataset = dataset[split]
    columns = tuple(dataset.column_names)

    def rows() -> Rows:
        yield from map(TableRow, dataset)

    return DataSource(name, str(dataset._fingerprint), rows, columns)


def _load_saved(path: Path, field: str) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{field}: {path} cannot be read as a saved data set: {_reason(error)}") from error


def _load_hub(name: str, subset: str | None, split: str, field: str) -> Any:
    import datasets

    with _hub_errors(name, field):
        return datasets.load_dataset(name, subset, split=split)


def _stream_hub(name: str, subset: str | None, split: str, field: str) -> DataSource:
    """Return a data set of the hub whose files are read while it is iterated, one shard after the other."""
    import datasets

    with _hub_errors(name, field):
        builder = datasets.load_dataset_builder(name, subset)
        dataset = builder.as_streaming_dataset(split=split)
    count = dataset.num_shards

    def rows_of(shard: int) -> Rows:
        yield from map(TableRow, dataset.shard(num_shards=count, index=shard))

    shards = tuple(functools.partial(rows_of, shard) for shard in range(count))

    def rows() -> Rows:
        for shard in shards:
            yield from shard()

    columns = None if dataset.column_names is None else tuple(dataset.column_names)
    # both hold hashes of the files' names and of their versions on the hub
    digest = hashlib.sha256("\0".join([name, builder.config_id, str(builder.hash), split]).encode()).hexdigest()
    return DataSource(name, digest, rows, columns, None, shards)


@contextlib.contextmanager
def _hub_errors(name: str, field: str) -> Iterator[None]:
    """Raise a ValueError of one line where the hub does not have a data set, or cannot be reached."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    local = "for local data, give the path of a json, jsonl, csv, parquet or txt file, or a folder of them"
    try:
        yield
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(f"{field}: {_reason(error)}; {local}") from error
    except (ConnectionError, OfflineModeIsEnabled, HfHubHTTPError, TimeoutError) as error:
        raise ValueError(f"{field}: the hub cannot be reached for {name!r} ({_reason(error)}); {local}") from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        hint = "data.subset or data.split" if "onfig" in str(error) or "split" in str(error) else field
        raise ValueError(f"{hint}: {name!r} cannot be loaded: {_reason(error)}; {local}") from error


def _reason(error: BaseException) -> str:
    return first_line(error).rstrip(".")
