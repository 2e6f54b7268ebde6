"""Several answers a prompt (`data.on_policy.samples`): which ones, in which rows, and runs that learn of them.

The file is also the program of two processes, which train together.
"""

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_crash import finish, rows, start
from test_on_policy import COLLATE, on_policy, packed, pairs, same_run, trainer, weights
from tiny import save_models, tiny_model
from transformers import TrainingArguments
from two_ranks import run_as_two

from distill.core.ranks import exit_process
from distill.generation.decode_loop import DecodeEngine, DecodeLoop, EngineSettings, Generated
from distill.generation.documents import RolloutDocument, documents_of
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import Sampling
from distill.models.head import decoder_of
from distill.planning.run_plan import plan_steps
from distill.planning.steps import data_rows_per_micro_batch
from distill.recipe import parse
from distill.recipe.resume_policy import why_batch_size_stays
from distill.training.arguments import training_arguments
from distill.training.step_listeners import RolloutBatches


def answered(batches, **settings):
    """The documents of micro-batches after the student has answered."""
    own = on_policy(tiny_model(dtype=torch.float64), **settings)
    made = own.replace([COLLATE(rows) for rows in batches], 4, COLLATE)
    return [[(tuple(d.ids), tuple(d.labels)) for d in documents_of(batch)] for batch in made], made


def test_a_prompt_is_answered_several_times_and_otherwise_each_time():
    """Beside each other; the first answer is the only one of a run with one."""
    (once,), _ = answered([pairs(4)])
    (thrice,), made = answered([pairs(4)], samples=3)
    assert len(made[0]["labels"]) == 12 and thrice[::3] == once
    for number, row in enumerate(pairs(4)):
        own = thrice[3 * number : 3 * number + 3]
        prompt = tuple(row["input_ids"][: row["labels"].count(-100)])
        assert all(ids[: len(prompt)] == prompt for ids, _ in own)
        assert len(set(own)) == 3, "no two are the same"


def test_the_first_answer_has_the_seed_of_the_only_one():
    """The seed follows from the step and the tokens alone, as in runs with one response."""
    document = RolloutDocument([5, 6], [-100, 6], 0)
    seeds = [replace(document, sample=number).hash(3, 1) for number in range(3)]
    assert seeds[0] == hashlib.blake2b(b"3,1,-1,5,6", digest_size=16).digest() and len(set(seeds)) == 3


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_micro_batches_do_not_change_the_rollouts(fraction):
    whole, _ = answered([pairs(8)], samples=2, fraction=fraction)
    parts, _ = answered([pairs(8)[:2], pairs(8)[2:4], pairs(8)[4:]], samples=2, fraction=fraction)
    assert [document for part in parts for document in part] == whole[0]
    untouched = {(tuple(row["input_ids"]), tuple(row["labels"])) for row in pairs(8)} & set(whole[0])
    assert len(whole[0]) == 16 - len(untouched) and (0 < len(untouched) < 8) == (fraction < 1)


def test_a_prompt_is_read_once():
    """Whatever its answers; which are those of prompts that are read each by itself, also of who takes a free place."""
    model, read = tiny_model(dtype=torch.float64), []
    decoder_of(model).register_forward_pre_hook(
        lambda module, args, given: read.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    loop = DecodeLoop(model, EngineSettings(2, [0], log_probs=True))
    prompts = [[5, 6, 7, 8], [9], [40, 3, 77]]
    asked = {"max_new_tokens": 7, "sampling": Sampling(1.0)}
    alone = [loop.generate([prompt], seeds=[seed], **asked) for prompt in prompts for seed in range(4)]
    asked["seeds"], several = [*range(4)] * 3, [prompt for prompt in prompts for _ in range(4)]
    for batch_size in (5, 64):
        read.clear()
        found = loop.generate(several, batch_size=batch_size, **asked)
        assert found.tokens == [each.tokens[0] for each in alone]
        for ours, each in zip(found.log_probs, alone, strict=True):
            assert ours == pytest.approx(each.log_probs[0], abs=1e-9)
    assert read[0] == (1, 3 + 2) and len({tuple(tokens) for tokens in found.tokens}) == 12


class Long(DecodeEngine):
    def run(self, request):
        return Generated([[7] * limit for limit in request.limits], [True] * len(request.prompts))


def test_packed_rows_are_as_many_times_more_at_most():
    data = packed(pairs(18))
    longest = max(len(row["input_ids"]) for row in data)
    kept = set()
    for step in range(4):
        own = OnPolicyRollouts(Long(), 1.0, 12, Sampling(1.0), seed=1, max_length=longest, samples=3)
        (batch,) = own.replace([COLLATE(data)], step, COLLATE)
        assert len(data) < batch["input_ids"].shape[0] <= 3 * len(data) and batch["input_ids"].shape[1] <= longest
        figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
        assert len(documents_of(batch)) + figures["rollouts_left_out"] == 54 and figures["rollouts_left_out"] > 0
        kept.add(tuple(tuple(document.prompt) for document in documents_of(batch)))
    assert len(kept) > 1


def test_a_few_rows_that_all_fit_are_all_answered():
    own = OnPolicyRollouts(Long(), 1.0, 4, Sampling(1.0), seed=1, max_length=60, samples=4)
    (batch,) = own.replace([COLLATE(packed(pairs(3)))], 0, COLLATE)
    assert (
        len(documents_of(batch)) == 12 and own.pop_metrics(lambda v: v, torch.device("cpu"))["rollouts_left_out"] == 0
    )


def eight_answers(folder, size, accumulation, **own):
    """Two steps of four prompts with two answers each: weights; tokens that train and documents of each step."""
    made = trainer(
        folder,
        max_steps=2,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        optim="sgd",
        learning_rate=1.0,
        own={"samples": 2, "max_new_tokens": 3} | own,
    )
    said, put_in = [], made.listeners.find(RolloutBatches).rollouts.replace

    def kept(*given):
        said.append(put_in(*given))
        return said[-1]

    made.listeners.find(RolloutBatches).rollouts.replace = kept
    made.train()
    logged = [entry for entry in made.state.log_history if "rollouts" in entry]
    assert all(entry["rollouts"] == 8 or own for entry in logged) and len(logged) == 2
    documents = [[(*d.ids, *d.labels) for batch in step for d in documents_of(batch)] for step in said]
    counts = [[entry["rollouts"], entry["trained_tokens"]] for entry in logged]
    return weights(made.accelerator.unwrap_model(made.model)), counts, documents


WAYS = ({}, {"fraction": 0.5, "samples": 3})


@pytest.mark.full
def test_micro_batches_and_ranks_change_neither_metrics_nor_weights(tmp_path):
    run_as_two(__file__, tmp_path, timeout=100)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for number, own in enumerate(WAYS):
        expected = eight_answers(tmp_path, 4, 1, **own)
        assert all(0 < answers < 12 for answers, _ in expected[1])  # of the second way, some are the data's
        for size, accumulation in ((2, 2), (1, 4)) if not own else ():
            same_run(expected, eight_answers(tmp_path, size, accumulation))
        first, second = (made[number] for made in of_ranks)
        for together in (first, second):
            same_run(expected, together)
        for whole, *parts in zip(expected[2], first[2], second[2], strict=True):
            assert all(parts) and sorted(map(tuple, parts[0] + parts[1])) == sorted(whole)


# ------------------------------------------------------------------ recipes and runs

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data:
    source: pairs.jsonl
    max_length: 64
    packing: false
    cache: false
    validation: {fraction: 0.1}
    on_policy: {max_new_tokens: 12, samples: 2, top_k: 40, top_p: 0.95, min_p: 0.001, stop: [e, "\\n"]}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 8, batch_size: 4, tokens_per_step: 512, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 1,
        device: cpu}
generate: {prompts: []}
"""


def test_the_data_bring_as_many_times_fewer_rows(tmp_path):
    """An epoch of on-policy rollouts has as many times more steps."""
    from distill.models.dtypes import Precision

    precision = Precision(torch.float32, torch.float32, None)
    for override, size, steps in (
        ("data.on_policy.samples=2", 2, 8),
        ("data.on_policy.samples=1", 4, 4),
        ("data.on_policy.fraction=0", 4, 4),
    ):
        recipe = parse(RECIPE, ["train.steps=null", "train.epochs=1", override])
        assert data_rows_per_micro_batch(recipe.train, recipe.data) == size
        plan = plan_steps(recipe, 31)
        made = training_arguments(recipe, tmp_path, plan, device=torch.device("cpu"), precision=precision)
        assert isinstance(made, TrainingArguments) and made.max_steps == steps
        assert (made.per_device_train_batch_size, made.per_device_eval_batch_size) == (size, 4)


def figures(run):
    """Return each step's metrics that do not depend on a clock."""
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows(run)]


def test_all_answers_of_a_prompt_stay_in_one_micro_batch():
    """So that its size is no setting of memory alone."""
    assert "samples" in why_batch_size_stays(parse(RECIPE))
    assert why_batch_size_stays(parse(RECIPE, ["data.on_policy.samples=1"])) is None


@pytest.mark.full  # a plain run kills and resumes in test_online_cache.py
def test_a_killed_run_resumes_bit_identically(tmp_path):
    """The run has cut-offs, stop strings, two responses a prompt and packed rows that are sampled ahead."""
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2, "attention_dropout": 0.1})
    lines = [json.dumps({"prompt": f"FunctionInput {n}?", "completion": f"It is {n * n}."}) for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    recipe = RECIPE.replace("packing: false", "packing: true").replace("{max", "{max_staleness: 2, max")
    recipe = recipe.replace("max_length: 64", "max_length: 256").replace("512", "2048")
    (tmp_path / "recipe.yaml").write_text(recipe)
    finish(tmp_path, "--name", "whole")
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    log = figures(whole)
    answers = [row["rollouts"] for row in log]
    assert sum(answers) > 64, answers
    assert any(0 < row["rollout_truncated"] < 1 for row in log), "a stop string ends some of them"
    process = start(tmp_path, "--name", "killed", forked=True)
    while not (killed / "checkpoint-2").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (killed / "result.json").exists()
    finish(tmp_path, "--name", "killed", "--resume")
    assert figures(killed) == log and len(log) == 8
    ours, theirs = (load_file(run / "student" / "model.safetensors") for run in (killed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":  # one of two processes
    torch.set_num_threads(1)
    made = [eight_answers(Path(sys.argv[1]), 1 if own else 2, 2 if own else 1, **own) for own in WAYS]
    torch.save(made, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.barrier()
    exit_process(0)
