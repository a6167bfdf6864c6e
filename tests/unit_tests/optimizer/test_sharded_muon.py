"""Muon on matrices whose shards lie on several ranks gives what it gives on the whole matrix."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.optimizer.newton_schulz import get_muon_scale_factor, newton_schulz
from megatron.core.optimizer.sharded_matrix import sharded_matrix_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import GTPChain, NormalInit
from megatron.core.tensor_parallel.gtp import GTPWeight, RowShards, cut_over_gtp
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from tests.ranks import run_ranks
from tests.training_run import DEVICE

# Heads of 4 rows: two query groups of three query heads, a key head and a value head.
QKV = [12, 4, 4]
# name: rows, columns, dimension that TP cuts, parts of it that are cut each on its own
MATRICES = {
    "column": (24, 16, 0, 1),
    "gated": (56, 16, 0, 2),
    "row": (18, 40, 1, 1),
    "qkv": (2 * sum(QKV), 24, 0, 1),
}


def values(name, salt=0):
    rows, columns, _, _ = MATRICES[name]
    generator = torch.Generator().manual_seed(len(name) + salt)
    return torch.randn(rows, columns, generator=generator).to(DEVICE)


def make(name, expert, alignment=8):
    """This rank's shard of a matrix as a parameter with a gradient."""
    rows, columns, dim, stride = MATRICES[name]
    kind = "expt_" if expert else ""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    tp = getattr(groups, f"{kind}tp")
    gtp_group = getattr(groups, f"{kind}gtp_remat")
    shape = [rows, columns]
    shape[dim] //= tp.size()
    gtp = None
    if gtp_group.size() > 1:
        shards = RowShards(shape[0], gtp_group.size(), alignment)
        gtp = GTPWeight(shards, shape[1], gtp_group, GTPChain())
    rule = NormalInit(1.0, (rows, columns), dim, stride, tp, gtp)
    param = torch.nn.Parameter(rule.own_part(values(name)))
    param.grad = rule.own_part(values(name, 1))
    set_tensor_model_parallel_attributes(param, True, dim, stride)
    if gtp is not None:
        cut_over_gtp(param, gtp)
    if name == "qkv":
        param.is_qkv, param.qkv_split_shapes = True, QKV
    if expert:
        param.allreduce = False
    return param, rule, groups


OPTIONS = {
    "lr": 0.1,
    "weight_decay": 0.1,
    "split_qkv": True,
    "fp32_matmul_prec": "highest",
    "extra_scale_factor": 0.5,
}


def whole(name, options):
    """The matrix after a step of an optimizer that has all of it."""
    param = torch.nn.Parameter(values(name))
    param.grad = values(name, 1)
    if name == "qkv":
        param.is_qkv, param.qkv_split_shapes = True, QKV
    TensorParallelMuon([param], **options).step()
    return param.detach()


def step_everywhere(sizes, expert, modes, options):
    """Steps in each mode; checks this rank's shards against the whole matrices', and returns them."""
    parallel_state.initialize_model_parallel(**sizes)
    results = {}
    for mode in modes:
        made = [make(name, expert) for name in MATRICES]
        params = [param for param, _, _ in made]
        TensorParallelMuon(params, pg_collection=made[0][2], tp_mode=mode, **options).step()
        for name, (param, rule, _) in zip(MATRICES, made, strict=True):
            torch.testing.assert_close(
                param.detach(),
                rule.own_part(whole(name, options)),
                rtol=1e-5,
                atol=2e-6,
                msg=lambda text, what=f"{mode} {name}": f"{what}: {text}",
            )
        results[mode] = [param.detach() for param in params]
    for one, other in zip(results["duplicated"], results["layer_sharded"], strict=True):
        assert torch.equal(one, other), "layer_sharded has the same bits as duplicated"


MODES = ("duplicated", "distributed", "layer_sharded")
SIZES = {
    "tp2": {"tensor_model_parallel_size": 2},
    "gtp2": {"gtp_remat_size": 2},
    "gtp4": {"gtp_remat_size": 4},
    "tp2-gtp2": {"tensor_model_parallel_size": 2, "gtp_remat_size": 2},
    "tp2-gtp4": {"tensor_model_parallel_size": 2, "gtp_remat_size": 4},
    "tp4-gtp2": {"tensor_model_parallel_size": 4, "gtp_remat_size": 2},
}
RANKS = {"tp2": 2, "gtp2": 2, "gtp4": 4, "tp2-gtp2": 4, "tp2-gtp4": 8, "tp4-gtp2": 8}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("sizes", list(SIZES))
def test_every_cut_gives_the_whole_matrix_s_update(sizes, per_head):
    options = OPTIONS | {"split_qkv_per_head": per_head}
    run_ranks(step_everywhere, RANKS[sizes], SIZES[sizes], False, MODES, options)


def put_together(sizes):
    parallel_state.initialize_model_parallel(**sizes)
    for name in MATRICES:
        param, _, groups = make(name, False)
        matrix = sharded_matrix_of(param, groups)
        full = matrix.gather(param.detach())
        assert torch.equal(full, values(name)), name
        assert torch.equal(matrix.shard(full), param.detach())


@pytest.mark.parametrize("sizes", ["tp2", "tp2-gtp4"])
def test_shards_are_put_together_as_they_were_cut(sizes):
    run_ranks(put_together, RANKS[sizes], SIZES[sizes])


def test_experts_are_put_together_over_their_own_ranks():
    sizes = {
        "expert_model_parallel_size": 2,
        "expert_gtp_remat_size": 2,
        "expert_tensor_parallel_size": 2,
        "tensor_model_parallel_size": 2,
    }
    run_ranks(step_everywhere, 8, sizes, True, MODES, OPTIONS)


def orthogonalized_matrices(sizes, mode):
    parallel_state.initialize_model_parallel(**sizes)
    made = [make(name, False) for name in MATRICES]
    shapes = []
    optimizer = TensorParallelMuon(
        [param for param, _, _ in made],
        pg_collection=made[0][2],
        tp_mode=mode,
        **OPTIONS | {"split_qkv": False},
    )
    original = optimizer._newton_schulz

    def watched(matrix):
        shapes.append(tuple(matrix.shape))
        return original(matrix)

    optimizer._newton_schulz = watched
    optimizer.step()
    return shapes


def test_layer_sharded_shares_the_matrices_out():
    """Every matrix is orthogonalised on one rank, and the costliest on different ones."""
    every = sorted(MATRICES[name][:2] for name in MATRICES)
    per_rank = run_ranks(orthogonalized_matrices, 4, SIZES["tp2-gtp2"], "layer_sharded")
    assert sorted(shape for shapes in per_rank for shape in shapes) == every
    assert [len(shapes) for shapes in per_rank] == [1, 1, 1, 1]
    for shapes in run_ranks(orthogonalized_matrices, 4, SIZES["tp2-gtp2"], "duplicated"):
        assert sorted(shapes) == every


def blockwise_update(name):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, gtp_remat_size=2)
    param, _, groups = make(name, False)
    optimizer = TensorParallelMuon(
        [param], pg_collection=groups, tp_mode="blockwise", **OPTIONS | {"split_qkv": False}
    )
    update = optimizer.orthogonalize(param, param.grad)
    matrix = sharded_matrix_of(param, groups)
    count = matrix.own_place.rows.numel()
    expected = torch.zeros_like(update)
    rows, columns, _, _ = MATRICES[name]
    factor = get_muon_scale_factor(rows, columns, "spectral") * 0.5
    expected[:count] = newton_schulz(param.grad[:count], precision="highest") * factor
    assert torch.equal(update, expected)
    return count


@pytest.mark.parametrize("name", ["column", "gated", "row"])
def test_blockwise_scales_by_the_matrix_s_shape_and_leaves_padding_out(name):
    counts = run_ranks(blockwise_update, 4, name)
    assert len(set(counts)) > 1, "no shard had padding"


def power_of_two(mode, exponent):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, gtp_remat_size=2)
    updates = []
    for scale in (1.0, 2.0**exponent, 0.0):
        param, _, groups = make("gated", False)
        optimizer = TensorParallelMuon([param], pg_collection=groups, tp_mode=mode, **OPTIONS)
        updates.append(optimizer.orthogonalize(param, param.grad * scale))
    assert torch.equal(updates[0], updates[1])
    assert not updates[2].any()


@pytest.mark.parametrize("exponent", [-100, 100])
def test_the_scale_of_a_gradient_changes_no_bit_of_a_distributed_update(exponent):
    run_ranks(power_of_two, 4, "distributed", exponent)


def nan_on_one_rank():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    param, _, groups = make("row", False)
    if torch.distributed.get_rank() == 1:
        param.grad[0, 0] = torch.nan
    optimizer = TensorParallelMuon([param], pg_collection=groups, tp_mode="distributed", **OPTIONS)
    return bool(optimizer.orthogonalize(param, param.grad).isnan().all())


def test_a_nan_on_one_rank_reaches_all():
    assert run_ranks(nan_on_one_rank, 2) == [True, True]
