"""Isolation: sandboxes and worker processes for code that is not trusted."""
