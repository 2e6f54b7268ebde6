"""Evaluation: held-out metrics with confidence intervals, samples, benchmark tasks."""
