"""Answers stored beside a run, answers by weights one step old, and by a student in shards: one process and two.

The file is also the program of the two processes, which make all runs in one start.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cache_sharded import said_by
from tiny import save_models, tiny_tokenizer
from two_ranks import run_as_two

from distill.core.ranks import exit_process
from distill.objectives.losses import STATISTICS
from distill.recipe import parse
from distill.training.progress import read_metrics
from distill.training.rollout_files import StoredRollouts, divergences_of, files, read

RECIPE = """
name: tiny
teacher: {model: teacher}
student: {model: student}
data:
    source: pairs.jsonl
    max_length: 64
    packing: false
    cache: false
    validation: {fraction: 0.2}
    on_policy: {max_new_tokens: 8, store_every: 2}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 4, batch_size: 1, tokens_per_step: 128, learning_rate: 1e-2, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: []}
"""
CLIPPED = "loss.terms=[{type: policy_gradient, importance: true, clip: 0.2, discount: 0.5}]"
CASES = {
    "plain": [],
    "routed": ["data.fields.teacher=domain", "teachers=[{model: teacher, route: even}, {model: other, route: odd}]"],
    "ahead": ["data.on_policy.max_staleness=1", CLIPPED, "train.save_every=3"],
}
REREAD_FP32 = ("plain", "ahead")
SHARDED = {
    "shards-ahead": ["parallel.strategy=fsdp", *CASES["ahead"]],
    "shards-lora": ["parallel.strategy=fsdp", "student.lora={r: 4}"],
}


def recipe(*overrides):
    return parse(
        RECIPE if "teachers=" not in str(overrides) else RECIPE.replace("teacher: {model: teacher}\n", "", 1), overrides
    )


def make(ways):
    from accelerate.state import AcceleratorState, PartialState

    from distill.run import run

    for name, overrides in ways.items():
        run(recipe(*overrides), name=name)
        AcceleratorState._reset_state()
        PartialState._shared_state.clear()


def cut_off(name, again):
    """Leave the run as if killed in step 4, after its responses were written."""
    shutil.copytree(f"runs/{name}", f"runs/{again}")
    for gone in ("student", "checkpoint-4"):
        shutil.rmtree(f"runs/{again}/{gone}", ignore_errors=True)
    Path(f"runs/{again}/result.json").unlink()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    save_models(
        folder, **{name: {"seed": n, "hidden": 32 + 16 * n} for n, name in enumerate(("student", "teacher", "other"))}
    )
    rows = [{"prompt": f"Say {n}?", "completion": f"It is {n}.", "domain": ("even", "odd")[n % 2]} for n in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make({"plain": CASES["plain"]})
    return folder


@pytest.fixture(scope="module")
def others(workplace):
    """The same folder with the other runs in it, those of two processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        make({"routed": CASES["routed"], "ahead": CASES["ahead"], "lora": ["student.lora={r: 4}"]})
        from distill.run import run

        cut_off("ahead", "again")
        run(recipe(*CASES["ahead"]), name="again", resume=True)
        run_as_two(__file__, workplace, timeout=500)
    return workplace


def stored(folder):
    return [row for file in files(folder) for row in read(file)]


def weights(folder):
    return load_file(next((folder / "student").glob("adapter_model.safetensors"), folder / "student/model.safetensors"))


def test_a_file_a_stored_step_and_a_row_an_answer(workplace):
    run = workplace / "runs/plain"
    assert [file.name for file in files(run)] == ["step-00000002.parquet", "step-00000004.parquet"]
    logged = {row["step"]: row for row in read_metrics(run / "metrics.jsonl") if "rollouts" in row}
    for file, step in zip(files(run), (2, 4), strict=True):
        rows = read(file)
        assert len(rows) == logged[step]["rollouts"] and {row["step"] for row in rows} == {step}
        lengths = [len(row["answer_ids"]) for row in rows]
        assert sum(lengths) == logged[step]["trained_tokens"]
        divergence = sum(sum(row["divergence"]) for row in rows)
        assert divergence / sum(lengths) == pytest.approx(logged[step]["kl"], rel=1e-4)
    tokenizer = tiny_tokenizer()
    for row in stored(run):
        assert row["route"] is None and "Say" in row["prompt"]
        assert row["answer"] == tokenizer.decode(row["answer_ids"])
        # drawn by the weights that learn: by decoding one by one and in one forward
        assert row["sampled_log_p"] == pytest.approx(row["student_log_p"], abs=2e-4)


def test_log_probabilities_are_the_models(workplace):
    """The first step's student is the loaded model."""
    from distill.models.loading import load_teacher
    from distill.run import run

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        run(recipe("data.on_policy.store_every=1", "data.on_policy.fraction=0.5", "train.steps=1"), name="first")
        models = [
            load_teacher(recipe().teacher.model_copy(update={"model": name})).eval() for name in ("student", "teacher")
        ]
    rows = stored(workplace / "runs/first")
    (entry,) = [row for row in read_metrics(workplace / "runs/first/metrics.jsonl") if "rollouts" in row]
    assert len(rows) == entry["rollouts"] and entry["trained_tokens"] > sum(len(row["answer_ids"]) for row in rows)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["answer_ids"]])
        log_s, log_t = (model(ids).logits[0].double().log_softmax(-1) for model in models)
        at = torch.arange(len(row["prompt_ids"]), ids.shape[1])
        for log_p, name in ((log_s, "student_log_p"), (log_t, "teacher_log_p")):
            assert row[name] == pytest.approx(log_p[at - 1, ids[0, at]].tolist(), abs=2e-4), name
        divergence = (log_s.exp() * (log_s - log_t)).sum(-1)[at - 1]
        assert row["divergence"] == pytest.approx(divergence.tolist(), abs=2e-4)


@pytest.mark.full
def test_each_response_has_the_route_of_its_prompt(others):
    rows = stored(others / "runs/routed")
    assert {row["route"] for row in rows} == {"even", "odd"}
    for row in rows:
        number = int("".join(filter(str.isdigit, row["prompt"])))
        assert row["route"] == ("even", "odd")[number % 2]


@pytest.mark.full
@pytest.mark.parametrize("case", REREAD_FP32)
def test_two_processes_store_and_learn_the_same(others, case):
    one = others / "runs" / case
    two = others / "runs" / f"{case}-two"
    same_answers(one, two)


@pytest.mark.full
@pytest.mark.parametrize("case, alone", [("shards-ahead", "ahead"), ("shards-lora", "lora")])
def test_a_student_in_shards_answers_and_learns_as_a_whole_one(others, case, alone):
    same_answers(others / "runs" / alone, others / "runs" / case)


def same_answers(one, two):
    ours, theirs = stored(one), stored(two)
    assert len(ours) >= 4 and len(ours) == len(theirs)
    for row, other in zip(ours, theirs, strict=True):
        for name in ("step", "route", "prompt_ids", "answer_ids"):
            assert row[name] == other[name]
        for name in ("sampled_log_p", "student_log_p", "teacher_log_p", "divergence"):
            assert row[name] == pytest.approx(other[name], abs=1e-4)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.full
def test_ahead_draws_from_weights_one_step_old(others):
    logged = [row for row in read_metrics(others / "runs/ahead/metrics.jsonl") if "rollouts" in row]
    assert [row["rollout_lag"] for row in logged] == [0, 1, 0, 1]
    drawn, learning = (
        [value for row in stored(others / "runs/ahead") for value in row[name]]
        for name in ("sampled_log_p", "student_log_p")
    )
    gaps = [abs(a - b) for a, b in zip(drawn, learning, strict=True)]
    assert max(gaps) > 1e-2, "the weights that drew are not those that learn"


@pytest.mark.full
def test_a_run_with_old_weights_resumes_to_the_bit_and_stores_nothing_twice(others):
    whole = others / "runs/ahead"
    again = others / "runs/again"
    assert [file.name for file in files(again)] == [file.name for file in files(whole)]
    assert stored(whole) == stored(again)
    for name, value in weights(whole).items():
        assert torch.equal(weights(again)[name], value), name


def test_stored_answers_are_shown(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    shown = said_by(["inspect", "plain", "--rollouts"])
    assert shown["code"] == 0, shown
    row = stored(workplace / "runs/plain")[-1]
    assert f"[{row['divergence'][0]:.2f}]" in shown["out"] and "step 4" in shown["out"]
    told = json.loads(said_by(["inspect", "plain", "--rollouts", "--json", "--rows", "1"])["out"])
    (first,) = told["rows"]
    answer = [token for token in first if token["state"] == "trained"]
    assert [token["id"] for token in answer] == read(files(workplace / "runs/plain")[-1])[0]["answer_ids"]
    Path("runs/none").mkdir()
    shutil.copy("runs/plain/recipe.yaml", "runs/none/recipe.yaml")
    none = said_by(["inspect", "none", "--rollouts"])
    assert none["code"] == 2 and "data.on_policy.store_every" in none["errors"]


def test_a_conversation_is_stored_with_its_turns():
    """Tokens of an environment stand in the answer, between those that the student sampled, which have figures."""
    tokenizer = tiny_tokenizer()
    texts = [(False, "Add 2 and 3."), (True, "add(2, 3)"), (False, "result: 5; now?"), (True, "It is 5.")]
    parts = [(own, tokenizer(text)["input_ids"]) for own, text in texts]
    ids = [token for _, part in parts for token in part]
    labels = [token if own else -100 for own, part in parts for token in part]
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    at = torch.tensor([place - 1 for place, label in enumerate(labels) if label != -100])
    batch |= {"valid_rows": at, "sampled_log_p": torch.where(batch["labels"] != -100, -1.5, torch.nan)}
    batch |= {"rewards": torch.full((1, len(ids)), 0.25), "advantages": torch.full((1, len(ids)), -0.5)}
    made = StoredRollouts(Path("run"), 1, tokenizer, ())
    made.add(batch, torch.arange(len(STATISTICS) * len(ids), dtype=torch.float64).view(len(STATISTICS), -1))
    (row,) = made._rows
    assert row["prompt"] == "Add 2 and 3." and row["prompt_ids"] == parts[0][1]
    assert row["answer_ids"] == ids[len(parts[0][1]) :]
    assert row["turns"] == [{"by_student": own, "text": text} for own, text in texts[1:]]
    assert [row["answer_ids"][place] for place in row["positions"]] == parts[1][1] + parts[3][1]
    assert (row["reward"], row["advantage"]) == (0.25, -0.5) and set(row["sampled_log_p"]) == {-1.5}
    shades = divergences_of(row)
    assert [shade is None for shade in shades] == [not own for own, part in parts[1:] for _ in part]
    divergence = STATISTICS.index("divergence") * len(ids)
    assert [shade for shade in shades if shade is not None] == [divergence + place for place in at.tolist()]


if __name__ == "__main__":  # one of two processes
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    make({f"{name}-two": CASES[name] for name in REREAD_FP32} | SHARDED)
    torch.distributed.barrier()
    exit_process(0)
