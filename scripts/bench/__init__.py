"""Kernel benchmarks, run from a clone: `python -m scripts.bench`."""
