"""Makes and updates MXFP8 matrices, by Transformer Engine's names."""

from __future__ import annotations

import torch

from megatron.core.quantization.tensor import MXFP8Tensor, empty_mxfp8_tensor


class MXFP8Quantizer:
    """What a quantised matrix is to keep, and how it is scaled.

    Args:
        rowwise: Keep the copy whose blocks lie along the last dimension (forward).
        columnwise: Keep the copy whose blocks lie along the first dimension (dgrad).
        with_2d_quantization: One scale for each 32 x 32 block, and so one copy for both.
        dtype: Nominal dtype of the matrices made.
    """

    def __init__(
        self,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.with_2d_quantization = with_2d_quantization
        self.dtype = dtype

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Changes what the matrices made from now on keep."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def make_empty(
        self, shape: tuple[int, int] | torch.Size, device: torch.device | str = "cpu"
    ) -> MXFP8Tensor:
        """An unwritten matrix."""
        return empty_mxfp8_tensor(
            (shape[0], shape[1]) if len(shape) == 2 else tuple(shape),  # type: ignore[arg-type]
            device,
            self.dtype,
            self.rowwise_usage,
            self.columnwise_usage,
            self.with_2d_quantization,
        )

    @torch.no_grad()
    def quantize(self, source: torch.Tensor) -> MXFP8Tensor:
        """A new matrix with the values of ``source``, ``[M, K]`` in BF16, FP16 or FP32."""
        return self.make_empty(source.shape, source.device).quantize_(source)

    def __call__(self, source: torch.Tensor) -> MXFP8Tensor:
        return self.quantize(source)

    def quantize_parameter(self, param: torch.nn.Parameter) -> torch.nn.Parameter:
        """``param`` as a quantised parameter, with its attributes.

        It keeps the values that it was made of, on the CPU, until masters are made from them
        (``get_high_precision_init_val``).
        """
        result = torch.nn.Parameter(self.quantize(param.detach()), param.requires_grad)
        result.__dict__.update(param.__dict__)
        result._high_precision_init_val = param.detach().cpu().clone()  # type: ignore[attr-defined]
        return result

    def update_quantized(self, source: torch.Tensor, destination: MXFP8Tensor) -> MXFP8Tensor:
        """Writes ``source``'s values into ``destination``."""
        return destination.quantize_(source)


def quantized_like(template: torch.Tensor, source: torch.Tensor) -> MXFP8Tensor:
    """``source`` quantised the way ``template`` is, into memory of its own.

    Raises:
        TypeError: If ``template`` is not an MXFP8Tensor.
    """
    if not isinstance(template, MXFP8Tensor):
        raise TypeError(f"expected an MXFP8Tensor, got {type(template).__name__}")
    quantizer = MXFP8Quantizer(
        template._rowwise_data is not None,
        template._columnwise_data is not None,
        template.is_2d_scaled,
        template.dtype,
    )
    return quantizer.quantize(source)
