"""Transformer layers and their options."""

from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["Float16Module", "MegatronModule", "TransformerConfig"]
