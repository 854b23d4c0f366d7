"""The parent's side of the workers: start, talk, watch, and end them.

A worker that dies closes its connection, one that fails says so, and one that gives no sign of life
for ``timeout_s`` is hung: each becomes one ``EngineError`` with that worker's log tail. All workers
are then ended, because the group cannot go on without one of them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from engine.config import LaunchConfig
from engine.errors import EngineError
from engine.messages import Beat, Close, Failed, Rendezvous, Reply, Start
from engine.shared_region import region_bytes

_LOG_TAIL_BYTES = 4000
#: after the first failure, how long to wait for the rank that caused it to speak
_GRACE_S = 1.0
_CLOSE_S = 3.0


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def log_tail(self) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(self.log.tell() - _LOG_TAIL_BYTES, 0))
        return self.log.read().decode(errors="replace")


class Supervisor:
    """Workers of one engine. ``log_dir``: where their output goes (else anonymous files)."""

    def __init__(self, config: LaunchConfig, log_dir: Path | None = None) -> None:
        self.config = config
        self._log_dir = log_dir
        self._ranks: list[_Rank] = []
        self._lifeline: int | None = None
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(r.process.pid for r in self._ranks)

    def command(self, message: object, stage: str) -> list[object]:
        """Send ``message`` to every rank and collect the replies by rank."""
        if not self._ranks:
            raise EngineError("crash", stage, "the engine is closed: an earlier failure ended it")
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send(message)
        return self._collect(stage)

    def close(self) -> None:
        """End the workers; may be called twice."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(Close())
        deadline_s = time.monotonic() + _CLOSE_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(deadline_s - time.monotonic(), 0.01))
        self.kill()

    def kill(self) -> None:
        """End the workers at once and free everything."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
            rank.log.close()
        self._ranks = []
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _start(self) -> None:
        config = self.config
        try:
            self._spawn_all()
        except OSError as error:
            raise EngineError("crash", "start", _no_worker(error, config.tp)) from None
        for number, rank in enumerate(self._ranks):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send(Start(config.model_dump_json(), number))
        self._collect("start")

    def _spawn_all(self) -> None:
        config = self.config
        memory_fd = os.memfd_create("engine-collectives")
        try:
            os.ftruncate(memory_fd, region_bytes(config.tp))
            read_fd, self._lifeline = os.pipe()
            try:
                for number in range(config.tp):
                    self._ranks.append(self._spawn(number, read_fd, memory_fd))
            finally:
                os.close(read_fd)
        finally:
            os.close(memory_fd)

    def _spawn(self, rank: int, lifeline_fd: int, memory_fd: int) -> _Rank:
        ours, theirs = Pipe()
        if self._log_dir is None:
            log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept open
        else:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log = open(self._log_dir / f"rank{rank}.log", "w+b")  # noqa: SIM115 - kept open
        fds = (theirs.fileno(), lifeline_fd, memory_fd)
        command = [sys.executable, "-m", "engine.worker"]
        for name, fd in zip(("--connection", "--lifeline", "--memory"), fds, strict=True):
            command += [name, str(fd)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(self.config),
                pass_fds=fds,
            )
        except OSError:
            ours.close()
            log.close()
            raise
        finally:
            theirs.close()
        return _Rank(process, ours, log)

    def _collect(self, stage: str) -> list[object]:
        """Wait for every rank's reply; any message counts as a sign of life of the group."""
        replies: dict[int, object] = {}
        failures: dict[int, Failed] = {}
        by_connection = {r.connection: n for n, r in enumerate(self._ranks)}
        deadline_s = time.monotonic() + self.config.timeout_s
        while len(replies) + len(failures) < len(self._ranks):
            pending = [c for c, n in by_connection.items() if n not in replies | failures]
            ready = wait(pending, timeout=max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                break
            if not failures:
                deadline_s = time.monotonic() + self.config.timeout_s
            for connection in ready:
                assert isinstance(connection, Connection)
                number = by_connection[connection]
                message = self._receive(connection, number, stage)
                if isinstance(message, Reply):
                    replies[number] = message.value
                elif isinstance(message, Failed):
                    failures[number] = message
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
                elif isinstance(message, Rendezvous):
                    self._pass_on(message)
                else:
                    assert isinstance(message, Beat)
        if failures:
            raise self._failure(failures)
        if len(replies) < len(self._ranks):
            raise self._hang(stage, [n for n in by_connection.values() if n not in replies])
        return [replies[n] for n in range(len(self._ranks))]

    def _pass_on(self, message: Rendezvous) -> None:
        for rank in self._ranks[1:]:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send(message)

    def _receive(self, connection: Connection, number: int, stage: str) -> object:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return self._death(number, stage)

    def _death(self, number: int, stage: str) -> Failed:
        process = self._ranks[number].process
        try:
            code = process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            code = 0
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (by someone, or by the kernel when the host ran out of memory)"
        else:
            how = f"ended with exit code {code}"
        message = f"worker of rank {number} (pid {process.pid}) {how}"
        return Failed("crash", stage, message, fatal=True, secondary=False)

    def _failure(self, failures: dict[int, Failed]) -> EngineError:
        """The failure that explains the others; ends the workers unless all can go on."""
        number = min(failures, key=lambda n: (failures[n].secondary, n))
        failed = failures[number]
        error = EngineError(
            failed.kind, failed.stage, failed.message, self._ranks[number].log_tail()
        )
        if any(f.fatal for f in failures.values()):
            self.kill()
        return error

    def _hang(self, stage: str, silent: list[int]) -> EngineError:
        states = ", ".join(
            f"rank {n} (pid {self._ranks[n].process.pid}, {_state(self._ranks[n].process.pid)})"
            for n in silent
        )
        error = EngineError(
            "hang",
            stage,
            f"no sign of life for {self.config.timeout_s:g} s; no reply from {states}",
            self._ranks[silent[0]].log_tail(),
        )
        self.kill()
        return error


def _no_worker(error: OSError, tp: int) -> str:
    """Why the host starts no process: out of processes, memory, files."""
    ranks = "a worker process" if tp == 1 else f"{tp} worker processes"
    reason = error.strerror or str(error)
    name = "" if error.filename is None else f" ({error.filename})"
    return (
        f"{ranks} cannot be started on this host: {reason}{name}; look at its limits of processes, "
        "memory and open files (ulimit -a), or end what else runs"
    )


def worker_environment(config: LaunchConfig) -> dict[str, str]:
    """The environment a worker is started with: ours, the config's, and the NCCL settings.

    An NCCL setting left to "auto" is removed, so that one exported in the user's shell cannot
    decide behind the config's back.
    """
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = root if not path else f"{root}{os.pathsep}{path}"
    environment["OMP_NUM_THREADS"] = str(config.host.threads)
    environment["MKL_NUM_THREADS"] = str(config.host.threads)
    # gloo looks up the host's own name to choose an interface, which many hosts cannot resolve
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in config.nccl.environment().items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment | config.environment


def _state(pid: int) -> str:
    """A process's state in a word, for a message."""
    names = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped"}
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return names.get(fields[0], fields[0])
