"""The model: right against plain formulas, the same whatever the number of ranks that cut it."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, pad_vocab_size
from megatron.core.quantization import MXFP8Tensor
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import Float16Module, TransformerConfig
from tests.ranks import run_ranks

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0}
SHAPE |= {"attention_dropout": 0.0, "init_method_std": 0.1}
VARIANTS: dict[str, tuple[dict, dict]] = {
    "gpt2": ({}, {}),
    "llama": (
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
        },
        {"position_embedding_type": "rope"},
    ),
    "tied": ({"kv_channels": 8}, {"share_embeddings_and_output_weights": True}),
    "half_rotary": ({}, {"position_embedding_type": "rope", "rotary_percent": 0.5}),
}
VOCABULARY, LENGTH = 96, 16


def build(variant: str, **config: object) -> GPTModel:
    """The model of a variant over the current world."""
    tp = config.get("tensor_model_parallel_size", 1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(1234)
    options, model_options = VARIANTS[variant]
    return GPTModel(
        TransformerConfig(**SHAPE | options | config), VOCABULARY, LENGTH, **model_options
    )


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def plain_logits(model: GPTModel, ids: torch.Tensor) -> torch.Tensor:
    """The same function of the same weights, in FP64, written out."""
    config = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if config.normalization == "RMSNorm":
            x = x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt()
            return x * w[f"{name}.weight"]
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        if model.rotary is None:
            return x
        half = model.rotary.dim // 2
        x = x.clone()
        for position in range(x.size(1)):
            for i in range(half):
                angle = position * model.rotary.base ** (-2 * i / model.rotary.dim)
                a, b = x[:, position, i].clone(), x[:, position, i + half].clone()
                x[:, position, i] = a * math.cos(angle) - b * math.sin(angle)
                x[:, position, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return x

    d, groups = config.kv_channels, config.num_query_groups
    per_group = config.num_attention_heads // groups
    x = w["embedding.word_embeddings.weight"][ids]
    if model.rotary is None:
        x = x + w["embedding.position_embeddings.weight"][: ids.size(1)]
    mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).tril()
    for number in range(config.num_layers):
        prefix = f"decoder.layers.{number}"
        mixed = layer(norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attention.linear_qkv")
        heads = []
        for group in range(groups):
            rows = mixed[..., group * (per_group + 2) * d : (group + 1) * (per_group + 2) * d]
            key = rotate(rows[..., per_group * d : (per_group + 1) * d])
            value = rows[..., (per_group + 1) * d :]
            for head in range(per_group):
                query = rotate(rows[..., head * d : (head + 1) * d])
                scores = query @ key.transpose(1, 2) / math.sqrt(d)
                heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ value)
        x = x + layer(torch.cat(heads, -1), f"{prefix}.self_attention.linear_proj")
        inner = layer(norm(x, f"{prefix}.pre_mlp_layernorm"), f"{prefix}.mlp.linear_fc1")
        if config.gated_linear_unit:
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner)
        x = x + layer(inner, f"{prefix}.mlp.linear_fc2")
    x = norm(x, "decoder.final_layernorm")
    output = (
        "output_layer.weight" if "output_layer.weight" in w else "embedding.word_embeddings.weight"
    )
    return x @ w[output].T


def against_formulas(variant: str) -> tuple[float, float]:
    model = build(variant)
    ids, labels = tokens()[:, :-1], tokens()[:, 1:]
    exact = plain_logits(model, ids)
    logits = model(ids)
    losses = model(ids, labels=labels)
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    error = float((logits.double() - exact).abs().max() / exact.abs().max())
    return error, float((losses.flatten().double() - expected).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_its_formulas(variant):
    logits_error, loss_error = run_ranks(against_formulas, 1, variant)[0]
    assert logits_error < 1e-5 and loss_error < 1e-5


def full_weights_and_grads(variant: str, tp: int, sequence_parallel: bool = False) -> dict:
    """Weights and gradients by name, put together over tensor-parallel ranks, and the loss."""
    from megatron.core.collectives import all_reduce

    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    model = build(variant, **options)
    group = parallel_state.get_tensor_model_parallel_group()
    loss = model(tokens()[:, :-1], labels=tokens()[:, 1:]).mean()
    loss.backward()
    result = {"loss": loss.detach()}
    for name, param in model.named_parameters():
        grad = param.grad
        if sequence_parallel and getattr(param, "sequence_parallel", False):
            all_reduce(grad, group)
        for kind, value in (("weight", param.detach()), ("grad", grad)):
            if getattr(param, "tensor_model_parallel", False):
                dim, stride = param.partition_dim, param.partition_stride
                parts = value.chunk(stride, dim)
                whole = [
                    gather_from_tensor_model_parallel_region(
                        part.transpose(dim, -1).contiguous(), group
                    ).transpose(dim, -1)
                    for part in parts
                ]
                value = torch.cat(whole, dim)
            result[f"{kind} {name}"] = value.contiguous()
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "tied"])
def test_tensor_parallel_ranks_compute_what_one_computes(variant, sequence_parallel):
    alone = run_ranks(full_weights_and_grads, 1, variant, 1)[0]
    for shared in run_ranks(full_weights_and_grads, 2, variant, 2, sequence_parallel):
        assert shared.keys() == alone.keys()
        for name, value in alone.items():
            if name.startswith("weight"):
                assert torch.equal(shared[name], value), name
            else:
                limit = 1e-5 * value.abs().max()
                assert (shared[name] - value).abs().max() <= limit, name


def cross_entropy_pieces(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=torch.distributed.get_world_size()
    )
    group = parallel_state.get_tensor_model_parallel_group()
    logits = (torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    target = torch.randint(32, (5, 3), generator=torch.Generator().manual_seed(1))
    own = logits.chunk(group.size(), -1)[group.rank()].contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, target, group)
    (loss * torch.arange(15.0).view(5, 3)).sum().backward()
    return loss.detach(), own.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_over_a_cut_vocabulary(dtype):
    alone_loss, alone_grad = run_ranks(cross_entropy_pieces, 1, dtype)[0]
    results = run_ranks(cross_entropy_pieces, 4, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for loss, _ in results:
        torch.testing.assert_close(loss, alone_loss, rtol=1e-6, atol=1e-6)
    grad = torch.cat([grad for _, grad in results], -1)
    torch.testing.assert_close(grad, alone_grad, rtol=tolerance, atol=tolerance)


def attributes(variant: str, **config: object) -> dict[str, dict]:
    wanted = (
        "is_embedding_or_output_parameter",
        "shared_embedding",
        "is_qkv",
        "qkv_split_shapes",
        "partition_dim",
        "tensor_model_parallel",
        "computes_in_mxfp8",
    )
    model = build(variant, **config)
    return {
        name: {key: getattr(param, key) for key in wanted if hasattr(param, key)}
        | {"quantized": isinstance(param, MXFP8Tensor), "dtype": param.dtype}
        for name, param in model.named_parameters()
    }


def test_parameters_carry_megatrons_attributes():
    found = run_ranks(attributes, 1, "llama")[0]
    qkv = found["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv["is_qkv"] and qkv["qkv_split_shapes"] == [32, 16, 16] and qkv["partition_dim"] == 0
    assert found["decoder.layers.0.mlp.linear_fc2.weight"]["partition_dim"] == 1
    embedded = {name for name, a in found.items() if a.get("is_embedding_or_output_parameter")}
    assert embedded == {"embedding.word_embeddings.weight", "output_layer.weight"}
    tied = run_ranks(attributes, 1, "tied")[0]
    assert tied["embedding.word_embeddings.weight"]["shared_embedding"]
    assert "output_layer.weight" not in tied


@pytest.mark.parametrize("stored", [False, True])
def test_which_layers_compute_in_mxfp8(stored):
    config = {"bf16": True, "params_dtype": torch.bfloat16, "fp8": "e4m3", "fp8_param": stored}
    found = run_ranks(attributes, 1, "gpt2", **config)[0]
    mark = "quantized" if stored else "computes_in_mxfp8"
    in_mxfp8 = {name for name, a in found.items() if a.get(mark)}
    layers = [
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ]
    assert in_mxfp8 == {f"decoder.layers.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    assert all(a["dtype"] == torch.bfloat16 for a in found.values())


def causality() -> float:
    model = build("llama")
    ids = tokens()[:, :-1]
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCABULARY
    return float((model(ids) - model(changed))[:, :10].abs().max())


def test_later_tokens_do_not_change_earlier_predictions():
    assert run_ranks(causality, 1) == [0.0]


def seeds() -> tuple[bool, bool]:
    first, again = build("gpt2"), build("gpt2")
    torch.manual_seed(99)
    other = GPTModel(first.config, VOCABULARY, LENGTH)

    def same(a: GPTModel, b: GPTModel) -> bool:
        return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))

    return same(first, again), same(first, other)


def test_the_seed_makes_the_model():
    assert run_ranks(seeds, 1) == [(True, False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 66}, "num_attention_heads"),
        ({"num_query_groups": 3}, "num_query_groups"),
        ({"normalization": "BatchNorm"}, "normalization"),
        ({"fp8": "hybrid", "bf16": True}, "fp8"),
        ({"fp8": "e4m3"}, "bf16"),
        ({"fp8_param": True}, "fp8_param"),
        ({"num_layers": 0}, "num_layers"),
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size"),
        ({"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}, "dropout"),
        ({"recompute_granularity": "full"}, "recompute"),
        ({"pipeline_model_parallel_size": 2}, "pipeline"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SHAPE | options)


def test_vocabulary_is_padded_for_every_rank():
    assert pad_vocab_size(257, 128, 1) == 384
    assert pad_vocab_size(257, 128, 2) == 512


def test_float16_module_casts_in_and_out():
    config = TransformerConfig(**SHAPE, bf16=True)
    wrapped = Float16Module(config, torch.nn.Linear(8, 8))
    assert wrapped(torch.ones(2, 8)).dtype == torch.float32
    assert wrapped.module.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="fp16 or"):
        Float16Module(TransformerConfig(**SHAPE), torch.nn.Linear(8, 8))
