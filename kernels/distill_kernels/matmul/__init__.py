"""Matrix products with something folded in: FP8 operands, LoRA branches, gates, an input read by several."""
