"""The proof's stand-in for Transformer Engine's MXFP8 tensor has the project's own bits."""

import pytest
import torch

from megatron.core.quantization import MXFP8Quantizer
from tests.functional_tests.backport.mxfp8_stand_in import MXFP8Tensor, mxfp8_parameter


@pytest.fixture
def source() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=generator) * 2.0 ** torch.randint(
        -40, 40, (64, 96), generator=generator
    )
    values[:32, :32] = 0.0
    return values.to(torch.bfloat16)


def test_both_copies_equal_the_project_s(source: torch.Tensor) -> None:
    mine, theirs = MXFP8Tensor.quantized_from(source), MXFP8Quantizer()(source)
    assert theirs._rowwise_data is not None and theirs._columnwise_data is not None
    assert torch.equal(mine._rowwise_data, theirs._rowwise_data.view(torch.uint8))
    assert torch.equal(mine._columnwise_data.T, theirs._columnwise_data.view(torch.uint8))
    assert torch.equal(mine.dequantize(), theirs.dequantize(dtype=torch.bfloat16))


def test_it_behaves_as_a_parameter_with_storage_of_its_own(source: torch.Tensor) -> None:
    parameter = mxfp8_parameter(source)
    assert isinstance(parameter, MXFP8Tensor) and isinstance(parameter, torch.nn.Parameter)
    assert parameter.dtype == torch.bfloat16 and parameter.shape == source.shape
    assert torch.equal(parameter.get_high_precision_init_val(), source)  # type: ignore[attr-defined]
    parameter.data.copy_(source * 2)
    assert torch.equal(parameter.dequantize(), MXFP8Tensor.quantized_from(source * 2).dequantize())
    with pytest.raises(RuntimeError, match="no view"):
        torch._utils._flatten_dense_tensors([parameter])
    parameter.clear_high_precision_init_val()  # type: ignore[attr-defined]
    assert parameter.get_high_precision_init_val() is None  # type: ignore[attr-defined]
