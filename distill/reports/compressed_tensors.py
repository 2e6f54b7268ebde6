"""A quantised student packed as compressed-tensors does (`pack-quantized`), which vLLM and transformers read.

Each quantised linear layer's weight becomes three tensors: `weight_packed`, int32 [N, K bits / 32], whose integers plus
2^(bits - 1) lie one after another from the lowest bits up; `weight_scale`, bfloat16 [N, K / block]; and `weight_shape`.
Everything else is bfloat16. `quantization_config` in config.json names the formats; readers need not know us.

The folder is read back: packed weights must equal the student's, and its KL on two short texts is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from distill_kernels.quantisation.formats import FORMATS, Blocks
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.core.errors import RecipeError
from distill.core.files import write_json
from distill.models.load.config_validation import read_json
from distill.models.load.read_weights import read_weights
from distill.models.precision.exact_blocks import exact_blocks
from distill.models.precision.quantised_student import FORMAT_FILE, read_formats
from distill.reports.gguf_file import TEXTS

PACKED = ("int4_g32", "int8")


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [N, K] of 4 or 8 bits into int32 [N, K bits / 32], the first in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[-1] % each))
    shifts = torch.arange(each, dtype=torch.int64) * bits
    words = (padded.unflatten(-1, (-1, each)) << shifts).sum(-1)  # below 2^32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_codes(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return the integers of `pack_codes`: int8 [N, columns]."""
    shifts = torch.arange(32 // bits, dtype=torch.int64) * bits
    fields = (packed.long()[..., None] >> shifts) & ((1 << bits) - 1)
    return (fields.flatten(-2)[..., :columns] - (1 << (bits - 1))).to(torch.int8)


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
    formats = read_formats(folder)
    if not formats or not set(formats.values()) <= set(PACKED):
        came = " and ".join(sorted(set(formats.values()))) or "float32"
        raise RecipeError(
            [
                f"--format: compressed-tensors holds weights in {' or '.join(PACKED)}, and this student's are in "
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
        blocks = exact_blocks(tensor, formats[name])
        if blocks is None:
            raise RecipeError([f"--format: {name} was trained in {formats[name]}, and its weights are not"])
        tensors[f"{name}_packed"] = pack_codes(blocks.codes, FORMATS[formats[name]].bits)
        tensors[f"{name}_scale"] = blocks.scale
        tensors[f"{name}_shape"] = torch.tensor(tensor.shape)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    if model.config.get_text_config().tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_torch_state_dict(tensors, folder, max_shard_size=shard_size)
    config = read_json(folder / "config.json", "--format")
    config |= {"dtype": "bfloat16", "quantization_config": _configuration(formats, linears)}
    write_json(folder / "config.json", config)
    (folder / FORMAT_FILE).unlink()
    return _check(model, folder, formats)


def _configuration(formats: Mapping[str, str], linears: set[str]) -> dict[str, object]:
    """Return `quantization_config`; the format of most layers is that of all linear layers without one of their own."""
    by_layer = {name.removesuffix(".weight"): form for name, form in formats.items()}
    kinds = sorted(set(by_layer.values()), key=lambda form: -list(by_layer.values()).count(form))
    groups = {}
    for number, form in enumerate(kinds):
        own = FORMATS[form]
        targets = ["Linear"] if number == 0 else sorted(name for name, other in by_layer.items() if other == form)
        weights = {
            "num_bits": own.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if own.block else "channel",
            "group_size": own.block or None,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        activations = {"input_activations": None, "output_activations": None}
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, "format": "pack-quantized", **activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
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
    values = {name: tensor for name, tensor in written.items() if not name.endswith(("_packed", "_scale", "_shape"))}
    for name, form in formats.items():
        shape = tuple(written[f"{name}_shape"].tolist())
        codes = unpack_codes(written[f"{name}_packed"], FORMATS[form].bits, shape[-1])
        values[name] = Blocks(codes, written[f"{name}_scale"]).values()
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
