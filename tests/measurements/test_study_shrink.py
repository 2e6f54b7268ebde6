"""The study of pruning: every shape and way of choosing is trained for as many tokens and judged on the same rows."""

import json
import sys

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from scripts.study import shrink

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


def test_shapes_are_trained_for_equal_tokens(tmp_path, monkeypatch, capsys):
    tokenizer = tiny_tokenizer(300)
    save_tiny(tmp_path / "model", tiny_model(tokenizer, seed=1, hidden=64, layers=8, vocab_size=320), tokenizer)
    rows = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}."} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {"tokens": 512, "step-tokens": 256, "length": 64, "batch": 2, "rows": 4, "layer-rows": 2, "held-out": 8}
    sizes |= {"seeds": 2, "share": 0.65, "rate": 1e-3}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    options += ["--data", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path / "model"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["shrink", *options, "--shapes", "depth,depth and width"])
    shrink.main()
    made = [json.loads(line) for line in (tmp_path / "cpu-shrink-trained.jsonl").read_text().splitlines()]
    arms = {(row["shape"], row["chosen"].partition(",")[0]) for row in made}
    assert ("depth", "position") in arms and {("depth", "random"), ("depth", "importance")} <= arms
    for shape, chosen in arms:
        own = [row for row in made if (row["shape"], row["chosen"].partition(",")[0]) == (shape, chosen)]
        assert sorted(row["seed"] for row in own) == [0, 1] and {row["tokens"] for row in own} == {512}
        if chosen != "random":
            assert len({row["kl"] for row in own}) == 1, "both seeds train the same student"
        for row in own:
            assert row["interval"][0] < row["trained_kl"] < row["interval"][1] and row["trained_kl"] != row["kl"]
    assert (tmp_path / "shrink-trained.md").read_text() in capsys.readouterr().out
