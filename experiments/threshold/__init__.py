"""A cap on the tokens of one request in a step."""
