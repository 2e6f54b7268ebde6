"""A recipe's on-policy section: a run, refusals before weights are read, planned memory."""

from pathlib import Path

import pytest
from test_on_policy import RECIPE
from tiny import tiny_model, tiny_tokenizer

from distill.data.chat import load_template
from distill.data.report import DataReport
from distill.generation.from_recipe import rollouts_from_recipe
from distill.recipe import parse
from distill.training.progress import read_metrics

pytestmark = pytest.mark.place(
    files={"pairs.jsonl": [{"prompt": f"Question {n}?", "completion": f"It is {n * n}."} for n in range(60)]},
    teacher={"layers": 3, "seed": 1},
    student={"seed": 2},
)


def test_a_run_with_the_recipes_section(workplace):
    from distill.run import run

    folder = run(parse(RECIPE)).folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert all(row["rollouts"] > 0 and row["rollout_length"] <= 8 for row in rows if "loss" in row)
    assert (folder / "student" / "config.json").exists()


def test_data_without_prompts_are_refused_before_weights_are_read(workplace, unread):
    from distill.run import run

    Path("plain.txt").write_text("Running text, line by line.\n" * 60)
    unread("teacher"), unread("student")
    with pytest.raises(ValueError, match=r"data\.on_policy: expected data with prompts"):
        run(parse(RECIPE, ["data.source=plain.txt"]))


@pytest.mark.full
def test_check_counts_the_kv_cache_of_rollouts(workplace):
    from distill.planning.devices import find_device
    from distill.planning.memory import step_memory
    from distill.planning.preflight import check_run, device_plan
    from distill.teachers.registry import source_of

    with_own, without = (
        step_memory(device_plan(made, find_device("cpu"), 1))
        for made in (parse(RECIPE), parse(RECIPE, ["data.on_policy.fraction=0"]))
    )
    cache = 1.5 * 64 * 64 * 2 * 2 * 16 * 4  # batch, slots, keys and values, layers, their width, bytes
    assert with_own.parts["cache of rollouts"] == cache
    assert with_own.peak - without.peak == cache and "cache of rollouts" not in without.parts
    recipe = parse(RECIPE)
    longest = source_of(recipe).vocabulary().read(recipe.data, recipe.train.seed).report.longest
    read = check_run(recipe, find_device("cpu")).memory.parts["cache of rollouts"]
    assert read == cache / 64 * (longest + recipe.data.on_policy.max_new_tokens) and 0 < longest < 64 - 8
    plan = device_plan(parse(RECIPE, ["data.on_policy.max_staleness=1"]), find_device("cpu"), 1)
    ahead = step_memory(plan)
    assert ahead.parts["cache of rollouts"] == 2 * cache == cache + ahead.peak - with_own.peak


def test_a_fraction_of_zero_is_the_plain_run():
    recipe = parse(RECIPE, ["data.on_policy.fraction=0", "loss.terms=[{type: cross_entropy}]"])
    assert (
        rollouts_from_recipe(recipe, None, None, template=None, report=DataReport(format="text"), vocab_size=1) is None
    )
    assert parse(RECIPE, ["data.on_policy=null"]).data.on_policy is None


def test_what_cannot_be_answered_is_refused():
    recipe, model, tokenizer = parse(RECIPE), tiny_model(), tiny_tokenizer()
    more = {"vocab_size": 259, "template": load_template("tokenizer", tokenizer)}
    with pytest.raises(ValueError, match="expected data with prompts"):
        rollouts_from_recipe(recipe, model, tokenizer, report=DataReport(format="text (text)"), **more)
    with pytest.raises(ValueError, match="expected data with prompts"):
        rollouts_from_recipe(recipe, model, None, report=DataReport(), **more)
    with pytest.raises(ValueError, match="vllm is not installed"):
        vllm, chats = parse(RECIPE, ["data.on_policy.engine=vllm"]), DataReport(format="chat (messages)")
        rollouts_from_recipe(vllm, model, tokenizer, report=chats, **more)
