"""Inference on Triton kernels alone, GEMMs included, without CUDA's libraries: `use_triton_only(model)`.

Linear layers go through `triton_linear` (split-K for up to 64 rows, tiles for more), norms, MLPs and rotary embeddings
through our kernels; attention is the decode loop's own. What is left to PyTorch are element-wise operations and the
embedding's lookup.
"""

from __future__ import annotations

import types

import torch
from distill_kernels import triton_linear
from torch import nn
from transformers.pytorch_utils import Conv1D

from distill.models.head import find_head, unwrap_peft
from distill.models.patch.patching import patch
from distill.models.patch.swaps import PatchReport


def linear_on_triton(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return triton_linear(x, self.weight, self.bias)


def use_triton_only(model: nn.Module) -> PatchReport:
    """Switch `model` to Triton kernels permanently, in place; it can then generate but not train.

    Args:
        model: A causal language model of transformers, merged, in eval mode, on a GPU of sm_90 or later in float16 or
            bfloat16 (or on a CPU, where references run).

    Raises:
        ValueError: A matrix product that is none of a plain linear layer with sizes that are multiples of 8.
    """
    inner = unwrap_peft(model)
    head = find_head(model).linear  # which sees one token of each answer
    for name, module in inner.named_modules():
        if type(module) is nn.Linear and module is not head and (module.in_features % 8 or module.out_features % 8):
            raise ValueError(
                f"--kernels: triton takes linear layers whose sizes are multiples of 8, got {name} of "
                f"{module.out_features} x {module.in_features}; leave --kernels out"
            )
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
        if own and type(module) not in (nn.Linear, nn.Embedding):
            kind = "a quantised layer" if isinstance(module, nn.Linear) else type(module).__name__
            kind = "the products of a GPT-2" if isinstance(module, Conv1D) else kind
            raise ValueError(f"--kernels: triton takes plain linear layers, got {kind} ({name}); leave --kernels out")
    report = patch(model, "teacher", attention=None)
    for module in inner.modules():
        if type(module) is nn.Linear:
            module.forward = types.MethodType(linear_on_triton, module)  # type: ignore[method-assign]
    return report
