"""How far the command has come, on a terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Progress:
    """A tqdm bar, or percentages without tqdm; nothing where the stream is not a terminal.

    Args:
        total: Bytes to be read; 0 if that is not known.
        stream: Where to show it; the standard error stream by default.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._done = 0
        self._shown = -1
        self._bar: Any = None
        self._is_shown = self._stream.isatty()
        if self._is_shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(
                total=total or None,
                unit="B",
                unit_scale=True,
                file=self._stream,
                dynamic_ncols=True,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown >= 0:
            print(file=self._stream)

    def advance(self, bytes_read: int) -> None:
        """Counts bytes."""
        self._done += bytes_read
        if self._bar is not None:
            self._bar.update(bytes_read)
        elif self._is_shown:
            percent = 100 * self._done // self._total if self._total else 0
            if percent > self._shown:
                self._shown = percent
                print(f"\r{percent:3d} %", end="", file=self._stream, flush=True)
