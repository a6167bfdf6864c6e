"""A mixture of experts against the plain sum over experts, however they are spread over ranks."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import initialize_parameters
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.layer_groups import LayerGroups
from megatron.core.transformer.moe import MoEAlltoAllTokenDispatcher, MoELayer, TopKRouter
from tests.ranks import run_ranks

EXPERTS, HIDDEN, FEATURES = 4, 32, 64


def options(**changes):
    defaults = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FEATURES,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**defaults | changes)


def tokens(rank):
    return torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


def whole_layer(config):
    """All experts in this process."""
    layer = MoELayer(config, LayerGroups())
    initialize_parameters(layer, 5)
    return layer


def plain_output(layer, x, config):
    """Every expert on every token, weighed by the router."""
    flat = x.flatten(0, 1)
    logits = flat @ layer.router.weight.T
    chosen, experts = logits.topk(config.moe_router_topk)
    shares = chosen.softmax(-1)
    if config.moe_router_pre_softmax:
        shares = logits.softmax(-1).gather(1, experts)
    weights = torch.zeros_like(logits).scatter(1, experts, shares)
    outputs = []
    for number in range(EXPERTS):
        mlp = layer.experts[str(number)]
        inner = F.gelu(flat @ mlp.linear_fc1.weight.T + mlp.linear_fc1.bias)
        outputs.append(inner @ mlp.linear_fc2.weight.T + mlp.linear_fc2.bias)
    return (torch.stack(outputs, 1) * weights.unsqueeze(-1)).sum(1).view_as(x)


@pytest.mark.parametrize(("k", "pre_softmax"), [(2, False), (2, True), (1, True), (4, False)])
def test_the_layer_is_the_weighed_sum_of_its_experts(k, pre_softmax):
    config = options(moe_router_topk=k, moe_router_pre_softmax=pre_softmax)
    layer, x = whole_layer(config), tokens(0).requires_grad_()
    output = layer(x)
    expected = plain_output(layer, x, config)
    torch.testing.assert_close(output, expected)
    mask = torch.randn_like(output)
    params = [x, *layer.parameters()]
    found = torch.autograd.grad((output * mask).sum(), params)
    wanted = torch.autograd.grad((expected * mask).sum(), params)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def spread(sizes, sequence_parallel):
    parallel_state.initialize_model_parallel(**sizes)
    tp = sizes.get("tensor_model_parallel_size", 1)
    config = options(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        expert_model_parallel_size=sizes["expert_model_parallel_size"],
        expert_gtp_weight_remat_size=sizes.get("expert_gtp_remat_size", 1),
    )
    groups = LayerGroups.from_collection(ProcessGroupCollection.use_mpu_process_groups())
    layer = MoELayer(config, groups)
    initialize_parameters(layer, 5)
    x = tokens(parallel_state.get_data_parallel_rank()).repeat(2, 1, 1)[:8]
    whole_x = x.clone().requires_grad_()
    if sequence_parallel:
        x = x.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
    groups.chain.start_pass()
    x.requires_grad_()
    output = layer(x)
    reference = whole_layer(options())
    expected = plain_output(reference, whole_x, options())
    mask = torch.linspace(-1, 1, whole_x.numel()).view_as(whole_x)
    (expected * mask).sum().backward()
    own = slice(None)
    if sequence_parallel:
        length = whole_x.size(0) // tp
        first = parallel_state.get_tensor_model_parallel_rank() * length
        own = slice(first, first + length)
    (output * mask[own]).sum().backward()
    torch.testing.assert_close(output, expected[own])
    torch.testing.assert_close(x.grad, whole_x.grad[own])
    return sorted(layer.experts)


@pytest.mark.parametrize(
    ("ranks", "sizes", "sequence_parallel"),
    [
        (2, {"expert_model_parallel_size": 2}, False),
        (4, {"expert_model_parallel_size": 4}, False),
        (4, {"expert_model_parallel_size": 2, "expert_gtp_remat_size": 2}, False),
        (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, False),
        (4, {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, True),
    ],
)
def test_spreading_experts_changes_neither_outputs_nor_gradients(ranks, sizes, sequence_parallel):
    held = run_ranks(spread, ranks, sizes, sequence_parallel)
    assert sorted({name for names in held for name in names}) == [str(i) for i in range(EXPERTS)]


def test_an_expert_without_tokens_still_has_a_gradient():
    """Ranks reduce it together, whoever had tokens for it."""
    config = options(moe_router_topk=1, moe_router_pre_softmax=True)
    layer = whole_layer(config)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    layer(torch.ones(3, 2, HIDDEN)).sum().backward()
    for name, expert in layer.experts.items():
        for param in expert.parameters():
            assert param.grad is not None
            assert bool(param.grad.any()) == (name == "2")


def test_mxfp8_pads_the_tokens_of_an_expert_and_takes_the_padding_off():
    config = options(bf16=True, params_dtype=torch.bfloat16, fp8="e4m3")
    layer = whole_layer(config)
    x = tokens(1).bfloat16()
    output = layer(x)
    assert output.shape == x.shape
    expected = plain_output(layer.float(), x.float(), config)
    assert (output - expected).abs().max() < 0.1 * expected.abs().max()


def test_router_shares_add_up_to_one_over_the_chosen():
    config = options()
    router = TopKRouter(config)
    initialize_parameters(router, 1)
    shares, experts = router(tokens(0).flatten(0, 1).bfloat16())
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares.sum(1), torch.ones(10))
    assert experts.shape == (10, 2)


def test_dispatch_keeps_the_order_of_tokens_within_an_expert():
    dispatcher = MoEAlltoAllTokenDispatcher(3, None)
    x = torch.arange(4.0).unsqueeze(1)
    experts = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    arrived, route = dispatcher.dispatch(x, experts)
    assert [part.flatten().tolist() for part in arrived] == [[0, 1, 3], [1, 2], [0, 2, 3]]
    shares = torch.full((4, 2), 0.5)
    assert torch.equal(dispatcher.combine(arrived, route, shares), x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_topk": 5}, "between 1 and num_moe_experts .4., got 5"),
        ({"moe_router_topk": 1}, "needs moe_router_pre_softmax"),
        ({"expert_model_parallel_size": 3}, "num_moe_experts .4. must divide by"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size .2. must be"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)
