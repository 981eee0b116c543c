"""Findings of `keel check`, by what they are read from."""
