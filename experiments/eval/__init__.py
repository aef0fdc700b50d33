"""What a model makes of a text: perplexity, and how far two models are apart."""
