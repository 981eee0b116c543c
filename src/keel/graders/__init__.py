"""Graders of answers: functions of text."""
