"""The pages on which people label the pairs of a preference store."""
