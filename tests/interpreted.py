"""Cases for Triton kernels that run interpreted on CPU tensors, and compiled on a GPU.

Whether Triton interprets is settled when it is imported, so the interpreted cases of a test file run
together in a process of their own: that file as a script, which ends with a call of :func:`report`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton, an optional extra, is not installed"
)


def report(cases: Mapping[str, Callable[[str], None]]) -> None:
    """Runs every case on the CPU and prints what each raised, empty if nothing, as JSON."""
    torch.set_num_threads(1)
    failures = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for name, case in cases.items():
            failures[name] = ""
            try:
                case("cpu")
            except Exception:
                failures[name] = traceback.format_exc()
    print(json.dumps(failures))


def run_interpreted(file: str) -> dict[str, str]:
    """What each case of a test file raised, with Triton as interpreter."""
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
