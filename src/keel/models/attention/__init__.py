"""Attention over packed sequences, for training and scoring."""
