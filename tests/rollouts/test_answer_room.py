"""Rows of data whose answers the student gives anew have room for them: none is left out, whatever a micro-batch is."""

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_on_policy import COLLATE, packed, pairs
from tiny import save_models

from distill.data.packing import Documents, Ragged, best_fit
from distill.generation.decode_loop import DecodeEngine, Generated
from distill.generation.documents import RolloutDocument, documents_of
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import Sampling
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics


class Long(DecodeEngine):
    """Answers that are as long as they may be."""

    def run(self, request):
        return Generated([[7] * limit for limit in request.limits], [True] * len(request.prompts))


def asked(rows, cuts, *, new, max_length, samples=1, fraction=1.0, step=3):
    """The documents of all micro-batches after the student has answered, how many were left out, and the batches."""
    own = OnPolicyRollouts(Long(), fraction, new, Sampling(1.0), seed=1, max_length=max_length, samples=samples)
    batches = own.replace([COLLATE(rows[a:b]) for a, b in itertools.pairwise([0, *cuts, len(rows)])], step, COLLATE)
    found = Counter((tuple(d.ids), tuple(d.labels)) for batch in batches for d in documents_of(batch))
    return found, own.pop_metrics(lambda values: values, torch.device("cpu"))["rollouts_left_out"], batches


def columns(lists):
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)
    return Ragged(np.concatenate([np.array(each, dtype=np.int32) for each in lists]), offsets)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_room_is_what_the_longest_answer_takes(learned, new, more):
    """The reserved length matches the batch's `RolloutDocument`, without the template's tokens after a response."""
    labels = [[-100, *(7 if each else -100 for each in document), 7] for document in learned]
    ids = [[7] * len(each) for each in labels]
    teacher = [[7] * (len(each) + more) for each in labels]
    documents = Documents(
        {"input_ids": columns(ids), "teacher_input_ids": columns(teacher), "labels": columns(labels)},
        np.arange(len(ids)),
        {},
        np.zeros((len(ids), 2), np.int32),
    )
    room = documents.lengths_with_answers(new, 14)
    for own, other, label, found in zip(ids, teacher, labels, room.tolist(), strict=True):
        prompt = RolloutDocument(own, label, 0, other).prompt_length
        assert found == max(len(other), min(prompt + new, 14))


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_rows_without_room_lose_the_same_parts_in_any_micro_batch(samples, fraction):
    """Also of a micro-batch whose only answer to be replaced is left out, and of longer rows that stay as they are."""
    rows = packed(pairs(18))
    longest, lost = max(len(row["input_ids"]) for row in rows) - 4, 0
    for step in range(8):
        more = {"new": 12, "max_length": longest, "samples": samples, "fraction": fraction, "step": step}
        (whole, left, _), *others = (asked(rows, cuts, **more) for cuts in ([], [3], [1, 2, 3, 4, 5]))
        lost += left
        for documents, left_out, _ in others:
            assert documents == whole and left_out == left
    assert lost > 0


def test_rows_that_first_fit_would_overfill_stay_as_they_are():
    """Six documents of two full rows, for which best-fit decreasing takes three."""
    lengths = [[6, 4, 2], [7, 2, 3]]
    assert len(best_fit(np.array([6, 4, 2, 7, 2, 3]), 12)) == 3
    rows = [
        {
            "input_ids": list(range(3, 15)),
            "labels": [label for n in row for label in (*[-100] * (n - 1), 5)],
            "position_ids": [position for n in row for position in range(n)],
        }
        for row in lengths
    ]
    for samples in (1, 2):
        found, left_out, (batch,) = asked(rows, [], new=1, max_length=12, samples=samples)
        assert left_out == 0 and sum(found.values()) == 6 * samples
        assert batch["input_ids"].shape == (2 * samples, 12)


RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: pairs.jsonl, max_length: 96, cache: false, validation: {fraction: 0.1, max_rows: 2}}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 3, batch_size: 4, learning_rate: 1e-3, log_every: 1, device: cpu}
generate: {prompts: []}
"""


@pytest.mark.full
def test_a_run_with_short_answers_in_its_data_leaves_no_prompt_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    lines = [json.dumps({"prompt": f"FunctionInput {n}?", "completion": "Yes."}) for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rows = {}
    for new in (0, 1, 30):
        own = f"data.on_policy={{fraction: {min(new, 1)}, max_new_tokens: {max(new, 1)}}}"
        done = run(parse(RECIPE, [own], name=f"run-{new}"))
        said = capsys.readouterr().out
        assert ("room for rollouts of 30 tokens" in said) == (new == 30)
        metrics = [row for row in read_metrics(done.folder / "metrics.jsonl") if "rollouts" in row]
        assert all(row["rollouts_left_out"] == 0 and row["rollouts"] > 0 for row in metrics) and (metrics or not new)
        rows[new] = int(re.search(r"in (\d+) rows", said.replace("\n            ", " "))[1])
    assert rows[0] == rows[1] < rows[30]
