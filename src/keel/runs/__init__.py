"""The run folder: its layout, what is written to it, how it is read back."""
