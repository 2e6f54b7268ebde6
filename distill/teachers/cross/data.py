"""Data for two tokenizers: pairs of readings on disk, packed into rows that both models can hold, and their batches.

A row holds the student's `input_ids`, `labels`, `position_ids`, the teacher's `teacher_input_ids`,
`teacher_position_ids`, and `spans`, four numbers each (cross_encode.Pair). Labels stand at the first token of each
span, so that the trained tokens of a batch are its spans: what the loss is a mean over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from distill.data.chat import load_template
from distill.data.collator import Collator
from distill.data.documents import _batches, _encoded, _limited
from distill.data.formats import detect
from distill.data.load import DataReport, Splits, _hold_out, _plain, _some, columns_of
from distill.data.packing import IGNORED, rows_of
from distill.data.sources import Source, open_source
from distill.data.token_cache import keep, key_of, tokenizer_hash
from distill.data.tokenise import Tally
from distill.recipe import Data
from distill.teachers.cross.encode import Pair, PairEncoder, Reader

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

COLUMNS = ("student", "teacher", "spans")
NAMES = ("input_ids", "labels", "position_ids", "teacher_input_ids", "teacher_position_ids", "spans")
ROWS_AT_ONCE = 1024


@dataclass
class CrossReport(DataReport):
    """What became of the data, for two tokenizers. Tokens are the student's, and so are rows.

    Attributes:
        teacher_tokens: the teacher's tokens in the training documents.
        spans: aligned spans to train on.
        single: of these the ones that are one token of each model.
        span_tokens, teacher_span_tokens: tokens in them.
    """

    teacher_tokens: int = 0
    spans: int = 0
    single: int = 0
    span_tokens: int = 0
    teacher_span_tokens: int = 0

    def __str__(self) -> str:
        spans = max(self.spans, 1)
        return (
            f"{super().__str__()}\naligned: {self.spans:,} spans, {self.single / spans:.1%} of them one token of each; "
            f"{self.single / max(self.span_tokens, 1):.1%} of the student's tokens and "
            f"{self.single / max(self.teacher_span_tokens, 1):.1%} of the teacher's stand one to one"
        )


class Ragged(NamedTuple):
    """Lists end to end: entry i is `values[offsets[i]:offsets[i + 1]]`."""

    values: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, number: Any) -> np.ndarray:  # type: ignore[override]
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.offsets)


class Pairs(NamedTuple):
    """Documents as both models read them, read from disk as they are used."""

    student: Ragged
    teacher: Ragged
    spans: Ragged
    origin: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """What a document takes of a row: the longer of its two readings."""
        return np.maximum(self.student.lengths, self.teacher.lengths)

    def row(self, documents: Iterable[int]) -> dict[str, np.ndarray]:
        """Documents end to end as one row; positions start again with each."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
        at, teacher_at = 0, 0
        for number in documents:
            student, teacher = self.student[number], self.teacher[number]
            spans = self.spans[number].reshape(-1, 4)
            labels = np.full(len(student), IGNORED, dtype=np.int32)
            labels[spans[:, 0]] = student[spans[:, 0]]
            here = (
                student, labels, np.arange(len(student)), teacher, np.arange(len(teacher)),
                (spans + np.array([at, at, teacher_at, teacher_at])).ravel(),
            )  # fmt: skip
            for name, values in zip(NAMES, here, strict=True):
                parts[name].append(values)
            at, teacher_at = at + len(student), teacher_at + len(teacher)
        return {name: np.concatenate(values).astype(np.int32) for name, values in parts.items()}


def load_cross_data(data: Data, student_tokenizer: Any, teacher_tokenizer: Any, *, seed: int) -> Splits:
    """`load_data` for a student and a teacher whose tokenizers differ.

    Args:
        data: the recipe's `data` section; `max_length` bounds both readings, `chat_template: tokenizer` means each its
            own.
        student_tokenizer, teacher_tokenizer: of the two models.
        seed: fixes which documents are held out and the order of the rows.

    Raises:
        ValueError: naming the field.
    """
    if data.source.partition(":")[0] == "synthetic":
        raise ValueError(
            f"data.source: {data.source} has no text, which student.vocabulary: cross needs to compare two tokenizers"
        )
    readers = [
        Reader(tokenizer, load_template(data.chat_template, tokenizer), field)
        for tokenizer, field in ((student_tokenizer, "student.model"), (teacher_tokenizer, "teacher.model"))
    ]
    source = open_source(data.source, subset=data.subset, split=data.split)
    encoder, pairs, tally, key, found = _read(data, source, readers, max_rows=data.max_rows)
    report = CrossReport(source.name, source.digest, str(encoder.format), data.max_length)
    report.rows_read, report.dropped, report.examples = tally.rows_read, dict(tally.dropped), tally.examples
    report.truncated, report.from_cache = tally.truncated, found
    days = [reader.template.frozen_date for reader in readers if reader.template and reader.template.frozen_date]
    report.frozen_date = max(days).isoformat() if days else None
    if data.validation.source is None:
        held_out, rest = _hold_out(pairs.origin, data.validation.fraction, data.validation.max_rows, seed)
        other = pairs
    else:
        place, colon, split = data.validation.source.rpartition(":")
        if not colon or Path(data.validation.source).expanduser().exists():
            place, split = data.validation.source, data.split
        source = open_source(place, field="data.validation.source", subset=data.subset, split=split)
        _, other, _, other_key, _ = _read(data, source, readers, max_rows=None)
        held_out = _some(other.origin, data.validation.max_rows, seed)
        rest = np.flatnonzero(~np.isin(pairs.origin, other.origin[held_out]))
        key = f"{key}-{other_key}"
    if len(rest) == 0:
        raise ValueError("data.validation: every document is held out and none is left to train on")
    settings = (key, seed, data.packing, data.max_length, _plain(data.validation))
    train = _rows(key_of("cross-train", *settings), pairs, rest, data, seed)
    validation = _rows(key_of("cross-validation", *settings), other, held_out, data, seed)
    _count(report, pairs, rest, other, held_out)
    report.rows, report.validation_rows = len(train), len(validation)
    return Splits(train, validation, report)


def _read(
    data: Data, source: Source, readers: Sequence[Reader], *, max_rows: int | None
) -> tuple[PairEncoder, Pairs, Tally, str, bool]:
    """All pairs of a source, what happened to its rows, the key, and whether the cache had it."""
    templates = [reader.template for reader in readers]
    format = detect(
        columns_of(source), data.fields, data.format, source=source.name, has_template=None not in templates
    )
    student, teacher = readers
    encoder = PairEncoder(student, teacher, format, max_length=data.max_length, train_on=data.train_on)
    key = key_of(
        "cross 2", source.digest, [tokenizer_hash(reader.tokenizer) for reader in readers],
        [template and template.source for template in templates], asdict(format),
        data.max_length, data.train_on, max_rows,
    )  # fmt: skip

    def build(folder: Path) -> None:
        logger.info("reading %s with two tokenizers", source.name)
        made = _encoded(_batches(_limited(source.rows(), max_rows)), encoder, data.workers)  # type: ignore[arg-type]
        tally = _write(folder, made)  # type: ignore[arg-type]
        (folder / "tally.json").write_text(json.dumps(vars(tally)))

    folder, found = keep(key, build, cache=data.cache)
    tally = Tally()
    tally.add(Tally(**json.loads((folder / "tally.json").read_text())))
    own, others, spans = (Ragged(_mapped(folder / f"{name}.bin"), np.load(folder / f"{name}.npy")) for name in COLUMNS)
    pairs = Pairs(own, others, spans, np.load(folder / "origin.npy"))
    reasons = "; ".join(f"{count:,} {why} ({tally.examples[why]})" for why, count in tally.dropped.most_common(3))
    if len(pairs.origin) == 0:
        raise ValueError(
            f"data.source: nothing in {source.name} can be compared: {tally.rows_read:,} rows read"
            + (f": {reasons}" if reasons else "")
        )
    dropped = sum(tally.dropped.values())
    if dropped * 10 > tally.rows_read:
        logger.warning("%s: %s of %s rows dropped: %s", source.name, f"{dropped:,}", f"{tally.rows_read:,}", reasons)
    return encoder, pairs, tally, key, found


def _write(folder: Path, encoded: Iterable[tuple[list[Pair], Tally]]) -> Tally:
    tally, origins = Tally(), []
    lengths: dict[str, list[int]] = {name: [] for name in COLUMNS}
    files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}
    for pairs, counts in encoded:
        tally.add(counts)
        for pair in pairs:
            for name, file in files.items():
                values = np.ascontiguousarray(getattr(pair, name), dtype=np.int32)
                file.write(values.tobytes())
                lengths[name].append(values.size)
            origins.append(pair.origin)
    for name, file in files.items():
        file.close()
        np.save(
            folder / f"{name}.npy", np.concatenate([[0], np.cumsum(lengths[name], dtype=np.int64)]).astype(np.int64)
        )
    np.save(folder / "origin.npy", np.array(origins, dtype=np.uint64))
    return tally


def _mapped(path: Path) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype=np.int32, mode="r") if path.stat().st_size else np.zeros(0, dtype=np.int32)


def _rows(key: str, pairs: Pairs, chosen: np.ndarray, data: Data, seed: int) -> datasets.Dataset:
    """The chosen documents as shuffled rows in an Arrow file."""
    import datasets

    def build(folder: Path) -> None:
        rows = rows_of(pairs.lengths, chosen, packing=data.packing, capacity=data.max_length, seed=seed)
        _write_rows(folder / "rows.arrow", map(pairs.row, rows))

    folder, _ = keep(key, build, cache=data.cache)
    return datasets.Dataset.from_file(str(folder / "rows.arrow"))


def _write_rows(path: Path, rows: Iterator[dict[str, np.ndarray]]) -> None:
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.list_(pyarrow.int32())) for name in NAMES])
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        waiting: list[dict[str, np.ndarray]] = []

        def flush() -> None:
            columns = [pyarrow.array([row[name] for row in waiting], type=schema.field(name).type) for name in NAMES]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            waiting.clear()

        for row in rows:
            waiting.append(row)
            if len(waiting) == ROWS_AT_ONCE:
                flush()
        if waiting:
            flush()


def _count(report: CrossReport, pairs: Pairs, chosen: np.ndarray, held_out_of: Pairs, held_out: np.ndarray) -> None:
    """Put into the report what the rows hold."""
    report.documents, report.tokens = len(chosen), int(pairs.student.lengths[chosen].sum())
    report.teacher_tokens = int(pairs.teacher.lengths[chosen].sum())
    for number in chosen:
        widths = np.diff(pairs.spans[number].reshape(-1, 2, 2), axis=2)[:, :, 0]
        report.spans += len(widths)
        report.single += int((widths == 1).all(1).sum())
        report.span_tokens += int(widths[:, 0].sum())
        report.teacher_span_tokens += int(widths[:, 1].sum())
    report.trained_tokens = report.span_tokens
    report.validation_documents = len(held_out)
    report.validation_tokens = int(held_out_of.student.lengths[held_out].sum())


class CrossCollator:
    """Adds to a plain collator's batch the teacher's reading and the spans in flat positions.

    Args:
        plain: makes the student's batch.
        pad_token_id: the teacher's; any id does.
    """

    def __init__(self, plain: Callable[[list[Any]], dict[str, Any]], pad_token_id: int) -> None:
        self.plain = plain
        inner = getattr(plain, "collator", plain)
        self.padding_side: Literal["right", "left"] = getattr(inner, "padding_side", "right")
        self.teacher = Collator(
            pad_token_id, getattr(inner, "pad_to_multiple_of", None), self.padding_side,
            getattr(inner, "omit_plain_positions", True),
        )  # fmt: skip

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """As `Collator`, and `teacher_input_ids`, `teacher_position_ids` (where a row holds several documents), `spans`
        int64 [M, 4]."""
        batch = self.plain([{name: row[name] for name in NAMES[:3]} for row in rows])
        readings = [(row["teacher_input_ids"], row["teacher_position_ids"]) for row in rows]
        teacher = self.teacher([{"input_ids": ids, "labels": ids, "position_ids": at} for ids, at in readings])
        spans = [torch.zeros(0, 4, dtype=torch.int64)]
        for number, row in enumerate(rows):
            own = torch.as_tensor(row["spans"], dtype=torch.int64).view(-1, 2, 2)
            for side, (made, name) in enumerate(((batch, "input_ids"), (teacher, "teacher_input_ids"))):
                width = made["input_ids"].shape[1]
                own[:, side] += number * width + (width - len(row[name])) * (self.padding_side == "left")
            spans.append(own.view(-1, 4))
        batch |= {f"teacher_{name}": teacher[name] for name in ("input_ids", "position_ids") if name in teacher}
        return batch | {"spans": torch.cat(spans)}
