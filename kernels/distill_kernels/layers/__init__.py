"""Layers of a transformer: norms, gated MLPs, rotary embeddings, distances of layer states."""
