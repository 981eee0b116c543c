"""Engines draw completions: the native one by continuous batching, the scripted one for trials."""
