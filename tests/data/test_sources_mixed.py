"""Several sources with shares: what an epoch holds of each, which documents, and the same again after a stop."""

import json
import re
import shutil

import numpy as np
import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.core.labels import document_bounds
from distill.data.load import load_data
from distill.data.mixing import MixedRows, epoch_mix
from distill.recipe import Data, dump, load, parse
from distill.run import run
from distill.training.progress import read_metrics

TRAIN = "teacher: {model: teacher}\nstudent: {model: student}\ntrain: {epochs: 2, batch_size: 2, learning_rate: 1e-2}\n"


def write(path, count, word):
    rows = [{"prompt": f"{word} {n}?", "completion": f"It is {'so ' * (n % 5)}{n} {word}."} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Two files, of 90 and of 30 rows, and two models."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    for seed, name in enumerate(("student", "teacher", "math", "talk")):
        save_tiny(tmp_path / name, tiny_model(tokenizer, seed=seed), tokenizer)
    write(tmp_path / "many.jsonl", 90, "many")
    write(tmp_path / "few.jsonl", 30, "few")
    return tokenizer


def data_of(weights=(1.0, 3.0), **more):
    sources = [{"source": f"{name}.jsonl", "weight": w} for name, w in zip(("many", "few"), weights, strict=True)]
    settings = {"sources": sources, "max_length": 96, "packing": False, "cache": False, "chat_template": "none"}
    return Data.model_validate(settings | more)


def texts(rows, tokenizer, numbers=None):
    return [tokenizer.decode(rows[n]["input_ids"]) for n in (range(len(rows)) if numbers is None else numbers)]


def test_an_epoch_holds_each_sources_share(here):
    splits = load_data(data_of(), here, seed=0)
    rows = splits.epochs
    assert len(rows) == len(splits.train) == splits.report.rows
    few = sum("few" in text for text in texts(rows, here))
    assert few == splits.mix.counts[1] == round(len(rows) * 0.75)
    report = str(splits.report)
    assert f"few.jsonl: {few} of an epoch's {len(rows)} rows (75.2%)" in report, report
    assert splits.report.as_dict()["parts"][1]["epoch_rows"] == few
    assert splits.report.documents == sum(part.documents for part in splits.report.parts)
    assert splits.report.trained_tokens == sum(part.trained_tokens for part in splits.report.parts)
    documents = [end - start for row in splits.train for start, end in document_bounds(row["position_ids"])]
    assert splits.report.longest == max(documents) == max(part.longest for part in splits.report.parts)
    assert min(part.longest for part in splits.report.parts) < splits.report.longest


def test_every_row_comes_before_any_comes_twice_more(here):
    """Over epochs each source goes round: no row falls behind another of its source by more than one."""
    splits = load_data(data_of(), here, seed=0)
    rows, seen = splits.epochs, np.zeros(len(splits.train), dtype=int)
    for epoch in range(7):
        rows.set_epoch(epoch)
        np.add.at(seen, rows.numbers, 1)
        many = seen[: splits.mix.sizes[0]]
        assert np.ptp(many) <= 1 and np.ptp(seen[splits.mix.sizes[0] :]) <= 1
    assert many.min() >= 2
    assert seen.sum() == 7 * len(rows)


def test_an_epoch_follows_from_its_number_alone():
    mix = epoch_mix([50, 9, 20], [0.2, 0.5, 0.3])
    assert mix.counts == (16, 39, 24) and sum(mix.counts) == 79
    one, other = MixedRows(range(79), mix), MixedRows(range(79), mix)
    for epoch in (0, 1, 2, 5):
        one.set_epoch(epoch)
    other.set_epoch(5)
    assert [one[n] for n in range(79)] == [other[n] for n in range(79)]


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_within_one_row_of_the_shares(seed):
    random = np.random.default_rng(seed)
    sizes, weights = random.integers(10, 999, 5), random.uniform(0.2, 3, 5)
    mix = epoch_mix(sizes.tolist(), (weights / weights.sum()).tolist())
    assert sum(mix.counts) == sizes.sum()
    assert np.abs(np.array(mix.counts) - weights / weights.sum() * sizes.sum()).max() < 1


def test_what_one_source_holds_out_no_other_trains(here, tmp_path, caplog):
    lines = (tmp_path / "few.jsonl").read_text()
    (tmp_path / "many.jsonl").write_text((tmp_path / "many.jsonl").read_text() + "\n" + lines)
    splits = load_data(data_of(validation={"fraction": 0.3}), here, seed=0)
    trained, held_out = set(texts(splits.train, here)), set(texts(splits.validation, here))
    assert any("few" in text for text in held_out) and any("many" in text for text in held_out)
    assert not trained & held_out
    assert "held out by another source" in caplog.text


def test_a_validation_source_is_read_once(here, tmp_path):
    write(tmp_path / "other.jsonl", 12, "other")
    splits = load_data(data_of(validation={"source": "other.jsonl"}), here, seed=0)
    assert len(splits.validation) == splits.report.validation_documents == 12
    assert splits.report.documents == 120


def test_each_source_is_read_in_its_own_way(here, tmp_path):
    chats = [
        {
            "talk": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": f"first {n}"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": f"second {n}"},
            ]
        }
        for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"body": f"plain words {n}"}) for n in range(20)))
    data = Data.model_validate(
        {
            "sources": [
                {"source": "chats.jsonl", "fields": {"messages": "talk"}, "train_on": "last"},
                {"source": "text.jsonl", "fields": {"text": "body"}, "max_rows": 10},
            ],
            "max_length": 96,
            "packing": False,
            "cache": False,
        }
    )
    splits = load_data(data, here, seed=0)
    learned = [here.decode([t for t in row["labels"] if t != -100]) for row in splits.train]
    assert any("second" in text for text in learned) and not any("first" in text for text in learned)
    assert splits.report.parts[1].rows_read == 10
    assert splits.report.format.startswith("text")


@pytest.mark.full
def test_a_run_that_is_resumed_reads_the_same_rows(here, tmp_path):
    """The run is resumed in the second epoch, which draws other rows of the larger source."""
    text = TRAIN.replace("epochs: 2", "epochs: 2, save_every: 40, log_every: 10") + (
        "data: {sources: [{source: many.jsonl}, {source: few.jsonl, weight: 3}], max_length: 96, packing: false, "
        "cache: false, chat_template: none}\ngenerate: {prompts: []}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    recipe = load("r.yaml")
    whole = run(recipe, name="whole")
    weights = whole.folder / "student/model.safetensors"
    metrics = whole.folder / "metrics.jsonl"
    first = read_metrics(metrics)
    trained = weights.read_bytes()
    last = sorted(whole.folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(last) >= 2 and whole.steps > 60
    for path in (*last[1:], whole.folder / "student"):
        shutil.rmtree(path)
    (whole.folder / "result.json").unlink()
    run(recipe, name="whole", resume=True)
    assert [row["loss"] for row in first] == [row["loss"] for row in read_metrics(metrics)]
    assert weights.read_bytes() == trained


def test_sources_send_their_rows_to_teachers(here, tmp_path):
    text = (
        "teachers: [{model: math, route: math}, {model: talk, route: talk}]\nstudent: {model: student}\n"
        "data: {sources: [{source: many.jsonl, teacher: math}, {source: few.jsonl, teacher: talk}], max_length: 96, "
        "cache: false}\ntrain: {steps: 4, log_every: 1}\ngenerate: {prompts: []}\n"
    )
    recipe = parse(text, name="r")
    assert parse(dump(recipe), name="r") == recipe
    result = run(recipe, name="routed")
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert sum(row["tokens_math"] for row in rows) > 0 and sum(row["tokens_talk"] for row in rows) > 0


def test_a_share_of_less_than_a_row_is_refused(here):
    with pytest.raises(ValueError, match=r"data.sources.0.weight: expected at least one of an epoch's \d+ rows"):
        load_data(data_of((1e-6, 1.0)), here, seed=0)


def test_commands_look_at_each_source(here, tmp_path, capsys):
    text = TRAIN + "data: {sources: [{source: many.jsonl}, {source: few.jsonl}], max_length: 96, cache: false}\n"
    (tmp_path / "mix.yaml").write_text(text)
    assert run_command(["validate", "mix.yaml"]) == 0
    assert "does not exist" not in (said := capsys.readouterr()).err and "sources:" in said.out
    assert run_command(["validate", "mix.yaml", "data.sources.1.source=nowhere.jsonl"]) == 1
    assert "data.sources.1.source: expected a local file" in capsys.readouterr().err
    assert run_command(["check", "mix.yaml"]) == 0
    assert re.search(r"few\.jsonl: \d+ of an epoch's \d+ rows \(5\d\.\d%\)", capsys.readouterr().out)
