"""A matrix that is stored in MXFP8 and can be a module's parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.quantization import format as reference
from megatron.core.quantization.kernels import Storage, empty_storage, quantize_many

aten = torch.ops.aten


class MXFP8Tensor(torch.Tensor):
    """An ``[M, K]`` matrix whose values are E4M3 elements times block scales.

    It has a nominal dtype (BF16), in which its gradients come, and the interface of Transformer
    Engine's tensor of the same name. It is written by :meth:`quantize_`, ``copy_`` or a quantizer and
    read by :meth:`dequantize` or kernels that take its bytes. Every other operation raises, because
    computing with a dequantised copy by accident would be neither fast nor what was meant.

    Args:
        storage: Its bytes.
        dtype: Nominal dtype.
        requires_grad: As for any tensor.
    """

    _storage: Storage
    _high_precision_init_val: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, storage: Storage, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False
    ) -> MXFP8Tensor:
        data = storage.rowwise_data if storage.rowwise_data is not None else storage.columnwise_data
        if data is None:
            raise ValueError("an MXFP8Tensor needs the bytes of at least one direction")
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=dtype, device=data.device, requires_grad=requires_grad
        )
        self._storage = storage
        self._high_precision_init_val = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # Bytes, by Transformer Engine's names

    @property
    def storage_bytes(self) -> Storage:
        """Its bytes, for kernels."""
        return self._storage

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self._storage.rowwise_data

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return self._storage.rowwise_scale

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._storage.columnwise_data

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return self._storage.columnwise_scale

    @property
    def is_2d_scaled(self) -> bool:
        """Whether each 32 x 32 block has one scale."""
        return self._storage.is_2d

    # Values

    @torch.no_grad()
    def quantize_(self, source: torch.Tensor) -> MXFP8Tensor:
        """Takes on the values of ``source``, a high-precision matrix of the same shape.

        Raises:
            ValueError: If the shape differs.
        """
        if source.shape != self.shape:
            raise ValueError(
                f"cannot quantise a source of shape {tuple(source.shape)} into {tuple(self.shape)}"
            )
        if source.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"MXFP8 quantises BF16, FP16 and FP32 values, got {source.dtype}")
        quantize_many([source.detach()], [self._storage])
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """Its values, in the nominal dtype unless another is given; from the rowwise copy if kept."""
        dtype = dtype or self.dtype
        storage = self._storage
        if storage.rowwise_data is not None and storage.rowwise_scale is not None:
            return reference.dequantize_rowwise(storage.rowwise_data, storage.rowwise_scale, dtype)
        assert storage.columnwise_data is not None and storage.columnwise_scale is not None
        return reference.dequantize_columnwise(
            storage.columnwise_data, storage.columnwise_scale, dtype
        )

    def has_same_bytes(self, other: MXFP8Tensor) -> bool:
        """Whether data and scales of both directions are equal."""
        mine, theirs = self._storage, other._storage
        pairs = [
            (mine.rowwise_data, theirs.rowwise_data),
            (mine.rowwise_scale, theirs.rowwise_scale),
            (mine.columnwise_data, theirs.columnwise_data),
            (mine.columnwise_scale, theirs.columnwise_scale),
        ]
        return all(
            (a is None) == (b is None) and (a is None or torch.equal(a, b))  # type: ignore[arg-type]
            for a, b in pairs
        )

    # The value before quantisation, kept until masters are made

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values it was first quantised from, on the CPU; ``None`` if not kept."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Lets go of them."""
        self._high_precision_init_val = None

    # As a tensor

    @property
    def data(self) -> MXFP8Tensor:
        """The same bytes without history; assigning gives it other bytes or values."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, MXFP8Tensor) and value.shape == self.shape:
            self._storage = value._storage
        else:
            self.quantize_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        directions = [
            name
            for name, data in (
                ("rowwise", self._rowwise_data),
                ("columnwise", self._columnwise_data),
            )
            if data is not None
        ]
        kind = "2-D scaled" if self.is_2d_scaled else "1-D scaled"
        return (
            f"MXFP8Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{'+'.join(directions)}, {kind}, values={self.dequantize()})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("_storage", "main_grad", "main_param")
        }
        args = (dict(vars(self._storage)), self.dtype, self.requires_grad, attributes)
        return _rebuild_mxfp8_tensor, args

    def _with_storage(self, storage: Storage) -> MXFP8Tensor:
        return MXFP8Tensor(storage, self.dtype)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MXFP8Tensor:
        """The same matrix with ``function`` applied to each of its byte tensors."""
        done = {id(tensor): function(tensor) for tensor in self._storage.tensors()}
        fields = {
            k: done[id(v)] if isinstance(v, torch.Tensor) else v
            for k, v in vars(self._storage).items()
        }
        return self._with_storage(Storage(**fields))  # type: ignore[arg-type]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} is not defined on an MXFP8Tensor, which holds quantised bytes; compute with "
                "tensor.dequantize(), write with tensor.quantize_(values)"
            )
        return handler(*args, **(kwargs or {}))


def _rebuild_mxfp8_tensor(
    storage: dict[str, Any], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> MXFP8Tensor:
    tensor = MXFP8Tensor(Storage(**storage), dtype, requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


torch.serialization.add_safe_globals([_rebuild_mxfp8_tensor, MXFP8Tensor])


def _alias(tensor: MXFP8Tensor, *args: Any, **kwargs: Any) -> MXFP8Tensor:
    return tensor._with_storage(tensor._storage)


def _clone(tensor: MXFP8Tensor, *, memory_format: Any = None) -> MXFP8Tensor:
    return tensor._map(torch.clone)


def _expand(tensor: MXFP8Tensor, size: Any, *, implicit: bool = False) -> MXFP8Tensor:
    if tuple(size) != tuple(tensor.shape):
        raise NotImplementedError(
            f"an MXFP8Tensor of shape {tuple(tensor.shape)} cannot be expanded to {tuple(size)}; "
            "expand tensor.dequantize()"
        )
    return _alias(tensor)


def _empty_like(
    tensor: MXFP8Tensor, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Any:
    """High-precision memory: what is asked of it next is arithmetic."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _zeros_like(
    tensor: MXFP8Tensor, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Any:
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _to_copy(
    tensor: MXFP8Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    **kw: Any,
) -> MXFP8Tensor:
    if dtype is not None and dtype != tensor.dtype:
        raise NotImplementedError(
            f"an MXFP8Tensor is not cast to {dtype} by .to(); use tensor.dequantize(dtype={dtype})"
        )
    return tensor._map(
        lambda data: data.to(device or data.device, non_blocking=non_blocking, copy=True)
    )


def _copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, MXFP8Tensor):
        return target.copy_(source.dequantize(dtype=torch.float32), non_blocking)
    if not isinstance(source, MXFP8Tensor):
        return target.quantize_(source)
    if target.shape != source.shape or target.is_2d_scaled != source.is_2d_scaled:
        raise ValueError(
            f"cannot copy an MXFP8Tensor of shape {tuple(source.shape)} (2-D scaled: "
            f"{source.is_2d_scaled}) into one of {tuple(target.shape)} ({target.is_2d_scaled})"
        )
    for name, mine in vars(target._storage).items():
        theirs = getattr(source._storage, name)
        if isinstance(mine, torch.Tensor):
            if theirs is None:
                raise ValueError(
                    f"the source of the copy does not keep {name}, which the target has"
                )
            mine.copy_(theirs, non_blocking)
    return target


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.expand.default: _expand,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: _zeros_like,
    aten.is_same_size.default: lambda a, b: a.shape == b.shape,
}


def empty_mxfp8_tensor(
    shape: tuple[int, int],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    rowwise: bool = True,
    columnwise: bool = True,
    is_2d: bool = False,
) -> MXFP8Tensor:
    """An unwritten matrix of ``shape``; see :func:`~megatron.core.quantization.kernels.empty_storage`."""
    return MXFP8Tensor(empty_storage(shape, device, rowwise, columnwise, is_2d), dtype)
