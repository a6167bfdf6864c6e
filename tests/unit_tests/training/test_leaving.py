"""The good end of a job: process groups end before the interpreter does.

A gloo thread that lets go of a tensor while the interpreter ends aborts the process, now and then; so no
such thread may be left when ``pretrain`` returns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import pretrain_gpt
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import pretrain

pretrain(
    parse_and_validate_args(argv=sys.argv[1:]),
    pretrain_gpt.data_iterators_provider,
    pretrain_gpt.model_provider,
    pretrain_gpt.forward_step,
)
names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
print("left:", sum("gloo" in name for name in names))
"""

FLAGS = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--mock-data"),
    *("--micro-batch-size", "1", "--train-iters", "2", "--lr", "1e-3", "--bf16"),
    *("--distributed-backend", "gloo", "--use-distributed-optimizer", "--optimizer", "muon"),
]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
@pytest.mark.parametrize("overlap", [[], ["--overlap-grad-reduce", "--overlap-param-gather"]])
def test_no_thread_of_gloo_is_left(overlap):
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *FLAGS, *overlap],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "left: 0"
