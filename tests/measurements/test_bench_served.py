"""`python -m scripts.bench served`: what it says of a tiny teacher is so, and a wrong answer is not timed."""

import re

import pytest
import torch
from served import engine_in, write_models

from distill.serving.app import RequestLimits
from scripts.bench import served

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_in(write_models(tmp_path_factory.mktemp("place")))


@pytest.mark.full
def test_rates_latencies_and_bytes(engine, limit):
    limit.setattr(served, "CLIENTS", (1, 8))
    own, *rows = served.compare(engine, length=32, requests=24, limits=RequestLimits(4096, 256, 1 << 16), shape="tiny")
    assert own.tokens_per_s == pytest.approx(8 * 32 / own.ms * 1e3)
    assert [row.candidate for row in rows] == ["1 client", "8 clients"]
    for row in rows:
        p99, share, busy, size = re.fullmatch(
            r"p99 ([\d,.]+) ms, (\d+)% of its own forward, (\d+)% in forwards, ([\d,]+) bytes per trained token",
            row.note,
        ).groups()
        assert float(p99.replace(",", "")) >= round(row.ms, 1) > 0 and 0 < int(busy) <= 100
        assert int(share) == pytest.approx(100 * row.tokens_per_s / own.tokens_per_s, abs=1)
        assert 4 * 64 <= int(size) < 4 * 64 + 8, "hidden states of 64 in float32, and the file's heading"
    # 24 questions of 32 tokens, answered one after another
    assert rows[0].tokens_per_s == pytest.approx(32 / rows[0].ms * 1e3, rel=0.9)


def test_a_wrong_answer_is_not_timed(engine, monkeypatch):
    alone = engine._alone
    monkeypatch.setattr(engine, "_alone", lambda job: alone(job) + torch.tensor(1e-3))
    with pytest.raises(ValueError, match="not those of the teacher's own forward"):
        list(served.compare(engine, length=32, requests=1, limits=RequestLimits(4096, 256, 1 << 16), shape="tiny"))
