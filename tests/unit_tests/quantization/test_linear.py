"""The three products of a linear layer: right operands, right blocks, one result for both storages."""

import pytest
import torch

from megatron.core.quantization import (
    MXFP8Quantizer,
    forget_quantized_weight,
    mxfp8_linear,
)
from megatron.core.quantization import format as mx
from megatron.core.quantization import linear as linear_module


def make(tokens: int = 64, out: int = 96, width: int = 128):
    generator = torch.Generator().manual_seed(0)
    # Rows and columns of different magnitude, so that blocks along the wrong dimension show.
    scale_in = 2.0 ** torch.randint(-6, 6, (1, width), generator=generator)
    scale_out = 2.0 ** torch.randint(-6, 6, (out, 1), generator=generator)
    scale_tokens = 2.0 ** torch.randint(-6, 6, (tokens, 1), generator=generator)
    x = torch.randn(tokens, width, generator=generator) * scale_tokens
    weight = torch.randn(out, width, generator=generator) * scale_in * scale_out
    grad = torch.randn(tokens, out, generator=generator) * scale_tokens * scale_out.T
    return x.bfloat16(), weight.bfloat16(), grad.bfloat16()


def rows(x: torch.Tensor) -> torch.Tensor:
    return mx.dequantize_rowwise(*mx.quantize_rowwise(x), torch.float64)


def columns(x: torch.Tensor) -> torch.Tensor:
    return mx.dequantize_columnwise(*mx.quantize_columnwise(x), torch.float64)


def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, bias=None):
    x = x.clone().requires_grad_()
    output = mxfp8_linear(x, weight, bias)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad


def test_stored_and_computed_weights_give_the_same_bits():
    x, w, grad = make()
    plain = torch.nn.Parameter(w.clone())
    stored = MXFP8Quantizer().quantize_parameter(torch.nn.Parameter(w))
    for ours, theirs in zip(run(x, plain, grad), run(x, stored, grad), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == torch.bfloat16


def test_products_contract_along_blocks_and_accumulate_in_fp32():
    x, w, grad = make()
    output, grad_input, grad_weight = run(x, torch.nn.Parameter(w), grad)
    expected = (
        (output, rows(x) @ rows(w).T),
        (grad_input, rows(grad) @ columns(w)),
        (grad_weight, columns(grad).T @ columns(x)),
    )
    for got, exact in expected:
        # One rounding to BF16, and FP32 sums of up to 128 terms that may cancel.
        magnitude = exact.abs().amax(dim=1, keepdim=True)
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + magnitude * 2**-15).all()


def test_bias_and_leading_dimensions():
    x, w, grad = make()
    bias = torch.nn.Parameter(torch.randn(96).bfloat16())
    flat = run(x, torch.nn.Parameter(w), grad, bias)[0]
    assert torch.equal(
        mxfp8_linear(x.view(2, 32, 128), torch.nn.Parameter(w), bias).flatten(0, 1), flat
    )
    assert torch.equal(bias.grad, grad.sum(0))


def test_a_computed_weight_is_quantised_once_until_it_is_told_to_have_changed(monkeypatch):
    x, w, grad = make()
    weight = torch.nn.Parameter(w.clone())
    count = 0
    original = MXFP8Quantizer.quantize

    def counting(self, source):
        nonlocal count
        count += 1
        return original(self, source)

    monkeypatch.setattr(linear_module.MXFP8Quantizer, "quantize", counting)
    for _ in range(3):
        first = run(x, weight, grad)[0]
    assert count == 1
    with torch.no_grad():
        weight.mul_(2)
    forget_quantized_weight(weight)
    assert torch.equal(run(x, weight, grad)[0], first * 2) and count == 2


def test_only_bytes_wait_for_the_backward_pass():
    x, w, _ = make()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.dtype) or t, lambda t: t
    )
    with hooks:
        mxfp8_linear(x.requires_grad_(), torch.nn.Parameter(w))
    assert saved and set(saved) == {torch.uint8}


def test_repeated_runs_have_the_same_bits():
    x, w, grad = make(512, 96, 128)
    first = run(x, torch.nn.Parameter(w), grad)
    second = run(x, torch.nn.Parameter(w), grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_gradients_that_nobody_needs_are_not_computed(frozen):
    x, w, grad = make()
    x.requires_grad_(frozen != "input")
    weight = torch.nn.Parameter(w, requires_grad=frozen != "weight")
    mxfp8_linear(x, weight).backward(grad)
    assert (x.grad is None) == (frozen == "input") and (weight.grad is None) == (frozen == "weight")


def test_tokens_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="micro batch size"):
        mxfp8_linear(torch.zeros(31, 64).bfloat16(), torch.zeros(32, 64).bfloat16())
    for kept in ({"rowwise": False}, {"columnwise": False}):
        half = MXFP8Quantizer(**kept).quantize(torch.zeros(32, 64).bfloat16())
        with pytest.raises(ValueError, match="quantise it with both"):
            mxfp8_linear(torch.zeros(32, 64).bfloat16(), half)
    with pytest.raises(ValueError, match="does not fit"):
        mxfp8_linear(torch.zeros(32, 32).bfloat16(), torch.zeros(32, 64).bfloat16())
