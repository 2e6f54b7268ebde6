"""Teachers whose linear layers are quantised by transformers: in int8 when they are loaded, or in the checkpoint.

A frozen teacher is asked for its hidden states and for its head. Whatever computes the hidden states may be quantised;
the head must be a plain `nn.Linear` in floating point, since the fused loss reads its weight (`read_head` holds that).
transformers leaves the head out by default: `BitsAndBytesConfig` does so when it quantises, and nearly all quantised
checkpoints were made so. A student is trained, cut and saved, and is never quantised.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from distill_kernels import Fp8Linear
from distill_kernels.matmul.fp8_experts import Fp8Experts
from torch import nn

from distill.core.errors import first_line
from distill.models.dtypes import is_in_4_bits
from distill.models.head import find_head, read_head
from distill.recipe import ModelSection
from distill.recipe.models import LOW_BITS

INSTALL = "pip install 'bitsandbytes>=0.48'"
# bits a weight takes, by quantisation method; where the configuration has `bits` or `load_in_4bit`, that counts
BITS = {"bitsandbytes": 8.0, "fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "eetq": 8.0}
NF4 = 4.5  # 4 bits and one fp32 scale for each 64 weights
# bits that a weight takes where the recipe's `dtype` quantises it; nf4 with scales that are quantised too (nf4.py)
BITS_OF_DTYPE = {"fp8": 8.0, "int8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}


def quantisation_of(config: Any) -> Mapping[str, Any] | None:
    """Return a model's quantisation configuration; None where its weights are not quantised."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            return found if isinstance(found, Mapping) else found.to_dict()
    return None


def method_of(found: Mapping[str, Any]) -> str:
    method = found.get("quant_method")
    return str(getattr(method, "value", method) or "bitsandbytes")


def stored_bits(found: Mapping[str, Any]) -> float | None:
    """Bits that a weight of a linear layer takes, scales included where they are known; None where nothing is known."""
    if found.get("load_in_4bit"):
        return NF4
    bits = found.get("bits")
    group = found.get("group_size")
    if isinstance(bits, int | float) and bits > 0:
        # a 16-bit scale and a zero point for each group
        return bits + (16 + bits) / group if isinstance(group, int) and group > 0 else float(bits)
    return BITS.get(method_of(found))


def saved_bytes(dtype: str, weights: int, itemsize: int) -> float:
    """Return the bytes that a recipe's `dtype` saves of so many weights of linear layers; 0 where it quantises none.

    Args:
        itemsize: Bytes of a weight that is not quantised.
    """
    bits = BITS_OF_DTYPE.get(dtype)
    return 0.0 if bits is None else weights * (itemsize - bits / 8)


def check_quantisation(config: Any, section: ModelSection, field: str) -> None:
    """Refuse a quantised checkpoint where it cannot be used, before its weights are read.

    Raises:
        ValueError: for a student, and for a teacher that is to be quantised again.
    """
    found = quantisation_of(config)
    if found is None:
        return
    kind = method_of(found)
    if field == "student":
        raise ValueError(
            f"{field}.model: {section.model} is quantised ({kind}), and a student is trained: give the model in "
            "bfloat16, or as a .gguf file, which is expanded when loaded"
        )
    if section.dtype in LOW_BITS:
        raise ValueError(
            f"{field}.dtype: {section.model} is quantised already ({kind}), and {section.dtype} would quantise it "
            "again; leave it at auto"
        )
    if getattr(section, "adapter", None) is not None:
        raise ValueError(
            f"{field}.adapter: {section.model} is quantised ({kind}), and an adapter cannot be merged into it; merge "
            "it into the model in bfloat16, save that and name it"
        )


def int8_arguments(gguf_file: str | None, device: torch.device, field: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantise all linear layers but the head to int8.

    Raises:
        ValueError: no GPU, bitsandbytes is not installed, or a GGUF file.
    """
    if gguf_file:
        raise ValueError(
            f"{field}.dtype: int8 quantises safetensors as they are read; for a .gguf file use fp8 or auto"
        )
    if device.type != "cuda":
        raise ValueError(
            f"{field}.dtype: int8 needs a CUDA GPU, and this run is on a {device.type.upper()}; use bfloat16 or auto"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{field}.dtype: int8 needs bitsandbytes, which is not installed; install it: {INSTALL}")
    from transformers import BitsAndBytesConfig

    # llm_int8_skip_modules stays None: transformers then leaves out the head by what it is, whatever its name
    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}


@contextlib.contextmanager
def naming_the_quantisation(config: Any) -> Iterator[None]:
    """Name the quantisation in what its library raises: a package that is missing, a GPU that it needs."""
    found = None if config is None else quantisation_of(config)
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, NotImplementedError) as error:
        if found is None:
            raise
        raise ValueError(f"it is quantised ({method_of(found)}): {first_line(error)}") from error


def check_quantised(model: nn.Module, section: ModelSection, field: str) -> None:
    """Hold that a model that came out quantised is a teacher whose head can be read.

    Raises:
        ValueError: it is a student, or its head is quantised too.
    """
    if not quantised_by_transformers(model):
        return
    if field == "student":
        raise ValueError(f"{field}.model: {section.model} is quantised, and a student is trained; give it in bfloat16")
    try:
        read_head(find_head(model))
    except ValueError as error:
        raise ValueError(
            f"{field}.model: the head of {section.model} is quantised too, and the fused loss reads its weight: {error}"
        ) from None


def quantised_by_transformers(model: object) -> bool:
    """Return whether transformers quantised some layers of `model` (our own fp8 layers do not count)."""
    return bool(getattr(model, "is_quantized", False))


def quantised_by(model: Any) -> str | None:
    """The method that layers of `model` are quantised by, by transformers or in nf4; None where none are."""
    if is_in_4_bits(model):
        return "nf4"
    found = quantisation_of(model.config) if quantised_by_transformers(model) else None
    return None if found is None else method_of(found)


def as_built(model: Any) -> Any:
    """`model`, or where it is quantised its architecture without memory, whose parameters count as they are: packed
    ones hold several numbers in one, and some methods keep none at all.
    """
    if not quantised_by_transformers(model):
        return model
    with torch.device("meta"):
        return type(model)(model.config).requires_grad_(False)


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every tensor that the weights of a quantised model consist of, scales included."""

    def parts(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if not isinstance(value, torch.Tensor):
            return
        if type(value) in (torch.Tensor, nn.Parameter) or not hasattr(value, "__tensor_flatten__"):
            yield name, value
            return
        for inner in value.__tensor_flatten__()[0]:
            yield from parts(f"{name}.{inner}", getattr(value, inner))

    for name, value in model.state_dict().items():
        yield from parts(name, value)


def is_quantised(model: nn.Module) -> bool:
    """Return whether some linear layers or experts of `model` are in fp8 already."""
    return any(isinstance(module, Fp8Linear | Fp8Experts) for module in model.modules())
