"""The study of students trained in 4 bits: every control and arm is judged on the same rows."""

import json

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from scripts.study import shrink_quantise


@pytest.mark.full  # of scripts that measure, which no run of ours imports
def test_controls_and_arms_are_judged_on_the_same_rows(tmp_path, capsys):
    tokenizer = tiny_tokenizer(300)
    save_tiny(tmp_path / "model", tiny_model(tokenizer, seed=1, hidden=64, vocab_size=320), tokenizer)
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {"tokens": 512, "first-tokens": 512, "calibration-tokens": 512, "seeds": 1, "length": 64, "rows": 2}
    sizes |= {"step-tokens": 256, "held-out": 8, "learning-rate": 1e-5}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    paths = {"model": "model", "data": "rows.jsonl", "out": "out.jsonl"}
    options += [text for name, path in paths.items() for text in (f"--{name}", str(tmp_path / path))]
    shrink_quantise.main([*options, "--device", "cpu"])
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in made] == ["nearest", "importance", "gptq", "straight-through", "learned"]
    assert len({row["held_out_tokens"] for row in made}) == 1 and made[0]["held_out_tokens"] > 50
    kl = {row["arm"]: row["kl"][0] for row in made}
    assert kl["gptq"] < kl["nearest"], "weights lie on no grid after the first training"
    best = min(kl[name] for name in shrink_quantise.CONTROLS)
    for row in made[4:]:
        assert abs(row["of_best_control"][0] - row["kl"][0] / best) < 1e-3
    # two steps at a low rate: the learned arm is where it started, at GPTQ's rounding
    assert abs(kl["learned"] / kl["gptq"] - 1) < 0.5 < kl["nearest"] / kl["gptq"] - 1
    assert "mean KL" in capsys.readouterr().out
