"""GPU kernels for distillation: fused losses, transformer layers, attention, matrix products and AdamW.

Needs torch; triton only where a CUDA tensor is used. Knows nothing of models, recipes or trainers.
"""

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
    "FusedCrossEntropyLoss",
    "FusedDistillationLoss",
    "FusedJSDLoss",
    "FusedKLLoss",
    "FusedSkewKLLoss",
    "FusedTVDLoss",
    "LossTerm",
    "TokenStats",
]
