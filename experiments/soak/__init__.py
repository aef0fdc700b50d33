"""A server under clients that behave badly."""
