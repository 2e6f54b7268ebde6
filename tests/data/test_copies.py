"""Held-out documents that are trained on as well are counted, and a warning says so."""

import json
import logging

import numpy as np
import pytest
from tiny import tiny_tokenizer

from distill.core.labels import IGNORE_INDEX
from distill.data.copies import count_copies
from distill.data.load import load_data
from distill.data.packing import Documents, Ragged
from distill.recipe import Data


def documents(lists, masks=None):
    ids = np.concatenate(lists).astype(np.int32)
    trained = np.ones(len(ids), dtype=bool) if masks is None else np.concatenate(masks)
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    columns = {"input_ids": ids, "labels": np.where(trained, ids, IGNORE_INDEX).astype(np.int32)}
    columns = {name: Ragged(values, offsets) for name, values in columns.items()}
    return Documents(columns, np.arange(len(lists), dtype=np.uint64), {}, np.zeros((len(lists), 2), np.int32))


def test_copies_and_beginnings_are_counted_as_a_comparison_of_all_pairs_does():
    """The documents have more tokens than are hashed at once, and few different ones, so that many are equal."""
    random = np.random.default_rng(0)
    lists = [random.integers(0, 2, length) for length in random.integers(1, 24, 4000)]
    lists += [random.integers(0, 150_000, 300) for _ in range(1000)]
    lists += [lists[-1][:200], lists[-2], lists[-3][1:], np.append(lists[-4], 0)]
    order = random.permutation(len(lists))
    lists, held_out = [lists[number] for number in order], np.flatnonzero(order % 7 == 0)
    rest = np.setdiff1d(np.arange(len(lists)), held_out)
    texts = [np.asarray(tokens, np.int64).tobytes() for tokens in lists]
    # hashes of 64 bits stand for a million beginnings of up to 300 tokens
    beginnings = {hash(texts[number][:end]) for number in rest for end in range(8, len(texts[number]) + 1, 8)}
    expected = sum(hash(texts[number]) in beginnings for number in held_out)
    assert 0 < expected < len(held_out)
    made = documents(lists)
    assert count_copies([(made, rest)], [(made, held_out)], "pairs", cache=False) == expected
    halves = [(made, rest[: len(rest) // 2]), (made, rest[len(rest) // 2 :])]  # as of two sources
    assert count_copies(halves, [(made, held_out)], "pairs", cache=False) == expected


def test_tokens_that_are_masked_in_one_and_trained_on_in_the_other_are_no_copy():
    made = documents([[5, 6, 7], [5, 6, 7, 8]], [[False, True, True], [False, False, False, True]])
    assert count_copies([(made, np.array([1]))], [(made, np.array([0]))], "masks", cache=False) == 0


@pytest.mark.parametrize(("train_on", "copies"), [("each", True), ("last", False)])
def test_chats_that_continue_one_another_are_warned_of(tmp_path, caplog, train_on, copies):
    """A log of each request of a conversation has every earlier turn again."""
    rows = []
    for number in range(20):
        messages = []
        for turn in range(3):
            messages += [{"role": "user", "content": f"{number} {turn}?"}, {"role": "assistant", "content": "Yes."}]
            rows.append({"messages": list(messages)})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"source": str(tmp_path / "log.jsonl"), "train_on": train_on, "max_length": 256, "cache": False}
    with caplog.at_level(logging.WARNING):
        load_data(Data.model_validate(section | {"validation": {"fraction": 0.1}}), tiny_tokenizer(), seed=0)
    assert ("held-out documents also trained on, token by token" in caplog.text) == copies
