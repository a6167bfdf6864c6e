"""Flags of logs, audits and checkpoints."""

from __future__ import annotations

from .flag import Flag, whole

OUTPUT = (
    Flag("--log-interval", "Iterations between log lines.", whole(1), 100),
    Flag("--log-num-zeros-in-grad", "Count the zeros among the gradients."),
    Flag("--tensorboard-dir", "Folder of TensorBoard events.", str, metavar="FOLDER"),
    Flag("--tensorboard-log-interval", "Iterations between TensorBoard points.", whole(1), 1),
    Flag("--metrics-jsonl", "File that gets one JSON object per iteration.", str, metavar="FILE"),
    Flag(
        "--check-param-sync-interval",
        "Iterations between audits of every rank's weights against their masters.",
        whole(1),
        metavar="N",
    ),
    Flag("--save", "Folder that checkpoints are written to.", str, metavar="FOLDER"),
    Flag("--load", "Folder that a checkpoint is read from.", str, metavar="FOLDER"),
    Flag("--save-interval", "Iterations between checkpoints.", whole(1)),
    Flag("--ckpt-format", "Format of checkpoints.", str, "torch_dist", ("torch_dist",)),
)
