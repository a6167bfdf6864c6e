"""Options of a transformer, by Megatron's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.model_parallel_config import (
    ModelParallelConfig,
    options_not_available,
    refuse_not_available,
)

_NotAvailable: Any = options_not_available(
    "_NotAvailable",
    {
        "multi-latent attention": {"multi_latent_attention": False},
        "window attention": {"window_size": None},
        "recomputation of parts of a layer": {"recompute_modules": None},
        "multi-token prediction": {"mtp_num_layers": None},
        "FP4": {"fp4": None, "fp4_param": False},
        "layernorm that is centred at zero": {"layernorm_zero_centered_gamma": False},
        "query and key norms": {"qk_layernorm": False},
    },
)


@dataclass
class TransformerConfig(_NotAvailable, ModelParallelConfig):
    """Options of a transformer. Only the number of layers and of heads have no default.

    Attributes:
        num_layers: Layers.
        hidden_size: Features of the residual stream.
        num_attention_heads: Query heads.
        num_query_groups: Key and value heads; as many as query heads if ``None``.
        kv_channels: Features of a head; ``hidden_size / num_attention_heads`` if ``None``.
        ffn_hidden_size: Features inside the MLP; ``4 * hidden_size`` if ``None``.
        gated_linear_unit: The MLP's activation is gated.
        activation_func: Of the MLP.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        layernorm_epsilon: Added to the variance.
        add_bias_linear: Linear layers have biases.
        add_qkv_bias: The fused query-key-value layer has one even so.
        hidden_dropout: After attention and after the MLP.
        attention_dropout: Of attention weights.
        init_method_std: Of initial weights; outputs of residual branches get it over
            ``sqrt(2 * num_layers)``.
        calculate_per_token_loss: Sum gradients and divide once by the global number of tokens.
        fp8: ``None``, or ``e4m3`` for linear layers that compute in 8 bits.
        fp8_recipe: ``mxfp8``.
        fp8_param: Their weights are stored quantised.
        recompute_granularity: ``None``, or ``full``: whole layers' activations are computed anew in
            the backward pass.
        recompute_method: Of which layers: ``uniform`` (of all, stretches of ``recompute_num_layers``
            at a time) or ``block`` (of the first ``recompute_num_layers``).
        recompute_num_layers: See above.
        num_moe_experts: Routed experts in place of every MLP; ``None`` for none.
        moe_router_topk: Experts that each token goes to.
        moe_router_pre_softmax: Probabilities over all experts rather than over the chosen ones.
        moe_ffn_hidden_size: Features inside an expert; ``ffn_hidden_size`` if ``None``.
        transformer_impl: Accepted, as are the ``*_fusion`` options and ``persist_layer_norm``: they
            say how Megatron computes what is computed one way here.

    Raises:
        ValueError: If an option is out of range, contradicts another or is not available.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    gated_linear_unit: bool = False
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    calculate_per_token_loss: bool = False
    fp8: str | None = None
    fp8_recipe: str = "mxfp8"
    fp8_param: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_ffn_hidden_size: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    transformer_impl: str = "local"
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    masked_softmax_fusion: bool = False
    apply_rope_fusion: bool = False
    persist_layer_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_not_available(self)
        for name in ("num_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads = self.num_attention_heads
        if self.kv_channels is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) must divide by num_attention_heads ({heads}); "
                    "otherwise set kv_channels"
                )
            self.kv_channels = self.hidden_size // heads
        if self.num_query_groups is None:
            self.num_query_groups = heads
        if self.num_query_groups < 1 or heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads ({heads}) must divide by num_query_groups "
                f"({self.num_query_groups})"
            )
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"normalization must be LayerNorm or RMSNorm, got {self.normalization!r}"
            )
        self._check_fp8()
        tp = self.tensor_model_parallel_size
        if heads % tp or (self.num_query_groups % tp and tp % self.num_query_groups):
            raise ValueError(
                f"num_attention_heads ({heads}) must divide by tensor_model_parallel_size ({tp}), and "
                f"num_query_groups ({self.num_query_groups}) must divide by it or divide it"
            )
        if tp > 1 and (self.hidden_dropout or self.attention_dropout):
            raise ValueError(
                "dropout with tensor_model_parallel_size above 1 is not available: set "
                "hidden_dropout and attention_dropout to 0"
            )

        self._check_recomputation()
        if self.num_moe_experts is not None:
            self._check_experts(self.num_moe_experts)

    def _check_recomputation(self) -> None:
        if self.recompute_granularity is None:
            if self.recompute_method is not None or self.recompute_num_layers is not None:
                raise ValueError(
                    "recompute_method and recompute_num_layers need recompute_granularity='full'"
                )
            return
        if self.recompute_granularity != "full":
            raise ValueError(
                f"recompute_granularity must be None or 'full', got {self.recompute_granularity!r}"
            )
        if self.recompute_method not in ("uniform", "block"):
            raise ValueError(
                "recompute_granularity='full' needs recompute_method 'uniform' or 'block', got "
                f"{self.recompute_method!r}"
            )
        if self.recompute_num_layers is None or self.recompute_num_layers < 1:
            raise ValueError(
                f"recompute_method={self.recompute_method!r} needs recompute_num_layers of at least "
                f"1, got {self.recompute_num_layers}"
            )

    def _check_experts(self, experts: int) -> None:
        if self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        if not 1 <= self.moe_router_topk <= experts:
            raise ValueError(
                f"moe_router_topk must be between 1 and num_moe_experts ({experts}), got "
                f"{self.moe_router_topk}"
            )
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk=1 needs moe_router_pre_softmax=True: a softmax over one chosen "
                "expert is always 1, and the router would learn nothing"
            )
        if experts % self.expert_model_parallel_size:
            raise ValueError(
                f"num_moe_experts ({experts}) must divide by expert_model_parallel_size "
                f"({self.expert_model_parallel_size})"
            )
        if self.expert_tensor_parallel_size != self.tensor_model_parallel_size:
            raise ValueError(
                "experts are cut over as many tensor-parallel ranks as the rest: "
                f"expert_tensor_parallel_size ({self.expert_tensor_parallel_size}) must be "
                f"tensor_model_parallel_size ({self.tensor_model_parallel_size})"
            )

    def _check_fp8(self) -> None:
        if self.fp8 is None:
            if self.fp8_param:
                raise ValueError("fp8_param needs fp8='e4m3': weights are stored as they compute")
            return
        if self.fp8 != "e4m3" or self.fp8_recipe != "mxfp8":
            raise ValueError(
                f"fp8={self.fp8!r} with fp8_recipe={self.fp8_recipe!r} is not available; the one recipe "
                "here is fp8='e4m3' with fp8_recipe='mxfp8'"
            )
        if not self.bf16:
            raise ValueError("fp8='e4m3' needs bf16=True: its outputs and gradients are BF16")
