"""Decoding on a CPU by compiled code."""
