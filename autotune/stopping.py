"""Ways a running study is asked to stop: Ctrl-C, SIGTERM, or `autotune study stop`."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.measuring import StopRequestedError
from autotune.store.store import Store
from autotune.store.workers import HEARTBEAT_S


class StopFlag:
    """Set by a signal or by another process; read between repeats."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def check(self) -> None:
        """Raise ``StopRequestedError`` when the study should stop."""
        if self.reason is not None:
            raise StopRequestedError(self.reason)

    @contextmanager
    def on_signals(self, notice: Callable[[str], None]) -> Iterator[None]:
        """Ctrl-C and SIGTERM set the flag; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.reason is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            notice(f"{self.reason}: finishing the repeat in flight (Ctrl-C again: drop it)")

        previous = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class Heartbeat:
    """Says every few seconds that the worker lives, and looks whether it should stop."""

    def __init__(self, store: Store, study_id: int, worker_id: int, flag: StopFlag) -> None:
        self._store, self._study_id, self._worker_id, self._flag = store, study_id, worker_id, flag
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        from autotune.errors import AutotuneError

        last = time.monotonic()
        while not self._done.wait(1.0):
            try:
                if self._store.stop_requested(self._study_id) and self._flag.reason is None:
                    self._flag.reason = "autotune study stop"
                if time.monotonic() - last >= HEARTBEAT_S:
                    self._store.heartbeat(self._worker_id)
                    last = time.monotonic()
            except AutotuneError:
                # a database that is busy now is asked again a second later
                continue
