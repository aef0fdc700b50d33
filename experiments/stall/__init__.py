"""One long prompt among streams."""
