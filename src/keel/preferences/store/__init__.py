"""The preference store: prompts, completions, pairs, labels, steps and costs in one SQLite file."""
