"""Engines sample completions: the native one by continuous batching, others by module:function."""
