"""Problems reported for other distillation tools: a LoRA on a tied head, added tokens, one-token responses."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from two_tokenizers import TOKENIZERS

from distill.cli import run_command
from distill.recipe import Data
from distill.reports.gguf_file import write_gguf
from distill.teachers.rows.retokenised.data import load_cross_data
from distill.training.progress import read_metrics

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 6, batch_size: 2, learning_rate: 1e-2, warmup: 0, log_every: 1, save_every: 3, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    text = "\n".join(f"The teacher explains line {line} and the student listens to it." for line in range(40))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.full
def test_a_lora_on_a_tied_head_changes_the_head_alone(place):
    """Merged, the head is the adapted one and the embedding the base's; adapter and merged model say the same."""
    tokenizer = tiny_tokenizer()
    save_tiny(place / "teacher", tiny_model(tokenizer, seed=1), tokenizer)
    save_tiny(place / "student", tiny_model(tokenizer, seed=2, tie=True), tokenizer)
    assert run_command(["run", "r.yaml", "student.lora={r: 4, head: true}"]) == 0
    base, saved = load_file("student/model.safetensors"), load_file("runs/r/student/model.safetensors")
    assert "lm_head.weight" not in base
    assert torch.equal(saved["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(saved["lm_head.weight"], base["model.embed_tokens.weight"])
    assert json.loads((place / "runs/r/student/config.json").read_text())["tie_word_embeddings"] is False
    merged, ids = AutoModelForCausalLM.from_pretrained("runs/r/student"), list(range(3, 40))
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("student"), "runs/r/adapter")
    torch.testing.assert_close(logits(merged, ids), logits(with_adapter, ids), rtol=1e-4, atol=1e-4)
    losses = [row["loss"] for row in read_metrics(place / "runs/r/metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]


def test_added_tokens_keep_their_ids_and_rows_in_a_gguf_file(tmp_path):
    tokenizer = tiny_tokenizer(300)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    added = {"<|tool|>": True, "<think>": False, "</think>": False}
    for content, special in added.items():
        tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)], special_tokens=special)
    model = tiny_model(tokenizer, hidden=64, vocab_size=320)
    folder = save_tiny(tmp_path / "m", model, tokenizer)
    write_gguf(folder, tmp_path / "m.gguf", "f32")
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    text = "Ask <|tool|>now<think>what then</think> and say it."
    ids = tokenizer(text).input_ids
    for number, content in enumerate(added):
        assert tokenizer.convert_tokens_to_ids(content) == again.convert_tokens_to_ids(content) == 300 + number
        assert 300 + number in ids
    assert again(text).input_ids == ids and again.decode(ids) == tokenizer.decode(ids) == text
    assert again.decode(ids, skip_special_tokens=True) == text.replace("<|tool|>", "")
    rows = slice(300, 303)
    assert torch.equal(loaded.get_input_embeddings().weight[rows], model.get_input_embeddings().weight[rows])
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize("teacher, student", [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "merged")])
def test_answers_of_one_token_are_learned_across_tokenizers(place, teacher, student):
    """The response's token and the end are compared at their positions in either tokenizer."""
    mine, theirs = (copy.deepcopy(TOKENIZERS[name]) for name in (student, teacher))
    mine.chat_template = theirs.chat_template = None
    rows = [{"prompt": f"Is {number} even? ", "completion": "yn"[number % 2]} for number in range(40)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": "rows.jsonl", "max_length": 64, "packing": False, "cache": False, "validation": {"fraction": 0.2}}
    for row in load_cross_data(Data.model_validate(data), mine, theirs, seed=1).train:
        for side, (tokenizer, ids) in enumerate(((mine, row["input_ids"]), (theirs, row["teacher_input_ids"]))):
            first, end = (span[2 * side : 2 * side + 2] for span in (row["spans"][:4], row["spans"][4:]))
            assert [first, end] == [[len(ids) - 2, len(ids) - 1], [len(ids) - 1, len(ids)]]
            assert tokenizer.decode(ids[-2:-1]).strip() in ("y", "n") and ids[-1] == tokenizer.eos_token_id
        assert [label != -100 for label in row["labels"]] == [False] * (len(row["labels"]) - 2) + [True, True]
    save_tiny(place / "teacher", tiny_model(theirs, hidden=64, seed=1), theirs)
    save_tiny(place / "student", tiny_model(mine, seed=2), mine)
    across = ["data.source=rows.jsonl", "data.packing=false", "student.vocabulary=cross", "train.steps=12"]
    assert run_command(["run", "r.yaml", *across]) == 0
    result = json.loads((place / "runs/r/result.json").read_text())
    assert result["after"]["forward_divergence"] < 0.5 * result["before"]["forward_divergence"]
