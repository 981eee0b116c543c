"""Peak memory of a stage."""
