"""The shape of published results."""
