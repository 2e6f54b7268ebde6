"""Formats of a model's parameters, and the blocks that a folder of weights is saved with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from distill_kernels.matmul.siblings import SIBLINGS
from distill_kernels.quantisation.formats import FORMATS, Blocks, fitting_format
from distill_kernels.quantisation.number_format import NumberFormat
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from distill.core.files import write_json
from distill.core.tensor_files import write_tensors
from distill.models.head import find_head, unwrap_peft
from distill.models.layers import find_layers
from distill.models.load.config_validation import read_json
from distill.recipe.quantise import FORMATS_OF_GGUF, Quantise

FORMAT_FILE = "quantised.json"  # in a folder of weights: the format of each
SCALES_FILE = "quantised_scales.safetensors"  # in a folder of weights: the scales of each, as the file holds them
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")  # linear layers that servers keep in 16 bits
CODES_FILE = "quantised_codes.safetensors"  # beside an adapter, whose folder has no weights: the codes of each weight


class Formats(NamedTuple):
    """The format of every quantised parameter of a model.

    Attributes:
        main: Format of the recipe.
        by_name: Name of the format of each parameter that is quantised, by its own name in the bare model.
        forms: The formats themselves, with the range that holds all weights of a module's layers, such as attention.
        unfit: Names of matrices that stay as they are: rows that are not whole blocks, and experts in one tensor.
        unfit_share: Share of the weights of decoder layers that are in these.
    """

    main: str
    by_name: dict[str, str]
    forms: dict[str, NumberFormat]
    unfit: list[str]
    unfit_share: float = 0.0

    def note(self) -> str:
        """Return a line on the matrices that stay as they are; empty where there are none."""
        if not self.unfit:
            return ""
        which = f"{len(self.unfit)} matrices ({self.unfit_share:.0%} of the layers' weights)"
        return f"{which} stay as they are, such as {self.unfit[0]}: rows that are not whole blocks, or experts"


class SavedBlocks(NamedTuple):
    """Formats and scales of a folder's weights, from which a file is written without rounding anything again.

    Attributes:
        main: Format of the recipe.
        by_name: Format of each quantised weight.
        scales: Scales of each as the file holds them, by field.
        codes: Codes of each where the folder holds an adapter, from which the rounding of the merged weights cannot be
            told; None where the folder holds the rounded weights.
    """

    main: str
    by_name: dict[str, str]
    scales: dict[str, dict[str, torch.Tensor]]
    codes: Mapping[str, torch.Tensor] | None = None

    def saved(self) -> SavedBlocks:
        """Return these blocks, as `QuantisedWeights.saved` does those of a student in training."""
        return self

    def blocks(self, name: str, values: torch.Tensor) -> Blocks | None:
        """Return the blocks of a weight; None where its values are not exactly those of its scales."""
        form = FORMATS[self.by_name[name]]
        stored = self.scales[name]
        found = Blocks(form, form.encode(values, form.load(stored)), stored)
        return found if torch.equal(found.values(), values.float()) else None

    def write(self, folder: Path) -> None:
        """Write formats, scales and codes into a folder of weights.

        Weights in a single file get an index: without one vLLM reads every safetensors file of a folder as weights.
        """
        write_json(folder / FORMAT_FILE, {"format": self.main, "tensors": self.by_name})
        flat = {f"{name}:{field}": part for name, fields in self.scales.items() for field, part in fields.items()}
        write_tensors(folder / SCALES_FILE, flat)
        if self.codes is not None:
            write_tensors(folder / CODES_FILE, self.codes)
        weights = folder / SAFE_WEIGHTS_NAME
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if weights.is_file():
            with safe_open(str(weights), framework="pt") as file:
                places = dict.fromkeys(file.keys(), weights.name)
            write_json(index, {"metadata": {"total_size": weights.stat().st_size}, "weight_map": places})

    @torch.no_grad()
    def restore_values(self, model: nn.Module) -> None:
        """Give a merged model the weights that were trained, where the codes are known."""
        parameters = dict(model.named_parameters())
        for name, codes in (self.codes or {}).items():
            form = FORMATS[self.by_name[name]]
            parameters[name].copy_(Blocks(form, codes.float(), self.scales[name]).values())


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp's `q4_k_m` holds values and down projections of a layer in 6 bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the part that PEFT adds to those inside its layers."""
    return name.replace(".base_layer", "")


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a bare model by the names they have without adapters, which are left out."""
    return {plain_name(name): p for name, p in model.named_parameters() if ".lora_" not in name}


def formats_of(model: nn.Module, section: Quantise) -> Formats:
    """Return the formats that a recipe's section gives the parameters of a model.

    Raises:
        ValueError: A key of `modules` that names no linear layer, two formats for one tied weight or for layers that
            vLLM joins, or a model without linear layers that the format holds.
    """
    model = unwrap_peft(model)
    prefix, layers = find_layers(model)
    linears = {
        plain_name(name): module
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name and not ROUTER.search(name)
    }
    wanted: dict[str, str] = {f"{prefix}.{name}.weight": section.format for name in linears}
    if section.format == "q4_k":
        wider = [name for name in linears if name.endswith(("v_proj", "down_proj"))]
        wider = [name for name in wider if has_more_bits(int(name.partition(".")[0]), len(layers))]
        wanted |= {f"{prefix}.{name}.weight": "q6_k" for name in wider}
    for key, chosen in section.modules.items():
        matched = [name for name in linears if f".{name}.".startswith(f".{key}.") or f".{name}".endswith(f".{key}")]
        if not matched:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ValueError(
                f"student.quantise.modules: {key!r} matches no linear layer; there are layers 0 to {len(layers) - 1}, "
                f"and {known}"
            )
        wanted |= {f"{prefix}.{name}.weight": chosen for name in matched}
    if not linears:
        raise ValueError(f"student.quantise: {type(model).__name__} has no linear layers (torch.nn.Linear) to quantise")
    parameters = plain_parameters(model)
    names: dict[torch.Tensor | nn.Module, str] = {p: name for name, p in parameters.items()}  # one of tied weights
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = find_head(model).linear.weight
    for_embedding, for_head = section.outside
    if embedding is head and section.head != "auto" and for_head != for_embedding:
        raise ValueError(
            f"student.quantise.head: expected that of embeddings ({for_embedding}), which share their weight, "
            f"got {for_head}"
        )
    wanted |= {names[head]: for_head} | {names[embedding]: for_embedding}
    kept = {name: form for name, form in wanted.items() if form != "keep"}
    fitting = {name: fitting_format(form, parameters[name].shape[-1]) for name, form in kept.items()}
    by_name = {name: form for name, form in fitting.items() if form is not None}
    _require_finite({name: parameters[name] for name in by_name})
    own = [f"{prefix}.{name}.weight" for name in linears]
    if not by_name.keys() & set(own) and kept.keys() & set(own):
        raise ValueError(
            f"student.quantise.format: no linear layer has rows that are whole blocks of {section.format}; expected "
            f"hidden and intermediate sizes that are multiples of 32, got {own[0]} of {tuple(parameters[own[0]].shape)}"
        )
    if section.format not in FORMATS_OF_GGUF:
        _check_joined(prefix, linears, by_name)
    parts = {name: p for name, p in parameters.items() if name.startswith(f"{prefix}.")}
    experts = [name for name, p in parts.items() if p.ndim == 3 and not name.endswith("conv1d.weight")]
    unfit = [name for name in (*kept, *experts) if name not in by_name]
    share = sum(parts[name].numel() for name in unfit if name in parts) / sum(p.numel() for p in parts.values())
    return Formats(section.format, by_name, _with_ranges(by_name, parameters), unfit, share)


def _require_finite(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise for a matrix with NaN or infinity: scales and codes are bounded, so a file would hold finite numbers."""
    for name, weight in parameters.items():
        if not weight.is_meta and not bool(weight.detach().isfinite().all()):
            raise ValueError(
                f"student.quantise: expected finite weights, got NaN or infinity in {name}: the model's files are "
                "damaged, or training diverged"
            )


def _check_joined(prefix: str, linears: Iterable[str], by_name: Mapping[str, str]) -> None:
    """Raise where layers that read the same input, which vLLM joins into one, have several formats."""
    for name in linears:
        parent, _, last = name.rpartition(".")
        siblings = next((names for names in SIBLINGS if names[0] == last), ())
        found = {each: by_name.get(f"{prefix}.{parent}.{each}.weight", "keep") for each in siblings}
        if len(set(found.values())) > 1:
            each = ", ".join(f"{form} for {name}" for name, form in found.items())
            raise ValueError(
                f"student.quantise.modules: expected one format for {' and '.join(found)} of {prefix}.{parent}, which "
                f"vLLM joins into one matrix, got {each}"
            )


def _with_ranges(by_name: Mapping[str, str], parameters: Mapping[str, torch.Tensor]) -> dict[str, NumberFormat]:
    """Return the format of each parameter, with one range for those of a module, which servers join."""
    keys = {name: (name.rsplit(".", 2)[0], form) for name, form in by_name.items()}
    together: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, key in keys.items():
        together.setdefault(key, []).append(parameters[name].detach())
    fitted = {key: FORMATS[key[1]].fitted(weights) for key, weights in together.items()}
    return {name: fitted[key] for name, key in keys.items()}


def read_saved(folder: Path) -> SavedBlocks | None:
    """Return formats and scales of a folder's weights; None where they are not quantised.

    Raises:
        ValueError: The files are not ours, or those of an adapter without its codes.
    """
    path = folder / FORMAT_FILE
    if not path.is_file():
        return None
    found = read_json(path, FORMAT_FILE)
    tensors = found.get("tensors")
    main = found.get("format")
    if not isinstance(tensors, dict) or not all(form in FORMATS for form in (main, *tensors.values())):
        raise ValueError(f"{path}: expected a format ({', '.join(FORMATS)}), and one for each weight")
    if not (folder / SCALES_FILE).is_file():
        raise ValueError(f"{folder / SCALES_FILE}: expected the scales of the weights; the file is missing")
    scales: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tensors}
    for key, part in load_file(folder / SCALES_FILE).items():
        name, _, field = key.rpartition(":")
        scales[name][field] = part
    codes = load_file(folder / CODES_FILE) if (folder / CODES_FILE).is_file() else None
    if codes is None and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder}: expected {CODES_FILE}, the rounded weights of a quantised student with an adapter; it is "
            "missing, as in checkpoints of earlier versions: resume the run, and use what it saves"
        )
    return SavedBlocks(str(main), tensors, scales, codes)
