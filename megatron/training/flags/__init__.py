"""Every flag of the command line, one table per group.

Names, types and defaults are Megatron-LM's. Where a default differs, the flag's help says so.
"""

from __future__ import annotations

from .flag import Flag
from .model import BATCH, DATA, MODEL
from .optimization import OPTIMIZER, PRECISION, RATE
from .output import OUTPUT
from .parallel import DDP, PARALLEL

GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": MODEL,
    "batch": BATCH,
    "learning rate": RATE,
    "optimizer": OPTIMIZER,
    "parallel": PARALLEL,
    "data-parallel communication": DDP,
    "precision": PRECISION,
    "data": DATA,
    "output": OUTPUT,
}

__all__ = ["GROUPS", "Flag"]
