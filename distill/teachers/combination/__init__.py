"""Combination of several teachers: mixtures of distributions, and routes by document."""
