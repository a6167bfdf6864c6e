"""The small residual model of the proof, and its MXFP8 linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.functional_tests.backport.mxfp8_stand_in import (
    MXFP8Tensor,
    dequantize_rows,
    mxfp8_parameter,
    quantize_rows,
)

VOCABULARY = 256
HIDDEN = 64
INNER = 128
LAYERS = 3
TOKENS = 64


class _MXFP8Product(torch.autograd.Function):
    """``x @ weight.T`` with the weight in MXFP8, whether it is stored so or quantised here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, MXFP8Tensor):
            rowwise, columnwise = weight.dequantize(), weight.dequantize_columnwise()
        else:
            rowwise = dequantize_rows(*quantize_rows(weight)).to(weight.dtype)
            columnwise = dequantize_rows(*quantize_rows(weight.T)).T.to(weight.dtype)
        ctx.save_for_backward(x, columnwise)
        return x @ rowwise.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        x, columnwise = ctx.saved_tensors
        return gradient @ columnwise, gradient.T @ x


class MXFP8Linear(nn.Module):
    """A linear layer without bias whose product is in MXFP8.

    Args:
        initial: ``[out, in]`` BF16 weight to start from.
        primary: Keep the weight in MXFP8 (True) or in BF16, quantised on the fly (False).
    """

    def __init__(self, initial: torch.Tensor, primary: bool) -> None:
        super().__init__()
        self.weight = mxfp8_parameter(initial) if primary else nn.Parameter(initial.clone())
        self.weight.computes_in_mxfp8 = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _MXFP8Product.apply(x, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class Norm(nn.Module):
    """Root-mean-square norm with a learned gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,)) * self.gain


class Block(nn.Module):
    """``x + down(relu(up(norm(x))))``."""

    def __init__(self, generator: torch.Generator, primary: bool, plain_down: bool) -> None:
        super().__init__()
        self.up = MXFP8Linear(_normal(generator, INNER, HIDDEN), primary)
        self.down = MXFP8Linear(_normal(generator, HIDDEN, INNER), primary and not plain_down)
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ResidualModel(nn.Module):
    """Embedding, three blocks, output layer: predicts the next token of a fixed random table.

    Args:
        primary: Blocks keep their weights in MXFP8.
        matrices_first: Register the blocks before the embedding, so that the first parameter is
            Muon's and not the scalar optimizer's.
        quantized_output: The output layer multiplies in MXFP8 too (and keeps its weight so if
            ``primary``), which gives the scalar optimizer a quantised matrix.
        plain_down: The second matrix of each block stays in BF16, which gives Muon a BF16 buffer
            beside the quantised one.
    """

    def __init__(
        self,
        primary: bool,
        quantized_output: bool = False,
        plain_down: bool = False,
        matrices_first: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1234)
        blocks = nn.ModuleList(Block(generator, primary, plain_down) for _ in range(LAYERS))
        if matrices_first:
            self.blocks = blocks
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.embedding.weight.data.copy_(_normal(generator, VOCABULARY, HIDDEN) * 0.25)
        self.blocks = blocks
        output = _normal(generator, VOCABULARY, HIDDEN) * 0.25
        self.output: nn.Module
        if quantized_output:
            self.output = MXFP8Linear(output, primary)
        else:
            self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
            self.output.weight.data.copy_(output)
        for matrix in (self.embedding.weight, self.output.weight):
            matrix.is_embedding_or_output_parameter = True  # type: ignore[union-attr, attr-defined]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.output(nn.functional.rms_norm(x, (HIDDEN,)))
        return nn.functional.cross_entropy(logits.float(), labels)


def batch(step: int, rank: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, ``[TOKENS]`` each, that this rank alone reads."""
    table = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1_000_003 * step + 1009 * rank + microbatch)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return tokens, table[tokens]


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # The last dimension is the fan-in of every matrix here.
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)
