"""The measurements behind the pages of docs/algorithms: `python -m studies.evidence --help`."""
