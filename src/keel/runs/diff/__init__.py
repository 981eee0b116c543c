"""Comparison of two runs: the first step, sequence, token and tensor that differ."""
