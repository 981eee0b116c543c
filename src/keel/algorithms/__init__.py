"""Algorithms as data: rows of five choices, the papers' presets, and the formula they stand for."""
