"""Megatron flags that are known but not obeyed: refused with a reason, or needless here.

A flag that is silently ignored trains something else than was asked for, so every flag of a feature
that this project does not have is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NONE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A flag of an absent feature; values in ``harmless`` leave it off and are accepted."""

    name: str
    feature: str
    harmless: tuple[str, ...] = _NONE

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Makes ``parser`` refuse the flag."""
        parser.add_argument(
            self.name,
            nargs="*",
            action=_Refuse,
            refused=self,
            dest=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Refuse(argparse.Action):
    def __init__(self, refused: Refused, **options: Any) -> None:
        super().__init__(**options)
        self.refused = refused

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [str(value) for value in values or ()]
        if given and set(given) <= set(self.refused.harmless):
            return
        advice = "leave it out"
        if self.refused.harmless:
            advice += " or give " + " or ".join(self.refused.harmless)
        parser.error(
            f"{' '.join([self.refused.name, *given])}: this project has no {self.refused.feature}; "
            f"{advice}"
        )


def _all(feature: str, *names: str) -> tuple[Refused, ...]:
    return tuple(Refused(name, feature) for name in names)


ABSENT: tuple[Refused, ...] = (
    Refused("--pipeline-model-parallel-size", "pipeline parallelism", ("1",)),
    *_all(
        "pipeline parallelism",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--overlap-param-gather-with-optimizer-step",
    ),
    Refused("--context-parallel-size", "context parallelism", ("1",)),
    *_all("context parallelism", "--cp-comm-type", "--hierarchical-context-parallel-sizes"),
    Refused("--data-parallel-sharding-strategy", "fully sharded data parallelism", ("no_shard",)),
    *_all(
        "fully sharded data parallelism",
        "--use-megatron-fsdp",
        "--use-custom-fsdp",
        "--use-torch-fsdp2",
        "--init-model-with-meta-device",
    ),
    *_all(
        "offloading to the CPU",
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--cpu-offloading",
        "--cpu-offloading-num-layers",
    ),
    *_all(
        "low-precision optimizer state",
        "--use-precision-aware-optimizer",
        "--main-grads-dtype",
        "--main-params-dtype",
        "--exp-avg-dtype",
        "--exp-avg-sq-dtype",
    ),
    *_all("FP4 training", "--fp4-format", "--fp4-recipe", "--fp4-param-gather"),
    Refused("--cuda-graph-impl", "CUDA graphs of layers", ("none",)),
    *_all("CUDA graphs of layers", "--enable-cuda-graph", "--external-cuda-graph"),
    *_all(
        "registration of NCCL buffers",
        "--use-nccl-ub",
        "--use-sharp",
        "--nccl-communicator-config-path",
    ),
    *_all("overlap of TP collectives with GEMMs", "--tp-comm-overlap"),
    *_all("delayed weight gradients", "--delay-wgrad-compute"),
    *_all(
        "FP32 accumulation by parameter name (see --accumulate-allreduce-grads-in-fp32)",
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
    ),
    *_all("check for large gradients", "--check-for-large-grads"),
    *_all("multi-latent attention", "--multi-latent-attention"),
    Refused("--moe-router-load-balancing-type", "balancing of experts", ("none",)),
    Refused("--moe-aux-loss-coeff", "balancing of experts", ("0", "0.0")),
    Refused("--moe-token-dispatcher-type", "exchange of tokens but by all-to-all", ("alltoall",)),
    *_all(
        "such part of a mixture of experts",
        "--moe-z-loss-coeff",
        "--moe-expert-capacity-factor",
        "--moe-shared-expert-intermediate-size",
        "--moe-layer-freq",
        "--moe-router-score-function",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "--moe-router-dtype",
        "--moe-router-fusion",
        "--moe-router-group-topk",
        "--moe-router-num-groups",
        "--moe-router-topk-scaling-factor",
        "--moe-router-force-load-balancing",
        "--moe-input-jitter-eps",
        "--moe-pad-expert-input-to-capacity",
        "--moe-token-drop-policy",
        "--moe-shared-expert-overlap",
        "--moe-apply-probs-on-input",
        "--moe-use-upcycling",
        "--moe-enable-deepep",
    ),
    *_all(
        "grouped product of experts",
        "--moe-grouped-gemm",
        "--moe-use-legacy-grouped-gemm",
        "--moe-permute-fusion",
    ),
    *_all(
        "recomputation of parts of a layer (see --recompute-granularity full)",
        "--recompute-activations",
        "--recompute-modules",
    ),
    *_all("multi-token prediction", "--mtp-num-layers"),
    *_all("custom layer specs", "--spec"),
    *_all(
        "separate switch for rotary positions (see --position-embedding-type rope)",
        "--use-rotary-position-embeddings",
    ),
    *_all("activation but GELU and SwiGLU", "--squared-relu", "--openai-gelu", "--quick-geglu"),
    Refused(
        "--attention-backend",
        "attention but torch's scaled_dot_product_attention, which chooses its kernel by itself",
        ("auto",),
    ),
    *_all(
        "attention but torch's scaled_dot_product_attention, which chooses its kernel by itself",
        "--use-flash-attn",
    ),
    Refused("--transformer-impl", "choice of layer implementations", ("local",)),
    *_all(
        "batch sizes that change (see --global-batch-size)",
        "--rampup-batch-size",
        "--step-batch-size-schedule",
        "--decrease-batch-size-if-needed",
    ),
    *_all(
        "schedule counted in samples (see the flags that end in -iters)",
        "--train-samples",
        "--lr-decay-samples",
        "--lr-warmup-samples",
        "--lr-wsd-decay-samples",
    ),
    *_all("separate rate for embeddings", "--decoupled-lr", "--decoupled-min-lr"),
    *_all(
        "treatment of document ends (samples run across documents)",
        "--reset-position-ids",
        "--reset-attention-mask",
        "--eod-mask-loss",
    ),
    *_all(
        "separate data for each split (see --data-path and --split)",
        "--train-data-path",
        "--valid-data-path",
        "--test-data-path",
        "--data-args-path",
        "--per-split-data-args-path",
    ),
    *_all(
        "tokenizer from vocabulary and merge files (see --tokenizer-model)",
        "--vocab-file",
        "--merge-file",
    ),
    *_all("loader processes: samples are read from mapped memory", "--num-workers"),
    *_all(
        "such log (see --metrics-jsonl and --tensorboard-dir)",
        "--log-params-norm",
        "--log-throughput",
        "--log-progress",
        "--log-timers-to-tensorboard",
        "--log-memory-to-tensorboard",
        "--log-validation-ppl-to-tensorboard",
    ),
    *_all("Weights & Biases logger", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    *_all("asynchronous saving", "--async-save"),
)

# These ask for what is done here in any case.
NEEDLESS = (
    "--use-mcore-models",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)


@dataclass(frozen=True)
class NotYet:
    """A flag whose feature is planned; ``allowed`` values leave it off."""

    name: str
    feature: str
    allowed: tuple[Any, ...] = (None,)

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


NOT_YET: tuple[NotYet, ...] = (
    NotYet("--layer-wise-param-layout", "layout", (None, "padded", "legacy")),
    NotYet("--save", "saving of checkpoints"),
    NotYet("--load", "loading of checkpoints"),
    NotYet("--save-interval", "saving of checkpoints"),
)


def refuse_not_yet(args: argparse.Namespace) -> None:
    """Refuses flags of planned features.

    Raises:
        ValueError: Naming the flag, its value and the values that are allowed.
    """
    for entry in NOT_YET:
        value = getattr(args, entry.dest)
        if value not in entry.allowed:
            allowed = [str(v) for v in entry.allowed if v is not None]
            advice = " or give " + " or ".join(allowed) if allowed else ""
            raise ValueError(
                f"{entry.name} {value}: the {entry.feature} that this asks for is not available "
                f"yet; leave the flag out{advice}"
            )
