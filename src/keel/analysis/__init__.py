"""Statistics, calibration, plots and the metric glossary, from the files of a run."""
