"""The command that turns text into token files."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import ByteTokenizer
from tools.preprocess_data import main
from tools.preprocessing.progress import Progress

ROOT = Path(__file__).parents[3]


def write_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts(prefix: Path) -> list[str]:
    return [
        ByteTokenizer().detokenize(sequence.tolist()) for sequence in IndexedDataset(str(prefix))
    ]


def produced(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "out")))


def run(folder: Path, *arguments: str) -> int:
    return main([*arguments, "--output-prefix", str(folder / "out")])


def test_json_lines_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(
        tmp_path / "a.jsonl", {"text": "Grüße"}, {"text": ""}, {"text": "two", "n": 1}
    )
    assert run(tmp_path, "--input", source, "--append-eod") == 0
    assert produced(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [sequence.tolist() for sequence in dataset] == [
        [*"Grüße".encode(), 256],
        [*b"two", 256],
    ]
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert dataset.dtype is np.uint16
    printed = capsys.readouterr()
    assert "2 documents, 12 tokens (uint16), 1 empty documents left out" in printed.out
    assert printed.err == ""


def test_each_key_gets_files_of_its_own(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", {"title": "a", "body": "b"})
    second = write_lines(tmp_path / "b.jsonl", {"title": "c", "body": "d"})
    assert run(tmp_path, "--input", first, second, "--json-keys", "title", "body") == 0
    assert texts(tmp_path / "out_title_document") == ["a", "c"]
    assert texts(tmp_path / "out_body_document") == ["b", "d"]


def test_plain_text_by_file_or_by_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\nmore\n\n \t\n\ntwo\r\n\r\nthree".encode())
    assert run(tmp_path, "--input", str(path)) == 0
    assert texts(tmp_path / "out_text_document") == ["one\nmore\n\n \t\n\ntwo\r\n\r\nthree"]
    assert run(tmp_path, "--input", str(path), "--text-format", "paragraph") == 0
    assert texts(tmp_path / "out_text_document") == ["one\nmore\n", "two\r\n", "three"]


def test_workers_change_nothing(tmp_path: Path) -> None:
    """Enough text for several batches, of documents of very different lengths."""
    records = [{"text": f"document {i} " * (1 + i * i % 997)} for i in range(400)]
    source = write_lines(tmp_path / "a.jsonl", *records)
    assert Path(source).stat().st_size > 4 * 2**18
    contents = []
    for workers in ("1", "2"):
        assert run(tmp_path, "--input", source, source, "--append-eod", "--workers", workers) == 0
        contents.append([(tmp_path / name).read_bytes() for name in produced(tmp_path)])
    assert len(contents[0]) == 2 and contents[0] == contents[1]


GOOD = '{"text": "good"}\n'
MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "half a line": ('{"text": "x', "line 2: malformed JSON: Unterminated string"),
    "nothing after a colon": ('{"text": \n', "line 2: malformed JSON: Expecting value at column 9"),
    "no object": ("[1]\n", "line 2: a JSON object is needed, got an array"),
    "deep nesting": ("[" * 100_000, "line 2: malformed JSON"),
    "no such key": ('{"body": 1, "id": 2}\n', "line 2: there is no key 'text'"),
    "a number": ('{"text": 5}\n', "line 2: the value of 'text' must be a string, got a number"),
    "null": ('{"text": null}\n', "line 2: the value of 'text' must be a string, got null"),
    "half a surrogate pair": ('{"text": "\\ud800"}\n', "line 2: half of a surrogate pair"),
    "Latin-1": (b'{"text": "\xe9"}\n', "line 2: byte 0xe9 is not UTF-8"),
    "after a blank line": ("\n\nx\n", "line 4: malformed JSON"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_malformed_line_is_named_and_nothing_is_left(
    tmp_path: Path, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, message = MISTAKES[mistake]
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD.encode() + (line if isinstance(line, bytes) else line.encode()))
    assert run(tmp_path, "--input", str(path)) == 1
    assert f"error: {path}, {message}" in capsys.readouterr().err
    assert produced(tmp_path) == []


def test_the_first_mistake_counts_with_workers_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 2**18}) + "\nbad\n" + "worse\n" * 100_000)
    assert run(tmp_path, "--input", str(path), "--workers", "2") == 1
    assert f"{path}, line 2: malformed JSON" in capsys.readouterr().err
    assert produced(tmp_path) == []


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "a.jsonl", {"text": "good"})
    bad = write_lines(tmp_path / "b.jsonl", {"text": "good"}, 5)
    assert run(tmp_path, "--input", good) == 0
    assert run(tmp_path, "--input", bad) == 1
    assert texts(tmp_path / "out_text_document") == ["good"]
    assert produced(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


def test_what_cannot_work_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"text": "", "id": "x"})
    (tmp_path / "b.txt").write_text("text")
    wrong = [
        (["--input", str(tmp_path / "no.jsonl")], "no.jsonl does not exist"),
        (["--input", str(tmp_path)], "is a folder"),
        (["--input", source], "no document with any text"),
        (["--input", source, str(tmp_path / "b.txt")], "say what they are"),
        (["--input", source, "--json-keys", "id", "id"], "a key twice"),
        (["--input", source, "--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
    ]
    for arguments, message in wrong:
        assert run(tmp_path, *arguments) == 1
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1
    assert main(["--input", source, "--output-prefix", str(tmp_path / "no" / "out")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    for arguments in (["--workers", "0"], ["--tokenizer-type", "GPT2BPETokenizer"]):
        with pytest.raises(SystemExit, match="2"):
            run(tmp_path, "--input", source, *arguments)
    assert produced(tmp_path) == []


def test_token_ids_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70000")
    source = write_lines(tmp_path / "a.jsonl", {"text": "5 69999"})
    assert run(tmp_path, "--input", source, *options, "--append-eod") == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert dataset.dtype is np.int32 and dataset[0].tolist() == [5, 69999, 69999]
    source = write_lines(tmp_path / "a.jsonl", {"text": "70000"})
    assert run(tmp_path, "--input", source, *options) == 1
    assert "line 1: token 70000 is outside of the vocabulary" in capsys.readouterr().err


def test_the_command_runs_by_its_path_from_anywhere(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"text": "text"})
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", "a.jsonl"]
    done = subprocess.run(
        [*command, "--output-prefix", "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert texts(tmp_path / "out_text_document") == ["text"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for stream, shown in ((_Terminal(), "\r 40 %\r100 %\n"), (io.StringIO(), "")):
        with Progress(5, stream) as progress:
            progress.advance(2)
            progress.advance(3)
        assert stream.getvalue() == shown
    monkeypatch.undo()
    pytest.importorskip("tqdm")
    stream = _Terminal()
    with Progress(5, stream) as progress:
        progress.advance(5)
    assert "100%" in stream.getvalue()
