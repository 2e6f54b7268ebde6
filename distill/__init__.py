"""Distil a large language model into a small one."""

__version__ = "0.1.0"
