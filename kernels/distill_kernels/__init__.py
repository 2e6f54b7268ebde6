"""GPU kernels for distillation: fused losses, transformer layers, attention, matrix products and AdamW.

Needs torch; triton only where a CUDA tensor is used. Knows nothing of models, recipes or trainers.
"""

from distill_kernels.attention.decode import decode_attention
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.kv_cache import KVCache
from distill_kernels.attention.ranges import cu_seqlens_from_position_ids
from distill_kernels.layers.bias_gelu import BiasGELU, bias_gelu
from distill_kernels.layers.glu import geglu, glu, swiglu
from distill_kernels.layers.kl_probabilities import kl_probabilities
from distill_kernels.layers.layer_norm import LayerNorm, layer_norm
from distill_kernels.layers.rms_norm import RMSNorm, add_rms_norm, rms_norm
from distill_kernels.layers.rope import rope
from distill_kernels.layers.softmax import softmax
from distill_kernels.losses.modules import (
    FusedCrossEntropyLoss,
    FusedDistillationLoss,
    FusedJSDLoss,
    FusedKLLoss,
    FusedSkewKLLoss,
    FusedTVDLoss,
)
from distill_kernels.losses.terms import LossTerm, TokenStats

__all__ = [
    "BiasGELU",
    "FusedCrossEntropyLoss",
    "FusedDistillationLoss",
    "FusedJSDLoss",
    "FusedKLLoss",
    "FusedSkewKLLoss",
    "FusedTVDLoss",
    "KVCache",
    "LayerNorm",
    "LossTerm",
    "RMSNorm",
    "TokenStats",
    "add_rms_norm",
    "bias_gelu",
    "cu_seqlens_from_position_ids",
    "decode_attention",
    "flash_attention",
    "geglu",
    "glu",
    "kl_probabilities",
    "layer_norm",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]
