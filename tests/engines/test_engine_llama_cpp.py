"""GGUF files as llama.cpp itself reads them: tokens, greedy answers and distributions of every type that is written.

`python -m scripts.engines install llama_cpp` puts it there; without it these tests are skipped.
"""

import random
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.prompts import encode_prompt
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe.quantise import Quantise
from distill.reports.gguf_file import LLAMA_3, TYPES, write_gguf
from scripts.engines import llama_cpp

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not llama_cpp.installed(), reason="python -m scripts.engines install llama_cpp"),
]

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"), BYTES]
    ),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": {"kind": "llama", "tie": True},
    "llama, untied": {"kind": "llama", "tie": False},
    "llama 3": {"kind": "llama", "rope_parameters": LLAMA_3_ROPE},
    "mistral": {"kind": "mistral", "sliding_window": None},
    "qwen2": {"kind": "qwen2", "tie": False},
    "llama, cut": {"kind": "llama", "hidden": 48, "head_dim": 16, "seed": 1},  # two tokens of seed 0 are level to 7e-4
    "qwen3": {"kind": "qwen3", "head_dim": 128},
    "qwen3, cut": {"kind": "qwen3", "hidden": 48, "head_dim": 24},
}
# pieces of the texts: words, numbers, code, scripts without spaces, emoji of several code points, runs of white space,
# tokens added to the vocabulary
PIECES = (
    "the teacher explains",
    " student",
    "It's",
    "they'LL",
    "don't",
    "naïve café",
    "Straße",
    "ΑΒΓ αβγ",
    "Привет, мир",
    "東京タワー",
    "你好，世界",
    "안녕하세요",
    "مرحبا",
    "שלום",
    "ไทย",
    "हिन्दी",
    "🎉",
    "👩‍👩‍👧‍👦",
    "🇫🇷",
    "👍🏽",
    "…",
    "—",
    "“quoted”",
    "3.14159",
    "1,024",
    "2026-11-25",
    "0x1F",
    "007",
    "12345678901",
    "a1b2c3",
    "def f(x):\n    return x**2",
    "x != y && z",
    '{"key": [1, 2]}',
    "<b>bold</b>",
    "https://example.org/a?b=c#d",
    "C:\\path",
    "$\\frac{1}{2}$",
    "||",
    "```python",
    " ",
    "  ",
    "    ",
    "\t",
    "\t\t",
    "\n",
    "\n\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u200b",
    "\u3000",
    "_",
    "__init__",
    "CamelCaseName",
    "ALLCAPS",
    "aaaaaaaaaaaa",
    "!!!???",
    "#@%^&*",
    "<|start|>",
    "<|end|>",
    "<|extra_0|>",
    "<|extra_1|>",
)


def texts(count: int, seed: int) -> list[str]:
    """Random texts of the pieces, joined with and without spaces."""
    draw = random.Random(seed)
    made = [draw.choice(("", " ")).join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(count)]
    assert len(set(made)) > 0.95 * count
    return made


def student(folder: Path, split: str = "gpt-2", **more) -> Path:
    tokenizer = tiny_tokenizer(420)
    tokenizer.backend_tokenizer.pre_tokenizer = SPLITS[split]
    return save_tiny(folder, tiny_model(tokenizer, vocab_size=448, **{"hidden": 64, **more}), tokenizer)


@torch.no_grad()
def read_back(path: Path, folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [positions, vocabulary], float64, of the file's weights as transformers computes them."""
    from transformers import AutoConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        config=AutoConfig.from_pretrained(folder),
    ).eval()
    return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def kl(p: torch.Tensor, top: list[list[tuple[int, float]]]) -> float:
    """Mean KL(p || llama.cpp) over positions, nats; llama.cpp gives all of the vocabulary."""
    total = 0.0
    for row, each in zip(p, top, strict=True):
        assert len(each) == len(row)
        q = torch.full_like(row, -torch.inf)
        q[[number for number, _ in each]] = torch.tensor([value for _, value in each], dtype=row.dtype)
        total += float((row.exp() * (row - q)).sum())
    return total / len(p)


@pytest.mark.parametrize("split", SPLITS)
def test_five_hundred_texts_become_the_same_tokens(split, tmp_path):
    folder = student(tmp_path / "m", split)
    path = Path(write_gguf(folder, tmp_path / "m.gguf", "f16").path)
    tokenizer, given = AutoTokenizer.from_pretrained(folder), texts(500, seed=list(SPLITS).index(split))
    made = llama_cpp.judge(path, texts=given).tokens
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in given]
    assert [text for text, a, b in zip(given, made, expected, strict=True) if a != b] == []
    assert any(tokenizer.convert_tokens_to_ids("<|extra_0|>") in ids for ids in expected), "an added token occurs"


def test_decomposed_text_becomes_other_tokens_where_a_tokenizer_normalises(tmp_path):
    """The export notes this for tokenizers such as Qwen's."""
    from tokenizers import normalizers

    folder, tokenizer = student(tmp_path / "m"), tiny_tokenizer(420)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(folder)
    path = Path(write_gguf(folder, tmp_path / "m.gguf", "f16").path)
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    one, two = llama_cpp.judge(path, texts=[composed, decomposed]).tokens
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (composed, decomposed)]
    assert ids[0] == ids[1] == one and two != one


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_computes_what_the_student_does(kind, tmp_path):
    folder = student(tmp_path / "m", **KINDS[kind])
    path = Path(write_gguf(folder, tmp_path / "m.gguf", "f32").path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(texts(12, seed=5)), add_special_tokens=False).input_ids[:200]
    prompt = tokenizer("The teacher explains", add_special_tokens=False).input_ids
    made = llama_cpp.judge(path, prompts=[prompt, ids[:20]], count=24, sequences=[ids], top=448)
    with torch.no_grad():
        own = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert abs(kl(own, made.top[0])) < 1e-5
    for given, answer in zip((prompt, ids[:20]), made.greedy, strict=True):
        greedy = model.generate(
            input_ids=torch.tensor([given]),
            attention_mask=torch.ones(1, len(given), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
        )[0, len(given) :].tolist()
        assert answer == greedy


@pytest.mark.parametrize("type", TYPES)
def test_each_type_holds_the_weights_that_were_rounded(type, tmp_path):
    folder = student(tmp_path / "m", layers=3)
    written = write_gguf(folder, tmp_path / "m.gguf", type)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(texts(12, seed=6)), add_special_tokens=False).input_ids[:200]
    made = llama_cpp.judge(Path(written.path), sequences=[ids], top=448)
    gap = kl(read_back(Path(written.path), folder, ids), made.top[0])
    # llama.cpp rounds activations too, to the type of the weights they meet: as much again as the weights' rounding
    assert gap < max(1e-5, 4 * written.kl)


@pytest.mark.parametrize(
    "name, type, hidden, share",
    [
        ("q4_0", "q4_0", 64, 0.05),
        ("q5_0", "q5_0", 64, 0.05),
        ("q8_0", "q8_0", 64, 1.0),
        ("q6_k", "q6_k", 256, 0.3),
        ("q4_k", "q4_k_m", 256, 0.05),
        ("q4_k", "q4_k_m", 128, 0.05),
    ],
)
def test_a_trained_student_computes_the_same_in_its_file(tmp_path, name, type, hidden, share):
    """Only llama.cpp's own rounding of activations to 8 bits is left: a share of what rounding the weights costs."""
    folder = student(tmp_path / "m", layers=3, hidden=hidden)
    costs = write_gguf(folder, tmp_path / "plain.gguf", type).kl
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    weights = quantise_student(model, formats_of(model, Quantise(format=name)), learned=True)
    weights.scales.values.mul_(0.9)
    weights.round()
    model.save_pretrained(folder)
    weights.saved().write(folder)
    written = write_gguf(folder, tmp_path / "m.gguf", type)
    ids = tokenizer(" ".join(texts(12, seed=6)), add_special_tokens=False).input_ids[:200]
    made = llama_cpp.judge(Path(written.path), sequences=[ids], top=448)
    with torch.no_grad():
        own = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert written.exact and abs(written.kl) < 1e-9
    gap = kl(own, made.top[0])
    print(f"{name}: KL {gap:.1e}, rounding without training {costs:.1e}")
    assert gap < share * costs


@pytest.mark.slow
def test_smollm2_answers_as_the_decode_loop_and_transformers_do(smollm2_folder, tmp_path):
    """Greedy answers to chat prompts by the weights in float32, which GGUF holds exactly."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    path = Path(write_gguf(smollm2_folder, tmp_path / "m.gguf", "f32").path)
    questions = ["What is the capital of France?", "Name three colours.", "Add 17 and 25.", "Say hello in Spanish."]
    prompts = [encode_prompt(tokenizer, question) for question in questions]
    made = llama_cpp.judge(path, prompts=prompts, count=24).greedy
    own = DecodeLoop(model, EngineSettings(tokenizer.pad_token_id, [])).generate(prompts, max_new_tokens=24)
    for prompt, answer, ours in zip(prompts, made, own.tokens, strict=True):
        given = torch.tensor([prompt])
        theirs = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        assert answer == ours[: len(answer)] == theirs[: len(answer)]
        assert len(answer) == 24 or tokenizer.eos_token_id in ours[: len(answer) + 1]
    assert "Paris" in tokenizer.decode(own.tokens[0])
