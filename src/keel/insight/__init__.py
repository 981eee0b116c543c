"""What a run shows: statistics, plots, curves for a terminal, the metric glossary."""
