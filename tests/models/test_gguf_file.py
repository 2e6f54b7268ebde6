"""GGUF export: what is written reads back as the same model, and what cannot be told in the format is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from distill.cli import run_command
from distill.models.loading import load_config, load_tokenizer
from distill.recipe import LocalTeacherConfig
from distill.reports import gguf_file
from distill.reports.gguf_file import LLAMA_3, TEXTS, split_name, write_gguf

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved(folder: Path, split=None, **more) -> Path:
    """A tiny model whose heads, pairs and widths all differ; its vocabulary has rows that no token uses."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.backend_tokenizer.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    more = {"hidden": 64, "layers": 2, "vocab_size": 320, "rope_theta": 5e4} | more
    return save_tiny(folder, tiny_model(tokenizer, **more), tokenizer)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def read_back(path: Path, **more):
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **more
    ).eval()


def test_a_header_is_read_once_until_the_file_changes(tmp_path, monkeypatch):
    """`check` asks for a configuration forty times; a header with 49,152 tokens takes three seconds."""
    write_gguf(saved(tmp_path / "student"), tmp_path / "m.gguf", "f32")
    section, read = LocalTeacherConfig(model=str(tmp_path / "m.gguf")), []
    from_pretrained = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **k: read.append(a) or from_pretrained(*a, **k))
    first, second = load_config(section, "teacher"), load_config(section, "teacher")
    assert len(read) == 1 and first.to_dict() == second.to_dict()
    first.num_hidden_layers += 1
    assert load_config(section, "teacher").to_dict() == second.to_dict(), "each caller has a copy of its own"
    os.utime(tmp_path / "m.gguf", ns=(0, 0))
    load_config(section, "teacher")
    assert len(read) == 2


@pytest.mark.plain(
    "llama-{'tie': True}",
    "qwen2-{'tie': False}",
    "qwen3-{'tie': True, 'head_dim': 24, 'hidden': 40}",
    "mistral-{'tie': False, 'sliding_window': None}",
)
@pytest.mark.parametrize(
    "kind, more",
    [
        ("llama", {"tie": True}),
        ("llama", {"tie": False}),
        ("qwen2", {"tie": False}),
        ("qwen3", {"tie": True, "head_dim": 128}),
        ("qwen3", {"tie": True, "head_dim": 24, "hidden": 40}),
        ("llama", {"hidden": 40, "head_dim": 24}),
        ("mistral", {"tie": False, "sliding_window": None}),
    ],
)
def test_a_file_reads_back_as_the_same_model(kind, more, tmp_path):
    folder = saved(tmp_path / "m", kind=kind, **more)
    written = write_gguf(folder, tmp_path / "m.gguf", "f32")
    assert written.kl == pytest.approx(0, abs=1e-6)
    assert ("NFC" in written.note) == (kind == "qwen2"), "whose tokenizer normalises"
    other_heads = kind == "qwen3" and more["head_dim"] != 128  # llama.cpp reads their width, transformers takes 128
    assert ("transformers ignores the file's width of heads" in written.note) == other_heads
    assert bool(written.note) == (other_heads or kind == "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    again = read_back(Path(written.path), **({"config": model.config} if other_heads else {}))
    ids = list(range(5, 300, 3))
    assert torch.allclose(logits(model, ids), logits(again, ids), atol=2e-4)
    one, two = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    chat = [{"role": "user", "content": "Hello"}]
    assert one.apply_chat_template(chat, tokenize=False) == two.apply_chat_template(chat, tokenize=False)
    assert one(TEXTS[0]).input_ids == two(TEXTS[0]).input_ids and one.eos_token_id == two.eos_token_id
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.plain("f16")
@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0"])
def test_types_round_as_they_say(type, tmp_path):
    folder = saved(tmp_path / "m")
    sizes = {name: write_gguf(folder, tmp_path / f"{name}.gguf", name).bytes for name in ("f32", type)}
    written = write_gguf(folder, tmp_path / "x.gguf", type)
    assert 0 < written.kl < 0.01, "rounding shows, and little"
    assert ("activations to 8 bits" in written.note) == (type == "q8_0")
    assert sizes[type] < {"f16": 0.65, "bf16": 0.65, "q8_0": 0.5}[type] * sizes["f32"]


def test_the_rope_scaling_of_llama_3_is_written(tmp_path):
    """The file holds each frequency's divisor; with the model's own configuration the logits are the same."""
    from gguf import GGUFReader

    folder = saved(tmp_path / "m", rope_parameters=LLAMA_3_ROPE)
    written = write_gguf(folder, tmp_path / "m" / "m.gguf", "f32")
    assert "rope scaling" in written.note and written.kl == pytest.approx(0, abs=1e-6)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (tensor,) = [t for t in GGUFReader(written.path).tensors if t.name == "rope_freqs.weight"]
    plain = 5e5 ** (-torch.arange(0, 16, 2).float() / 16)
    assert torch.allclose(plain / torch.tensor(tensor.data), model.model.rotary_emb.inv_freq)
    assert tensor.data[0] == 1 and tensor.data[-1] == 32
    ids = list(range(3, 290))
    assert torch.allclose(
        logits(model, ids), logits(read_back(Path(written.path), config=model.config), ids), atol=2e-4
    )


@pytest.mark.parametrize(
    "kind, more, message",
    [
        ("gemma2", {}, "models of type 'gemma2' (supported: llama, mistral"),
        ("llama", {"rope_parameters": LINEAR_ROPE}, "rope of type 'linear' in a llama"),
        ("mistral", {"sliding_window": 16}, "sliding windows"),
        ("llama", {"attention_bias": True}, "biases of a llama"),
        ("qwen3", {"attention_bias": True, "head_dim": 128}, "biases of a qwen3"),
        ("llama", {"hidden_act": "gelu"}, "MLPs with gelu"),
        ("qwen2", {"rope_parameters": LLAMA_3_ROPE}, "rope of type 'llama3' in a qwen2"),
        ("qwen2", {"head_dim": 24}, "a qwen2 whose heads are 96 wide together, and its hidden channels 64"),
    ],
)
def test_models_that_the_format_cannot_describe_are_refused(kind, more, message, tmp_path):
    folder = saved(tmp_path / "m", kind=kind, **more)
    with pytest.raises(ValueError, match=r"--gguf: not supported") as error:
        write_gguf(folder, tmp_path / "m.gguf", "f32")
    assert message in str(error.value) and not (tmp_path / "m.gguf").exists()


# ---------------------------------------------------------------- tokenizers


@pytest.mark.plain("-llama-bpe", "-gpt-2")
@pytest.mark.parametrize(
    "split, name",
    [
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]), "llama-bpe"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"), BYTES]
            ),
            "qwen2",
        ),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            "smollm",
        ),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ways_of_splitting_have_names(split, name, tmp_path):
    tokenizer = tiny_tokenizer(280)
    tokenizer.backend_tokenizer.pre_tokenizer = split
    assert split_name(json.loads(tokenizer.backend_tokenizer.to_str())) == name
    folder = saved(tmp_path / "m", split)
    assert write_gguf(folder, tmp_path / "m.gguf", "f32").kl < 1e-6, "and read back, they split alike"


def test_text_that_llama_cpp_would_not_normalise_is_named(tmp_path):
    from tokenizers import normalizers

    folder, tokenizer = saved(tmp_path / "m"), tiny_tokenizer(300)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(folder)
    assert "NFC" in write_gguf(folder, tmp_path / "m.gguf", "f32").note


def test_other_tokenizers_are_refused(tmp_path):
    folder = saved(tmp_path / "m", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES]))
    with pytest.raises(ValueError, match="pre-tokenizer Whitespace then ByteLevel"):
        write_gguf(folder, tmp_path / "m.gguf", "f32")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"expected a tokenizer\.json"):
        write_gguf(folder, tmp_path / "m.gguf", "f32")
    without_merges = save_tiny(tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"a tokenizer without merges, of which llama\.cpp reads none"):
        write_gguf(without_merges, tmp_path / "m.gguf", "f32")


def test_a_tokenizer_beside_a_file_is_not_taken_for_the_files(tmp_path):
    """transformers prefers the folder's tokenizer.json, and then lacks the special tokens."""
    folder = saved(tmp_path / "m")
    write_gguf(folder, folder / "m.gguf", "f32")
    saved(folder, pre_tokenizers.Digits(individual_digits=True))
    loaded = load_tokenizer(LocalTeacherConfig(model=str(folder / "m.gguf")))
    assert loaded.eos_token == "<|end|>" and loaded.pad_token == "<|pad|>" and loaded.chat_template
    assert loaded(TEXTS[0]).input_ids == tiny_tokenizer(300)(TEXTS[0]).input_ids
    assert Path(loaded.name_or_path) == folder


# ---------------------------------------------------------------- the check


@pytest.mark.plain("order-differs in the file", "merges-encodes")
@pytest.mark.parametrize(
    "told, message",
    [
        ("order", "differs in the file"),
        ("epsilon", "computes other logits"),
        ("theta", "computes other logits"),
        ("merges", "encodes"),
    ],
)
def test_a_file_that_tells_it_wrong_is_not_kept(told, message, tmp_path, monkeypatch, fault):
    from gguf import GGUFWriter

    folder = saved(tmp_path / "m", rope_theta=1e4)
    wrong = {
        "epsilon": ("add_layer_norm_rms_eps", lambda value: 0.5),
        "theta": ("add_rope_freq_base", lambda value: 100.0),
        "merges": ("add_token_merges", lambda value: value[:5]),
    }
    if told == "order":
        fault.setattr(gguf_file, "INTERLEAVED", ())
    else:
        name, change = wrong[told]
        right = getattr(GGUFWriter, name)
        monkeypatch.setattr(GGUFWriter, name, lambda self, value: right(self, change(value)))
    with pytest.raises(ValueError, match=message):
        write_gguf(folder, folder / "m.gguf", "f32")  # beside the student's own tokenizer, as an export writes it
    assert not list(folder.glob("*.gguf"))


def test_the_command_writes_the_file_next_to_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "runs" / "mine" / "student")
    (tmp_path / "runs/mine/recipe.yaml").write_text("name: mine")
    assert run_command(["export", "mine", "-o", "out", "--gguf", "q8_0", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["gguf"]
    assert written["path"] == "out/out-q8_0.gguf" and written["bytes"] == Path("out/out-q8_0.gguf").stat().st_size
    assert run_command(["export", "mine", "-o", "out2", "--gguf", "f32"]) == 0
    assert "wrote out2/out2-f32.gguf" in capsys.readouterr().out
    assert run_command(["export", "mine", "-o", "out3", "--gguf", "q4"]) == 2
    assert "--gguf: expected one of f32" in capsys.readouterr().err and not Path("out3").exists()


DEFAULT, TOOL_USE = "{{ messages[0].content }}", "{{ tools }}{{ messages[0].content }}"


def keep_as_list(folder: Path) -> None:
    """Write the named templates as older tokenizers have them: a list in tokenizer_config.json."""
    found = AutoTokenizer.from_pretrained(folder).chat_template
    templates = {"default": found} if isinstance(found, str) else found
    for path in [folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*")]:
        path.unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    "templates, default, named",
    [
        (DEFAULT, DEFAULT, {}),
        ({"default": DEFAULT}, DEFAULT, {}),
        ({"default": DEFAULT, "tool_use": TOOL_USE, "rag-2": "r"}, DEFAULT, {"tool_use": TOOL_USE, "rag_2": "r"}),
        ({"tool_use": TOOL_USE}, None, {"tool_use": TOOL_USE}),
    ],
)
def test_named_chat_templates_are_written_as_llama_cpps_converter_does(templates, default, named, as_list, tmp_path):
    import gguf

    folder = saved(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = templates
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    if isinstance(templates, dict):
        assert as_list or set(templates) == {"default"} or (folder / "additional_chat_templates").is_dir()
        if as_list:
            keep_as_list(folder)
    written = write_gguf(folder, tmp_path / "m.gguf", "f32")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.chat_template")}
    expected = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    expected |= {"tokenizer.chat_template": default} if default else {}
    expected |= {"tokenizer.chat_templates": sorted(named)} if named else {}
    assert found == expected
    assert ("llama.cpp takes ChatML" in written.note) == (default is None)
    # gguf-py's own writer, which llama.cpp's converter calls, writes the same
    other = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    listed = templates if isinstance(templates, str) else [{"name": n, "template": t} for n, t in templates.items()]
    other.add_chat_template(listed)
    theirs = {key: value.value for data in other.kv_data for key, value in data.items() if "chat_template" in key}
    if "tokenizer.chat_templates" in theirs:
        theirs["tokenizer.chat_templates"] = sorted(theirs["tokenizer.chat_templates"])
    assert theirs == found


def test_templates_of_one_name_in_the_format_are_refused_and_variables_are_named(tmp_path):
    from distill.data.chat import with_template_kwargs

    folder = saved(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": DEFAULT, "tool-use": TOOL_USE, "tool_use": TOOL_USE}
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="chat templates called tool-use and tool_use, which have one name"):
        write_gguf(folder, tmp_path / "m.gguf", "f32")
    folder = saved(tmp_path / "n")
    with_template_kwargs(AutoTokenizer.from_pretrained(folder), {"enable_thinking": False}).save_pretrained(folder)
    written = write_gguf(folder, tmp_path / "n.gguf", "f32")
    assert """--chat-template-kwargs '{"enable_thinking": false}'""" in written.note
