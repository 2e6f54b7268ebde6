"""Backends: where a teacher's outputs are computed (a local model, a server, a store, the student itself)."""
