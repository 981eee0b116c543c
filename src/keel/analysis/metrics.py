"""Glossary entries of every metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them: what it is, its unit, what to watch for."""

    name: str
    meaning: str
    unit: str
    watch: str


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    metrics: tuple[Metric, ...]
