"""Mixture of experts: each token goes through a few of many MLPs."""

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

__all__ = ["MoEAlltoAllTokenDispatcher", "MoELayer", "TopKRouter"]
