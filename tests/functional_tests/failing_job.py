"""``pretrain_gpt.py`` with a failure of choice: ``FAILURE`` names it, ``FAILING_RANK`` has it.

- ``raise``: an error in the third forward pass;
- ``kill``: the system kills the process there;
- ``interrupt``: the rank gets Ctrl-C's signal there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

import pretrain_gpt
from megatron.training.step import LossFunc

_calls = 0


def _failing_step(data: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
    global _calls
    _calls += 1
    if _calls == 3 and os.environ["RANK"] == os.environ["FAILING_RANK"]:
        if os.environ["FAILURE"] == "raise":
            raise RuntimeError("the injected failure")
        signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
        os.kill(os.getpid(), signals[os.environ["FAILURE"]])
    return _forward_step(data, model)


_forward_step = pretrain_gpt.forward_step
pretrain_gpt.forward_step = _failing_step

if __name__ == "__main__":
    pretrain_gpt.main()
