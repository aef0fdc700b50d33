"""Serving of Llama-family models with chunked prefill under a token budget."""

__version__ = "0.1.0"
