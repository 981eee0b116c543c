"""What people, models and rules preferred: the rows, where they come from, how far they agree."""
