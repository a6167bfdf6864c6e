"""The reported loss depends on the samples, not on how ranks and microbatches share them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron.training.losses import SampleLosses, average_losses
from tests.ranks import run_ranks

SAMPLES = 48


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over a wide range of magnitudes, whose FP64 sum depends on the order."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-40, 40, (SAMPLES,), generator=generator)
    sums = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) * 2.0**exponents
    return sums, torch.arange(1, SAMPLES + 1)


def shared_out(microbatches: int) -> float:
    """The average when ranks take samples by turns."""
    sums, counts = samples()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    pieces: list[SampleLosses] = [
        {"lm loss": piece}
        for piece in zip(
            sums[mine].chunk(microbatches), counts[mine].chunk(microbatches), strict=True
        )
    ]
    return average_losses(pieces, None)["lm loss"]


def test_the_average_is_the_same_however_samples_are_shared_out() -> None:
    sums, counts = samples()
    exact = math.fsum(sums.tolist()) / int(counts.sum())
    naive = {sum(torch.cat([sums[r::n] for r in range(n)]).tolist()) for n in (1, 2, 3)}
    assert len(naive) > 1, "samples whose sum does not depend on the order prove nothing"
    for ranks, microbatches in ((1, 1), (1, 4), (2, 3), (3, 2)):
        assert run_ranks(shared_out, ranks, microbatches) == [exact] * ranks


def test_losses_that_are_not_finite_show() -> None:
    one = torch.ones(1)
    for bad in (math.inf, -math.inf, math.nan):
        losses: list[SampleLosses] = [{"lm loss": (one * bad, one)}, {"lm loss": (one, one)}]
        assert not math.isfinite(average_losses(losses, None)["lm loss"])
    both: list[SampleLosses] = [{"a": (torch.tensor([math.inf, -math.inf]), torch.ones(2))}]
    assert math.isnan(average_losses(both, None)["a"])


def test_no_token_gives_zero() -> None:
    assert average_losses([{"lm loss": (torch.zeros(2), torch.zeros(2))}], None) == {"lm loss": 0.0}
