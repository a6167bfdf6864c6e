"""GPT: embeddings, transformer layers, output layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization import MXFP8Quantizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    NormalInit,
    VocabParallelEmbedding,
    gather_from_tensor_model_parallel_region,
    initialize_parameters,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.layer_groups import LayerGroups
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")


def pad_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Vocabulary rounded up so that every tensor-parallel rank holds a multiple of ``divisible_by``."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


class LanguageModelEmbedding(MegatronModule):
    """Embeddings of tokens and, if they are learned, of positions."""

    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_sequence_length: int,
        learned: bool,
        groups: LayerGroups,
    ) -> None:
        super().__init__(config)
        std = config.init_method_std
        self.tp_group = groups.tp
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            config=config,
            std=std,
            tp_group=groups.tp,
            gtp=groups.gtp,
        )
        self.word_embeddings.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self.position_embeddings: torch.nn.Embedding | None = None
        if learned:
            shape = (max_sequence_length, config.hidden_size)
            table = torch.nn.Embedding(
                *shape, _weight=torch.empty(shape, dtype=config.params_dtype)
            )
            table.weight.normal_init = NormalInit(std, shape)  # type: ignore[attr-defined]
            table.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
            self.position_embeddings = table

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` to ``[s, b, h]``."""
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids)
        x = x.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x, self.tp_group)
        rate = self.config.hidden_dropout
        return F.dropout(x, rate, self.training) if rate else x


class GPTModel(MegatronModule):
    """A decoder-only language model, initialised from ``torch.initial_seed()``.

    Under ``config.fp8_param`` its linear layers' weights are stored in MXFP8 and keep the values that
    they were quantised from until an optimizer seeds its masters.

    Args:
        config: A :class:`~megatron.core.transformer.TransformerConfig`.
        vocab_size: Tokens; a multiple of the tensor-parallel size.
        max_sequence_length: Positions, if they are learned.
        share_embeddings_and_output_weights: One matrix for both.
        position_embedding_type: ``learned_absolute``, ``rope`` or ``none``.
        rotary_percent: Share of a head's features that is rotated.
        rotary_base: Base of the wavelengths.
        pg_collection: Gives ``tp``, ``gtp_remat``, ``ep``, ``expt_tp`` and ``expt_gtp_remat``; those
            of :mod:`megatron.core.parallel_state` if ``None``.

    Attributes:
        gtp_chain: Gathers the weights that are cut over GTP ranks.

    Raises:
        ValueError: If an option is none of its choices.
    """

    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_sequence_length: int,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        if position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type must be one of {', '.join(POSITION_EMBEDDING_TYPES)}, got "
                f"{position_embedding_type!r}"
            )
        groups = LayerGroups.from_collection(pg_collection)
        self.tp_group = groups.tp
        self.gtp_chain = groups.chain
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.embedding = LanguageModelEmbedding(
            config,
            vocab_size,
            max_sequence_length,
            position_embedding_type == "learned_absolute",
            groups,
        )
        self.rotary = None
        if position_embedding_type == "rope":
            self.rotary = RotaryEmbedding(config.kv_channels, rotary_percent, rotary_base)
        self.decoder = TransformerBlock(config, groups)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            std=config.init_method_std,
            bias=False,
            tp_group=self.tp_group,
            quantized=False,
            gtp=groups.gtp,
        )
        if share_embeddings_and_output_weights:
            shared = self.embedding.word_embeddings.weight
            shared.shared_embedding = True  # type: ignore[attr-defined]
            self.output_layer.weight = shared
        self.output_layer.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        if config.perform_initialization:
            initialize_parameters(self, torch.initial_seed())
        if config.fp8_param:
            self._store_weights_quantized()

    def _store_weights_quantized(self) -> None:
        quantizer = MXFP8Quantizer(dtype=self.config.params_dtype)
        for module in self.modules():
            weight = getattr(module, "weight", None)
            if getattr(weight, "computes_in_mxfp8", False):
                module.weight = quantizer.quantize_parameter(weight)  # type: ignore[assignment,arg-type]

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """The output matrix, which may be the embedding table."""
        return self.output_layer.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Losses of all tokens, or logits.

        Args:
            input_ids: ``[b, s]``.
            position_ids: ``[b, s]``; 0, 1, 2, ... if ``None``.
            attention_mask: Must be ``None``: attention is causal.
            labels: ``[b, s]``, the tokens to predict.

        Returns:
            With labels FP32 losses ``[b, s]``, otherwise logits ``[b, s, vocabulary]``.

        Raises:
            ValueError: If an attention mask is given.
        """
        if attention_mask is not None:
            raise ValueError("attention_mask must be None: attention is causal over each sample")
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device).expand_as(
                input_ids
            )
        self.gtp_chain.start_pass()
        x = self.embedding(input_ids, position_ids)
        rotation = None if self.rotary is None else self.rotary(input_ids.size(1), x.device)
        logits = self.output_layer(self.decoder(x, rotation))
        if labels is None:
            logits = gather_from_tensor_model_parallel_region(logits, self.tp_group)
            return logits.transpose(0, 1)
        target = labels.transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits, target, self.tp_group).transpose(0, 1)
