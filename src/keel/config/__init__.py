"""The recipe: its schema, reading it, overriding it, and the messages about mistakes."""
