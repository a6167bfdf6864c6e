"""The audit: is every rank about to multiply with the weights that their owners computed?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_mxfp8tensor
from megatron.core.optimizer.masters import iter_param_masters
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.quantization import MXFP8Quantizer, MXFP8Tensor, quantized_like


class ParamSyncError(RuntimeError):
    """Parameters are not what their owners computed."""


@torch.no_grad()
def audit_param_sync(
    model_chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Compares every parameter on every rank with what its owner's master says it must be.

    That is ``quantise(bf16(master))`` for a quantised parameter, ``bf16(master)`` for another of low
    precision, and the master itself for an FP32 one, bit for bit. Replicas are compared with each
    other by that, too. Collective; call it after ``optimizer.step()``. With ``overlap_param_gather``,
    gathers that are still to come are made now, as the next forward pass would have.

    Args:
        model_chunks: The wrapped model.
        optimizer: Its optimizer.

    Raises:
        ParamSyncError: On every rank, naming the parameter with the largest error, the ranks on which
            it differs and that error.
    """
    for chunk in model_chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in chunk.all_bucket_groups:
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)
    names, findings = [], []
    for name, param, master in iter_param_masters(optimizer, model_chunks):
        names.append(name)
        findings.append(_compare(param, master))
    device = next(model_chunks[0].module.parameters()).device
    own = torch.tensor(findings, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    _report(names, torch.stack(everyone).cpu())


def _compare(param: torch.nn.Parameter, master: torch.Tensor) -> tuple[float, float, float]:
    """Whether it differs, by how much at most, and whether it still holds its initial value."""
    holds_initial = getattr(param, "get_high_precision_init_val", lambda: None)() is not None
    expected = master.to(param.dtype)
    if isinstance(param, MXFP8Tensor):
        quantized = quantized_like(param, expected)
        same = param.has_same_bytes(quantized)
        found, wanted = param.dequantize(torch.float32), quantized.dequantize(torch.float32)
    elif is_mxfp8tensor(param):
        found = param.dequantize().float()
        wanted = MXFP8Quantizer().quantize(expected).dequantize(torch.float32)
        same = torch.equal(found, wanted)
    else:
        found, wanted = param.detach().float(), expected.float()
        same = torch.equal(found, wanted)
    if same:
        return 0.0, 0.0, float(holds_initial)
    error = float((found - wanted).abs().max())
    return 1.0, error if error == error else float("inf"), float(holds_initial)


def _report(names: list[str], findings: torch.Tensor) -> None:
    """Raises if ``findings``, ``[ranks, parameters, 3]``, hold anything."""
    differs, errors, holds_initial = findings.unbind(2)
    if not (differs.any() or holds_initial.any()):
        return
    # Ranks that hold other experts have other names at the same place.
    everyone: list[list[str]] = [[] for _ in range(findings.size(0))]
    dist.all_gather_object(everyone, names)
    if differs.any():
        rank, worst = divmod(int((errors + differs).argmax()), len(names))
        name = everyone[rank][worst]
        ranks = [
            r for r in differs[:, worst].nonzero().flatten().tolist() if everyone[r][worst] == name
        ]
        wrong = {everyone[r][i] for r, i in differs.nonzero().tolist()}
        count = len({name for names_of_rank in everyone for name in names_of_rank})
        raise ParamSyncError(
            f"parameter {name} is not what its owner computed, on ranks {ranks}: it differs by "
            f"up to {float(errors[rank, worst]):.3g}; {len(wrong)} of {count} parameters differ"
        )
    rank, first = holds_initial.nonzero()[0].tolist()
    ranks = [
        r
        for r in holds_initial[:, first].nonzero().flatten().tolist()
        if everyone[r][first] == everyone[rank][first]
    ]
    raise ParamSyncError(
        f"parameter {everyone[rank][first]} still holds the values that it was quantised from, on "
        f"ranks {ranks}: its master was not seeded from them"
    )
