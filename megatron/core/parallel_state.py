"""The registry of process groups, under Megatron's names.

The one place with state of the whole process. Code below the training loop takes a
``ProcessGroupCollection`` instead and looks here only where a caller gave it none.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron.core import parallel_registry as registry
from megatron.core.expert_parallel_state import (  # noqa: F401  (part of this module's names)
    get_expert_data_parallel_group,
    get_expert_data_parallel_group_gloo,
    get_expert_data_parallel_rank,
    get_expert_data_parallel_world_size,
    get_expert_gtp_weight_remat_group,
    get_expert_gtp_weight_remat_rank,
    get_expert_gtp_weight_remat_world_size,
    get_expert_model_parallel_group,
    get_expert_model_parallel_rank,
    get_expert_model_parallel_world_size,
    get_expert_tensor_and_gtp_weight_remat_group,
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_rank,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_model_pipeline_parallel_group,
    get_expert_tensor_parallel_group,
    get_expert_tensor_parallel_rank,
    get_expert_tensor_parallel_world_size,
)
from megatron.core.parallel_mesh import ParallelSizes, build_groups, check_order, refuse_unavailable


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Makes all process groups; every rank of the world calls it with the same arguments.

    World = TP x GTP x DP with TP fastest, and = expert TP x EP x expert GTP x expert DP for experts.

    Args:
        tensor_model_parallel_size: TP, the ranks that each layer's work is cut over.
        pipeline_model_parallel_size: 1.
        virtual_pipeline_model_parallel_size: ``None``.
        pipeline_model_parallel_comm_backend: ``None``.
        use_sharp: False.
        context_parallel_size: 1.
        hierarchical_context_parallel_sizes: ``None``.
        hybrid_context_parallel: False.
        expert_model_parallel_size: EP, the ranks that experts are spread over.
        gtp_remat_size: GTP, the ranks that each TP-local weight is cut over.
        expert_gtp_remat_size: GTP of the experts' weights.
        num_distributed_optimizer_instances: Replicas of the sharded optimizer state.
        expert_tensor_parallel_size: TP of the experts; that of the rest if ``None``.
        nccl_communicator_config_path: ``None``.
        distributed_timeout_minutes: After which a collective of these groups fails.
        order: Axes from the fastest to the slowest; TP, EP, DP must follow each other like this.
        get_embedding_ranks: ``None``.
        get_position_embedding_ranks: ``None``.
        create_gloo_process_groups: Make gloo twins of the data-parallel groups where the backend is
            another.
        high_priority_stream_groups: ``None``.
        sharp_enabled_group: ``None``.
        rank_offset: 0.
        local_world_size: The world size, or ``None``.

    Raises:
        RuntimeError: If the sizes do not fit the world, ``torch.distributed`` is not initialised, or
            the groups exist already.
        ValueError: If an option of a part that this project does not have is set.
    """
    arguments = dict(locals())
    refuse_unavailable(arguments)
    if not dist.is_initialized():
        raise RuntimeError(
            "initialize_model_parallel() needs torch.distributed; call "
            "torch.distributed.init_process_group() first"
        )
    if registry.current() is not None:
        raise RuntimeError(
            "the process groups exist already; call destroy_model_parallel() before making others"
        )
    world_size = dist.get_world_size()
    if local_world_size not in (None, world_size):
        raise ValueError(
            "groups over a part of the world are not available here: local_world_size must stay "
            f"None, got {local_world_size} of {world_size} ranks"
        )
    if expert_tensor_parallel_size is None:
        expert_tensor_parallel_size = tensor_model_parallel_size
    sizes = ParallelSizes(
        world=world_size,
        tp=tensor_model_parallel_size,
        gtp_remat=gtp_remat_size,
        ep=expert_model_parallel_size,
        expt_tp=expert_tensor_parallel_size,
        expt_gtp_remat=expert_gtp_remat_size,
        instances=num_distributed_optimizer_instances,
    )
    check_order(order, sizes)
    groups, gloo_groups = build_groups(sizes, create_gloo_process_groups)
    world = dist.group.WORLD
    timeout = timedelta(minutes=distributed_timeout_minutes)
    for group in {id(g): g for g in (*groups.values(), *gloo_groups.values())}.values():
        if group is not world:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    registry.replace(registry.Registry(sizes, groups, gloo_groups, world))


def destroy_model_parallel() -> None:
    """Takes down the groups that :func:`initialize_model_parallel` made; the world stays."""
    before = registry.replace(None)
    if before is None:
        return
    made = (*before.groups.values(), *before.gloo_groups.values())
    for group in {id(g): g for g in made}.values():
        if group is not before.world:
            dist.destroy_process_group(group)


def is_initialized() -> bool:
    """Whether the process groups exist."""
    return registry.current() is not None


def model_parallel_is_initialized() -> bool:
    """Whether the process groups exist."""
    return registry.current() is not None


def get_parallel_sizes() -> ParallelSizes:
    """The sizes that the groups were made with."""
    now = registry.current()
    if now is None:
        raise RuntimeError(
            "there are no parallel sizes yet; call parallel_state.initialize_model_parallel() first"
        )
    return now.sizes


# Tensor parallelism, GTP and both together


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that hold one copy of the dense parameters: TP x GTP."""
    return registry.group("mp", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that share each layer's work."""
    return registry.group("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Number of tensor-parallel ranks."""
    return registry.group("tp").size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor-parallel group."""
    return registry.group("tp").rank()


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's tensor-parallel group."""
    return dist.get_process_group_ranks(registry.group("tp"))[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of this rank's model-parallel group."""
    return dist.get_process_group_ranks(registry.group("mp"))[0]


def get_gtp_weight_remat_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The ranks that a TP-local weight is cut over."""
    return registry.group("gtp_remat", check_initialized)


def get_gtp_weight_remat_world_size() -> int:
    """Number of ranks that a TP-local weight is cut over."""
    return registry.size("gtp_remat")


def get_gtp_weight_remat_rank() -> int:
    """This rank's place among those that a TP-local weight is cut over."""
    return registry.rank("gtp_remat")


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Global ranks of this rank's GTP group."""
    group = registry.group("gtp_remat", check_initialized)
    return None if group is None else dist.get_process_group_ranks(group)


# Data parallelism


def _data_parallel_name(
    with_context_parallel: bool, with_gtp_remat: bool, partial_data_parallel: bool
) -> str:
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel=True, the ranks of one distributed-optimizer instance, is "
            "defined with with_context_parallel=True only"
        )
    return ("intra_dp" if partial_data_parallel else "dp") + "_gtp_remat" * with_gtp_remat


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> dist.ProcessGroup:
    """The data-parallel ranks.

    Args:
        with_context_parallel: Makes no difference here.
        with_gtp_remat: All ranks with batches of their own (GTP peers among them), rather than those
            that hold the same parameters.
        partial_data_parallel: Only those of this rank's distributed-optimizer instance.
    """
    return registry.group(
        _data_parallel_name(with_context_parallel, with_gtp_remat, partial_data_parallel)
    )


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Number of ranks in :func:`get_data_parallel_group`; 0 outside a distributed run."""
    return registry.size(
        _data_parallel_name(with_context_parallel, with_gtp_remat, partial_data_parallel)
    )


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """This rank's place in :func:`get_data_parallel_group`; 0 outside a distributed run."""
    return registry.rank(
        _data_parallel_name(with_context_parallel, with_gtp_remat, partial_data_parallel)
    )


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first of the ranks that hold the same parameters."""
    return dist.get_process_group_ranks(registry.group("dp"))[0]


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """A gloo group of the ranks that hold the same parameters."""
    return registry.gloo_group(
        _data_parallel_name(with_context_parallel, False, partial_data_parallel)
    )


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> dist.ProcessGroup:
    """TP x GTP x DP: the whole world."""
    return registry.group("tp_dp", check_initialized)


def get_intra_distributed_optimizer_instance_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """All ranks of this rank's distributed-optimizer instance, model parallel ones among them."""
    return registry.group("intra_dist_opt", check_initialized)


def get_inter_distributed_optimizer_instance_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup:
    """This rank's peers, one in each distributed-optimizer instance."""
    return registry.group("inter_dist_opt", check_initialized)


# Pipeline and context parallelism are not available: groups of this rank alone


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """This rank alone."""
    return registry.group("alone", check_initialized)


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """This rank alone."""
    return registry.group("alone", check_initialized)


def get_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """This rank alone."""
    return registry.group("alone", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """This rank alone."""
    return registry.group("alone", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The tensor-parallel ranks."""
    return registry.group("tp", check_initialized)


def get_pipeline_model_parallel_world_size() -> int:
    """1."""
    return 1


def get_pipeline_model_parallel_rank() -> int:
    """0."""
    return 0


def get_context_parallel_world_size() -> int:
    """1."""
    return 1


def get_context_parallel_rank() -> int:
    """0."""
    return 0


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True: there is one stage."""
    return True


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """True: there is one stage."""
    return True


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """None: there are no virtual stages."""
    return None


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """None: there are no virtual stages."""
    return None
