"""Engines sample completions: the native one by continuous batching, the scripted one for tests."""
