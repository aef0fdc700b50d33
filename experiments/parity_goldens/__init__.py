"""Golden logits of tiny random Llamas, by transformers."""
