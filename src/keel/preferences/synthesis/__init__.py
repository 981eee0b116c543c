"""Synthetic preferences: completions from models, and pairs of them judged by a model."""
