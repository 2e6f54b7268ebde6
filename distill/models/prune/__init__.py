"""Pruning of a model in depth and width, and the importance of its layers, heads and channels."""
