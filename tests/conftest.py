"""Pytest set-up shared by all tests."""

import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--device``."""
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where ranks keep their tensors; on cuda one rank uses NCCL, and several share GPUs over gloo",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tells this process and the workers that it will start where tensors lie."""
    os.environ["TEST_DEVICE"] = config.getoption("--device")
    if os.environ["TEST_DEVICE"] == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a GPU, and torch.cuda.is_available() is False")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
