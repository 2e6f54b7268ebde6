"""Attention: forward and backward over dense and packed rows, with windows, sinks and soft caps."""
