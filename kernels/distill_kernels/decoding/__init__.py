"""Decoding one token a sequence: attention over a cache, products of few rows, sampling the next token."""
