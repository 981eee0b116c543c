"""The recipe: its schema, reading it, overriding it, and what is said of a mistake."""
