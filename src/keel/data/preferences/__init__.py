"""Preference data: records, readers, agreement between annotators."""
