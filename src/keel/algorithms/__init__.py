"""Algorithms as data: five choices each, the papers' presets, and the formula they stand for."""
