"""An LLM as a judge."""
