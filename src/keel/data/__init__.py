"""Prompts with their references, and preference data."""
