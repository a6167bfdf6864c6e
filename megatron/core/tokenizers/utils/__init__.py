"""How a tokenizer is chosen by name."""
