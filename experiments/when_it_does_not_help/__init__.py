"""Loads that chunking does nothing for."""
