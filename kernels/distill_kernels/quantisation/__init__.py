"""Number formats of quantised weights: exact references, and fake quantisation for training."""
