"""The simulator's prediction of a live run."""
