"""Foundations of every package: errors, console, run folders, processes."""
