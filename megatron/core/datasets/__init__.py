"""Token files, and the samples of a GPT drawn from them."""
