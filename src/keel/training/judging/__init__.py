"""Stages that learn from pairs, labelled answers and labelled steps: rows, losses, measures."""
