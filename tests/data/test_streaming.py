"""Streamed data: the rows and losses of data that are read whole, and the same rows again after a stop."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import TrainingArguments
from two_ranks import run_as_two

from distill.cli import run_command
from distill.core.labels import document_bounds
from distill.data import sources
from distill.data.load import load_data
from distill.recipe import Data, RecipeError, load, parse
from distill.run import run
from distill.teachers.registry import source_of
from distill.training.progress import read_metrics
from distill.training.trainer import DistillationTrainer

ROWS = 150
OTHER = 40
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: many, streaming: true, shuffle_buffer: 32, max_length: 64, chat_template: none,
       validation: {max_rows: 6}}
train: {steps: 12, batch_size: 2, tokens_per_step: 256, learning_rate: 1e-2, log_every: 1, save_every: 5, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of three files with 150 rows, of which one in ten cannot be used, and a file of held-out rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distill.data.documents.BATCH_ROWS", 8)
    tokenizer = tiny_tokenizer()
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(tmp_path / name, tiny_model(tokenizer, seed=seed), tokenizer)
    (tmp_path / "many").mkdir()
    rows = [
        {"prompt": f"Is {n} many?", "completion": f"It {'so ' * (n % 5)}is {n}." * (n % 10 > 0)} for n in range(ROWS)
    ]
    for number in range(3):
        lines = map(json.dumps, rows[number * 50 : number * 50 + 50])
        (tmp_path / f"many/{number}.jsonl").write_text("\n".join(lines))
    other = [{"prompt": f"Few {n}?", "completion": f"Yes, {n} are few."} for n in range(OTHER)]
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, other)))
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tokenizer


def data_of(**more):
    settings = {"source": "many", "max_length": 64, "packing": False, "cache": False, "chat_template": "none"}
    return Data.model_validate(settings | {"validation": {"source": "few.jsonl"}} | more)


def streamed(tokenizer, count, *, rank=0, ranks=1, batch_rows=1, **more):
    stream = load_data(data_of(streaming=True, **more), tokenizer, seed=0).stream
    return stream.rows(count, batch_rows=batch_rows, rank=rank, ranks=ranks)


def plain(row):
    return {name: np.asarray(values).tolist() for name, values in row.items()}


def taken(rows, numbers):
    return [plain(rows[number]) for number in numbers]


def documents(rows):
    """The source's row of each document, in order."""
    return [number for row in rows for number in np.asarray(row["row"]).reshape(-1, 3)[:, 1].tolist()]


def figures(folder):
    """The log without times."""
    return [
        {key: value for key, value in row.items() if "second" not in key and not key.startswith(("time_", "peak_"))}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.full
def test_without_shuffling_rows_and_losses_are_those_of_data_that_are_read_whole(here, tmp_path):
    whole = load_data(data_of(), here, seed=0).train
    by_row = sorted((plain(row) for row in whole), key=lambda row: row["row"][1])
    usable = ROWS * 9 // 10
    rows = streamed(here, 2 * usable, shuffle_buffer=0)
    assert taken(rows, range(2 * usable)) == by_row + by_row  # and again from the start
    rows.close()

    def losses(train, tokens, name):
        arguments = TrainingArguments(
            str(tmp_path / name),
            max_steps=20,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            learning_rate=1e-2,
        )
        student = tiny_model(tokens, seed=1)
        trainer = DistillationTrainer(student, tiny_model(tokens, seed=2), arguments, train_dataset=train)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], student.state_dict()

    own, weights = losses(streamed(here, 120, shuffle_buffer=0, batch_rows=3), here, "streamed")
    expected, same = losses(by_row, here, "whole")
    assert len(own) == 20 and own == expected
    assert all(torch.equal(weights[name], same[name]) for name in same)


CROSS = ["teacher.model=other", "student.vocabulary=cross"]
CONTEXT = ['teacher.context={template: "In {{ row.prompt }}", syntax: jinja}', "data.max_length=96"]
ROUTES = [
    "teacher=null",
    "teachers=[{model: teacher, route: a}, {model: other, route: b}]",
    "data.fields={teacher: by}",
    "student.vocabulary=cross",
]


@pytest.mark.parametrize("teacher", [CROSS, CONTEXT, ROUTES], ids=["cross", "context", "routes"])
def test_rows_of_other_readings_are_those_of_data_that_are_read_whole(here, tmp_path, teacher):
    """A teacher's own prompt or tokens, whose spans are four numbers each, come as in data that are read whole."""
    other = tiny_tokenizer(300)
    save_tiny(tmp_path / "other", tiny_model(other, seed=3), other)
    lines = [json.dumps({"prompt": f"Is {n}?", "completion": f"It is {n}.", "by": "ab"[n % 2]}) for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:40]))
    (tmp_path / "held.jsonl").write_text("\n".join(lines[40:]))
    settings = [
        "data.source=rows.jsonl",
        "data.validation={source: held.jsonl}",
        "data.shuffle_buffer=0",
        "data.packing=false",
        "data.cache=false",
        *teacher,
    ]

    def rows_of(streaming):
        recipe = load("r.yaml", [*settings, f"data.streaming={streaming}"])
        return source_of(recipe).vocabulary().read(recipe.data, 0)

    whole = sorted((plain(row) for row in rows_of("false").train), key=lambda row: row["row"])
    rows = rows_of("true").stream.rows(2 * len(whole), batch_rows=1, rank=0, ranks=1)
    seen = {json.dumps(row, sort_keys=True) for row in taken(rows, range(2 * len(whole)))}
    rows.close()
    assert seen == {json.dumps(row, sort_keys=True) for row in whole}


@pytest.mark.parametrize("packing", [True, False])
def test_every_document_comes_once_an_epoch_in_another_order(here, packing):
    rows = streamed(here, 10_000, shuffle_buffer=40, packing=packing)
    expected = [n for n in range(ROWS) if n % 10]
    epochs: list[list[int]] = [[], []]
    for number in range(2 * ROWS):
        epochs[len(epochs[0]) >= len(expected)] += documents([rows[number]])
        if len(epochs[1]) >= len(expected):
            break
    rows.close()
    for epoch in epochs:
        assert sorted(epoch) == expected and epoch != expected
    assert epochs[0] != epochs[1]


def test_packed_rows_are_nearly_full_and_hold_whole_documents(here):
    alone = {row["row"][1]: plain(row) for row in load_data(data_of(), here, seed=0).train}
    rows = streamed(here, 100, shuffle_buffer=64, packing=True)
    found = [plain(rows[number]) for number in range(20)]
    rows.close()
    assert sum(len(row["input_ids"]) for row in found) > 0.85 * 64 * len(found)
    for row in found:
        numbers = np.reshape(row["row"], (-1, 3))[:, 1].tolist()
        bounds = document_bounds(row["position_ids"])
        assert [row["input_ids"][start:end] for start, end in bounds] == [alone[n]["input_ids"] for n in numbers]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_workers_read_the_same_rows(here, workers):
    rows = streamed(here, 100, shuffle_buffer=32, packing=True)
    ahead = streamed(here, 100, shuffle_buffer=32, packing=True, workers=workers)
    assert taken(ahead, range(60)) == taken(rows, range(60))
    ahead.close()
    rows.close()


def test_ranks_read_each_row_once_and_as_many_batches(here):
    of_ranks = [streamed(here, 120, rank=rank, ranks=2, batch_rows=3, shuffle_buffer=16) for rank in (0, 1)]
    numbers = [[n for n in range(120) if n // 3 % 2 == rank] for rank in (0, 1)]
    found = [documents(taken(rows, own)) for rows, own in zip(of_ranks, numbers, strict=True)]
    assert len(found[0]) == len(found[1]) == 60
    assert not set(found[0]) & set(found[1]) and len(set(found[0])) == 60


def test_a_restored_stream_goes_on_with_the_same_rows_without_reading_those_before(here, monkeypatch):
    opened = []
    read_file = sources.read_file
    monkeypatch.setattr(sources, "read_file", lambda path, field: opened.append(path.name) or read_file(path, field))
    both = [{"source": "many", "weight": 3.0}, {"source": "few.jsonl", "weight": 1.0}]
    settings = {"sources": both, "source": None, "validation": {"max_rows": 4}, "shuffle_buffer": 20, "packing": True}
    data = data_of(streaming=True, **settings)

    def again():
        return load_data(data, here, seed=0).stream.rows(400, batch_rows=2, rank=0, ranks=1)

    rows = again()
    taken(rows, range(40))
    state = json.loads(json.dumps(rows.state(36)))  # rows after it were read ahead
    expected = taken(rows, range(40, 90))
    other = again()
    other.restore(state)
    opened.clear()
    assert taken(other, range(40, 90)) == expected
    assert next(name for name in opened if name != "few.jsonl") == "1.jsonl"
    with pytest.raises(AssertionError, match="before the 36 rows"):
        other[3]


def test_weights_are_shares_of_the_rows(here):
    both = [{"source": "many", "weight": 3.0}, {"source": "few.jsonl", "weight": 1.0}]
    data = data_of(streaming=True, sources=both, source=None, validation={"max_rows": 4})
    rows = load_data(data, here, seed=0).stream.rows(100, batch_rows=1, rank=0, ranks=1)
    of_sources = [np.asarray(rows[n]["row"])[0] for n in range(100)]
    assert of_sources.count(1) == 25 and of_sources[:8].count(1) == 2


def test_the_first_rows_are_held_out_with_their_copies(here, tmp_path):
    first = json.loads((tmp_path / "many/0.jsonl").read_text().splitlines()[1])
    with (tmp_path / "many/2.jsonl").open("a") as file:
        file.write("\n" + json.dumps(first))
    splits = load_data(data_of(streaming=True, validation={"max_rows": 6}, shuffle_buffer=8), here, seed=0)
    assert sorted(documents(splits.validation)) == [1, 2, 3, 4, 5]
    rows = splits.stream.rows(500, batch_rows=1, rank=0, ranks=1)
    seen = documents(taken(rows, range(300)))
    assert min(seen) == 6 and ROWS not in seen and set(seen) == {n for n in range(6, ROWS) if n % 10}
    assert "figures are estimates from these first rows" in str(splits.report)


def test_a_run_reads_rows_as_it_goes_and_resumes_to_the_bit(here, tmp_path, caplog):
    whole = run(load("r.yaml"), name="whole")
    assert whole.steps == 12
    assert "rows dropped so far" in caplog.text
    last = read_metrics(tmp_path / "runs/whole/metrics.jsonl")
    read = [row["data_rows_read"] for row in last if "data_rows_read" in row]
    assert read[0] < read[-1] and [row for row in last if row.get("data_rows_dropped")]
    for name in ("runs/whole/checkpoint-10", "runs/whole/student"):
        shutil.copytree(tmp_path / name, tmp_path / "kept" / name)
    expected = figures(tmp_path / "runs/whole")
    shutil.rmtree(tmp_path / "runs/whole/checkpoint-10")
    (tmp_path / "runs/whole/result.json").unlink()
    # stopped after step 5, and resumed with other workers
    assert run_command(["run", "r.yaml", "--name", "whole", "--resume", "data.workers=1"]) == 0
    ours, theirs = (load_file(root / "runs/whole/student/model.safetensors") for root in (tmp_path, tmp_path / "kept"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert figures(tmp_path / "runs/whole") == expected


@pytest.mark.full
def test_two_processes_train_on_their_shares_and_resume_together(here, tmp_path):
    run_as_two("-m", "distill", "run", "r.yaml", "--name", "two")
    rows = read_metrics(tmp_path / "runs/two/metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    student = load_file(tmp_path / "runs/two/student/model.safetensors")
    shutil.rmtree(tmp_path / "runs/two/checkpoint-10")
    (tmp_path / "runs/two/result.json").unlink()
    run_as_two("-m", "distill", "run", "r.yaml", "--name", "two", "--resume")
    again = load_file(tmp_path / "runs/two/student/model.safetensors")
    assert all(torch.equal(again[name], student[name]) for name in student)
    with pytest.raises(ValueError, match="each process reads its share of the rows: expected 2 processes, got 1"):
        (tmp_path / "runs/two/result.json").unlink()
        run(load("r.yaml"), name="two", resume=True)


def test_a_source_without_rows_to_train_on_is_refused_instead_of_read_for_ever(here, tmp_path):
    lines = [json.dumps({"prompt": "Why?", "completion": "" if n > 2 else "So."}) for n in range(20)]
    (tmp_path / "none.jsonl").write_text("\n".join(lines))
    rows = streamed(here, 10, source="none.jsonl", validation={"source": "few.jsonl"})
    assert plain(rows[0])
    (tmp_path / "none.jsonl").write_text("\n".join(lines[3:]))
    with pytest.raises(ValueError, match=r"no trainable tokens in none.jsonl"):
        rows.readers[0].restore(rows.readers[0].marks[0])
        rows.readers[0].row(0)


def test_a_data_set_of_the_hub_is_streamed_shard_by_shard(here, tmp_path, monkeypatch):
    import datasets

    builder = datasets.load_dataset_builder("json", data_files=sorted(map(str, (tmp_path / "many").glob("*.jsonl"))))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, subset: builder)
    local = streamed(here, 200, shuffle_buffer=16)
    hub = streamed(here, 200, shuffle_buffer=16, source="someone/many")
    assert taken(hub, range(150)) == taken(local, range(150))
    assert len(hub.readers[0].streamed.source.parts) == 3


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["train.steps=null", "train.epochs=1"], "train.epochs: requires data that are read whole; got data.streaming"),
        (["data.validation.max_rows=null"], "data.validation.max_rows: expected a number of first rows to hold out"),
        (["data.source=synthetic"], "data.streaming: requires text"),
        (["teacher.online_cache=store"], "data.streaming: requires a teacher that computes outputs for rows"),
        (["data.on_policy={turns: all}"], "data.on_policy.turns: all: requires data that are read whole"),
        (["train.arguments={auto_find_batch_size: true}"], "data.streaming: train.arguments.auto_find_batch_size"),
    ],
)
def test_what_needs_all_rows_is_refused_by_one_line(overrides, says):
    with pytest.raises(RecipeError) as refused:
        parse(RECIPE, overrides)
    assert says in str(refused.value)


def test_distill_cache_refuses_a_stream(here, capsys):
    assert run_command(["cache", "r.yaml", "--out", "cached"]) != 0
    assert "distill cache: requires data that are read whole; got data.streaming: true" in capsys.readouterr().err
