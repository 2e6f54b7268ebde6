"""Patching of models: fused kernels in place of norms, MLPs, attention, heads and LoRA layers."""
