"""Data of a run: from `data:` in the recipe to tokenised rows and a report.

    splits = load_data(recipe.data, tokenizer, seed=recipe.train.seed)
    splits.train[0]     # {"input_ids": [...], "labels": [...], "position_ids": [...]}
    print(splits.report)

Steps, for each source: open it, detect its format, tokenise (or find the result in the cache), hold out documents for
validation, pack the rest. Everything follows from the recipe and the seed; a second call gives the same rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.core.units import plural
from distill.data.chat import ChatOptions, ChatTemplate, template_of
from distill.data.copies import Chosen, count_copies
from distill.data.documents import tokenise_documents
from distill.data.formats import RowFormat, detect
from distill.data.known_columns import advice, template_names
from distill.data.packing import BLOCK, Documents, Ragged, shuffle_into_rows
from distill.data.rendering import NOT_LOCATED, NOT_RENDERED
from distill.data.report import DataReport
from distill.data.row_counts import RowCounts
from distill.data.rows import RowFault
from distill.data.sources import DataSource, open_source, prompt_lines
from distill.data.stream import Layout, RowStream, StreamedSource
from distill.data.token_cache import cache_key, cached_folder
from distill.data.tokenise import Encoder, RowEncoder

if TYPE_CHECKING:
    import datasets

    from distill.data.mixing import Mix, MixedRows
    from distill.recipe import Data, DataPart, Validation


logger = logging.getLogger(__name__)

SYNTHETIC_ROWS = 1024
SAMPLE_ROWS = 2048  # of a stream, which its report and `distill check` are made from
FIRST_ROWS = 200  # rows that are looked at before all are tokenised


class Splits(NamedTuple):
    """Result of `load_data`.

    Attributes:
        train: Training rows, shuffled; for several sources all rows of each.
        validation: Held-out rows, from documents that are in no row of `train`.
        mix: Number of rows of each source in an epoch; None for a single source.
        sets: Rows of each further held-out set, by name.
        stream: What is trained on with `data.streaming`: `train` then holds its first rows, which the report is of.
    """

    train: datasets.Dataset
    validation: datasets.Dataset
    report: DataReport
    mix: Mix | None
    sets: Mapping[str, datasets.Dataset]
    stream: RowStream | None = None

    @property
    def held_out(self) -> dict[str, datasets.Dataset]:
        """All held-out rows by the prefix of their figures, the rows of `validation` first, without one."""
        return {"": self.validation, **{f"{name}_": rows for name, rows in self.sets.items()}}

    def read_as(self, view: Callable[[Any], Any]) -> Splits:
        """Return the same data with each part of the rows seen as `view` returns it."""
        sets = {name: view(rows) for name, rows in self.sets.items()}
        return self._replace(train=view(self.train), validation=view(self.validation), sets=sets)

    @property
    def epochs(self) -> datasets.Dataset | MixedRows:
        """Return the rows that a trainer reads: as many as `train` has, for several sources by their weights.

        Of a stream these are its first rows.
        """
        if self.mix is None:
            return self.train
        from distill.data.mixing import MixedRows

        return MixedRows(self.train, self.mix)


def load_data(data: Data, tokenizer: Any, *, seed: int, vocab_size: int | None = None) -> Splits:
    """Read, tokenise, split and pack the data that `data` describes.

    Every row holds `input_ids`, `labels` and `position_ids`, lists of one length, at most `data.max_length`. Labels
    are not shifted; they are -100 where masked from the loss and at each document's first token, which would be
    predicted from the document before it. Positions restart at 0 with each document. `row` holds three numbers for each
    document: the index of its source, of its row there, and of the message that its last trained tokens are of.

    Args:
        data: The recipe's `data` section.
        tokenizer: A transformers tokenizer; None only for `source: synthetic`.
        seed: Seed of the order of rows; `data.validation.seed` is that of the held-out documents.
        vocab_size: Upper bound of the ids for `source: synthetic` (uniform) and `synthetic:zipf`.

    Raises:
        ValueError: The source, its columns, template or rows cannot be used; the message names the field.
    """
    if data.is_synthetic:
        size = vocab_size or (len(tokenizer) if tokenizer is not None else 0)
        return _synthetic(data, size, seed)
    if tokenizer is None:
        raise ValueError(f"data.source: expected a tokenizer for text {data.source!r}; only synthetic needs none")
    template = template_of(data, tokenizer)

    def encoder(format: RowFormat, part: DataPart) -> Encoder:
        return Encoder(tokenizer, format, template, max_length=data.max_length, options=ChatOptions.of(part.data))

    return load_rows(data, encoder, [template], seed=seed)


def load_rows(
    data: Data,
    encoder_for: Callable[[RowFormat, DataPart], RowEncoder],
    templates: Sequence[ChatTemplate | None],
    *,
    seed: int,
    report_type: type[DataReport] = DataReport,
    room: int = 0,
) -> Splits:
    """Load data by any encoder: rows hold its columns, and positions for each column of ids.

    Args:
        encoder_for: Function from a format and a source to its encoder.
        room: Tokens that a rollout may have in a row beside those of its prompt and its response.
    """
    streamed: list[StreamedSource] = []

    def read(part: DataPart, number: int) -> tuple[Documents, DataReport, str]:
        data = part.data
        source = source_of(part)
        encoder = encoder_for(format_of(source, data, templates), part)
        format = encoder.format
        check_first_rows(source, format)
        most = data.max_rows
        if data.streaming:
            first = _first_held_out(data.validation, part)
            streamed.append(StreamedSource(number, source, encoder, part.share, first, most))
            most = min(first + SAMPLE_ROWS, most or first + SAMPLE_ROWS)
        documents, tally, key, cached = tokenise_documents(
            # the digest of a stream does not tell a file whose middle was changed
            source,
            encoder,
            max_rows=most,
            workers=data.workers,
            cache=data.cache and not data.streaming,
        )
        _check(documents, tally, source, part.field)
        require_words_are_read(tally, format, source.name)
        report = report_type(source=source.name, digest=source.digest, format=str(format), max_length=data.max_length)
        report.from_cache = cached
        report.frozen_date = max(days).isoformat() if days else None
        report.add(tally)
        report.copies = max(0, tally.rows_read - sum(tally.dropped.values()) - len(np.unique(documents.origin)))
        return documents.with_row_column(number), report, key

    days = [template.frozen_date for template in templates if template and template.frozen_date]
    sources = [read(part, number) for number, part in enumerate(data.parts)]
    keys = [key for _, _, key in sources]
    sections = [data.validation] * len(sources)
    held_out = []
    rests = []
    own = data.validation.source is None
    if own:
        if any(part.data.format == "prompts" for part in data.parts):
            raise ValueError(
                "data.validation.source: the data are prompts, and held-out metrics need responses: expected a file of "
                "chats or of prompts with completions (distill sample writes one)"
            )
        sections = [_share_of(data.validation, part) for part in data.parts]
        for (documents, _, _), section in zip(sources, sections, strict=True):
            if data.streaming:
                chosen, rest = _hold_out_first(documents, section)
            else:
                chosen, rest = _hold_out(documents.origin, section)
            held_out.append((documents, chosen))
            rests.append(rest)
    else:
        other, _, other_key = read(_validation_part(data), -1)
        keys.append(other_key)
        pieces, texts = _texts(other.origin)
        chosen = _chosen(texts, data.validation.max_rows or len(texts), data.validation.seed)
        held_out = [(other, np.flatnonzero(np.isin(pieces, chosen)))] * len(sources)
        rests = [np.arange(len(documents.origin)) for documents, _, _ in sources]
    sets = {}
    set_keys = []
    for own_set, part in zip(data.validation.sets, data.set_parts, strict=True):
        documents, _, key = read(part, -1)
        section = data.validation.model_copy(update={"max_rows": own_set.max_rows or data.validation.max_rows})
        pieces, texts = _texts(documents.origin)
        chosen = _chosen(texts, section.max_rows or len(texts), section.seed)
        sets[own_set.name] = (documents, np.flatnonzero(np.isin(pieces, chosen))), key, section
        set_keys.append(key)
    parts = []
    trained = list[Chosen]()
    twice = 0
    for number, (documents, report, key) in enumerate(sources):
        others = [o.origin[c] for n, (o, c) in enumerate(held_out) if not (own and n == number)]
        others += [documents.origin[chosen] for (documents, chosen), _, _ in sets.values()]
        rest = rests[number]
        if others:  # documents held out by one source are not trained on from another
            rest = rest[~np.isin(documents.origin[rest], np.concatenate(others))]
            twice += len(rests[number]) - len(rest)
        trained.append((documents, rest))
        # the column `row` has the source's number, other sources decide what is held out
        settings = (f"{number}-" + "-".join([key, *keys[:number], *keys[number + 1 :], *set_keys]), sections[number])
        parts.append(_pack(data, (documents, rest), held_out[number], report, seed, settings, room))
    if twice:
        logger.warning("%s of the training data held out by another source: not trained on", plural(twice, "document"))
    held_out = (held_out if own else held_out[:1]) + [chosen for chosen, _, _ in sets.values()]
    key = cache_key("copies", keys + set_keys, [_selection(section) for section in sections])
    copies = count_copies(trained, held_out, key, cache=data.cache)
    if copies:
        logger.warning(
            "%s of %s also trained on, token by token, as a document or its beginning, which inflates held-out "
            "metrics; remove the copies, or set data.validation.source",
            f"{copies:,}",
            plural(sum(len(chosen) for _, chosen in held_out), "held-out document"),
        )
    splits = parts[0] if len(parts) == 1 else _mixed_splits(parts, data, own)
    rows = {name: _held_out_rows(data, *found) for name, found in sets.items()}
    stream = None
    if data.streaming:
        splits.report.is_sample = True
        splits.report.longest = data.max_length  # of the documents to come
        origins = [documents.origin[chosen] for documents, chosen in held_out]
        layout = Layout(data.packing, data.max_length, _answer_room(data, room), data.shuffle_buffer, seed)
        stream = RowStream(streamed, layout, np.unique(np.concatenate(origins)), data.workers)
    return splits._replace(sets=rows, stream=stream)


def _held_out_rows(data: Data, held_out: Chosen, key: str, section: Validation) -> datasets.Dataset:
    decided = (key, data.packing, data.max_length, _selection(section))
    return _dataset(cache_key("validation", *decided), held_out, data, section.seed)


def _selection(section: Validation) -> dict[str, Any]:
    """Return the settings that choose held-out documents of one source, for the keys of cached files."""
    return section.model_dump(exclude={"sets"})


def _share_of(section: Validation, part: DataPart) -> Validation:
    most = section.max_rows and max(1, round(section.max_rows * part.share))
    return section.model_copy(update={"max_rows": most})


def _first_held_out(section: Validation, part: DataPart) -> int:
    """Return the number of rows at the beginning of a streamed source that are held out."""
    return 0 if section.source is not None else _share_of(section, part).max_rows or 0


def _mixed_splits(parts: list[Splits], data: Data, own: bool) -> Splits:
    """Combine several sources; each has held out documents of its `own`, or all the same."""
    import datasets

    from distill.data.mixing import epoch_mix

    reports = [splits.report for splits in parts]
    if not own:
        for report in reports[1:]:
            report.validation_documents = report.validation_tokens = 0
    mix = epoch_mix([len(splits.train) for splits in parts], [part.share for part in data.parts])
    train = datasets.concatenate_datasets([splits.train for splits in parts])
    held_out = datasets.concatenate_datasets([splits.validation for splits in parts]) if own else parts[0].validation
    return Splits(train, held_out, type(reports[0]).of(reports, mix.counts), mix, {})


def source_of(part: DataPart) -> DataSource:
    """Open the rows of one source of a recipe, numbered as the column `row` of tokenised data has them."""
    data = part.data
    source = open_source(data.source, field=part.field, subset=data.subset, split=data.split, streaming=data.streaming)
    return prompt_lines(source, data.source) if data.format == "prompts" else source


def format_of(source: DataSource, data: Data, templates: Sequence[ChatTemplate | None]) -> RowFormat:
    """Return the format of a source by its columns, the recipe and the chat templates that will render it.

    Raises:
        ValueError: No format fits its columns, or a template is missing.
    """
    format = detect(
        columns_of(source),
        data.fields,
        data.format,
        source=source.name,
        has_template=None not in templates,
        rows=source.rows,
        ignored=data.unread,
    )
    reads = [template_names(template.definition) for template in templates if template is not None]
    known = sorted(frozenset.intersection(*reads)) if reads else []
    return replace(format, keeps_empty=data.empty_answers == "keep", template_reads=tuple(known))


def check_first_rows(source: DataSource, format: RowFormat) -> None:
    """Raise a ValueError before all rows are tokenised if the first ones have unread columns with words of the chat."""
    counts = RowCounts()
    for row in islice(source.rows(), FIRST_ROWS):
        counts.rows_read += 1
        if isinstance(row, dict):
            with suppress(RowFault, RecursionError):  # counted when the row is tokenised
                counts.see_unread(format.sample(row).unread)
    require_words_are_read(counts, format, source.name)


def require_words_are_read(counts: RowCounts, format: RowFormat, name: str, field: str = "data.fields") -> None:
    """Raise if a column that carries words of the conversation is not read.

    Args:
        field: The recipe's field that names columns.
    """
    if not counts.unread_words:
        return
    parts = [
        f"{column!r} in {rows:,} of {plural(counts.rows_read, 'row')} ({advice(column, format.kind)})"
        for column, rows in counts.unread_words.most_common(3)
    ]
    names = ",".join(sorted(counts.unread_words))
    raise ValueError(
        f"{field}: {name} has columns that change what is trained on, and are not read: {', '.join(parts)}; "
        f"data.unread=[{names}] trains without them"
    )


def columns_of(source: DataSource) -> tuple[str, ...]:
    if source.columns is not None:
        return source.columns
    names: dict[str, None] = {}
    for row in islice(source.rows(), 200):
        if isinstance(row, dict):
            names.update(dict.fromkeys(map(str, row)))
    if not names:
        fault = next(iter(source.rows()), None)
        why = f" ({fault})" if fault else ": it is empty"
        raise ValueError(f"data.source: {source.name} has no usable rows{why}")
    return tuple(names)


def _check(documents: Documents, tally: RowCounts, source: DataSource, field: str) -> None:
    """Raise for data without usable documents; warn where much is lost."""
    lost = Counter({reason: count for reason, count in tally.dropped.items() if NOT_RENDERED in reason})
    if lost.total() * 2 > tally.rows_read:
        what, _, cure = lost.most_common(1)[0][0].partition("; ")
        raise ValueError(
            f"data.chat_template: {what}; {lost.total():,} of {plural(tally.rows_read, 'row')} of {source.name} "
            f"dropped; {cure} ({tally.examples[lost.most_common(1)[0][0]]})"
        )
    dropped = sum(tally.dropped.values())
    if len(documents.origin) == 0:
        at = "data.chat_template" if NOT_LOCATED in tally.dropped else field
        raise ValueError(
            f"{at}: no trainable tokens in {source.name}: {plural(tally.rows_read, 'row')} read, "
            f"{dropped:,} dropped{tally.reasons and f': {tally.reasons}'}"
        )
    if dropped * 10 > tally.rows_read:
        logger.warning("%s: %s rows dropped: %s", source.name, f"{dropped:,} of {tally.rows_read:,}", tally.reasons)
    if tally.merged * 2 > tally.rows_read:
        logger.warning(
            "%s: the tokenizer merges the end of the prompt with the completion in %s of %s rows; the merged token is "
            "not trained on",
            source.name,
            f"{tally.merged:,}",
            f"{tally.rows_read:,}",
        )


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """Return seeded hashes of uint64 values (splitmix64, Steele et al., 2014), which define an order."""
    with np.errstate(over="ignore"):
        z = values ^ (np.uint64(seed % 2**63) * np.uint64(0x9E3779B97F4A7C15))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _texts(origin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each document's text and all texts, by hash; if all is one text, its pieces count as texts."""
    texts = np.unique(origin)
    if len(texts) > 1 or len(origin) < 2:
        return origin, texts
    logger.info("the data are one text: some of its pieces are held out")
    pieces = np.arange(len(origin), dtype=np.uint64)
    return pieces, pieces


def _hold_out(origin: np.ndarray, section: Validation) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the held-out and the other documents.

    Pieces and copies of one text stay together, unless all is one text.
    """
    origin, texts = _texts(origin)
    if len(texts) < 2:
        raise ValueError(
            "data.validation: expected at least two documents to hold one out, got one; set data.validation.source or "
            "use more data"
        )
    count = min(max(1, round(section.fraction * len(texts))), section.max_rows or len(texts), len(texts) - 1)
    held_out = np.isin(origin, _chosen(texts, count, section.seed))
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def _hold_out_first(documents: Documents, section: Validation) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the documents of a stream's first rows, and of the others without copies of these."""
    is_first = documents.source_rows[:, 0] < (section.max_rows or 0)
    is_held_out = np.isin(documents.origin, documents.origin[is_first])
    if not is_first.any() or is_held_out.all():
        raise ValueError(
            f"data.validation: expected documents in the first {section.max_rows or 0} rows of a stream, which are "
            f"held out, and others after them; got {int(is_first.sum())} and {int((~is_held_out).sum())}; change "
            "data.validation.max_rows, or set data.validation.source"
        )
    return np.flatnonzero(is_first), np.flatnonzero(~is_held_out)


def _chosen(texts: np.ndarray, count: int, seed: int) -> np.ndarray:
    return texts[np.argsort(_mixed(texts, seed), kind="stable")[:count]]


def _validation_part(data: Data) -> DataPart:
    """Return `data.validation.source` as a source: a path, a hub id, or either with a suffix `:split`."""
    name = data.validation.source or ""
    place, colon, split = name.rpartition(":")
    if not colon or Path(name).expanduser().exists():
        place = name
        split = data.split
    if any((place, split) == (part.data.source, part.data.split) for part in data.parts):
        raise ValueError(
            f"data.validation.source: expected other data than the training data {name!r}; name another split, as in "
            "ID:test, or remove the setting to hold out a fraction"
        )
    kind = "auto" if data.parts[0].data.format == "prompts" else data.parts[0].data.format
    update: dict[str, object] = {"format": kind, "source": place, "sources": [], "split": split, "max_rows": None}
    update["streaming"] = False
    return data.parts[0]._replace(field="data.validation.source", data=data.model_copy(update=update), teacher=None)


def _pack(
    data: Data,
    trained: Chosen,
    held_out: Chosen,
    report: DataReport,
    seed: int,
    settings: tuple[str, Validation],
    room: int,
) -> Splits:
    if len(trained[1]) == 0:
        raise ValueError(
            "data.validation: expected documents left to train on, but all are held out; lower the fraction"
        )
    key_of_source, section = settings
    decided = (key_of_source, data.packing, data.max_length, _selection(section))
    new = _answer_room(data, room)
    whole = data.generates_every_turn
    # no value for what does not apply: keys of files that were written before these settings existed stay valid
    added: list[int | str] = [new] if new > 0 else []
    if whole:
        added.append("together")
    key = cache_key("train", seed, *decided, *added)
    train = _dataset(key, trained, data, seed, new, together=whole)
    validation = _held_out_rows(data, held_out, key_of_source, section)
    report.count(*trained, *held_out)
    report.answer_room = new
    report.rows = len(train)
    return Splits(train, validation, report, None, {})


def _answer_room(data: Data, room: int) -> int:
    """Return the tokens that a packed row leaves to the last response of each document; 0 without rollouts."""
    own = data.active_on_policy if data.packing else None
    return 0 if own is None else own.max_new_tokens + room


def _dataset(
    key: str, chosen: Chosen, data: Data, seed: int, new: int = 0, *, together: bool = False
) -> datasets.Dataset:
    """The chosen documents as shuffled rows in an Arrow file, with room for last answers of `new` tokens.

    With `together` the rows of a conversation's documents follow each other, which the column `BLOCK` tells.
    """
    import datasets

    documents, numbers = chosen

    def build(folder: Path) -> None:
        lengths = documents.lengths_with_answers(new, data.max_length) if new else documents.lengths
        rows = shuffle_into_rows(
            lengths,
            numbers,
            packing=data.packing,
            capacity=data.max_length,
            seed=seed,
            together=documents.origin if together else None,
        )
        batches = documents.rows(rows.groups)
        _write_rows(folder / "rows.arrow", _with_blocks(batches, rows.blocks) if together else batches)

    folder, _ = cached_folder(key, build, cache=data.cache)
    return datasets.Dataset.from_file(str(folder / "rows.arrow"))


def _with_blocks(batches: Iterator[dict[str, Ragged]], blocks: np.ndarray) -> Iterator[dict[str, Ragged]]:
    begin = 0
    for batch in batches:
        count = len(next(iter(batch.values())).offsets) - 1
        yield {**batch, BLOCK: Ragged(blocks[begin : begin + count], np.arange(count + 1))}
        begin += count


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
    """Return rows of random ids, all trained on, to measure speed and memory."""
    _, _, kind = data.source.partition(":")
    if kind not in ("", "uniform", "zipf"):
        raise ValueError(f"data.source: expected synthetic or synthetic:zipf; got {data.source!r}")
    if vocab_size < 2:
        raise ValueError("data.source: expected a tokenizer or vocab_size for synthetic data, got none")
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
    numbers = np.stack([np.arange(rows), np.full(rows, -1)], 1).astype(np.int32)
    documents = Documents(columns, np.arange(rows, dtype=np.uint64), {}, numbers).with_row_column(0)
    digest = f"synthetic-{kind}-{vocab_size}-{data.validation.seed}"
    report = DataReport(
        source=data.source, digest=digest, format="random tokens", max_length=data.max_length, rows_read=rows
    )
    held_out, rest = _hold_out(documents.origin, data.validation)
    key = cache_key(digest, rows, data.max_length)
    return _pack(data, (documents, rest), (documents, held_out), report, seed, (key, data.validation), room=0)
