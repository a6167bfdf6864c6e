"""What the rest of the project asks of quantised parameters, ours and Transformer Engine's."""

import sys
import types

import pytest
import torch

from megatron.core import fp8_utils
from megatron.core.quantization import MXFP8Quantizer


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


class StandInTensor(torch.nn.Parameter):
    """What is used of Transformer Engine's tensor: its class and its quantizer."""


class StandInQuantizer:
    def __init__(self) -> None:
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update_quantized(self, source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        self.written.append((source, destination))
        return destination


@pytest.fixture
def te_parameter(monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch.tensor.mxfp8_tensor")
    module.MXFP8Tensor = StandInTensor
    monkeypatch.setitem(sys.modules, module.__name__, module)
    param = StandInTensor(values())
    param._quantizer = StandInQuantizer()
    return param


def test_recognises_ours_and_nothing_else():
    ours = MXFP8Quantizer().quantize(values())
    assert fp8_utils.is_mxfp8tensor(ours) and fp8_utils.is_float8tensor(ours)
    assert not fp8_utils.is_mxfp8tensor(values()) and not fp8_utils.is_float8tensor(values())


def test_transformer_engines_parameters_are_written_by_their_own_quantizer(te_parameter):
    ours = MXFP8Quantizer().quantize(values())
    assert fp8_utils.is_mxfp8tensor(te_parameter)
    new = values(1)
    fp8_utils.copy_tensors_to_quantized_params([te_parameter, ours], [new, new])
    assert te_parameter._quantizer.written == [(new, te_parameter)]
    assert ours.has_same_bytes(MXFP8Quantizer().quantize(new))
    te_parameter._quantizer = None
    with pytest.raises(TypeError, match="quantizer"):
        fp8_utils.copy_tensor_to_quantized_param(te_parameter, new)


def test_many_parameters_in_one_call():
    params = [MXFP8Quantizer().quantize(values(i)) for i in range(3)]
    sources = [values(10 + i) for i in range(3)]
    fp8_utils.copy_tensors_to_quantized_params(params, sources)
    for param, source in zip(params, sources, strict=True):
        assert param.has_same_bytes(MXFP8Quantizer().quantize(source))


def test_wrong_shapes_and_kinds_are_refused():
    with pytest.raises(ValueError, match="shape"):
        fp8_utils.copy_tensors_to_quantized_params(
            [MXFP8Quantizer().quantize(values())], [torch.zeros(2)]
        )
    with pytest.raises(TypeError, match="not a quantised parameter"):
        fp8_utils.copy_tensors_to_quantized_params([values()], [values()])


def test_popping_the_initial_value_gives_it_once():
    param = MXFP8Quantizer().quantize_parameter(torch.nn.Parameter(values()))
    assert torch.equal(fp8_utils.pop_high_precision_init_val(param), values())
    assert fp8_utils.pop_high_precision_init_val(param) is None
    assert fp8_utils.pop_high_precision_init_val(values()) is None
