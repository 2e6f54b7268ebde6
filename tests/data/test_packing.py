"""Packing and batching: every token once, documents whole, labels and positions in line, one shift."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.core.labels import IGNORE_INDEX, shift_labels
from distill.data.collator import Collator, valid_rows
from distill.data.packing import ROW, Documents, Ragged, best_fit

LENGTHS = st.lists(st.integers(2, 16), min_size=1, max_size=60)


def make_documents(lengths, seed=0, learned=0.7):
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(100, 100 + offsets[-1], dtype=np.int32)  # every token its own
    labels = np.where(random.random(offsets[-1]) < learned, ids, IGNORE_INDEX).astype(np.int32)
    labels[offsets[:-1]] = IGNORE_INDEX
    columns = {"input_ids": Ragged(ids, offsets), "labels": Ragged(labels, offsets)}
    source_rows = np.stack([np.arange(len(lengths)), offsets[1:]], 1).astype(np.int32)
    return Documents(columns, np.arange(len(lengths), dtype=np.uint64), {}, source_rows).with_row_column(7)


def as_rows(documents, groups, **options):
    rows = []
    for batch in documents.rows(groups, **options):
        columns = {name: batch[name] for name in ("input_ids", "labels", "position_ids", ROW)}
        for number in range(len(batch["input_ids"].lengths)):
            numbers = np.array([number])
            rows.append({name: column.take(numbers)[0].tolist() for name, column in columns.items()})
    return rows


@given(LENGTHS, st.integers(0, 3), st.integers(1, 40))
@settings(deadline=None)
def test_packing_keeps_every_token_once_and_documents_whole(lengths, seed, tokens_at_once):
    documents = make_documents(lengths, seed)
    rows = as_rows(documents, best_fit(documents.lengths, 16), tokens_at_once=tokens_at_once)
    (ids, offsets), labels = documents.columns["input_ids"], documents.columns["labels"].values
    assert sorted(token for row in rows for token in row["input_ids"]) == ids.tolist()
    whole = {tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(offsets)}
    learned = dict(zip(ids.tolist(), labels.tolist(), strict=True))
    for row in rows:
        assert 1 <= len(row["input_ids"]) <= 16
        assert row["labels"] == [learned[token] for token in row["input_ids"]]
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0] + [len(row["input_ids"])]
        found = [tuple(row["input_ids"][a:b]) for a, b in itertools.pairwise(starts)]
        assert set(found) <= whole
        numbers = [int(np.flatnonzero(ids[offsets[:-1]] == document[0])[0]) for document in found]
        assert row[ROW] == [n for number in numbers for n in (7, number, int(offsets[number + 1]))]
        for start, end in itertools.pairwise(starts):
            assert row["position_ids"][start:end] == list(range(end - start))
            assert row["labels"][start] == IGNORE_INDEX


@given(LENGTHS)
def test_a_row_is_opened_only_where_no_earlier_one_has_room(lengths):
    rows = best_fit(np.array(lengths), 16)
    rooms = [16 - sum(lengths[document] for document in row) for row in rows]
    assert min(rooms) >= 0
    for number, row in enumerate(rows):
        assert all(room < lengths[row[0]] for room in rooms[:number])


def test_best_fit_fills_rows_exactly_where_it_can():
    rows = best_fit(np.array([6, 10, 3, 13, 8, 8, 16]), 16)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 1], [2, 3], [4, 5], [6]]


def test_best_fit_takes_the_fullest_row_with_room():
    # rows with 10, 6 and 4 left when 4 comes: it goes where 4 is left
    rows = best_fit(np.array([12, 10, 6, 4]), 16)
    assert [row.tolist() for row in rows] == [[0, 3], [1, 2]]


def test_a_hundred_thousand_documents_pack_tightly():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64), 2, 4096)
    rows = best_fit(lengths, 4096)
    assert np.bincount(np.concatenate(rows), minlength=len(lengths)).tolist() == [1] * len(lengths)
    assert lengths.sum() / (len(rows) * 4096) > 0.995


def test_a_document_that_fits_no_row_is_an_internal_error():
    with pytest.raises(AssertionError, match="does not fit"):
        best_fit(np.array([5, 17]), 16)


def test_no_documents_make_no_rows():
    assert best_fit(np.zeros(0, dtype=np.int64), 16) == []


# the collator


def naive_valid_rows(labels):
    rows, length = labels.shape
    return [b * length + i for b in range(rows) for i in range(length - 1) if labels[b, i + 1] != IGNORE_INDEX]


@given(LENGTHS, st.sampled_from([None, 1, 8, 24]), st.sampled_from(["left", "right"]))
@settings(deadline=None)
def test_a_batch_keeps_rows_and_shifts_once(lengths, multiple, side):
    documents = make_documents(lengths)
    rows = as_rows(documents, best_fit(documents.lengths, 16))
    batch = Collator(7, multiple, side)(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids", "valid_rows"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    length = batch["input_ids"].shape[1]
    assert length % (multiple or 1) == 0 and length < max(len(r["input_ids"]) for r in rows) + (multiple or 1)
    assert batch["valid_rows"].tolist() == naive_valid_rows(batch["labels"])
    # each valid position predicts the very token that the row marks as learned, in the same document
    predicted = batch["labels"].flatten()[batch["valid_rows"] + 1].tolist()
    assert predicted == [label for row in rows for label in row["labels"] if label != IGNORE_INDEX]
    assert (batch["position_ids"].flatten()[batch["valid_rows"] + 1] > 0).all()
    assert batch["input_ids"].flatten()[batch["valid_rows"] + 1].tolist() == predicted


def test_padding_is_a_document_of_its_own_on_either_side():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "position_ids": [0, 1, 2]},
        {"input_ids": [8], "labels": [-100], "position_ids": [0]},
    ]
    right, left = Collator(9)(rows), Collator(9, padding_side="left")(rows)
    assert right["input_ids"][1].tolist() == [8, 9, 9] and left["input_ids"][1].tolist() == [9, 9, 8]
    assert right["position_ids"][1].tolist() == [0, 0, 1] and left["position_ids"][1].tolist() == [0, 1, 0]
    assert right["labels"][1].tolist() == left["labels"][1].tolist() == [-100] * 3


def test_a_real_end_token_is_learned_though_it_is_the_padding_token():
    rows = [
        {"input_ids": [5, 6, 0], "labels": [-100, 6, 0], "position_ids": [0, 1, 2]},
        {"input_ids": [5, 0], "labels": [-100, 0], "position_ids": [0, 1]},
    ]
    batch = Collator(pad_token_id=0)(rows)
    assert batch["labels"].tolist() == [[-100, 6, 0], [-100, 0, -100]]
    assert batch["valid_rows"].tolist() == [0, 1, 3]


def test_a_first_token_is_not_learned_whatever_label_a_row_brings():
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "position_ids": [0, 1, 2, 0, 1]}]
    batch = Collator(pad_token_id=0)(rows)
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7, IGNORE_INDEX, 9]]
    assert batch["valid_rows"].tolist() == [0, 1, 3]


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 0, 0]])
def test_a_row_whose_mask_has_gaps_is_refused(mask):
    with pytest.raises(ValueError, match=r"^attention_mask: expected zeros at a row's ends only, got "):
        Collator(0)([{"input_ids": [5, 6, 7], "attention_mask": mask}])


def test_the_collator_draws_no_random_numbers():
    state = torch.get_rng_state()
    rows = [{"input_ids": [5, 6], "labels": [-100, 6], "position_ids": [0, 1]}]
    Collator(0)(rows)
    assert torch.equal(state, torch.get_rng_state())


def test_labels_shift_by_one_to_the_left():
    labels = torch.tensor([[1, 2, 3], [4, IGNORE_INDEX, 6]])
    expected = [[2, 3, IGNORE_INDEX], [IGNORE_INDEX, 6, IGNORE_INDEX]]
    assert shift_labels(labels).tolist() == expected and labels[0].tolist() == [1, 2, 3]
    assert shift_labels(labels[:, ::2]).tolist() == [[3, IGNORE_INDEX], [6, IGNORE_INDEX]]


def test_nothing_learned_gives_no_valid_rows():
    assert valid_rows(torch.full((2, 4), IGNORE_INDEX)).shape == (0,)


def test_positions_are_left_out_only_where_nothing_needs_them():
    one = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "position_ids": [0, 1, 2]}
    two = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 0]}
    short = {"input_ids": [5, 6], "labels": [-100, 6], "position_ids": [0, 1]}
    plain = Collator(0, omit_plain_positions=True)
    assert "position_ids" not in plain([one, short])
    assert "position_ids" in plain([one, two])
    assert "position_ids" in Collator(0, omit_plain_positions=True, padding_side="left")([one, short])
    assert "position_ids" in Collator(0)([one, short])
    kept, left_out = Collator(0)([one, short]), plain([one, short])
    assert all(torch.equal(kept[name], left_out[name]) for name in left_out)
