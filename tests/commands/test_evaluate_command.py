"""`distill eval`: figures equal those of training's evaluation, intervals cover, calibration is what it says."""

import json

import numpy as np
import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from distill.cli import app
from distill.evaluation.bootstrap import mean_intervals, reduction_interval
from distill.evaluation.evaluate import evaluate
from distill.evaluation.evaluate_documents import FIGURES, _calibration_error, _count, evaluate_documents
from distill.evaluation.targets import Target, held_out_rows
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.top_k_encoding import log_probabilities
from distill.recipe import Student, parse

KINDS = {"llama": {}, "gemma2": {"final_logit_softcapping": 3.0}, "granite": {"logits_scaling": 4.0}}


def interval(sums, counts, **more):
    return mean_intervals(sums[:, None], counts, **more)[0]


def rows(count=6, length=24):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(3, 259, (length,), generator=generator).tolist()
        yield {"input_ids": ids, "labels": [-100, *ids[1:-4], *[-100] * 4], "position_ids": list(range(length))}


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_the_evaluation_in_training(kind):
    tokenizer = tiny_tokenizer()
    student = tiny_model(tokenizer, kind=kind, seed=2, **KINDS[kind]).train()
    teacher = tiny_model(tokenizer, kind=kind, hidden=48, seed=1, **KINDS[kind])
    data = list(rows())
    found, expected = evaluate_documents(student, teacher, data), evaluate(student, teacher, data)
    assert student.training and found.tokens == expected.tokens == 6 * 19
    for name in FIGURES:
        assert found.figures[name].value == pytest.approx(getattr(expected, name), rel=1e-4), name
        assert found.figures[name].low <= found.figures[name].value <= found.figures[name].high
    assert found.perplexity("teacher").value == pytest.approx(expected.teacher_perplexity, rel=1e-4)
    assert found.kl_reduction(found).value == 0
    assert evaluate_documents(teacher, teacher, data).kl_reduction(found).value == pytest.approx(1)


def test_rows_are_kept_apart_in_a_batch():
    """Rows of different lengths, padded into one batch, give each row the sums that it has alone."""
    student, teacher = tiny_model(seed=2), tiny_model(hidden=48, seed=1)
    data = [*rows(3, 24), *rows(2, 17), *rows(2, 31)]
    alone = evaluate_documents(student, teacher, data)
    together = evaluate_documents(student, teacher, data, batch_size=4)
    assert np.array_equal(alone.counts, together.counts)
    assert np.allclose(alone.sums, together.sums, rtol=1e-5) and len(set(alone.sums[:, 0])) > 3
    assert together.calibration_error == pytest.approx(alone.calibration_error, abs=1e-6)


def test_documents_of_a_packed_row_are_drawn_for_themselves():
    """Five documents in one row are five to draw from; of one alone nothing is told, where it read "from 2 to 2"."""
    student, teacher = tiny_model(seed=2), tiny_model(hidden=48, seed=1)
    data = [*rows(3, 24), *rows(2, 17)]
    packed = {name: [value for row in data for value in row[name]] for name in data[0]}
    alone, together = evaluate_documents(student, teacher, data), evaluate_documents(student, teacher, [packed])
    assert together.rows == 1 and np.allclose(alone.sums, together.sums, rtol=1e-4)
    assert together.figures["forward_kl"] == pytest.approx(alone.figures["forward_kl"], rel=1e-4)
    single = evaluate_documents(student, teacher, data[:1])
    for found in (*single.figures.values(), single.perplexity("student"), single.kl_reduction(single)):
        assert np.isnan([found.low, found.high]).all() and np.isfinite(found.value)
    with pytest.raises(ValueError, match="no trained tokens"):
        evaluate_documents(student, teacher, [])


def test_logits_of_16_bit_models_are_not_rounded(device):
    """A teacher in bfloat16 beside the same weights in float32 but for the rounding of hidden states."""
    hidden = torch.randn(40, 64, dtype=torch.bfloat16, device=device)
    weight = torch.randn(300, 64, dtype=torch.bfloat16, device=device)
    exact = hidden.double() @ weight.double().T
    logits, _ = log_probabilities(hidden, HeadWeights(weight, None, None), LogitTransform(), len(weight), 1.0)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4
    assert ((hidden @ weight.T) - exact).abs().max() > 1e-2, "which rounding would not pass"


def test_masked_rows_are_an_error():
    data = [{"input_ids": [3, 4, 5], "labels": [-100] * 3, "position_ids": [0, 1, 2]}]
    with pytest.raises(ValueError, match="no trained tokens"):
        evaluate_documents(tiny_model(), tiny_model(seed=1), data)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    random, hits = np.random.default_rng(0), 0
    for trial in range(200):
        counts = random.integers(5, 50, 60).astype(float)
        # rows differ from each other far more than tokens within a row do
        sums = counts * (2.0 + random.normal(0, 1, 60))
        found = interval(sums, counts, draws=400, seed=trial)
        hits += found.low <= 2.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99, hits


def test_intervals_follow_the_spread_and_the_seed():
    counts, sums = np.full(50, 10.0), np.full(50, 20.0)
    assert tuple(interval(sums, counts)) == (2, 2, 2)
    spread = sums + np.linspace(-20, 20, 50)
    assert interval(spread, counts).low < 1.9 < 2.1 < interval(spread, counts).high
    assert interval(spread, counts, seed=1) == interval(spread, counts, seed=1)
    with pytest.raises(ValueError, match="at least one token"):
        interval(sums, np.zeros(50))
    closed = reduction_interval(spread, spread / 4)
    assert tuple(closed) == pytest.approx((0.75, 0.75, 0.75))


def test_calibration_error_is_the_gap_between_sure_and_right():
    probabilities = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.55, 0.45], [0.55, 0.45]])
    bins = torch.zeros(3, 15, dtype=torch.float64)
    _count(bins, probabilities.log(), torch.tensor([0, 0, 0, 1]))
    # half the tokens: sure 0.8, right 1.0; the other half: sure 0.55, right 0.5
    assert _calibration_error(bins) == pytest.approx(0.5 * 0.2 + 0.5 * 0.05, abs=1e-6)
    certain = torch.zeros(3, 15, dtype=torch.float64)
    _count(certain, torch.tensor([[0.0, -torch.inf]]), torch.tensor([0]))
    assert _calibration_error(certain) == 0


def test_models_that_cannot_keep_documents_apart_get_one_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    for name, seed in (("teacher", 1), ("student", 2)):
        model = tiny_model(tokenizer, kind="lfm2", seed=seed, layer_types=["conv", "full_attention"])
        save_tiny(tmp_path / name, model, tokenizer)
    lines = [json.dumps({"text": f"The teacher explains line {number}."}) for number in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    app(args=["eval", "student", "--teacher", "teacher", "--data", "data.jsonl", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] > 1  # together they would fill less than one
    recipe = parse(
        "{teacher: {model: teacher}, student: {model: student}, train: {steps: 1}, "
        "data: {source: data.jsonl, max_length: 256, cache: false, validation: {fraction: 0.5}}}"
    )
    whole, apart = (
        held_out_rows(Target(recipe.student, recipe), None, tokenizer, 512, 1024, packing=packing)
        for packing in (True, False)
    )
    assert len(whole) < len(apart) == sum(row["position_ids"].count(0) for row in whole)
    rows = held_out_rows(Target(Student(model="student")), "data.jsonl", tokenizer, 512, 1024, packing=False)
    models = [AutoModelForCausalLM.from_pretrained(name).eval() for name in ("student", "teacher")]
    assert told["figures"]["forward_kl"]["value"] == pytest.approx(evaluate(*models, rows).forward_kl, rel=1e-5)
