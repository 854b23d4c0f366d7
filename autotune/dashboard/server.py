"""Serves optuna-dashboard on the loopback address, in this process: Ctrl-C ends all of it."""

import errno
import logging
import signal
import socketserver
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.storages import RDBStorage
from optuna_dashboard import wsgi

from autotune.errors import AutotuneError, UserError

HOST = "127.0.0.1"
_LOG = logging.getLogger(__name__)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    #: a browser keeps connections open; they must not hold up the end
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """One line per request is no use to the reader of a dashboard."""


class Dashboard:
    """A bound server. Raises ``UserError`` naming the port when it can't be had."""

    def __init__(self, storage: RDBStorage, port: int) -> None:
        if not 0 <= port <= 65535:
            raise UserError(f"--port {port}: a port is 0 (any free one) to 65535")
        try:
            self._server = make_server(
                HOST, port, wsgi(storage), server_class=_Server, handler_class=_Quiet
            )
        except OSError as error:
            why = {
                errno.EADDRINUSE: "is in use by another program",
                errno.EACCES: "needs root",
            }.get(error.errno or 0, error.strerror)
            raise UserError(
                f"--port {port}: the port {why} on {HOST}; choose another, or --port 0 for any "
                "free one"
            ) from None
        self.port = int(self._server.server_port)
        self._done = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def serve(self, refresh: Callable[[], bool], every_s: float) -> None:
        """Serve until Ctrl-C or SIGTERM; call ``refresh`` every so often until it says False."""
        refresher = threading.Thread(target=self._refresh, args=(refresh, every_s), daemon=True)
        refresher.start()
        previous = signal.signal(signal.SIGTERM, _as_interrupt)
        try:
            self._server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, previous)
            self._done.set()
            self._server.server_close()

    def close(self) -> None:
        """Give the port back without having served."""
        self._server.server_close()

    def _refresh(self, refresh: Callable[[], bool], every_s: float) -> None:
        while not self._done.wait(every_s):
            try:
                if not refresh():
                    return
            except AutotuneError as error:
                # a locked database now is no reason to stop showing what was read before
                _LOG.warning("notes and plots are not refreshed this time: %s", error)


def _as_interrupt(_number: int, _frame: FrameType | None) -> Any:
    raise KeyboardInterrupt
