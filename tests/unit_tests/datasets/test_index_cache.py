"""The cache of indices: built once, by any number of processes, whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.datasets import gpt_dataset
from megatron.core.tokenizers import ByteTokenizer, NullTokenizer
from megatron.training.datasets.gpt_datasets import build_train_valid_test_datasets
from tests.ranks import run_ranks

from .token_files import LENGTH, build, numbered_documents, write_documents


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    builds: list[int] = []
    build_indices = gpt_dataset.build_sample_indices

    def counted(*arguments: Any) -> Any:
        builds.append(1)
        return build_indices(*arguments)

    monkeypatch.setattr(gpt_dataset, "build_sample_indices", counted)
    return builds


def test_an_index_is_built_once_for_all_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = count_builds(monkeypatch)
    prefix = write_documents(tmp_path / "data", numbered_documents([30, 31, 32]))
    first = build(tmp_path, prefix)[0]
    second = build(tmp_path, prefix)[0]
    assert len(builds) == 1
    assert [first.text(i).tolist() for i in range(10)] == [
        second.text(i).tolist() for i in range(10)
    ]
    build(tmp_path, prefix, seed=2)
    build(tmp_path, prefix, sizes=(11, 0, 0))
    build(tmp_path, prefix, sizes=(10, 5, 0), split="2,1")
    assert len(builds) == 5
    # Other documents under the same name.
    write_documents(tmp_path / "data", numbered_documents([30, 32, 31]))
    build(tmp_path, prefix)
    assert len(builds) == 6


def test_a_damaged_cache_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([30, 31, 32]))
    expected = [build(tmp_path, prefix)[0].text(i).tolist() for i in range(10)]
    files = sorted((tmp_path / "cache").glob("*-GPTDataset-train-*.npy"))
    assert len(files) == 3
    for file in files:
        content = file.read_bytes()
        for damaged in (b"", content[:40], content[:-1], b"x" * len(content), None):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            builds = count_builds(monkeypatch)
            again = build(tmp_path, prefix)[0]
            monkeypatch.undo()
            assert len(builds) == 1
            assert [again.text(i).tolist() for i in range(10)] == expected
            assert file.read_bytes() == content


def test_an_interrupted_write_leaves_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([30, 31, 32]))

    def interrupted(file: Any, array: Any, **_: Any) -> None:
        file.write(b"\x93NUMPY half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, prefix, vocab_size=2**31)
    monkeypatch.undo()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(build(tmp_path, prefix)[0]) >= 10


def test_a_cache_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([30]))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match=r"cache folder .*cache: .* --data-cache-path"):
        build(tmp_path, prefix)


def test_without_a_home_indices_are_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file, where no folder can be made")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prefix = write_documents(tmp_path / "data", numbered_documents([30]))
    (dataset, _, _) = build_train_valid_test_datasets(
        NullTokenizer(100), (5, 0, 0), seed=1, seq_length=4, data_path=[prefix], split="1"
    )
    assert len(dataset) >= 5  # type: ignore[arg-type]
    assert list(tmp_path.glob("megatron-layerwise-*/*.npy"))


def _texts_on_this_rank(folder: str, prefix: str, locks: bool) -> list[Any]:
    if not locks:
        sys.modules["fcntl"] = None  # type: ignore[assignment]
    try:
        dist.barrier()
        (dataset, _, _) = build(folder, prefix, (200, 0, 0))
        texts = [dataset.text(i).tolist() for i in range(len(dataset))]
        text = build_train_valid_test_datasets(
            ByteTokenizer(), (5, 5, 5), seed=1, seq_length=LENGTH, data_cache_path=folder + "/cache"
        )
        return [texts, [part.text(0).tolist() for part in text]]  # type: ignore[union-attr]
    finally:
        sys.modules.pop("fcntl")


@pytest.mark.parametrize("locks", [True, False])
def test_ranks_may_build_in_one_folder_at_once(tmp_path: Path, locks: bool) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([30, 7, 12, 60]))
    results = run_ranks(_texts_on_this_rank, 4, str(tmp_path), prefix, locks)
    assert all(result == results[0] for result in results)
    left = [path.name for path in (tmp_path / "cache").iterdir() if ".tmp" in path.name]
    assert left == []
