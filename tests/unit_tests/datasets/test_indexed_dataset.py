"""Token files: the bytes are Megatron's, and whatever is wrong with them is said."""

from __future__ import annotations

import pickle
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets import index_file
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from .token_files import write_documents

# Two documents, of sequences [1, 2, 3], [] and [4, 5], as Megatron-LM writes them as int32.
BIN = bytes.fromhex("01000000 02000000 03000000 04000000 05000000")
IDX = bytes.fromhex(
    "4d4d494449445800 00"  # MMIDIDX, two zeros
    "0100000000000000 04"  # version, int32
    "0300000000000000 0300000000000000"  # sequences, document boundaries
    "03000000 00000000 02000000"  # lengths
    "0000000000000000 0c00000000000000 0c00000000000000"  # byte offsets
    "0000000000000000 0200000000000000 0300000000000000"  # document boundaries
)


def write_files(folder: Path, idx: bytes = IDX, bin_: bytes = BIN) -> str:
    prefix = str(folder / "data")
    Path(get_idx_path(prefix)).write_bytes(idx)
    Path(get_bin_path(prefix)).write_bytes(bin_)
    return prefix


@pytest.mark.parametrize("mapped_from", [1, 1000])
def test_megatrons_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped_from: int
) -> None:
    monkeypatch.setattr(index_file, "MAPPED_FROM_BYTES", mapped_from)
    dataset = IndexedDataset(write_files(tmp_path))
    assert [sequence.tolist() for sequence in dataset] == [[1, 2, 3], [], [4, 5]]
    assert dataset.sequence_lengths.tolist() == [3, 0, 2]
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert dataset.dtype is np.int32


def test_megatrons_bytes_are_written(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(get_bin_path(prefix))
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item(torch.tensor([], dtype=torch.int64))
    builder.end_document()
    builder.add_document(np.array([4, 5]), [2])
    builder.finalize(get_idx_path(prefix))
    assert Path(get_idx_path(prefix)).read_bytes() == IDX
    assert Path(get_bin_path(prefix)).read_bytes() == BIN


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.name)
def test_round_trip_of_every_dtype(tmp_path: Path, dtype: DType) -> None:
    scalar = DType.dtype_from_code(dtype.value)
    limits = np.iinfo(scalar) if np.issubdtype(scalar, np.integer) else np.finfo(scalar)  # type: ignore[arg-type, type-var]
    values = np.array([limits.min, 0, 1, limits.max], scalar)
    prefix = write_documents(tmp_path / "data", [values, [], values[:1]], scalar)  # type: ignore[list-item]
    assert Path(get_idx_path(prefix)).read_bytes()[17] == dtype.value
    assert Path(get_bin_path(prefix)).stat().st_size == 5 * DType.size(scalar)
    dataset = IndexedDataset(prefix)
    assert dataset.dtype is scalar and dataset[0].dtype == scalar
    assert [sequence.tolist() for sequence in dataset] == [values.tolist(), [], values[:1].tolist()]


def _with(place: int, value: bytes) -> bytes:
    return IDX[:place] + value + IDX[place + len(value) :]


LENGTHS, POINTERS, BOUNDARIES = 34, 46, 70
LIFTED = b"".join(struct.pack("<q", offset) for offset in (4, 16, 16))

DAMAGES: dict[str, tuple[bytes, bytes, str, str]] = {
    "another format": (b"PK\x03\x04" + IDX[4:], BIN, ".idx", "not an index"),
    "empty index": (b"", BIN, ".idx", "truncated: it has 0 bytes"),
    "half a magic number": (IDX[:5], BIN, ".idx", "truncated: it has 5 bytes"),
    "half a header": (IDX[:30], BIN, ".idx", "truncated: it has 30 bytes"),
    "unknown version": (_with(9, b"\x02"), BIN, ".idx", "version 2"),
    "dtype code 0": (_with(17, b"\x00"), BIN, ".idx", "dtype code 0"),
    "dtype code 9": (_with(17, b"\x09"), BIN, ".idx", "dtype code 9"),
    "one byte short": (IDX[:-1], BIN, ".idx", "truncated: 3 sequences and 3 document boundaries"),
    "one byte more": (IDX + b"\x00", BIN, ".idx", "too long"),
    "modes of a multimodal dataset": (IDX + bytes(3), BIN, ".idx", "multimodal"),
    "a count of 2**63": (_with(18, b"\xff" * 7 + b"\x7f"), BIN, ".idx", "truncated"),
    "no document boundary": (_with(26, b"\x00")[:-24], BIN, ".idx", "run from none"),
    "boundaries not from 0": (_with(BOUNDARIES, b"\x01"), BIN, ".idx", "run from 1 to 3"),
    "boundaries not to the end": (_with(BOUNDARIES + 16, b"\x02"), BIN, ".idx", "from 0 to 2"),
    "boundaries that descend": (_with(BOUNDARIES + 8, b"\x04"), BIN, ".idx", "do not ascend"),
    "a negative length": (_with(LENGTHS + 4, b"\xff" * 4), BIN, ".idx", "sequence 1 has length -1"),
    "a negative offset": (_with(POINTERS, b"\xff" * 8), BIN, ".idx", "byte offset -1"),
    "an offset beyond the end": (_with(POINTERS + 16, b"\x10"), BIN, ".bin", "sequence 2"),
    "an offset near 2**63": (_with(POINTERS, b"\xff" * 7 + b"\x7f"), BIN, ".bin", "sequence 0"),
    "a length beyond the end": (_with(LENGTHS + 8, b"\x03"), BIN, ".bin", "is shorter than"),
    "tokens one byte short": (IDX, BIN[:-1], ".bin", "it has 19 bytes"),
    "no tokens": (IDX, b"", ".bin", "it has 0 bytes"),
    "tokens of another file": (IDX, BIN * 2, ".bin", "is longer than"),
    "another width": (_with(17, b"\x08"), BIN, ".bin", "uint16"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    idx, bin_, named, said = DAMAGES[damage]
    if damage == "another width":
        offsets = b"".join(struct.pack("<q", offset) for offset in (0, 6, 6))
        idx = idx[:POINTERS] + offsets + idx[BOUNDARIES:]
    prefix = write_files(tmp_path, idx, bin_)
    with pytest.raises(ValueError) as caught:
        IndexedDataset(prefix)
    assert str(caught.value).startswith(f"{prefix}{named} ")
    assert said in str(caught.value)


@pytest.mark.parametrize("get_path", [get_idx_path, get_bin_path])
def test_a_missing_file_is_named(tmp_path: Path, get_path: Callable[[str], str]) -> None:
    prefix = write_files(tmp_path)
    Path(get_path(prefix)).unlink()
    assert not IndexedDataset.exists(prefix)
    with pytest.raises(FileNotFoundError, match=get_path(prefix)):
        IndexedDataset(prefix)


def test_a_prefix_with_an_extension_is_explained(tmp_path: Path) -> None:
    prefix = write_files(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"give the prefix of the two files, {prefix},"):
        IndexedDataset(get_bin_path(prefix))


def test_an_index_may_point_into_a_larger_file(tmp_path: Path) -> None:
    idx = IDX[:POINTERS] + LIFTED + IDX[BOUNDARIES:]
    dataset = IndexedDataset(write_files(tmp_path, idx, bytes(4) + BIN + bytes(8)))
    assert [sequence.tolist() for sequence in dataset] == [[1, 2, 3], [], [4, 5]]
    assert np.concatenate(list(dataset.iter_token_chunks())).tolist() == [1, 2, 3, 4, 5]


def test_an_empty_dataset_is_a_dataset(tmp_path: Path) -> None:
    assert len(IndexedDataset(write_documents(tmp_path / "data", []))) == 0


def test_parts_of_a_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "data", [[1, 2, 3, 4], [5, 6]]))
    assert dataset.get(0, 1, 2).tolist() == [2, 3]
    assert dataset.get(0, 3).tolist() == [4]
    assert dataset.get(-1, 2).tolist() == []
    assert [sequence.tolist() for sequence in dataset[1:]] == [[5, 6]]
    for idx, offset, length in [(2, 0, None), (-3, 0, None), (0, 5, None), (0, 3, 2), (0, -1, 1)]:
        with pytest.raises(IndexError):
            dataset.get(idx, offset, length)
    with pytest.raises(ValueError, match="step 1"):
        dataset[::2]
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 9


def test_a_dataset_reopens_where_it_is_unpickled(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_files(tmp_path))
    assert pickle.loads(pickle.dumps(dataset))[2].tolist() == [4, 5]


def test_tokens_keep_their_values_or_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "data.bin"), np.uint16) as builder:
        builder.add_item(torch.tensor([0, 65535]))
        builder.add_item(np.array([1.0, 2.0]))
        for tokens in ([65536], [-1], [1.5], [float("nan")], [2**40]):
            with pytest.raises(ValueError, match="cannot be stored as uint16"):
                builder.add_item(np.array(tokens))
        with pytest.raises(ValueError, match="of 2 tokens"):
            builder.add_document([1, 2], [1])
        builder.end_document()
        builder.finalize(str(tmp_path / "data.idx"))
    sequences = [sequence.tolist() for sequence in IndexedDataset(str(tmp_path / "data"))]
    assert sequences == [[0, 65535], [1, 2]]


def test_files_appear_complete_or_not_at_all(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [[1, 2]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(KeyError), IndexedDatasetBuilder(str(tmp_path / "data.bin")) as builder:
        builder.add_document([7], [1])
        raise KeyError
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"))
    builder.add_item([7])
    with pytest.raises(ValueError, match=r"end_document\(\)"):
        builder.finalize(str(tmp_path / "data.idx"))
    del builder
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    write_documents(tmp_path / "data", [[7]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert IndexedDataset(str(tmp_path / "data"))[0].tolist() == [7]


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the end of the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        for tokens in (np.zeros(5_000, np.int32), np.zeros(2_600, np.int32)):
            with (
                pytest.raises(OSError, match=f"too large: '{tmp_path}/data.bin'"),
                IndexedDatasetBuilder(str(tmp_path / "data.bin")) as builder,
            ):
                builder.add_document(tokens, [len(tokens)])
                builder.finalize(str(tmp_path / "data.idx"))
        with (
            pytest.raises(OSError, match=f"too large: '{tmp_path}/data.idx'"),
            IndexedDatasetBuilder(str(tmp_path / "data.bin")) as builder,
        ):
            for _ in range(1_000):
                builder.add_document([1], [1])
            builder.finalize(str(tmp_path / "data.idx"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_finalized_builder_takes_nothing_more(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"))
    builder.finalize(str(tmp_path / "data.idx"))
    with pytest.raises(ValueError, match="finalized"):
        builder.add_item([1])
    with pytest.raises(ValueError, match="finalized"):
        builder.finalize(str(tmp_path / "data.idx"))


def test_merging_appends_documents(tmp_path: Path) -> None:
    first = write_documents(tmp_path / "first", [[1, 2], [3]])
    moved = write_files(tmp_path, IDX[:POINTERS] + LIFTED + IDX[BOUNDARIES:], bytes(4) + BIN)
    with IndexedDatasetBuilder(str(tmp_path / "all.bin")) as builder:
        for prefix in (first, moved, first):
            builder.add_index(prefix)
        builder.finalize(str(tmp_path / "all.idx"))
    merged = IndexedDataset(str(tmp_path / "all"))
    assert [sequence.tolist() for sequence in merged] == [
        [1, 2],
        [3],
        [1, 2, 3],
        [],
        [4, 5],
        [1, 2],
        [3],
    ]
    assert merged.document_indices.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_merging_needs_one_dtype(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", [[1]], np.uint16)
    with (
        IndexedDatasetBuilder(str(tmp_path / "all.bin")) as builder,
        pytest.raises(ValueError, match=r"uint16.*int32"),
    ):
        builder.add_index(prefix)


def test_dtypes_follow_megatrons_rule() -> None:
    assert DType.optimal_dtype(65499) is np.uint16
    assert DType.optimal_dtype(65500) is np.int32
    assert DType.optimal_dtype(None) is np.int32
    with pytest.raises(ValueError, match="bool"):
        DType.code_from_dtype(np.bool_)  # type: ignore[arg-type]
