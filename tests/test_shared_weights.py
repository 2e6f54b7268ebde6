"""One copy of a checkpoint that teacher and student hold frozen: less memory, and the same run to the last bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.models.patch.patching import patch
from distill.recipe import parse
from distill.run import run
from distill.teachers.load_context import load_context
from distill.teachers.opening import open_pair
from distill.teachers.registry import source_of

RECIPE = """
teacher: {model: base, context: {template: 'Know that {hint}'}}
student: {model: base, lora: {r: 4, alpha: 16, dropout: 0.1}}
data: {source: chat.jsonl, max_length: 192, cache: false}
train: {steps: 6, batch_size: 2, tokens_per_step: 768, learning_rate: 1e-2, device: cpu, log_every: 1}
generate: {prompts: []}
"""
ITSELF = "teacher={type: student, context: {template: 'Know that {hint}'}}"
# the same files in another folder, which are loaded a second time
COPY = "teacher={model: copy, context: {template: 'Know that {hint}'}}"
PLAIN = "teacher={model: %s}"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "base", tiny_model(tokenizer, hidden=64, seed=1), tokenizer)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is it, for the time {number}?"},
                {"role": "assistant", "content": f"It is {'so ' * (number % 4)}nine."},
            ],
            "hint": f"The sum of four and five is nine. {number}",
        }
        for number in range(24)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def recipe(*overrides):
    return parse(RECIPE, overrides, name="tiny")


def opened(*overrides):
    source = source_of(recipe(*overrides))
    return open_pair(source, source.vocabulary(), load_context(source.recipe))


def weight_bytes(pair):
    """Return the bytes of all weights, storages that several parameters lie in counted once, and of the adapters."""
    parameters = [(name, p) for _, model in pair.models() for name, p in model.named_parameters()]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, p in parameters}
    return sum(storages.values()), sum(p.nbytes for name, p in parameters if "lora_" in name)


def figures(folder):
    """Return the losses of each step, the held-out figures and the trained weights of a run."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(step["step"], name, step[name]) for step in steps for name in ("loss", "grad_norm") if name in step]
    result = json.loads((folder / "result.json").read_text())
    return losses, result["before"], result["after"], load_file(folder / "adapter/adapter_model.safetensors")


def assert_same(one, other):
    assert len(one[0]) >= 10 and one[0] == other[0]
    assert one[1:3] == other[1:3]
    assert one[3].keys() == other[3].keys()
    assert any(tensor.any() for name, tensor in one[3].items() if "lora_B" in name), "the adapters are trained"
    assert all(torch.equal(tensor, other[3][name]) for name, tensor in one[3].items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_half_the_weights_and_the_same_run(workplace, precision):
    """Held against a run whose teacher is read from a copy of the files."""
    setting = f"train.precision={precision}"
    two, adapters = weight_bytes(opened(setting, COPY))
    for name, override in (("itself", ITSELF), ("path", "teacher.model=./base")):
        pair = opened(setting, override)
        one, _ = weight_bytes(pair)
        assert one - adapters == (two - adapters) / 2 and one <= 0.55 * two + adapters
        assert pair.sharing.startswith("teacher and student hold one copy of")
        assert not any(p.requires_grad for p in pair.teacher.models["teacher"].parameters())
    assert_same(*(figures(run(recipe(setting, override), name=name).folder) for name, override in (("a", ITSELF), ("b", COPY))))
