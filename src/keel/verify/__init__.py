"""Answers and formats, judged from text alone: pure functions that know no model."""
