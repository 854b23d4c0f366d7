"""One measurement at a time on one machine: two at once would measure each other.

An advisory lock on a file in the temporary folder, held while a backend that uses this machine is
at work; the system releases it when the process ends, however it ends.
"""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

#: backends that load nothing on this machine
IDLE_BACKENDS = frozenset({"sim", "replay"})

_POLL_S = 0.5


def lock_path() -> Path:
    """Where the lock of this machine is."""
    return Path(tempfile.gettempdir()) / "autotune-machine.lock"


@contextmanager
def hold_machine(
    backend: str, what: str, notice: Callable[[str], None], check_stop: Callable[[], None]
) -> Iterator[None]:
    """Hold this machine for ``what``; waits, after one line, while another process has it.

    ``check_stop`` is called while waiting and may raise. Nothing is held for ``IDLE_BACKENDS``.
    """
    if backend in IDLE_BACKENDS:
        yield
        return
    path = lock_path()
    # another user's file can't be written, but locking needs no more than reading
    flags = os.O_RDWR if os.access(path, os.W_OK) or not path.exists() else os.O_RDONLY
    handle = os.open(path, flags | os.O_CREAT, 0o666)
    try:
        _wait(handle, path, notice, check_stop)
        if flags == os.O_RDWR:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            holder = json.dumps({"pid": os.getpid(), "what": what, "since": since})
            os.ftruncate(handle, 0)
            os.pwrite(handle, holder.encode(), 0)
        yield
    finally:
        os.close(handle)


def _wait(
    handle: int, path: Path, notice: Callable[[str], None], check_stop: Callable[[], None]
) -> None:
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                notice(
                    f"{_holder(path)} measures on this machine; waiting for it, since two at once "
                    f"would slow each other (Ctrl-C gives up)"
                )
                told = True
        check_stop()
        time.sleep(_POLL_S)


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        return f"process {found['pid']} ({found['what']}, since {found['since']} UTC)"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
