"""What a step costs as rows, context, tokens, lengths and pool grow, and what must not grow."""
