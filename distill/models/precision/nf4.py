"""Frozen linear layers in 4 bits: NormalFloat4 (Dettmers et al., 2023, QLoRA), by bitsandbytes.

    quantise_nf4(model, device, "student")   # the device holds 4 bits, and one layer that is not quantised yet
    dequantise_nf4(model, "cpu")             # dense linear layers again, with the weights that it computed with

A block of 64 weights is 64 codes of 4 bits and the block's largest magnitude in 8 bits, with a float32 scale for 256
of these magnitudes: 4.127 bits a weight. Products dequantise the weight, in the forward and again in the backward, so
that no dense copy is kept. Head, embeddings and norms stay as they are.

Layers are replaced once a model is loaded, instead of while transformers reads it: so random weights, GGUF files and
students that are cut from a teacher work too, and transformers does not take the model for one that it quantised,
which it would neither train nor save.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distill.models.dtypes import MARK_OF_4_BITS
from distill.models.head import unwrap_peft
from distill.models.layers import find_layers

INSTALL = "pip install 'distill-toolkit[nf4]'"
BLOCK = 64  # weights that share a scale


def require_bitsandbytes(field: str) -> None:
    """Raise unless bitsandbytes can be imported.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{field}.dtype: nf4 needs bitsandbytes, which is not installed; install it: {INSTALL}")


@torch.no_grad()
def quantise_nf4(model: Any, device: torch.device, field: str, draw: Callable[[nn.Module], None] | None = None) -> Any:
    """Put the linear layers of the decoder's layers into 4 bits, in place, and the whole model on `device`.

    Args:
        model: Model of transformers, in host memory, or on the meta device where its weights are drawn.
        device: Device on which weights are quantised.
        field: Field of the recipe, for errors.
        draw: Gives a part of a model on the meta device its weights on `device`.

    Raises:
        ValueError: bitsandbytes is not installed, or there is no linear layer.
    """
    require_bitsandbytes(field)
    _, layers = find_layers(model)
    count = 0
    for layer in layers:
        if draw is not None:
            draw(layer)
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear:
                layer.set_submodule(name, _in_4_bits(module, device))
                count += 1
        layer.to(device)
    if not count:
        raise ValueError(f"{field}.dtype: nf4 quantises linear layers (torch.nn.Linear), and this model has none")
    if draw is not None:
        draw(model)
        model.tie_weights()
    # PEFT looks for this attribute before it puts an adapter on a layer of bitsandbytes
    setattr(model, MARK_OF_4_BITS, True)
    return model.to(device)


def _in_4_bits(linear: nn.Linear, device: torch.device) -> nn.Module:
    from bitsandbytes.functional import quantize_4bit  # a second
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = linear.weight.detach().to(device)
    codes, state = quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    # The weight does not name its module: several models may share it. It alone holds the scales.
    layer.weight = Params4bit(
        codes, quant_state=state, blocksize=BLOCK, compress_statistics=True, quant_type="nf4", bnb_quantized=True
    )
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    # Some CPUs would repack the codes in the first evaluation, for kernels without a backward.
    layer.support_avx512bf16_for_cpu = False
    return layer.train(linear.training)


@torch.no_grad()
def dequantise_nf4(model: Any, device: torch.device | str) -> Any:
    """Put dense linear layers in place of those in 4 bits, and the whole model on `device`, in place.

    Args:
        model: Bare model; its adapters are elsewhere.
        device: Device of the dense weights; they are dequantised where they are.
    """
    from bitsandbytes.functional import dequantize_4bit  # a second
    from bitsandbytes.nn import Linear4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            packed: Any = module.weight
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            weight = dequantize_4bit(packed, packed.quant_state).to(device)
            dense.weight = nn.Parameter(weight, requires_grad=False)
            dense.bias = module.bias
            model.set_submodule(name, dense.train(module.training))
    delattr(model, MARK_OF_4_BITS)
    return model.to(device)


def dense_adapters(model: Any) -> Any:
    """Return a `PeftModel` over dense weights, on the CPU, with the adapters of one whose base is in 4 bits.

    PEFT alone would merge an adapter into weights in 4 bits and round the sum to 4 bits again.

    Args:
        model: The `PeftModel`; consumed.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    name = model.active_adapter
    config = copy.deepcopy(model.peft_config[name])
    config.base_model_name_or_path = None  # the name of the base as it is saved, which PEFT would warn of
    adapters = get_peft_model_state_dict(model, adapter_name=name)
    dense = dequantise_nf4(unwrap_peft(model.unload()), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers has renamed
        again = get_peft_model(dense, config, adapter_name=name)
    set_peft_model_state_dict(again, adapters, adapter_name=name)
    return again.train(model.training)
