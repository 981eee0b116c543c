"""Peak memory of a stage, measured in a shortened run."""
