"""Tokenizers and models small enough to make on the spot: a byte-level tokenizer and models of tens of kilobytes.

tokenizer = tiny_tokenizer()
teacher = tiny_model(tokenizer, layers=4, hidden=64, seed=1)
save_tiny(tmp_path / "teacher", teacher, tokenizer)      # AutoModelForCausalLM.from_pretrained takes the folder
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "The teacher explains and the student listens. A small model learns to say what a large model says. "
    "def mean(values): return sum(values) / len(values)\n"
    "Question: how many tokens are there in this sentence? Answer: nobody has counted them yet.\n"
) * 3


def tiny_tokenizer(
    vocab_size: int = 256 + len(SPECIALS),
    chat_template: str | None = CHAT_TEMPLATE,
    specials: tuple[str, ...] = SPECIALS,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens that can encode every text.

    The first ids are `specials` (end of sequence, start of turn, padding; give two for pad = eos), then come 256
    bytes, then merges learned from a fixed text, then `<|extra_i|>` tokens where the text offers no more merges.
    `len(tokenizer)` is `vocab_size`.
    """
    assert vocab_size >= 256 + len(specials), f"vocab_size must be at least {256 + len(specials)}"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TRAINING_TEXT], trainer)
    missing = vocab_size - backend.get_vocab_size()
    backend.add_tokens([AddedToken(f"<|extra_{i}|>", normalized=False) for i in range(missing)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=specials[0], pad_token=specials[2] if len(specials) > 2 else specials[0]
    )
    tokenizer.chat_template = chat_template
    assert len(tokenizer) == vocab_size
    return tokenizer


def tiny_config(
    kind: str = "llama", *, vocab_size: int = 259, layers: int = 2, hidden: int = 32, tie: bool = True, **more
):
    """The configuration of a tiny model of any llama-like `kind` (llama, qwen2, gemma2, granite, cohere) or gpt2."""
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 2,
    }
    if kind == "gpt2":
        return AutoConfig.for_model(
            "gpt2",
            vocab_size=vocab_size,
            n_embd=hidden,
            n_layer=layers,
            n_head=4,
            n_positions=512,
            tie_word_embeddings=tie,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=2,
            **more,
        )
    return AutoConfig.for_model(kind, **(common | more))


def tiny_model(
    tokenizer: PreTrainedTokenizerFast | None = None,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
    tie: bool = True,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    **more,
) -> PreTrainedModel:
    """A causal language model with random weights, in eval mode; the same seed gives the same weights.

    `more` goes to the configuration (`vocab_size=320` pads the vocabulary beyond the tokenizer's). Weights are drawn
    larger than usual, so that predictions differ from uniform. The global random state is left as it was.
    """
    more.setdefault("vocab_size", len(tokenizer) if tokenizer is not None else 259)
    more.setdefault("initializer_range", 0.15)
    config = tiny_config(kind, layers=layers, hidden=hidden, tie=tie, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def save_tiny(
    folder: Path, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Save a tiny model and its tokenizer (both made where not given) as a local folder; returns the folder."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    model = tiny_model(tokenizer) if model is None else model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


@functools.cache
def _tiny_files(settings: str) -> dict[str, bytes]:
    """What `save_tiny` writes for these settings, made once a process: a model takes 16 ms to make and save."""
    of_model = json.loads(settings)
    tokenizer = tiny_tokenizer(of_model.pop("tokens"))
    model = tiny_model(tokenizer, **of_model)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder), model, tokenizer)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def save_models(
    folder: Path,
    *,
    text: str | None = None,
    tokens: int = 259,
    files: dict[str, str | list] | None = None,
    **models: dict,
) -> PreTrainedTokenizerFast:
    """Save models of one tokenizer, each by its name with its settings of `tiny_model`; `text` goes into text.txt.

    `files` are texts by their names, or rows, which become lines of JSON. A tokenizer of more than 259 `tokens` has
    merges, without which llama.cpp reads none; a model's own setting `tokens` gives it another tokenizer.
    """
    for name, settings in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        settings = {"tokens": tokens} | settings
        for file, content in _tiny_files(json.dumps(settings)).items():
            (folder / name / file).write_bytes(content)
    for file, content in (({} if text is None else {"text.txt": text}) | (files or {})).items():
        rows = isinstance(content, list)
        (folder / file).write_text("\n".join(map(json.dumps, content)) if rows else content)
    return tiny_tokenizer(tokens)
