"""Rounding of a model to a file's blocks without training: the control of a trained student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from distill_kernels.quantisation.formats import FORMATS, reference_quantise
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.core.files import atomic_folder
from distill.core.folders import check_new_folder
from distill.models.layers import find_layers
from distill.models.precision.gptq import Method, calibration_batches, round_weights
from distill.models.precision.quantised_formats import SavedBlocks, formats_of
from distill.recipe.quantise import GGUF_FILES, Quantise
from distill.reports.gguf_file import check_supported, write_gguf
from distill.reports.packed_folder import pack_folder


class RoundedModel(NamedTuple):
    """Result of rounding a model.

    Attributes:
        file: The GGUF file, or the folder of packed weights; None where nothing was packed.
        by_method: Number of those that the method rounded; the others are rounded to nearest.
        kl: KL of the packed file to the rounded model on two short texts, nats per token; None without one.
        note: Line on the matrices that stay as they are; may be empty.
    """

    folder: str
    file: str | None
    matrices: int
    by_method: int
    kl: float | None
    note: str


class Rounding(NamedTuple):
    """Way of rounding a model.

    Attributes:
        section: Formats, as in a recipe.
        method: nearest, importance or gptq; see `distill.models.precision.gptq`.
        rows: Tokenised rows to calibrate on; nearest reads none.
    """

    section: Quantise
    method: Method
    rows: Sequence[Mapping[str, Sequence[int]]]


def quantise_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    destination: Path,
    rounding: Rounding,
    *,
    pack: bool = False,
) -> RoundedModel:
    """Round a model's weights and write them to a folder that `distill eval` compares with the model.

    The decoder's linear layers in less than 8 bits are rounded by `method`, everything else to nearest.

    Args:
        model: Causal language model in float32, which is changed.
        tokenizer: Tokenizer to write with the model; None for none.
        destination: Folder that does not exist or is empty.
        rounding: Formats, method and rows to calibrate on.
        pack: Also write the GGUF file, or pack the folder's weights as compressed-tensors does.

    Raises:
        RecipeError: The destination is in use, or the file cannot hold the model.
        ValueError: The model cannot be rounded so.
    """
    section, method, rows = rounding
    check_new_folder(destination, "--output")
    if pack and section.format in GGUF_FILES:
        check_supported(model.config, tokenizer)
    found = formats_of(model, section)
    formats = found.by_name
    parameters = dict(model.named_parameters())
    inside = f"{find_layers(model)[0]}." if method != "nearest" else None
    by_method = {
        name for name, form in formats.items() if inside and name.startswith(inside) and FORMATS[form].is_learned
    }
    scales: dict[str, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name in formats.keys() - by_method:
            blocks = reference_quantise(parameters[name], found.forms[name])
            parameters[name].copy_(blocks.values())
            scales[name] = dict(blocks.stored)
    if by_method:
        batches = calibration_batches(rows, section.calibration_tokens, parameters[next(iter(by_method))].device)
        rounded = round_weights(model, {name: formats[name] for name in by_method}, batches, method)
        missed = sorted(by_method - rounded.keys())
        if missed:
            raise ValueError(
                f"--method: {missed[0]} is not called by its decoder layer, so that {method} has no inputs"
            )
        scales |= {name: own.form.store(own.scales) for name, own in rounded.items()}
    kl = None
    file = None
    with atomic_folder(destination) as unfinished:
        model.to("cpu").save_pretrained(unfinished)  # type: ignore[arg-type]
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        SavedBlocks(section.format, formats, scales).write(unfinished)
        if pack and section.format in GGUF_FILES:
            type = GGUF_FILES[section.format]
            name = f"{destination.name}-{type}.gguf"
            kl = write_gguf(unfinished, unfinished / name, type).kl
            file = str(destination / name)
        elif pack:
            kl = pack_folder(unfinished)
            file = str(destination)
    count = len(formats) if method == "nearest" else len(by_method)
    return RoundedModel(str(destination), file, len(formats), count, kl, found.note())
