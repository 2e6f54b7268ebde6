"""A quantised student packed as compressed-tensors does, which vLLM and transformers read.

Each quantised linear layer's weight becomes the tensors of its format's layout (`distill_kernels.quantisation`).
Everything else is bfloat16. `quantization_config` in config.json names the formats; readers need not know us.

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
from distill.models.precision.quantised_student import FORMAT_FILE, SCALES_FILE, read_saved
from distill.reports.gguf_file import TEXTS

PACKED = {name: form for name, form in FORMATS.items() if isinstance(form, PackedIntegers)}


def pack_folder(folder: Path, shard_size: str = "5GB") -> float:
    """Replace the weights of a quantised student's folder by packed ones, and verify them.

    Args:
        folder: Folder of a student in float32 whose weights are exactly in their formats.
        shard_size: Maximum size of a file.

    Returns:
        KL(student || folder) on two short texts, nats per token: that of bfloat16 for the tensors that stay.

    Raises:
        RecipeError: The student is not in the formats of compressed-tensors.
    """
    saved = read_saved(folder)
    formats = {} if saved is None else saved.by_name
    if saved is None or not set(formats.values()) <= set(PACKED):
        came = " and ".join(sorted(set(formats.values()))) or "float32"
        raise RecipeError(
            [
                f"--format: compressed-tensors holds weights in {', '.join(PACKED)}, and this student's are in "
                f"{came}; train it with student.quantise, or round it by distill quantise"
            ]
        )
    model = read_weights(AutoModelForCausalLM, folder, "--format", dtype=torch.float32).eval()
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name not in formats:
            tensors[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            continue
        blocks = saved.blocks(name, tensor)
        if blocks is None:
            raise RecipeError([f"--format: {name} was trained in {formats[name]}, and its weights are not"])
        tensors |= {name + suffix: part for suffix, part in blocks.form.pack(blocks.codes, blocks.stored).items()}
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    if model.config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_torch_state_dict(tensors, folder, max_shard_size=shard_size)
    config = read_json(folder / "config.json", "--format")
    config |= {"dtype": "bfloat16", "quantization_config": _configuration(formats, linears)}
    write_json(folder / "config.json", config)
    for file in (FORMAT_FILE, SCALES_FILE):
        (folder / file).unlink()
    return _check(model, folder, formats)


def _configuration(formats: Mapping[str, str], linears: set[str]) -> dict[str, object]:
    """Return `quantization_config`; the format of most layers is that of all linear layers without one of their own."""
    by_layer = {name.removesuffix(".weight"): form for name, form in formats.items()}
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
        "ignore": sorted(linears - set(by_layer)),
        "config_groups": groups,
    }


@torch.no_grad()
def _check(model: PreTrainedModel, folder: Path, formats: Mapping[str, str]) -> float:
    """Hold the folder's weights to the student's; returns KL(student || folder)."""
    written: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        written |= load_file(path)
    values = dict(written)
    for name, form in formats.items():
        tensors = {key.removeprefix(name): tensor for key, tensor in written.items() if key.startswith(name)}
        values[name] = PACKED[form].unpack(tensors)
    for name, parameter in model.named_parameters():
        exact = parameter if name in formats else parameter.to(torch.bfloat16)
        if name not in values or not torch.equal(values[name].to(exact.dtype), exact):
            raise RecipeError([f"--format: {name} differs in the files; not written"])
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    ids = [tokenizer(text).input_ids for text in TEXTS] if tokenizer is not None else [list(range(32))]
    rows = [torch.tensor([row]) for row in ids]
    before = [model(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
    after = [model(input_ids=row).logits[0].log_softmax(-1) for row in rows]
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True))
    return total / sum(len(p) for p in before)
