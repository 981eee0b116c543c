"""People who label the pairs of a preference store: what each is shown, and what is stored."""
