"""GPU kernels for distillation: fused losses, transformer layers, attention, matrix products and AdamW.

Needs torch; triton only where a CUDA tensor is used. Knows nothing of models, recipes or trainers.
"""

__all__: list[str] = []
