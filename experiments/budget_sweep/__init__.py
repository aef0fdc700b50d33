"""Latency against the token budget."""
