"""Write tiny models (a pair, a second teacher, a student with another tokenizer), 80 chats and `tiny.yaml`.

The guides' examples run with them on any CPU.

python scripts/examples/tiny_pair.py [FOLDER]        # then, in the folder: distill run tiny.yaml
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
RECIPE = """\
teacher: {model: ./tiny-teacher}
student: {model: ./tiny-student}
data: {source: ./chats.jsonl, max_length: 128, validation: {fraction: 0.1}}
train: {steps: 12, tokens_per_step: 1024, batch_size: 4, learning_rate: 1e-2, log_every: 4, device: cpu}
generate: {prompts: []}
"""


def chats() -> list[dict]:
    """Return questions on sums of two numbers, with answers, a hint for each, and the domain `small` or `large`."""
    rows = []
    for a, b in itertools.product(range(2, 12), range(3, 11)):
        question, answer = f"What is {a} plus {b}?", f"If you add {b} to {a}, you get {a + b}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "hint": f"the sum is {a + b}", "domain": "small" if a + b < 12 else "large"})
    return rows


def byte_tokenizer(size: int, text: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `size` tokens: special ones, 256 bytes, merges learned from `text`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIALS[0], pad_token=SPECIALS[2])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, seed: int) -> None:
    """Save a Llama with random weights, larger than usual so that its predictions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.15}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **shape, **heads, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path = Path()) -> None:
    """Write everything into `folder`."""
    rows = chats()
    text = "\n".join(message["content"] for row in rows for message in row["messages"])
    plain = byte_tokenizer(256 + len(SPECIALS) + 1, "qz")  # bytes, and one merge: llama.cpp reads none without
    save_model(folder / "tiny-teacher", plain, 64, 4, seed=1)
    save_model(folder / "tiny-second-teacher", plain, 64, 4, seed=4)
    save_model(folder / "tiny-student", plain, 32, 2, seed=2)
    save_model(folder / "tiny-other", byte_tokenizer(300, text), 32, 2, seed=3)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(RECIPE)
    print(f"wrote four tiny models, chats.jsonl and tiny.yaml into {folder.resolve()}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
