"""Weights cut over GTP ranks: what is gathered, when, into which memory, and what comes out."""

import gc

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization import MXFP8Tensor
from megatron.core.tensor_parallel import ColumnParallelLinear, GTPChain, GTPRemat, NormalInit
from megatron.core.tensor_parallel.gtp import GTPWeight, RowShards, is_gtp_param
from megatron.core.tensor_parallel.gtp_chain import Direction
from megatron.core.transformer import TransformerConfig
from tests.ranks import run_ranks

LAYERS, HIDDEN, VOCABULARY, SEQUENCE = 2, 64, 128, 32


@pytest.mark.parametrize("alignment", [1, 16, 32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 96, 100])
def test_shards_cover_every_row_once_and_end_with_zeros(rows, ranks, alignment):
    shards = RowShards(rows, ranks, alignment)
    matrix = torch.randn(rows, 3)
    cut = [shards.cut(matrix, rank) for rank in range(ranks)]
    assert shards.shard_rows % alignment == 0
    assert shards.shard_rows - alignment < rows / ranks, "no more padding than alignment asks for"
    valid = [cut[rank][: shards.valid_rows(rank)] for rank in range(ranks)]
    assert torch.equal(torch.cat(valid), matrix)
    assert torch.cat(cut).shape[0] == shards.padded_rows == rows + shards.pad_length
    assert not torch.cat(cut)[rows:].any()


# Layers by themselves


class Layers(torch.nn.Module):
    """Linear layers that a test calls in the order it likes."""

    def __init__(self, group, count=4, rows=(48, 64, 40, 64)):
        super().__init__()
        self.chain = GTPChain()
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        self.layers = torch.nn.ModuleList(
            ColumnParallelLinear(
                64, rows[i], config=config, std=0.1, bias=False, gtp=GTPRemat(group, self.chain)
            )
            for i in range(count)
        )
        self.set_weights(0)

    def whole_weights(self, version):
        """The matrices, the same on every rank."""
        return [
            torch.randn(
                layer.weight.normal_init.full_shape,
                generator=torch.Generator().manual_seed(10 * version + number),
            )
            for number, layer in enumerate(self.layers)
        ]

    def set_weights(self, version):
        self.version = version
        with torch.no_grad():
            for layer, whole in zip(self.layers, self.whole_weights(version), strict=True):
                rule: NormalInit = layer.weight.normal_init
                layer.weight.copy_(rule.own_part(whole))

    def whole_grads(self, x, order):
        """What plain torch gives for the sum of all layers' outputs, in ``order``."""
        weights = [weight.requires_grad_() for weight in self.whole_weights(self.version)]
        x = x.clone().requires_grad_()
        sum((x @ weights[i].T).square().sum() for i in order).backward()
        return weights, x.grad


def check_pass(model, x, order):
    """Runs the layers in ``order``; every rank has the same input, so gradients are twice plain ones."""
    model.zero_grad()
    model.chain.start_pass()
    x = x.clone().requires_grad_()
    sum(model.layers[i](x).square().sum() for i in order).backward()
    weights, x_grad = model.whole_grads(x.detach(), order)
    torch.testing.assert_close(x.grad, x_grad)
    for layer, weight in zip(model.layers, weights, strict=True):
        rule = layer.weight.normal_init
        if weight.grad is None:
            assert layer.weight.grad is None, "a weight that is not used has no gradient"
        else:
            torch.testing.assert_close(layer.weight.grad, rule.own_part(2 * weight.grad))


def any_order():
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    model = Layers(parallel_state.get_gtp_weight_remat_group())
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(9))
    wasted = []
    # In order, as learnt; another order; one twice; one left out; as learnt then; twice in a row.
    orders = [[0, 1, 2, 3]] * 2 + [[3, 1, 0, 2], [0, 1, 0, 2]] + [[1, 3]] * 3 + [[2, 2]]
    for version, order in enumerate(orders):
        before = model.chain.wasted
        model.set_weights(version)
        check_pass(model, x, order)
        wasted.append(model.chain.wasted - before)
    # A pass without gradients is a kind of its own and disturbs nothing.
    with torch.no_grad():
        model.chain.start_pass()
        model.layers[2](x)
    check_pass(model, x, [2, 2])
    return wasted


def abandoned_pass():
    """A pass that ends early leaves a weight gathered ahead, which is another one by the next pass."""
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    model = Layers(parallel_state.get_gtp_weight_remat_group())
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        check_pass(model, x, [0, 1])
    model.chain.start_pass()
    model.layers[0](x)
    model.set_weights(7)
    check_pass(model, x, [1, 0])


def test_what_was_gathered_for_one_pass_is_not_used_in_the_next():
    run_ranks(abandoned_pass, 2)


def test_weights_used_out_of_order_twice_or_not_at_all_stay_right():
    for wasted in run_ranks(any_order, 2):
        assert wasted[1] == 0 and wasted[2] > 0, "the third pass must have surprised the chain"
        assert wasted[6] == 0, "the new order has been learnt"


def two_models():
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    group = parallel_state.get_gtp_weight_remat_group()
    one, other = Layers(group), Layers(group, count=2)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        check_pass(one, x, [0, 1, 2, 3])
        check_pass(other, x, [1, 0])
    for model in (one, other):
        model.zero_grad()
        model.chain.start_pass()
    # Forward and backward passes of the two between each other.
    losses = [one.layers[0](x).square().sum(), other.layers[1](x).square().sum()]
    losses[0] = losses[0] + one.layers[1](x).square().sum()
    for loss in losses:
        loss.backward()
    weights, _ = one.whole_grads(x, [0, 1])
    for i in (0, 1):
        expected = one.layers[i].weight.normal_init.own_part(2 * weights[i].grad)
        torch.testing.assert_close(one.layers[i].weight.grad, expected)
    weights, _ = other.whole_grads(x, [1])
    expected = other.layers[1].weight.normal_init.own_part(2 * weights[1].grad)
    torch.testing.assert_close(other.layers[1].weight.grad, expected)


def test_two_models_live_in_one_process():
    run_ranks(two_models, 2)


# A whole model


def gpt(fp8, tied=False, recompute=False):
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        fp8="e4m3" if fp8 else None,
        fp8_param=fp8,
        gtp_weight_remat_size=2,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    torch.manual_seed(3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModel(config, VOCABULARY, SEQUENCE, tied, pg_collection=groups)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)


def count_gathers(fp8, tied, recompute):
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    model = gpt(fp8, tied, recompute)
    passes = 3
    for step in range(passes):
        model(tokens(step), labels=tokens(step)).mean().backward()
    with torch.no_grad():
        model(tokens(0))
    names = {id(param): name for name, param in model.named_parameters()}
    gathered = {
        (names[key], direction.value): count
        for (key, direction), count in model.gtp_chain.gathers.items()
    }
    cut = sorted(name for name, param in model.named_parameters() if is_gtp_param(param))
    return gathered, cut, model.gtp_chain.wasted, passes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_weight_is_gathered_once_a_pass_and_direction(fp8, tied, recompute):
    for gathered, cut, wasted, passes in run_ranks(count_gathers, 2, fp8, tied, recompute):
        table = "embedding.word_embeddings.weight"
        expected = {}
        for name in cut:
            forward, dgrad = passes + 1, passes
            if recompute and "layers" in name:
                forward += passes
            if name == table:
                forward, dgrad = (2 * forward, dgrad) if tied else (forward, 0)
            expected[name, "forward"] = forward
            if dgrad:
                expected[name, "dgrad"] = dgrad
        assert gathered == expected
        assert wasted == 0
        assert len(cut) == 4 * LAYERS + (1 if tied else 2)


def live_byte_storages():
    """Address and storage of all byte tensors of this process, whoever made them."""
    gc.collect()
    tensors = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.Tensor) and not issubclass(type(item), MXFP8Tensor)
    ]
    storages = [t.untyped_storage() for t in tensors if t.dtype == torch.uint8]
    return {storage.data_ptr(): storage for storage in storages}


def live_bytes_beyond(known):
    return sum(s.nbytes() for place, s in live_byte_storages().items() if place not in known)


def measure_gathered(fp8):
    """The most bytes of gathered weights that are alive when one is asked for, and what it may be."""
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    # Of earlier work in this process; kept, so that no address is taken again.
    before = live_byte_storages()
    model = gpt(fp8)
    for step in range(2):
        model(tokens(step), labels=tokens(step)).mean().backward()
    known = set(before)
    for param in model.parameters():
        pieces = param.storage_bytes.tensors() if isinstance(param, MXFP8Tensor) else [param.data]
        known |= {piece.untyped_storage().data_ptr() for piece in pieces}
    chain, peaks, neighbours = model.gtp_chain, [], []
    acquire = chain.acquire

    def watched(param, direction):
        gathered = acquire(param, direction)
        neighbours.append(gathered.memory.data_ptr())
        with torch.no_grad():
            if chain._ahead is not None:
                neighbours.append(chain._ahead.memory.data_ptr())
                assert neighbours[-1] != neighbours[-2], "neighbours share their memory"
        peaks.append(live_bytes_beyond(known))
        return gathered

    chain.acquire = watched
    with torch.no_grad():
        model(tokens(5))
    largest = 0
    for param in model.parameters():
        weight: GTPWeight | None = getattr(param, "gtp_remat", None)
        if weight is not None:
            numel = weight.shards.padded_rows * weight.columns
            per_element = (1 + 1 / 32) if isinstance(param, MXFP8Tensor) else 2
            largest = max(largest, int(numel * per_element))
    return max(peaks), largest, len(set(neighbours))


@pytest.mark.parametrize("fp8", [False, True])
def test_at_most_two_gathered_weights_are_held(fp8):
    for peak, largest, pieces in run_ranks(measure_gathered, 2, fp8):
        assert largest < peak <= 2 * largest + 2 * 256
        assert pieces == 2, "the same two pieces of memory serve all weights"


def a_bad_direction():
    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    chain = GTPChain()
    with pytest.raises(ValueError, match="not cut over GTP ranks"):
        chain.acquire(torch.zeros(4, 4), Direction.FORWARD)


def test_a_whole_parameter_is_refused_by_the_chain():
    run_ranks(a_bad_direction, 2)
