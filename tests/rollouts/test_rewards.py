"""Rewards beside the teacher: advantages within a group, the rows that functions are given, safe calls, whole runs."""

import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from subjects import answering, routed_answering
from test_on_policy import COLLATE, packed, pairs, same_run
from test_trainer import arguments, weights
from tiny import tiny_model, tiny_tokenizer
from two_ranks import run_as_two

from distill.commands.arguments import plugin_override
from distill.core.ranks import exit_process
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.documents import documents_of
from distill.generation.function_calls import FunctionInput
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.rewards import Rewards, group_advantages
from distill.generation.sampling import Sampling
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.plugin import allowed_plugin
from distill.objectives.policy_gradient import SampledTokenLoss
from distill.objectives.targets import HeadForward, StepInputs, VocabularyAlignment
from distill.recipe import parse
from distill.recipe.loss import Loss
from distill.run import run
from distill.training.progress import read_metrics
from distill.training.rollout_files import files, read
from distill.training.step_listeners import RolloutBatches
from distill.training.trainer import DistillationTrainer

REWARD = "mine.py:even"
TERM = {"type": "policy_gradient", "reward": REWARD, "weight": 0.7, "teacher_weight": 0.3}


def even(questions):
    """Rewards that follow from the answers: how many of their tokens have an even number."""
    return [sum(token % 2 == 0 for token in map(int, question.answer.split())) for question in questions]


def spelled(document, tokens):
    return FunctionInput(str(document.row), "", " ".join(map(str, tokens)), {})


def rewards(scale="group"):
    return Rewards(even, spelled, scale)


def on_policy(model, **settings):
    defaults = {
        "fraction": 1.0,
        "max_new_tokens": 5,
        "sampling": Sampling(1.0),
        "seed": 3,
        "max_length": 40,
        "samples": 2,
        "log_probs": True,
        "rewards": rewards(),
    }
    return OnPolicyRollouts(DecodeLoop(model, EngineSettings(2, [0], log_probs=True)), **(defaults | settings))


# ------------------------------------------------------------------ advantages


@pytest.mark.parametrize("group", [[0.0, 1.0, 1.0, 0.0], [3.5, -2.0, 0.25], [1.0, 1.0], [0.1] * 7, [5.0]])
def test_advantages_are_distances_from_the_groups_mean(group):
    values = torch.tensor(group, dtype=torch.float64)
    distance = values - values.mean()
    flat = len(set(group)) == 1
    scaled = torch.zeros_like(values) if flat else distance / (values.std(correction=1) + 1e-4)
    assert group_advantages(group) == pytest.approx(scaled.tolist(), rel=1e-12)
    assert group_advantages(group, "none") == pytest.approx([0.0] * len(group) if flat else distance.tolist())
    assert not flat or group_advantages(group) == [0.0] * len(group)  # exactly: rounding is no signal


@pytest.mark.parametrize("shape", ["plain", "packed"])
@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_each_token_of_an_answer_has_its_answers_advantage(shape, one_row, scale):
    model = tiny_model(dtype=torch.float64)
    own = on_policy(model, samples=3, one_row=one_row, rewards=rewards(scale))
    (batch,) = own.replace([COLLATE(pairs(6) if shape == "plain" else packed(pairs(6)))], 0, COLLATE)
    groups = {}
    for document in documents_of(batch):
        groups.setdefault(tuple(document.prompt), []).append(document.ids[len(document.prompt) :])
    assert sorted(map(len, groups.values())) == [3] * 6
    expected = {}
    for prompt, answers in groups.items():
        points = torch.tensor([sum(token % 2 == 0 for token in answer) for answer in answers], dtype=torch.float64)
        spread = points.std() + 1e-4 if scale == "group" else 1.0
        for answer, value in zip(answers, (points - points.mean()) / spread, strict=True):
            expected[(*prompt, *answer)] = value.item()
    assert len(set(expected.values())) > 3
    found, learned = batch["advantages"], batch["labels"] != -100
    assert found.shape == batch["labels"].shape and not found[~learned].any()
    values = iter(found[learned].tolist())
    for document in documents_of(batch):
        for _ in range(len(document.ids) - len(document.prompt)):
            assert next(values) == pytest.approx(expected[tuple(document.ids)], abs=1e-6)


def test_figures_are_means_over_answers_and_groups():
    own = on_policy(tiny_model(dtype=torch.float64), samples=2, max_new_tokens=2)
    batches = own.replace([COLLATE(pairs(16)), COLLATE(pairs(16, seed=1))], 0, COLLATE)
    points = {}
    for batch in batches:
        for document in documents_of(batch):
            answer = document.ids[len(document.prompt) :]
            points.setdefault(tuple(document.prompt), []).append(sum(token % 2 == 0 for token in answer))
    figures = own.pop_metrics(lambda values: values, torch.device("cpu"))
    groups = list(points.values())
    assert figures["reward"] == pytest.approx(statistics.fmean(r for group in groups for r in group))
    assert figures["reward_std"] == pytest.approx(statistics.fmean(statistics.stdev(group) for group in groups))
    flat = sum(len(set(group)) == 1 for group in groups) / len(groups)
    assert 0 < flat < 1 and figures["reward_zero_std"] == pytest.approx(flat)
    assert "reward" not in on_policy(tiny_model(), rewards=None).pop_metrics(lambda values: values, torch.device("cpu"))


# ------------------------------------------------------------------ the loss


@pytest.mark.plain(
    "{'discount': 0.5}-routed_answering",
    "{'teacher_weight': 0.0}-answering",
    "{'importance': True, 'clip': 0.1}-answering",
    "{}-answering",
)
@pytest.mark.parametrize("make", [answering, routed_answering])
@pytest.mark.parametrize("more", [{}, {"importance": True, "clip": 0.1}, {"discount": 0.5}, {"teacher_weight": 0.0}])
def test_loss_and_gradients_are_those_of_full_logits(make, more):
    """A = w (log p_t - log p_s), discounted, + the reward's, with autograd over all logits."""
    term = TERM | more
    subject = make()
    if make is routed_answering:
        subject.teacher = type(subject.teacher)(list(subject.teacher.models.values())[:2], subject.teacher.routes)
        subject.weights, subject.tokenizers = (1.0, 1.0), subject.tokenizers[:3]
    subject.loss = Loss.model_validate({"terms": [term]})
    objective, batch = subject.objective(), subject.batch()
    generator = torch.Generator().manual_seed(5)
    shape, learned = batch["labels"].shape, batch["labels"] != -100
    batch["sampled_log_p"] = (-4 - 2 * torch.rand(shape, generator=generator)).masked_fill(~learned, torch.nan)
    batch["advantages"] = torch.randn(shape, generator=generator).masked_fill(~learned, 0.0)
    got = subject.student(**objective.student_inputs(batch))["loss"]
    parameters = list(subject.student.parameters())
    gradients = torch.autograd.grad(got, parameters)
    objective.detach()
    labels, learned, rewarded = batch["labels"][:, 1:], learned[:, 1:], batch["advantages"][:, 1:].double()

    def log_p(model):
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        z = model(**inputs, use_cache=False).logits[:, :-1, : objective.columns].double().log_softmax(-1)
        return z.gather(-1, labels.clamp_min(0)[..., None])[..., 0]

    log_s = log_p(subject.student)
    models = list(subject.teacher.models.values())
    log_t = log_p(models[0])
    if make is routed_answering:
        log_t = torch.where(batch["routes"][:, :-1] == 0, log_t, log_p(models[1]))
    total = 0
    for row, column in learned.nonzero().tolist():
        gain, share, at = 0.0, 1.0, column
        while at < labels.shape[1] and learned[row, at]:
            gain = gain + share * (log_t - log_s)[row, at].detach()
            share, at = share * term.get("discount", 0.0), at + 1
        gain = term["teacher_weight"] * gain + rewarded[row, column]
        ratio = (log_s[row, column] - log_s[row, column].detach()).exp()
        if term.get("importance"):
            ratio = (log_s[row, column] - batch["sampled_log_p"][row, column + 1].double()).exp()
        clipped = ratio.clamp(0.9, 1.1) if "clip" in term else ratio
        total = total - torch.minimum(ratio * gain, clipped * gain)
    expected = term["weight"] * total / learned.sum()
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_token_that_the_teacher_rules_out_is_no_fault_of_the_reward_alone():
    """0 x -inf is no number."""
    section = Loss.model_validate({"terms": [TERM | {"teacher_weight": 0.0, "weight": 1.0}]})
    loss = SampledTokenLoss(section.terms[0], section, VocabularyAlignment(LogitTransform(), 2, None), LogitTransform())
    hidden, weight = torch.ones(1, 1, 1), torch.zeros(2, 1)
    inputs = StepInputs(hidden, None, False, advantages=torch.tensor([[2.0]]))
    call = HeadForward(hidden, HeadWeights(weight, None, None), inputs, torch.tensor([[1]]), None)
    assert loss(call, HeadWeights(weight, torch.tensor([0.0, -torch.inf]), None)).item() == -2.0


# ------------------------------------------------------------------ steps


def two_steps(folder, batch, accumulation, rows=None, **more):
    """Weights and figures of two steps of four prompts with two answers each."""
    student = tiny_model(dtype=torch.float64)
    made = DistillationTrainer(
        student,
        tiny_model(seed=1, hidden=64, dtype=torch.float64),
        arguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=1.0,
        ),
        loss=Loss.model_validate({"terms": [TERM]}),
        train_dataset=Dataset.from_list(rows or pairs()),
    )
    made.add_callback(RolloutBatches(on_policy(student, max_new_tokens=3, **more), made))
    made.train()
    logged = [entry for entry in made.state.log_history if "reward" in entry]
    keys = ("rollouts", "reward", "reward_std", "reward_zero_std", "trained_tokens")
    found = [[round(row[key], 9) for key in keys] for row in logged]
    return weights(made.accelerator.unwrap_model(made.model)), found


@pytest.mark.full
def test_accumulation_and_ranks_learn_the_same(tmp_path):
    expected = two_steps(tmp_path, 4, 1)
    assert all(row[1] > 0 for row in expected[1])
    same_run(expected, two_steps(tmp_path, 2, 2))
    without, _ = two_steps(tmp_path, 4, 1, rewards=Rewards(lambda questions: [0.0] * len(questions), spelled))
    assert any(not torch.allclose(without[name], value) for name, value in expected[0].items())
    run_as_two(__file__, tmp_path, timeout=300)
    same_run(expected, torch.load(tmp_path / "two.pt", weights_only=True))


def test_packed_rows_learn_what_plain_ones_do(tmp_path):
    rows = pairs(4)
    apart = two_steps(tmp_path, 4, 1, rows=rows)
    together = two_steps(tmp_path, 1, 1, rows=packed(rows, 4), max_length=200)
    same_run(apart, together)


def test_a_reward_without_rollouts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a reward needs a callback of RolloutBatches with rewards"):
        two_steps(tmp_path, 4, 1, rewards=None)


def late_reward(folder, terms, seed):
    """Mean reward of the answers of the last steps, whether the loss has it or not."""
    student = tiny_model(dtype=torch.float64, seed=seed)
    made = DistillationTrainer(
        student,
        tiny_model(seed=11, hidden=64, dtype=torch.float64),
        arguments(folder, max_steps=30, per_device_train_batch_size=8, learning_rate=5e-3),
        loss=Loss.model_validate({"terms": terms}),
        train_dataset=Dataset.from_list(pairs(32)),
    )
    made.add_callback(RolloutBatches(on_policy(student, samples=4, max_new_tokens=4, seed=seed), made))
    made.train()
    found = [row["reward"] for row in made.state.log_history if "reward" in row]
    return statistics.fmean(found[:5]), statistics.fmean(found[-5:])


@pytest.mark.full
def test_a_reward_is_learned(tmp_path):
    early, late = late_reward(tmp_path, [TERM | {"weight": 1.0, "teacher_weight": 0.0}], 0)
    assert late > early + 0.5


@pytest.mark.full
def test_a_reward_added_to_the_reverse_kl_improves_on_the_reverse_kl(tmp_path):
    """At equal steps, in each of three seeds."""
    both = [{"type": "reverse_kl"}, TERM | {"weight": 1.0, "teacher_weight": 0.0}]
    for seed in range(3):
        alone, rewarded = (late_reward(tmp_path, terms, seed)[1] for terms in (both[:1], both))
        assert rewarded > alone + 0.2, (seed, alone, rewarded)


# ------------------------------------------------------------------ runs

FILE = """
def right(prompt, answer, row):
    assert prompt[-1]["role"] == "user" and row["id"] == int(prompt[-1]["content"].split()[1][:-1])
    return sum(letter in row["letters"] for letter in answer) / 10
"""
RUN = """
teacher: {model: teacher}
student: {model: student}
data:
    source: pairs.jsonl
    max_length: 64
    cache: false
    validation: {fraction: 0.2}
    on_policy: {max_new_tokens: 6, samples: 2}
loss: {terms: [{type: reverse_kl}, {type: policy_gradient, reward: "mine.py:right", teacher_weight: 0, weight: 0.5}]}
train: {steps: 4, batch_size: 2, learning_rate: 1e-3, warmup: 0, log_every: 1, device: cpu, save_every: 2}
generate: {prompts: []}
"""


pytestmark = pytest.mark.place(
    files={
        "pairs.jsonl": [
            {"prompt": f"FunctionInput {n}?", "completion": f"It is {n * n}.", "id": n, "letters": "aeiou"}
            for n in range(40)
        ],
        "mine.py": FILE,
    },
    teacher={"layers": 3, "seed": 1},
    student={"seed": 2},
)


def recipe_of(*overrides):
    return parse(RUN, [*plugin_override(Path("mine.py")), *overrides])


@pytest.mark.full
def test_a_resumed_run_is_the_same_to_the_bit(workplace):
    storing = "data.on_policy.store_every=1"
    whole = run(recipe_of(storing), name="whole", plugin=Path("mine.py")).folder
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["reward_zero_std"] <= 1 and row["reward_std"] >= 0 for row in rows)
    assert any(row["reward"] > 0 for row in rows)
    shutil.copytree(whole, whole.parent / "again")
    again = whole.parent / "again"
    for path in (again / "checkpoint-4", again / "student"):
        shutil.rmtree(path)
    (again / "result.json").unlink()
    run(recipe_of(storing), name="again", resume=True, plugin=Path("mine.py"))
    rewards_are_stored(rows, [row for file in files(whole) for row in read(file)])
    assert [read(file) for file in files(whole)] == [read(file) for file in files(again)]
    metrics = [list(map(same, read_metrics(folder / "metrics.jsonl"))) for folder in (whole, again)]
    assert metrics[0] == metrics[1]
    both = [load_file(folder / "student" / "model.safetensors") for folder in (whole, again)]
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())


def rewards_are_stored(logged, stored):
    """Each answer's own reward and its advantage within its group; the log has their means."""
    tokenizer, groups = tiny_tokenizer(), {}
    for row in stored:
        said = tokenizer.decode(row["answer_ids"]).removesuffix(tokenizer.eos_token)
        assert row["reward"] == pytest.approx(sum(letter in "aeiou" for letter in said) / 10)
        groups.setdefault((row["step"], *row["prompt_ids"]), []).append(row)
    for group in groups.values():
        values = [row["reward"] for row in group]
        assert len(group) == 2
        assert [row["advantage"] for row in group] == pytest.approx(group_advantages(values), abs=1e-6)
    for entry in logged:
        found = [row["reward"] for row in stored if row["step"] == entry["step"]]
        assert statistics.fmean(found) == pytest.approx(entry["reward"], abs=1e-6)
    assert len({row["reward"] for row in stored}) > 1


def same(row):
    return {key: row.get(key) for key in ("step", "loss", "reward", "reward_std", "reward_zero_std", "rollout_length")}


def test_code_runs_only_where_it_was_allowed(workplace):
    for path in (None, Path("other.py")):
        with pytest.raises(ValueError, match=r"the reward mine\.py:right runs code; allow it with --plugin mine\.py"):
            allowed_plugin(parse(RUN).loss, path)
    (workplace / "mine.py").write_text("raise SystemExit('this process runs it')")
    assert allowed_plugin(recipe_of().loss, workplace / "mine.py").terms == {}


if __name__ == "__main__":  # one of two processes
    torch.set_num_threads(1)
    result = two_steps(Path(sys.argv[1]), 2, 1)
    if torch.distributed.get_rank() == 0:
        torch.save(result, Path(sys.argv[1]) / "two.pt")
    torch.distributed.barrier()
    exit_process(0)
