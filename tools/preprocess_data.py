"""Turns text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod

writes ``corpus_text_document.bin`` and ``corpus_text_document.idx``, for ``--data-path
corpus_text_document``. Inputs are UTF-8 and of one of these kinds:

- JSON lines: a JSON object on each line, of which each key of ``--json-keys`` is a document and gets
  files of its own;
- plain text (``--text-format``, or files named ``.txt``, ``.text``, ``.md`` or ``.rst``): each file is
  one document (``file``, the default), or each run of lines between blank lines is (``paragraph``).

Documents come out in the order of the inputs, whatever the number of workers. Documents without any
text are left out. Files appear under their names when all is done; after an error there are none.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NoReturn

if __name__ == "__main__":
    # Started by its path, without the project being installed.
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.utils.build_tokenizer import TOKENIZER_TYPES
from tools.preprocessing.documents import Batch, read_batches
from tools.preprocessing.encoder import Encoded, Encoder
from tools.preprocessing.progress import Progress

_TEXT_EXTENSIONS = (".txt", ".text", ".md", ".rst")
_INTERRUPTED = 130


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_argument_group("input")
    source.add_argument("--input", nargs="+", required=True, metavar="FILE", help="what to read")
    kind = source.add_mutually_exclusive_group()
    kind.add_argument(
        "--json-keys", nargs="+", metavar="KEY", help="JSON lines: keys to take (default: text)"
    )
    kind.add_argument(
        "--text-format", choices=("file", "paragraph"), help="plain text: what a document is"
    )
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="ByteTokenizer")
    tokens.add_argument("--tokenizer-model", metavar="FILE", help="a tokenizer.json")
    tokens.add_argument("--vocab-size", type=int, help="for NullTokenizer: largest id plus one")
    tokens.add_argument("--append-eod", action="store_true", help="end every document with a token")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="what to write")
    output.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"argument --workers: must be at least 1, got {args.workers}")
    return args


def input_kinds(args: argparse.Namespace) -> list[str]:
    """Returns for each input ``json``, ``file`` or ``paragraph``.

    Raises:
        ValueError: If the inputs are JSON lines and plain text at once.
    """
    if args.json_keys:
        return ["json"] * len(args.input)
    if args.text_format:
        return [args.text_format] * len(args.input)
    kinds = ["file" if path.lower().endswith(_TEXT_EXTENSIONS) else "json" for path in args.input]
    if len(set(kinds)) > 1:
        raise ValueError(
            "some inputs are named as plain text and some are not; say what they are with "
            "--text-format or --json-keys"
        )
    return kinds


def preprocess(args: argparse.Namespace) -> None:
    """Reads, tokenizes and writes.

    Raises:
        ValueError: If an input is malformed, naming file and line, or an option is wrong.
        OSError: If a file cannot be read or written.
        ImportError: If the tokenizer needs a library that is not installed.
        RuntimeError: If a worker process died.
    """
    started = time.perf_counter()
    kinds = input_kinds(args)
    size = sum(_size(path) for path in args.input)
    folder = os.path.dirname(args.output_prefix) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"--output-prefix {args.output_prefix}: there is no folder {folder}"
        )
    keys = tuple(args.json_keys or ("text",))
    if len(set(keys)) < len(keys):
        raise ValueError(f"--json-keys names a key twice: {' '.join(keys)}")
    options = (args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    tokenizer = build_tokenizer(*options)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    eod = tokenizer.eod if args.append_eod else None
    encoder = Encoder(options, keys, eod, dtype)
    prefixes = [f"{args.output_prefix}_{key}_document" for key in keys]
    documents, tokens, empty = [0] * len(keys), [0] * len(keys), [0] * len(keys)
    with contextlib.ExitStack() as stack:
        builders = [
            stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), dtype))
            for prefix in prefixes
        ]
        progress = stack.enter_context(Progress(size))
        batches = (
            batch
            for path, kind in zip(args.input, kinds, strict=True)
            for batch in read_batches(path, kind)
        )
        for encoded in _encode_all(encoder, batches, args.workers):
            for i, part in enumerate(encoded.parts):
                start = 0
                for length in part.lengths.tolist():
                    builders[i].add_document(part.tokens[start : start + length], [length])
                    start += length
                documents[i] += len(part.lengths)
                tokens[i] += start
                empty[i] += part.empty
            progress.advance(encoded.bytes_read)
        for key, count in zip(keys, documents, strict=True):
            if count == 0:
                raise ValueError(f"no document with any text in {', '.join(args.input)} ({key})")
        _finalize(builders, prefixes)
    seconds = time.perf_counter() - started
    for i, prefix in enumerate(prefixes):
        left_out = f", {empty[i]:,} empty documents left out" if empty[i] else ""
        print(
            f"{prefix}: {documents[i]:,} documents, {tokens[i]:,} tokens "
            f"({dtype.__name__}){left_out}, {seconds:.1f} s"
        )


def _size(path: str) -> int:
    if not os.path.exists(path):
        raise FileNotFoundError(f"--input {path} does not exist")
    if os.path.isdir(path):
        raise IsADirectoryError(f"--input {path} is a folder")
    return os.path.getsize(path)


def _finalize(builders: Sequence[IndexedDatasetBuilder], prefixes: Sequence[str]) -> None:
    """Gives all files their names, or none."""
    done: list[str] = []
    try:
        for builder, prefix in zip(builders, prefixes, strict=True):
            builder.finalize(get_idx_path(prefix))
            done.append(prefix)
    except BaseException:
        for prefix in done:
            os.unlink(get_idx_path(prefix))
            os.unlink(get_bin_path(prefix))
        raise


def _start_worker() -> None:
    # Ctrl-C reaches the whole process group; the main process alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # One process is one worker, whatever the library would do by itself.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_all(encoder: Encoder, batches: Iterator[Batch], workers: int) -> Iterator[Encoded]:
    """Yields the tokens of batches in their order."""
    if workers == 1:
        yield from map(encoder.encode, batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encoder.encode, batch))
            # Reading ahead of the workers without a bound would take the whole input into memory.
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError("a worker process died: killed, or out of memory") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _terminate(*_: Any) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        preprocess(args)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
