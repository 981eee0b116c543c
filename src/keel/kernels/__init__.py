"""What is written in C: compiled at first use by the machine's own compiler, and kept."""
