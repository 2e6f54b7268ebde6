"""Export of a student as a GGUF file (the format of llama.cpp), read back and compared before it is kept.

    written = write_gguf(folder, folder / "student-q8_0.gguf", "q8_0")

A student trained in the file's format (`student.quantise`) gets the very blocks that it trained with, by the scales
beside its weights, and the file reads back equal. Any other student is rounded as llama.cpp's converter rounds.

Supported are Llama-like decoders (llama, mistral, qwen2, qwen3) with a byte-level BPE tokenizer whose pre-tokenizer has
a name in the format. Anything else is refused: a file that loads but computes wrong outputs is worse than none.
Matrices get the formats that `student.quantise` gives for the type, vectors (norms, biases) stay float32. Llama's
query and key rows are stored with the two halves of each head interleaved, as the format requires; Llama 3's rope
scaling becomes `rope_freqs.weight`, the divisor of each frequency.

The check loads the file with transformers and compares every weight with the student's, rounded to the type; the logits
with those of the student with the file's weights, so that shapes, rope and norms are right; and the tokens of texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from distill_kernels.quantisation.formats import FORMATS, Blocks, reference_quantise
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from distill.core.errors import RecipeError, first_line
from distill.core.files import atomic_path
from distill.data.chat import template_kwargs_of
from distill.models.head import attention_sizes
from distill.models.load.read_weights import read_weights
from distill.models.load.source import ModelFiles, tokenizer_place
from distill.models.precision.quantised_formats import SavedBlocks, formats_of, read_saved
from distill.recipe.quantise import GGUF_FILES, Quantise

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
INTERLEAVED = ("llama",)
FORMAT_OF = {type: form for form, type in GGUF_FILES.items()}  # type of a file -> format of student.quantise
DEFAULT = "default"  # name of the template that is taken where none is asked for
TYPES = ("f32", "f16", "bf16", *FORMAT_OF)
# largest error of a tensor relative to its norm
ROUNDING = {"f32": 0.0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 1.2e-2, "q6_k": 0.04, "q5_0": 0.08, "q4_0": 0.16}
ROUNDING["q4_k"] = ROUNDING["q4_0"]
AGREEING = 2e-3  # largest relative error of logits from the same weights
TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs; it's 4.5 kg, isn't it?\n\n\tdef f(x): return x**2  # café, 東京",
    "Question: what is 48/2 + 1,024?  Answer:   1048.",
)
# pre-tokenizer steps of byte-level tokenizers -> their name in the format; the patterns are those of the models'
# published tokenizer.json files
LLAMA_3 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # noqa: E501
SPLITS = {
    ("Split:" + LLAMA_3, "ByteLevel"): "llama-bpe",
    ("Split:" + LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"), "ByteLevel"): "qwen2",
    ("Digits", "ByteLevel:regex"): "smollm",
    ("ByteLevel:regex",): "gpt-2",
}


class ExportSummary(NamedTuple):
    """Summary of a written GGUF file.

    Attributes:
        kl: KL(student || file) on two short texts, nats per token: the cost of rounding the weights.
        note: Notes for users of the file; may be empty.
        exact: The student was trained with the file's own blocks.
    """

    path: str
    bytes: int
    type: str
    kl: float
    note: str = ""
    exact: bool = False


class TensorPlan(NamedTuple):
    """Types of a file's tensors.

    Attributes:
        formats: Format of each quantised tensor, by name.
        trained: Blocks that the student was trained with; None where its weights are rounded now.
    """

    type: str
    formats: Mapping[str, str]
    trained: SavedBlocks | None

    def type_of(self, name: str, tensor: torch.Tensor) -> str:
        """Return the GGUF type of a tensor: f32 for vectors, f16 where blocks do not fit or were not trained."""
        if tensor.ndim < 2:
            return "f32"
        return self.formats.get(name, "f16" if self.type in FORMAT_OF else self.type)

    def data_of(self, name: str, tensor: torch.Tensor, order: torch.Tensor) -> np.ndarray:
        """Return a tensor, its rows in `order`, as the file holds it: numbers, or the bytes of its blocks.

        Raises:
            RecipeError: A trained student's weights are not in its format.
        """
        kind = self.type_of(name, tensor)
        values = tensor.detach().float().contiguous()
        if kind not in FORMATS:
            return values[order].numpy().astype("float16" if kind == "f16" else "float32")
        blocks: Blocks | None = reference_quantise(values, kind)
        if self.trained is not None:
            blocks = self.trained.blocks(name, values)
        if blocks is None:
            raise RecipeError(
                [f"--gguf: {name} was trained in {kind}, and its weights are not; they were changed since"]
            )
        stored = {field: part[order] for field, part in blocks.stored.items()}
        return blocks.form.pack(blocks.codes[order], stored)["weight"].numpy()

    def rounding_of(self, name: str, tensor: torch.Tensor) -> float:
        """Return the largest error of a tensor in the file, relative to its norm."""
        kind = self.type_of(name, tensor)
        return 0.0 if self.trained is not None and kind in FORMATS else ROUNDING[kind]


def write_gguf(folder: Path, destination: Path, type: str = "q8_0") -> ExportSummary:
    """Write the model in `folder` as a GGUF file to `destination` and verify it by reading it back.

    Args:
        folder: Folder of a saved student with its tokenizer.
        destination: Path of the file; replaced only by a verified file.
        type: f32, f16, bf16, q8_0, q5_0 and q4_0 (8, 5 and 4 bits per weight and a scale per 32 weights), q6_k (6 bits,
            scales of 8 bits) or q4_k_m (4 and 6 bits, scales of 6 and 8 bits).

    Raises:
        RecipeError: The architecture, tokenizer or type is not supported, or the file reads back differently.
    """
    check_type(type)
    if not (folder / "tokenizer.json").is_file():
        raise RecipeError([f"--gguf: expected a tokenizer.json in {folder}, which a GGUF file needs; got none"])
    model = read_weights(AutoModelForCausalLM, folder, "--gguf", dtype="auto").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    check_supported(model.config, tokenizer)
    trained = read_saved(folder)
    trained = trained if trained is not None and trained.main == FORMAT_OF.get(type) else None
    formats = {} if trained is None else trained.by_name
    if trained is None and type in FORMAT_OF:
        formats = formats_of(model, Quantise.model_validate({"format": FORMAT_OF[type]})).by_name
    plan = TensorPlan(type, formats, trained)
    with atomic_path(destination) as unfinished:
        _write(model, tokenizer, unfinished, plan, destination.stem)
        kl = _check(model, tokenizer, unfinished, plan)
    nfc = _normalises(tokenizer)
    unread = _unread_settings(model.config)
    notes = {
        f"transformers ignores the file's {' and '.join(unread)}: load it with config=AutoConfig of the folder": bool(
            unread
        ),
        # measured with SmolLM2: 2.0e-3 nats from the weights, 7.0e-3 as llama.cpp computes
        "llama.cpp on CPUs also rounds activations to 8 bits, which adds to this": type in FORMAT_OF,
        "llama.cpp does not normalise text to NFC, as this tokenizer does: decomposed characters get other tokens": nfc,
    }
    notes |= _template_notes(tokenizer)
    note = "; ".join(text for text, holds in notes.items() if holds)
    return ExportSummary(str(destination), destination.stat().st_size, type, kl, note, trained is not None)


def _normalises(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a tokenizer normalises text before splitting it, as Qwen's do."""
    return bool(json.loads(tokenizer.backend_tokenizer.to_str()).get("normalizer"))


def check_type(type: str) -> None:
    if type not in TYPES:
        raise RecipeError([f"--gguf: expected one of {', '.join(TYPES)}; got {type!r}"])


def check_supported(config: Any, tokenizer: object) -> None:
    """Raise for a model or tokenizer that `write_gguf` would refuse.

    Raises:
        RecipeError: A line for each reason.
    """
    faults = gguf_faults(config, tokenizer)
    if faults:
        raise RecipeError([f"--gguf: not supported: {fault}" for fault in faults])


def gguf_faults(config: Any, tokenizer: object) -> list[str]:
    """Return what a GGUF file cannot express of a model or its tokenizer, or llama.cpp does not read of it."""
    kind = config.model_type
    backend = getattr(tokenizer, "backend_tokenizer", None)
    faults = [f"models of type {kind!r} (supported: {', '.join(ARCHITECTURES)})"]
    if kind in ARCHITECTURES:
        faults = _unread_parts(config)
    if backend is not None:
        try:
            split_name(json.loads(backend.to_str()))
        except RecipeError as error:
            faults += error.faults
    return faults + _template_faults(tokenizer)


def _unread_parts(config: Any) -> list[str]:
    kind = config.model_type
    rope = _rope_type(config)
    heads, _, width = attention_sizes(config)
    found = {
        f"rope of type {rope!r} in a {kind}": rope != "default" and (rope, kind) != ("llama3", "llama"),
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or [])
        or (kind == "mistral" and config.sliding_window is not None),
        f"biases of a {kind}, which readers ignore": kind != "qwen2"
        and (getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)),
        f"MLPs with {config.hidden_act}, which readers take for silu": config.hidden_act != "silu",
        f"a qwen2 whose heads are {heads * width} wide together, and its hidden channels {config.hidden_size}": (
            kind == "qwen2" and heads * width != config.hidden_size
        ),
    }
    return [fault for fault, holds in found.items() if holds]


def _rope_type(config: object) -> str:
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _unread_settings(config: Any) -> list[str]:
    """Return the settings of a file that llama.cpp reads and transformers does not."""
    fixed_width = config.model_type == "qwen3" and attention_sizes(config)[2] != 128
    settings = {"rope scaling": _rope_type(config) == "llama3", "width of heads": fixed_width}
    return [name for name, present in settings.items() if present]


def _write(model: Any, tokenizer: PreTrainedTokenizerFast, path: Path, plan: TensorPlan, name: str) -> None:
    import gguf

    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    heads, pairs, width = attention_sizes(config)
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(pairs)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    kind = "ALL_F32" if plan.type == "f32" else f"MOSTLY_{plan.type.upper()}"
    writer.add_file_type(gguf.LlamaFileType[kind])
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    if _rope_type(config) == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.float()
        plain = float(config.rope_parameters["rope_theta"]) ** (-torch.arange(0, width, 2).float() / width)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).numpy())
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    for key, tensor in model.named_parameters():
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise RecipeError([f"--gguf: the format has no tensor for the weight {key} of {config.model_type}"])
        order = torch.arange(len(tensor))
        if architecture in INTERLEAVED and (".q_proj." in key or ".k_proj." in key):
            # Rows i and i + width / 2 of a head, which rope turns together in transformers, become neighbours, as the
            # format pairs them.
            order = order.view(-1, 2, width // 2).transpose(1, 2).flatten()
        stored = gguf.GGMLQuantizationType[plan.type_of(key, tensor).upper()]
        data = plan.data_of(key, tensor, order)
        if stored == gguf.GGMLQuantizationType.BF16:
            data = gguf.quants.quantize(data, stored)
        writer.add_tensor(target, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    import gguf
    from gguf import TokenType

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    split = split_name(spec)
    vocabulary = {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}
    special = {token["id"]: token["special"] for token in spec["added_tokens"]}
    by_id = {number: token for token, number in vocabulary.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [
        TokenType.UNUSED
        if number not in by_id
        else TokenType.NORMAL
        if number not in special
        else TokenType.CONTROL
        if special[number]
        else TokenType.USER_DEFINED
        for number in range(rows)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    for name in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    for key, text in chat_templates(tokenizer).items():
        writer.add_string(key, text)
    named = [_name_in_file(name) for name in _named_templates(tokenizer) if name != DEFAULT]
    if named:
        writer.add_array(gguf.Keys.Tokenizer.CHAT_TEMPLATES, sorted(named))


def chat_templates(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Return a tokenizer's chat templates by the file's keys: the default one, and `tokenizer.chat_template.NAME`."""
    import gguf

    keys = gguf.Keys.Tokenizer
    return {
        keys.CHAT_TEMPLATE if name == DEFAULT else keys.CHAT_TEMPLATE_N.format(name=_name_in_file(name)): text
        for name, text in _named_templates(tokenizer).items()
    }


def _named_templates(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's chat templates by name, wherever its folder keeps them; a single one is the default."""
    templates = getattr(tokenizer, "chat_template", None) or {}
    return {DEFAULT: templates} if isinstance(templates, str) else dict(templates)


def _name_in_file(name: str) -> str:
    """Return a template's name as llama.cpp's converter writes it: of ASCII letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def _template_faults(tokenizer: object) -> list[str]:
    names: dict[str, list[str]] = {}
    for name in _named_templates(tokenizer):
        names.setdefault(_name_in_file(name), []).append(name)
    return [
        f"chat templates called {' and '.join(same)}, which have one name ({name}) in the format"
        for name, same in names.items()
        if len(same) > 1
    ]


def _template_notes(tokenizer: Any) -> dict[str, bool]:
    """Return what users of the file have to know about its chat templates, and whether it holds."""
    names = _named_templates(tokenizer)
    kwargs = template_kwargs_of(tokenizer)
    return {
        f"its chat templates are {', '.join(names)} and none is called default: llama.cpp takes ChatML unless one is "
        "given by --chat-template-file": bool(names) and DEFAULT not in names,
        "a GGUF file has no place for the variables that the student's prompts were rendered with: give llama.cpp "
        f"--chat-template-kwargs '{json.dumps(kwargs)}'": bool(kwargs),
    }


def split_name(spec: dict[str, Any]) -> str:
    """Return the format's name of a tokenizer.json's pre-tokenizer.

    Raises:
        RecipeError: It is not a byte-level BPE, or its pre-tokenizer has no name.
    """
    before = spec.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    parts = []
    for step in steps:
        kind = step.get("type", "none")
        if kind == "Split":
            kind += ":" + str(step["pattern"].get("Regex"))
        elif kind == "ByteLevel" and step.get("use_regex", True):
            kind += ":regex"
        parts.append(kind)
    name = SPLITS.get(tuple(parts))
    if spec["model"]["type"] != "BPE" or name is None or spec.get("normalizer") not in (None, {"type": "NFC"}):
        this = f"this tokenizer ({spec['model']['type']}, pre-tokenizer {' then '.join(parts)})"
        known = f"supported are byte-level BPE tokenizers with the pre-tokenizer of {', '.join(SPLITS.values())}"
        raise RecipeError([f"{this} has no name in the format; {known}"])
    if not spec["model"]["merges"]:
        raise RecipeError(["a tokenizer without merges, of which llama.cpp reads none"])
    return name


@torch.no_grad()
def _check(model: Any, tokenizer: PreTrainedTokenizerFast, path: Path, plan: TensorPlan) -> float:
    """Compare the file with the student; returns KL(student || file) on the texts, nats per token."""
    place: dict[str, Any] = {"gguf_file": path.name}
    with tokenizer_place(ModelFiles(str(path.parent), path.name)) as folder:
        again = AutoTokenizer.from_pretrained(folder, **place)
    for text in TEXTS:
        ids = [t(text, add_special_tokens=False).input_ids for t in (tokenizer, again)]
        if ids[0] != ids[1]:
            raise RecipeError([f"--gguf: the file's tokenizer encodes {text[:40]!r} differently; not written"])
    if _unread_settings(model.config):
        place["config"] = model.config
    try:
        loaded: Any = read_weights(
            AutoModelForCausalLM,
            path.parent,
            "--gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            **place,
        ).eval()
    except (RuntimeError, ValueError) as error:  # shapes that the format cannot express
        raise RecipeError([f"--gguf: transformers cannot read it back: {first_line(error)}"]) from error
    rows = [torch.tensor([tokenizer(text).input_ids]) for text in TEXTS]
    # the student's own outputs come first, since it gets the file's weights below
    before = [model.float()(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    theirs = dict(loaded.named_parameters())
    for name, tensor in model.named_parameters():
        allowed = plan.rounding_of(name, tensor) * float(tensor.norm())
        if name not in theirs or theirs[name].shape != tensor.shape or float((theirs[name] - tensor).norm()) > allowed:
            raise RecipeError([f"--gguf: {name} differs in the file; not written"])
    after = [loaded(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    # With the file's weights in the student's modules nothing is left to rounding: other logits mean that shapes, rope
    # or norms are read differently.
    model.load_state_dict(loaded.state_dict(), assign=True)
    for row, logs in zip(rows, after, strict=True):
        expected = model(input_ids=row).logits[0].log_softmax(-1)
        if float((logs - expected).norm()) > AGREEING * float(expected.norm()):
            raise RecipeError(["--gguf: the file's model computes other logits; not written"])
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True))
    return total / sum(len(p) for p in before)
