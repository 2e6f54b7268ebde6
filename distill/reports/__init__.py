"""Outputs of a run: report, curves, model card, exported student."""
