"""Whether Triton, an optional extra, is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Looks once, without importing it: that takes a while, and nothing on a CPU needs it."""
    return find_spec("triton") is not None
