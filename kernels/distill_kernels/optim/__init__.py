"""AdamW over all tensors in one launch, with stochastic rounding of bf16 weights."""
