"""What went wrong in a run, with evidence, likely causes and the recipe keys to change."""
