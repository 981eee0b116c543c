"""The vLLM engine: sampling by a vLLM server on this machine."""
