"""The version of Keel: also that of the package, and there without its metadata."""

from __future__ import annotations

VERSION = "0.1.0"
