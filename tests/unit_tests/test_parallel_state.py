"""Process groups: who is with whom along every axis, and which sizes are refused."""

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.parallel_mesh import ParallelSizes
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.ranks import run_ranks


def test_tensor_parallel_ranks_are_neighbours_then_gtp_then_data_parallel():
    sizes = ParallelSizes(world=8, tp=2, gtp_remat=2)
    assert sizes.dp == 2
    assert sizes.rank_lists("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.rank_lists("gtp_remat") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.rank_lists("mp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sizes.rank_lists("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.rank_lists("dp_gtp_remat") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_experts_have_a_grid_of_their_own():
    sizes = ParallelSizes(world=8, tp=2, gtp_remat=2, ep=2, expt_tp=1, expt_gtp_remat=2)
    assert sizes.expt_dp == 2
    assert sizes.rank_lists("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.rank_lists("expt_gtp_remat") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.rank_lists("expt_tp_gtp_remat") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sizes.rank_lists("expt_dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.rank_lists("tp_ep") == sizes.rank_lists("ep")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 6, "tp": 4}, r"world_size \(6\) is not divisible by 4 = .*size 4 x .*size 1"),
        ({"world": 8, "tp": 2, "gtp_remat": 3}, r"\(8\) is not divisible by 6 = .* 2 x .* 3"),
        ({"world": 8, "ep": 3}, r"\(8\) is not divisible by 3 = .* 1 x .* 3 x .* 1"),
        ({"world": 4, "ep": 2, "expt_gtp_remat": 4}, r"\(4\) is not divisible by 8 = "),
        ({"world": 4, "tp": 0}, "size of tp must be a whole number above 0, got 0"),
        ({"world": 8, "gtp_remat": 2, "instances": 2}, "instances 2 excludes GTP"),
        ({"world": 6, "instances": 4}, "instances 4 does not divide the 6 / 1 = 6 data-parallel"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(sizes, message):
    with pytest.raises(RuntimeError, match=message):
        ParallelSizes(**sizes)


def groups_here():
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        gtp_remat_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        expert_gtp_remat_size=1,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    names = ("tp", "gtp_remat", "mp", "dp", "dp_cp_gtp_remat", "ep", "expt_tp", "expt_dp")
    members = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}
    numbers = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_gtp_weight_remat_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    with pytest.raises(RuntimeError, match="exist already"):
        parallel_state.initialize_model_parallel()
    return members, numbers


def test_every_rank_is_in_the_groups_that_the_sizes_say():
    sizes = ParallelSizes(world=8, tp=2, gtp_remat=2, ep=2, expt_tp=2)
    results = run_ranks(groups_here, 8)
    mesh_names = {"dp_cp_gtp_remat": "dp_gtp_remat"}
    for rank, (members, numbers) in enumerate(results):
        for name, ranks in members.items():
            lists = sizes.rank_lists(mesh_names.get(name, name))
            assert ranks == next(group for group in lists if rank in group), name
        assert numbers == (rank % 2, rank // 2 % 2, rank // 2 % 2, 4)


def too_large():
    for sizes in ({"tensor_model_parallel_size": 4}, {"gtp_remat_size": 3}):
        with pytest.raises(RuntimeError, match=r"world_size \(2\) is not divisible by"):
            parallel_state.initialize_model_parallel(**sizes)
        assert not parallel_state.is_initialized()
    with pytest.raises(ValueError, match="pipeline parallelism is not available here"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)


def test_what_is_refused_leaves_nothing_behind():
    run_ranks(too_large, 2)
