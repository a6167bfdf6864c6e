"""The examples run, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses_printed_by(example: str, ranks: int) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), f"examples/{example}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def test_own_model_learns_on_two_ranks() -> None:
    losses = losses_printed_by("own_model.py", 2)
    assert losses[-1] < 0.7 * losses[0]


def test_hugging_face_model_learns_alone() -> None:
    pytest.importorskip("transformers")
    losses = losses_printed_by("hf_model.py", 1)
    assert losses[-1] < 0.7 * losses[0]
