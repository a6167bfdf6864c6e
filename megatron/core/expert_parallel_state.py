"""Process groups of routed experts; :mod:`megatron.core.parallel_state` offers them all."""

from __future__ import annotations

import torch.distributed as dist

from megatron.core import parallel_registry as registry


def get_expert_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that experts are spread over."""
    return registry.group("ep", check_initialized)


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks that experts are spread over; 0 outside a distributed run."""
    return registry.size("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's place among those that experts are spread over."""
    return registry.rank("ep")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share an expert's work."""
    return registry.group("expt_tp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks that share an expert's work."""
    return registry.size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place among those that share an expert's work."""
    return registry.rank("expt_tp")


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that a TP-local expert weight is cut over."""
    return registry.group("expt_gtp_remat", check_initialized)


def get_expert_gtp_weight_remat_world_size() -> int:
    """Number of ranks that a TP-local expert weight is cut over."""
    return registry.size("expt_gtp_remat")


def get_expert_gtp_weight_remat_rank() -> int:
    """This rank's place among those that a TP-local expert weight is cut over."""
    return registry.rank("expt_gtp_remat")


def get_expert_tensor_and_gtp_weight_remat_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """The ranks that hold one copy of an expert's weights: expert TP x expert GTP."""
    return registry.group("expt_tp_gtp_remat", check_initialized)


def get_expert_tensor_and_model_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """Expert TP x EP."""
    return registry.group("tp_ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks in expert TP x EP."""
    return registry.size("tp_ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """This rank's place in expert TP x EP."""
    return registry.rank("tp_ep")


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> dist.ProcessGroup:
    """Expert TP x EP; x expert GTP, one copy of all experts, with ``with_egtp_remat``."""
    return registry.group(
        "tp_ep_with_egtp_remat" if with_egtp_remat else "tp_ep", check_initialized
    )


def _expert_data_parallel_name(with_gtp_remat: bool, partial: bool) -> str:
    return ("intra_expt_dp" if partial else "expt_dp") + "_gtp_remat" * with_gtp_remat


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> dist.ProcessGroup:
    """Like :func:`get_data_parallel_group`, for routed experts."""
    name = _expert_data_parallel_name(with_gtp_remat, partial_expert_data_parallel)
    return registry.group(name, check_initialized)


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Number of ranks in :func:`get_expert_data_parallel_group`."""
    return registry.size(_expert_data_parallel_name(with_gtp_remat, partial_expert_data_parallel))


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """This rank's place in :func:`get_expert_data_parallel_group`."""
    return registry.rank(_expert_data_parallel_name(with_gtp_remat, partial_expert_data_parallel))


def get_expert_data_parallel_group_gloo(
    partial_expert_data_parallel: bool = False,
) -> dist.ProcessGroup:
    """A gloo group of the ranks that hold the same experts' parameters."""
    return registry.gloo_group(_expert_data_parallel_name(False, partial_expert_data_parallel))
