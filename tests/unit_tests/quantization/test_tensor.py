"""MXFP8Tensor as a parameter: it is written, copied, saved and trained, and never computed with."""

import copy
import io

import pytest
import torch

from megatron.core.quantization import MXFP8Quantizer, MXFP8Tensor, quantized_like
from megatron.core.quantization import format as mx


def values(rows: int = 64, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def parameter(seed: int = 0) -> torch.nn.Parameter:
    return MXFP8Quantizer().quantize_parameter(torch.nn.Parameter(values(seed=seed)))


def test_it_holds_the_bytes_of_both_directions():
    source = values()
    tensor = MXFP8Quantizer().quantize(source)
    rows, columns = mx.quantize_rowwise(source), mx.quantize_columnwise(source)
    assert torch.equal(tensor._rowwise_data, rows[0])
    assert torch.equal(tensor._rowwise_scale_inv, rows[1])
    assert torch.equal(tensor._columnwise_data, columns[0])
    assert torch.equal(tensor._columnwise_scale_inv, columns[1])
    assert (tensor.shape, tensor.dtype) == (source.shape, torch.bfloat16)
    assert torch.equal(tensor.dequantize(), mx.dequantize_rowwise(*rows, torch.bfloat16))


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_one_direction_alone(rowwise, columnwise):
    tensor = MXFP8Quantizer(rowwise=rowwise, columnwise=columnwise).quantize(values())
    assert (tensor._rowwise_data is not None, tensor._columnwise_data is not None) == (
        rowwise,
        columnwise,
    )
    assert (tensor.dequantize() - values()).abs().max() < 0.2
    with pytest.raises(ValueError, match="rowwise or columnwise"):
        MXFP8Quantizer(rowwise=False, columnwise=False).make_empty((32, 32))


def test_2d_scaling_keeps_one_copy():
    tensor = MXFP8Quantizer(with_2d_quantization=True).quantize(values())
    assert tensor._rowwise_data is tensor._columnwise_data and tensor.is_2d_scaled
    moved = tensor.clone()
    assert moved._rowwise_data is moved._columnwise_data and moved.has_same_bytes(tensor)


def test_quantize_writes_in_place():
    tensor = parameter()
    data = tensor._rowwise_data
    tensor.quantize_(values(seed=1))
    assert tensor._rowwise_data is data
    assert tensor.has_same_bytes(MXFP8Quantizer().quantize(values(seed=1)))
    with pytest.raises(ValueError, match="shape"):
        tensor.quantize_(values(32, 32))


def test_sources_that_are_not_contiguous_quantise_alike():
    source = values(96, 64)
    assert (
        MXFP8Quantizer()
        .quantize(source.T)
        .has_same_bytes(MXFP8Quantizer().quantize(source.T.contiguous()))
    )


def test_it_is_a_parameter_with_the_attributes_of_the_one_it_replaces():
    plain = torch.nn.Parameter(values())
    plain.use_muon = False
    param = MXFP8Quantizer().quantize_parameter(plain)
    module = torch.nn.Module()
    module.weight = param
    assert isinstance(param, torch.nn.Parameter) and isinstance(param, MXFP8Tensor)
    assert dict(module.named_parameters())["weight"] is param and param.requires_grad
    assert param.use_muon is False
    assert torch.equal(param.get_high_precision_init_val(), plain.detach())
    param.clear_high_precision_init_val()
    assert param.get_high_precision_init_val() is None


def test_assigning_data_gives_it_other_bytes_or_values():
    param, other = parameter(0), parameter(1)
    param.data = other.data
    assert param.has_same_bytes(other)
    param.data = values(seed=2)
    assert param.has_same_bytes(MXFP8Quantizer().quantize(values(seed=2)))
    with pytest.raises(ValueError, match="float64"):
        param.data = values().double()


def test_copy_means_quantise_or_copy_bytes():
    tensor, other = parameter(0), parameter(1)
    with torch.no_grad():
        tensor.copy_(other)
        assert tensor.has_same_bytes(other) and tensor._rowwise_data is not other._rowwise_data
        tensor.copy_(values(seed=2))
        assert tensor.has_same_bytes(MXFP8Quantizer().quantize(values(seed=2)))
        plain = torch.empty(64, 96)
        plain.copy_(tensor)
        assert torch.equal(plain, tensor.dequantize(torch.float32))


def test_deepcopy_pickle_and_load_state_dict_keep_the_bytes():
    param = parameter()
    duplicate = copy.deepcopy(param)
    assert isinstance(duplicate, torch.nn.Parameter) and duplicate.has_same_bytes(param)
    assert duplicate._rowwise_data.data_ptr() != param._rowwise_data.data_ptr()
    file = io.BytesIO()
    torch.save({"weight": param}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert isinstance(loaded, torch.nn.Parameter) and loaded.has_same_bytes(param)
    module = torch.nn.Module()
    module.weight = parameter(5)
    module.load_state_dict({"weight": param})
    assert module.weight.has_same_bytes(param)
    module.load_state_dict({"weight": values(seed=3)})
    assert module.weight.has_same_bytes(MXFP8Quantizer().quantize(values(seed=3)))


def test_to_moves_bytes_and_refuses_casts():
    tensor = MXFP8Quantizer().quantize(values())
    moved = tensor.to("cpu", copy=True)
    assert moved.has_same_bytes(tensor) and moved._rowwise_data is not tensor._rowwise_data
    with pytest.raises(NotImplementedError, match="dequantize"):
        tensor.to(torch.float32)


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t + 1,
        lambda t: t @ t.mT,
        lambda t: t.view(-1),
        lambda t: t[0],
        lambda t: t.sum(),
        lambda t: torch.nn.functional.linear(torch.ones(2, 96, dtype=torch.bfloat16), t),
        lambda t: t.mul_(2),
        lambda t: t.zero_(),
        lambda t: t.expand(2, 64, 96),
        lambda t: t.float(),
    ],
)
def test_what_would_compute_with_it_raises_and_says_what_to_do(operation):
    with pytest.raises(NotImplementedError, match="dequantize"), torch.no_grad():
        operation(parameter().detach())


def test_a_torch_optimizer_cannot_step_it_by_accident():
    param = parameter()
    before = param.detach().clone()
    param.grad = torch.ones(64, 96, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError):
        torch.optim.SGD([param], lr=0.1, foreach=False).step()
    assert param.has_same_bytes(before)


def test_hooks_and_the_accumulator_are_reachable():
    param = parameter()
    accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
    assert type(accumulator).__name__ == "AccumulateGrad"


def test_it_prints_its_values():
    text = repr(parameter())
    assert "MXFP8Tensor" in text and "(64, 96)" in text and "rowwise+columnwise" in text


def test_quantized_like_follows_its_template():
    template = MXFP8Quantizer(columnwise=False).quantize(values())
    result = quantized_like(template, values(seed=1))
    assert result._columnwise_data is None and result._rowwise_data is not template._rowwise_data
    with pytest.raises(TypeError, match="MXFP8Tensor"):
        quantized_like(values(), values())


@pytest.mark.parametrize("shape", [(64, 33), (31, 64), (64,)])
def test_shapes_that_do_not_divide_are_refused(shape):
    with pytest.raises(ValueError, match="multiples of 32"):
        MXFP8Quantizer().quantize(torch.zeros(shape))
