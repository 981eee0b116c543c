"""Policies, value models and references: Hugging Face models over packed sequences."""
