"""Offline distillation: a teacher's outputs for each document, written to disk once and found by content."""
