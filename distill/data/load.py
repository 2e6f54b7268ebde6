"""Data for a run: from `data:` in the recipe to rows of tokens, with what was learned of the data on the way.

    splits = load_data(recipe.data, tokenizer, seed=recipe.train.seed)
    splits.train[0]     # {"input_ids": [...], "labels": [...], "position_ids": [...]}
    print(splits.report)

Steps, in order: open the source, see what its columns mean, tokenise (or find it in the cache), hold out documents for
validation, pack the rest. Everything follows from the recipe and the seed; a second call gives the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.core.units import counted
from distill.data.chat import ChatTemplate, load_template
from distill.data.documents import tokenised
from distill.data.formats import Format, detect
from distill.data.packing import Documents, Ragged, rows_of
from distill.data.sources import Source, open_source
from distill.data.token_cache import keep, key_of
from distill.data.tokenise import Encoder, RowEncoder, Tally

if TYPE_CHECKING:
    import datasets

    from distill.recipe import Data, Validation


logger = logging.getLogger(__name__)

SYNTHETIC_ROWS = 1024


@dataclass
class DataReport(Tally):
    """What was read, what was dropped and why, what is left.

    Attributes:
        source: what was read.
        digest: hash of its content.
        format: what the rows were taken for.
        max_length: tokens in a row at most.
        documents: pieces of text, chats and pairs to train on; none is split further.
        tokens: in them.
        trained_tokens: of these the ones that are learned.
        rows: rows they are packed into.
        validation_documents: documents held out, and likewise the tokens and rows of them.
        frozen_date: the day a chat template stamps instead of today, if it stamps one.
        from_cache: nothing was tokenised anew.
    """

    source: str = ""
    digest: str = ""
    format: str = ""
    max_length: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    rows: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    validation_rows: int = 0
    frozen_date: str | None = None
    from_cache: bool = False

    @property
    def trained_share(self) -> float:
        """Share of the tokens that are learned."""
        return self.trained_tokens / max(1, self.tokens)

    @property
    def packing_efficiency(self) -> float:
        """Share of the rows' room that holds tokens."""
        return self.tokens / max(1, self.rows * self.max_length)

    def count(self, documents: Documents, chosen: np.ndarray, held_out_of: Documents, held_out: np.ndarray) -> None:
        """Count what is trained and what is held out, by the documents' numbers."""
        self.documents, self.validation_documents = len(chosen), len(held_out)
        self.tokens, self.validation_tokens = documents.tokens(chosen), held_out_of.tokens(held_out)
        self.trained_tokens = documents.trained_tokens(chosen)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields and the two shares."""
        return vars(self) | {"trained_share": self.trained_share, "packing_efficiency": self.packing_efficiency}

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.format}, {counted(self.rows_read, 'row')} read"
            + (" (cached)" if self.from_cache else ""),
            f"train: {counted(self.documents, 'document')}, {counted(self.tokens, 'token')} "
            f"({self.trained_share:.0%} learned) in {counted(self.rows, 'row')} of {self.max_length:,} "
            f"({self.packing_efficiency:.1%} full)",
            f"held out: {counted(self.validation_documents, 'document')}, {counted(self.validation_tokens, 'token')}",
        ]
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            lines.append(f"dropped {count:,}: {reason} ({self.examples.get(reason, '')})")
        if self.truncated:
            lines.append(f"cut off at {self.max_length:,} tokens: {self.truncated:,}")
        if self.merged:
            lines.append(f"one token across the end of the prompt, not learned: {self.merged:,}")
        if self.roles:
            roles = ", ".join(f"{role!r:.40} in {counted(count, 'row')}" for role, count in self.roles.items())
            lines.append(f"roles that templates do not usually know, given to this one as they are: {roles}")
        if self.frozen_date:
            lines.append(f"the chat template's date is frozen at {self.frozen_date}")
        return "\n".join(lines)


class Splits(NamedTuple):
    """What `load_data` gives.

    Attributes:
        train: rows to learn, shuffled.
        validation: rows held out, from documents that no row of `train` holds.
    """

    train: datasets.Dataset
    validation: datasets.Dataset
    report: DataReport


def load_data(data: Data, tokenizer: Any, *, seed: int, vocab_size: int | None = None) -> Splits:
    """Read, tokenise, split and pack what `data` describes.

    Every row holds `input_ids`, `labels` and `position_ids`, lists of one length, at most `data.max_length`. Labels
    are not shifted; they are -100 where nothing is learned and at each document's first token, whose prediction would
    come from the document before it. Positions start again at 0 with each document.

    Args:
        data: the recipe's `data` section.
        tokenizer: a transformers tokenizer; None only for `source: synthetic`.
        seed: fixes the order of the rows; `data.validation.seed` fixes which documents are held out.
        vocab_size: for `source: synthetic` (uniform) and `synthetic:zipf`, ids are drawn below it.

    Raises:
        ValueError: the source, its columns, its template or all of its rows are of no use; the message names the field.
    """
    if data.source.partition(":")[0] == "synthetic":
        size = vocab_size or (len(tokenizer) if tokenizer is not None else 0)
        return _synthetic(data, size, seed)
    if tokenizer is None:
        raise ValueError(f"data.source: {data.source!r} holds text and needs a tokenizer; only synthetic needs none")
    template = load_template(data.chat_template, tokenizer)

    def encoder(format: Format) -> Encoder:
        return Encoder(tokenizer, format, template, max_length=data.max_length, train_on=data.train_on)

    return load_rows(data, encoder, [template], seed=seed)


def load_rows(
    data: Data,
    encoder_for: Callable[[Format], RowEncoder],
    templates: Sequence[ChatTemplate | None],
    *,
    seed: int,
    report_type: type[DataReport] = DataReport,
) -> Splits:
    """`load_data` by any encoder: the rows hold its columns, and positions for each column of ids.

    Args:
        encoder_for: the encoder for rows of a format.
        templates: the chat templates that it uses.
    """

    def read(place: str, field: str, split: str, max_rows: int | None) -> tuple[Documents, str]:
        source = open_source(place, field=field, subset=data.subset, split=split)
        format = detect(
            columns_of(source), data.fields, data.format, source=source.name, has_template=None not in templates
        )
        documents, tally, key, cached = tokenised(
            source, encoder_for(format), max_rows=max_rows, workers=data.workers, cache=data.cache
        )
        _check(documents, tally, source, field)
        if field == "data.source":
            report.source, report.digest, report.format = source.name, source.digest, str(format)
            report.from_cache = cached
            report.add(tally)
        return documents, key

    report = report_type(source=data.source, max_length=data.max_length)
    days = [template.frozen_date for template in templates if template and template.frozen_date]
    report.frozen_date = max(days).isoformat() if days else None
    documents, key = read(data.source, "data.source", data.split, data.max_rows)
    if data.validation.source is None:
        held_out, rest = _hold_out(documents.origin, data.validation)
        return _pack(data, (documents, rest), (documents, held_out), report, seed, key)
    other, other_key = read(*_validation_source(data), None)
    pieces, texts = _texts(other.origin)
    chosen = _chosen(texts, data.validation.max_rows or len(texts), data.validation.seed)
    held_out = np.flatnonzero(np.isin(pieces, chosen))
    rest = np.flatnonzero(~np.isin(documents.origin, other.origin[held_out]))
    if len(rest) < len(documents.origin):
        logger.warning(
            "%d documents of the training data are also held out: not trained", len(documents.origin) - len(rest)
        )
    return _pack(data, (documents, rest), (other, held_out), report, seed, f"{key}-{other_key}")


def columns_of(source: Source) -> tuple[str, ...]:
    """The declared columns, else those of the first rows."""
    if source.columns is not None:
        return source.columns
    names: dict[str, None] = {}
    for row in islice(source.rows(), 200):
        if isinstance(row, dict):
            names.update(dict.fromkeys(map(str, row)))
    if not names:
        fault = next(iter(source.rows()), None)
        raise ValueError(
            f"data.source: {source.name} holds no usable row" + (f" ({fault})" if fault else ": it is empty")
        )
    return tuple(names)


def _check(documents: Documents, tally: Tally, source: Source, field: str) -> None:
    """Refuse data of which nothing is left; say so where much is lost."""
    dropped = sum(tally.dropped.values())
    if len(documents.origin) == 0:
        raise ValueError(
            f"{field}: no trainable tokens in {source.name}: {counted(tally.rows_read, 'row')} read, "
            f"{dropped:,} dropped{tally.reasons and f': {tally.reasons}'}"
        )
    if dropped * 10 > tally.rows_read:
        logger.warning(
            "%s: %s of %s rows dropped: %s", source.name, f"{dropped:,}", f"{tally.rows_read:,}", tally.reasons
        )
    if tally.merged * 2 > tally.rows_read:
        logger.warning(
            "%s: prompts end in a way that the tokenizer merges with the answer in %s of %s rows; the merged token is "
            "not learned",
            source.name, f"{tally.merged:,}", f"{tally.rows_read:,}",
        )  # fmt: skip


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """Hashes of uint64 values under a seed (splitmix64, Steele et al., 2014): an order that nothing else decides."""
    with np.errstate(over="ignore"):
        z = values ^ (np.uint64(seed % 2**63) * np.uint64(0x9E3779B97F4A7C15))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _texts(origin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each document's text, and all texts, by hash; where all is one text, its pieces are texts of their own."""
    texts = np.unique(origin)
    if len(texts) > 1 or len(origin) < 2:
        return origin, texts
    logger.info("the data are one text: some of its pieces are held out")
    return (pieces := np.arange(len(origin), dtype=np.uint64)), pieces


def _hold_out(origin: np.ndarray, section: Validation) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the held-out and the other documents; pieces of one text and copies of it stay together.

    Only where all is one text are its pieces themselves divided.
    """
    origin, texts = _texts(origin)
    if len(texts) < 2:
        raise ValueError(
            "data.validation: nothing can be held out of one document; give data.validation.source or more data"
        )
    count = min(max(1, round(section.fraction * len(texts))), section.max_rows or len(texts), len(texts) - 1)
    held_out = np.isin(origin, _chosen(texts, count, section.seed))
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def _chosen(texts: np.ndarray, count: int, seed: int) -> np.ndarray:
    return texts[np.argsort(_mixed(texts, seed), kind="stable")[:count]]


def _validation_source(data: Data) -> tuple[str, str, str]:
    """Place, field and split of `data.validation.source`: a path, a hub id, or either with `:split` at the end."""
    name = data.validation.source or ""
    place, colon, split = name.rpartition(":")
    if not colon or Path(name).expanduser().exists():
        place, split = name, data.split
    if (place, split) == (data.source, data.split):
        raise ValueError(
            f"data.validation.source: {name!r} is the training data itself; "
            "name another split, as in ID:test, or leave it out to hold out a share"
        )
    return place, "data.validation.source", split


Chosen = tuple[Documents, np.ndarray]  # documents, and the numbers of some


def _pack(data: Data, trained: Chosen, held_out: Chosen, report: DataReport, seed: int, key: str) -> Splits:
    """Lay the chosen documents out as rows and count them."""
    if len(trained[1]) == 0:
        raise ValueError("data.validation: every document is held out and none is left to train on")
    settings = (key, data.packing, data.max_length, data.validation.model_dump())
    train = _dataset(key_of("train", seed, *settings), trained, data, seed)
    validation = _dataset(key_of("validation", *settings), held_out, data, data.validation.seed)
    report.count(*trained, *held_out)
    report.rows, report.validation_rows = len(train), len(validation)
    return Splits(train, validation, report)


def _dataset(key: str, chosen: Chosen, data: Data, seed: int) -> datasets.Dataset:
    """The chosen documents as shuffled rows in an Arrow file."""
    import datasets

    documents, numbers = chosen

    def build(folder: Path) -> None:
        groups = rows_of(documents.lengths, numbers, packing=data.packing, capacity=data.max_length, seed=seed)
        _write_rows(folder / "rows.arrow", documents.rows(groups))

    folder, _ = keep(key, build, cache=data.cache)
    return datasets.Dataset.from_file(str(folder / "rows.arrow"))


def _write_rows(path: Path, batches: Iterator[dict[str, Ragged]]) -> None:
    import pyarrow

    first = next(batches)
    schema = pyarrow.schema([(name, pyarrow.list_(pyarrow.int32())) for name in first])
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for batch in chain([first], batches):
            lists = [
                pyarrow.ListArray.from_arrays(pyarrow.array(column.offsets.astype(np.int32)), column.values)
                for column in batch.values()
            ]
            writer.write_batch(pyarrow.record_batch(lists, schema=schema))


def _synthetic(data: Data, vocab_size: int, seed: int) -> Splits:
    """Rows of random ids, all learned, for runs in which only speed and memory count."""
    _, _, kind = data.source.partition(":")
    if kind not in ("", "uniform", "zipf"):
        raise ValueError(f"data.source: expected synthetic or synthetic:zipf; got {data.source!r}")
    if vocab_size < 2:
        raise ValueError("data.source: synthetic needs the size of a vocabulary (a tokenizer or vocab_size)")
    rows = max(2, data.max_rows or SYNTHETIC_ROWS)
    random = np.random.default_rng(data.validation.seed)
    shape = (rows, data.max_length)
    if kind == "zipf":  # frequency proportional to 1 / rank, by inversion of its continuous form
        ids = np.minimum(np.exp(random.random(shape) * np.log(vocab_size)) - 1, vocab_size - 1).astype(np.int32)
    else:
        ids = random.integers(0, vocab_size, shape, dtype=np.int32)
    labels = ids.copy()
    labels[:, 0] = IGNORE_INDEX
    offsets = np.arange(rows + 1, dtype=np.int64) * data.max_length
    columns = {name: Ragged(values.reshape(-1), offsets) for name, values in (("input_ids", ids), ("labels", labels))}
    documents = Documents(columns, np.arange(rows, dtype=np.uint64), {})
    digest = f"synthetic-{kind}-{vocab_size}-{data.validation.seed}"
    report = DataReport(
        source=data.source, digest=digest, format="random tokens", max_length=data.max_length, rows_read=rows
    )
    held_out, rest = _hold_out(documents.origin, data.validation)
    return _pack(data, (documents, rest), (documents, held_out), report, seed, key_of(digest, rows, data.max_length))
