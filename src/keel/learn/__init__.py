"""From a batch and a row to an optimizer step."""
