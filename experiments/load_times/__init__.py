"""How long a model takes to load, and how much memory."""
