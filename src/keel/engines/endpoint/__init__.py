"""An OpenAI-compatible endpoint of an engine: for programs in training, and for `keel serve`."""
