"""A quantised student's folder packed for servers, as compressed-tensors.

Each quantised linear layer's weight becomes the tensors of its format's layout (`distill_kernels.quantisation`).
Everything else is in bfloat16. `quantization_config` in config.json names the formats; readers need not know us.

The folder is read back: packed weights must equal the student's, and its KL on two short texts is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from distill_kernels.quantisation.formats import FORMATS
from distill_kernels.quantisation.packed_tensors import PackedIntegers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.core.errors import RecipeError
from distill.core.files import write_json
from distill.models.load.config_validation import read_json
from distill.models.load.read_weights import read_weights
from distill.models.precision.quantised_formats import FORMAT_FILE, SCALES_FILE, read_saved
from distill.reports.gguf_file import TEXTS

PACKED = {name: form for name, form in FORMATS.items() if isinstance(form, PackedIntegers)}
DTYPE = torch.bfloat16  # of what is not quantised


def pack_folder(folder: Path, shard_size: str = "5GB") -> float:
    """Replace the weights of a quantised student's folder by packed ones, and verify them.

    Args:
        folder: Folder of a student in float32 whose weights are exactly in their formats.

    Returns:
        KL(student || folder) on two short texts, nats per token: that of 16 bits for the tensors that stay.

    Raises:
        RecipeError: The student is not in a format of compressed-tensors.
    """
    saved = read_saved(folder)
    formats = {} if saved is None else saved.by_name
    if saved is None or not set(formats.values()) <= set(PACKED):
        came = " and ".join(sorted(set(formats.values()))) or "float32"
        raise RecipeError(
            [
                f"--format: compressed-tensors holds weights in {', '.join(PACKED)}, and this student's are in "
                f"{came}; train it with student.quantise, or quantise it with distill quantise"
            ]
        )
    model = read_weights(AutoModelForCausalLM, folder, "--format", dtype=torch.float32).eval()
    before = _tensors_of(folder)  # by the names of the files, which differ from the model's where experts are joined
    absent = sorted(formats.keys() - before.keys())
    if absent:
        raise RecipeError(
            [f"--format: {absent[0]} has another name in the files of a {type(model).__name__}; not packed"]
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in before.items():
        if name not in formats:
            tensors[name] = tensor.to(DTYPE) if tensor.is_floating_point() else tensor
            continue
        blocks = saved.blocks(name, tensor)
        if blocks is None:
            raise RecipeError([f"--format: {name} was trained in {formats[name]}, and its weights are not"])
        packed = PACKED[formats[name]].pack(blocks.codes, blocks.stored)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=shard_size)
    config = read_json(folder / "config.json", "--format")
    by_layer = {name.removesuffix(".weight"): form for name, form in formats.items()}
    config["dtype"] = str(DTYPE).removeprefix("torch.")
    config["quantization_config"] = _quantization_config(by_layer, sorted(_other_layers(model, before) - set(by_layer)))
    write_json(folder / "config.json", config)
    for file in (FORMAT_FILE, SCALES_FILE):
        (folder / file).unlink()
    return _check(model, folder, before, formats)


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder's files, by their names there."""
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def _other_layers(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the linear layers of a model, and routers and experts by their names in the files."""
    embeddings = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    stored = {name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.ndim > 1 and "weight" in name}
    return (stored - embeddings) | {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}


def _quantization_config(by_layer: Mapping[str, str], others: list[str]) -> dict[str, object]:
    """Return `quantization_config`; the format of most layers is that of all linear layers without one of their own."""
    kinds = sorted(set(by_layer.values()), key=lambda form: -list(by_layer.values()).count(form))
    groups = {}
    for number, form in enumerate(kinds):
        targets = ["Linear"] if number == 0 else sorted(name for name, other in by_layer.items() if other == form)
        activations = {"input_activations": None, "output_activations": None}
        own = {"targets": targets, "weights": PACKED[form].described(), "format": PACKED[form].layout}
        groups[f"group_{number}"] = own | activations
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts := {PACKED[form].layout for form in kinds}) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": others,
        "config_groups": groups,
    }


@torch.no_grad()
def _check(
    model: PreTrainedModel, folder: Path, before: Mapping[str, torch.Tensor], formats: Mapping[str, str]
) -> float:
    """Hold the folder's weights to the student's; returns KL(student || folder)."""
    written = _tensors_of(folder)
    for name, tensor in before.items():
        module = name.removesuffix("weight")
        exact = tensor if name in formats else tensor.to(DTYPE)
        found = written.get(name)
        if name in formats:
            parts = {key.removeprefix(module): part for key, part in written.items() if key.startswith(module)}
            found = PACKED[formats[name]].unpack(parts)
        if found is None or not torch.equal(found.to(exact.dtype), exact):
            raise RecipeError([f"--format: {name} differs in the files; not written"])
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    ids = [tokenizer(text).input_ids for text in TEXTS] if tokenizer is not None else [list(range(32))]
    rows = [torch.tensor([row]) for row in ids]
    student = [model(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    for name, parameter in model.named_parameters():
        if name not in formats:  # the others were found equal
            parameter.copy_(parameter.to(DTYPE))
    packed = [model(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(student, packed, strict=True))
    return total / sum(len(p) for p in student)
