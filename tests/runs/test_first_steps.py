"""Whole runs of one step, from chats to weights, against a reference that shares nothing with them.

The step is SGD's with a learning rate of 1, so that the weights' difference is the gradient of the whole data set: over
several micro-batches, the last of them smaller, packed or not, some without a token of one of the routes.
"""

import json
import os

import pytest
import torch
from chat_steps import Member, loss_of_chats
from safetensors.torch import load_file
from served import serving
from tiny import save_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.recipe import parse
from distill.recipe.yaml_text import to_yaml
from distill.run import run
from distill.serving.open import open_engine
from distill.training.progress import read_metrics

CONTEXT = {"template": "A hint. {hint}", "place": "before"}
JSD = {"temperature": 2.0, "terms": [{"type": "jsd", "beta": 0.3}, {"type": "cross_entropy", "weight": 0.5}]}
SKEWED = {
    "temperature": 1.5,
    "terms": [{"type": "skew_reverse_kl", "alpha": 0.2}, {"type": "cross_entropy", "weight": 0.3}],
    "label_smoothing": 0.1,
    "z_loss": 0.01,
}
# a padded vocabulary of 259 tokens; heads with a soft cap, a scale, a divisor, tied and not
MODELS = {
    "padded": {"layers": 3, "seed": 1, "vocab_size": 320},
    "capped": {"hidden": 64, "seed": 5, "kind": "gemma2", "final_logit_softcapping": 4.0, "vocab_size": 288},
    "scaled": {"hidden": 48, "seed": 6, "kind": "cohere", "logit_scale": 0.3, "vocab_size": 272},
    "student": {"seed": 2, "vocab_size": 272},
    "capped-student": {"seed": 3, "kind": "gemma2", "final_logit_softcapping": 3.0, "vocab_size": 272},
    "scaled-student": {"seed": 3, "kind": "cohere", "logit_scale": 0.4, "vocab_size": 272},
    "divided-student": {"seed": 4, "kind": "granite", "logits_scaling": 2.0, "tie": False, "vocab_size": 272},
}
SERVED = {"type": "server", "url": "{url}", "of": "padded"}
# by name: student, loss, rows a micro-batch, teachers; `of` names the model of a section that does not
CASES = {
    "filled with a context": ("capped-student", JSD, 2, [{"model": "scaled", "online_cache": "a", "context": CONTEXT}]),
    "the student with a context": ("divided-student", SKEWED, 1, [{"type": "student", "context": CONTEXT}]),
    "served, in a mixture": ("student", SKEWED, 3, [{**SERVED, "weight": 3}, {"model": "capped"}]),
    "on routes": (
        "scaled-student",
        JSD,
        1,
        [
            {**SERVED, "online_cache": "a", "route": "even", "weight": 3},
            {"model": "scaled", "route": "even", "context": CONTEXT},
            {"model": "capped", "online_cache": "b", "route": "odd"},
        ],
    ),
    "a running average on a route": (
        "capped-student",
        SKEWED,
        2,
        [{"type": "student", "ema": 0.9, "context": CONTEXT, "route": "even"}, {**SERVED, "route": "odd"}],
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, and chats of one to three turns; every third has a system prompt."""
    folder = tmp_path_factory.mktemp("steps")
    save_models(folder, **MODELS)
    for name, count in (("chats", 11), ("others", 4)):
        rows = [
            {"messages": list(chat(name, n)), "hint": f"Say {n * n}{'!' * (n % 5)}", "domain": ("even", "odd")[n % 2]}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def chat(name, number):
    if number % 3 == 0:
        yield {"role": "system", "content": f"Be short, {name} {number}."}
    for turn in range(1 + number % 3):
        yield {"role": "user", "content": f"What is {number * 7919 % 97} and {turn} to {name}?"}
        yield {"role": "assistant", "content": f"It is {'so ' * (number % 4)}{number * 31337 % 9973} {turn}."}


@pytest.fixture(scope="module")
def url(place):
    recipe = parse(
        f"{{teacher: {{model: {place}/padded}}, student: {{model: {place}/student}}, "
        f"data: {{source: {place}/chats.jsonl}}, train: {{steps: 1, device: cpu}}}}"
    )
    with serving(open_engine(recipe, 4096)) as address:
        yield address


@pytest.mark.plain("on routes-padded")
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_full_logits(name, packing, place, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for each in os.listdir(place):
        (tmp_path / each).symlink_to(place / each)
    student, loss, batch, teachers = CASES[name]
    routed = any("route" in teacher for teacher in teachers)
    sections = [
        {key: url if key == "url" else value for key, value in teacher.items() if key != "of"} for teacher in teachers
    ]
    data = {"source": "chats.jsonl", "max_length": 300, "packing": packing, "cache": False}
    data |= {"validation": {"source": "others.jsonl"}, "fields": {"teacher": "domain"} if routed else {}}
    train = {"epochs": 1, "batch_size": batch, "tokens_per_step": 300 * 60, "learning_rate": 1.0, "warmup": 0}
    train |= {"schedule": "constant", "optimizer": "sgd", "max_grad_norm": 0, "log_every": 1, "device": "cpu"}
    tree = {"teacher": sections[0]} if len(sections) == 1 else {"teachers": sections}
    tree |= {"student": {"model": student}, "data": data, "train": train, "loss": loss, "generate": {"prompts": []}}
    folder = run(parse(to_yaml(tree), name="step"), name="step").folder
    (logged,) = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]

    def wide(model):
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()

    members = [
        Member(
            wide(teacher.get("model") or teacher.get("of") or student),
            *(teacher.get(key, default) for key, default in (("weight", 1.0), ("route", None), ("context", None))),
        )
        for teacher in teachers
    ]
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    reference = wide(student)
    expected = loss_of_chats(reference, rows, AutoTokenizer.from_pretrained(student), members, loss, 272)
    expected.backward()
    assert logged["loss"] == pytest.approx(expected.item(), rel=1e-5)
    before, after = load_file(f"{student}/model.safetensors"), load_file(folder / "student" / "model.safetensors")
    for key, weight in reference.named_parameters():
        if key in before:
            error = (before[key].double() - after[key].double() - weight.grad).norm() / weight.grad.norm()
            assert error < 2e-4, (key, error)
