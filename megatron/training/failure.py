"""How a job ends when something goes wrong: with one error, that of the rank where it started.

A rank that fails leaves its peers blocked in collectives that then fail too, and whose tracebacks
would bury the one that matters. So the first rank to fail says so in the job's store, prints its
error and ends; the others end in silence.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch.distributed as dist

ERROR_EXIT_CODE = 1
INTERRUPT_EXIT_CODE = 130

_FAILURES_KEY = "megatron/failures"

# What gloo and NCCL say when a rank at the other end is gone.
_LOST_PEER = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    "remote process exited|pair closure|Socket closed|NCCL communicator was aborted|"
    "failed to recv, got 0 bytes",
    re.IGNORECASE,
)

# How long a rank that lost a peer waits for that peer's own error, and how long a rank that has
# nothing to say waits for the launcher to end it. A launcher reports the rank that ended first.
_WAIT_FOR_CAUSE_S = 2.0
_WAIT_FOR_LAUNCHER_S = 3.0


class PlainError(Exception):
    """An error whose message says all there is to say; shown without a traceback."""


@contextlib.contextmanager
def errors_are_the_users() -> Iterator[None]:
    """Within it, wrong values, missing files and missing packages are the user's to put right."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise PlainError(str(error)) from error


@contextlib.contextmanager
def one_error_per_job() -> Iterator[None]:
    """Ends the process after an error in its body, which one rank of the job prints.

    A failing process ends with code 1, after Ctrl-C with code 130, and does so at once: taking
    process groups down in good order would wait for peers.
    """
    try:
        yield
    except SystemExit:
        raise
    except KeyboardInterrupt:
        if _rank() == 0:
            _say("interrupted")
        _end(INTERRUPT_EXIT_CODE)
    except BaseException as error:
        _report(error)
        _end(ERROR_EXIT_CODE)


def _report(error: BaseException) -> None:
    lost_peer = _LOST_PEER.search(str(error)) is not None
    if lost_peer and _somebody_failed_within(_WAIT_FOR_CAUSE_S):
        time.sleep(_WAIT_FOR_LAUNCHER_S)
        return
    if not _is_first_to_fail():
        time.sleep(_WAIT_FOR_LAUNCHER_S)
        return
    where = f"rank {_rank()}: " if _world_size() > 1 else ""
    if lost_peer:
        _say(
            f"{where}lost the connection to another rank, which ended without a message "
            "(killed, out of memory, or its host is gone)"
        )
    elif isinstance(error, PlainError):
        _say(f"{where}error: {error}")
    else:
        text = "".join(traceback.format_exception(error))
        _say("".join(where + line for line in text.splitlines(keepends=True)).rstrip())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _store() -> dist.Store | None:
    """Returns the store that the ranks met in, or None before they met."""
    if _world_size() == 1 or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _is_first_to_fail() -> bool:
    """Registers this rank's failure; false if another rank did so before."""
    store = _store()
    if store is None:
        return True
    try:
        return store.add(_FAILURES_KEY, 1) == 1
    except Exception:  # the store went down with the rank that held it
        return True


def _somebody_failed_within(seconds: float) -> bool:
    store = _store()
    deadline = time.monotonic() + seconds
    while store is not None and time.monotonic() < deadline:
        try:
            if store.add(_FAILURES_KEY, 0) > 0:
                return True
        except Exception:  # as above
            return False
        time.sleep(0.05)
    return False


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    if _world_size() == 1:
        sys.exit(code)
    os._exit(code)
