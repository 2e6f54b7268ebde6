"""Kernels that training does not need: softmax, KL of probabilities, products of few rows, attention over a cache."""
