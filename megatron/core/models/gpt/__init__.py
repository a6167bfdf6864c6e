"""GPT."""

from megatron.core.models.gpt.gpt_model import GPTModel, pad_vocab_size

__all__ = ["GPTModel", "pad_vocab_size"]
