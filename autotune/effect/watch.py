"""Starts a command for a while, with NCCL's log on, and looks into each of its processes.

Everything is stopped afterwards: an interrupt first, as a user would, then harder. While it runs
this process adopts orphans of the tree (a child subreaper), so that a daemon which left its parent
and its session is still seen and still stopped.
"""

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType

import psutil

from autotune.effect.process_environment import seen_inside, started_with
from autotune.errors import AutotuneError, UserError

_POLL_S = 0.05
#: a process that is known is looked at again after this time
_AGAIN_S = 0.5
#: patience after each signal
_GRACE_S = (15.0, 5.0, 5.0)
_PR_SET_CHILD_SUBREAPER = 36
#: of the command's own output, NCCL's lines in it included
_OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """One process of the tree, as it was when it was last looked at.

    ``environment``: what C ``getenv`` gives inside it, else what it was started with; None where
    neither can be read. ``started``: what it was started with. ``alive``: until we stopped it.
    """

    pid: int
    parent: int
    name: str
    environment: Mapping[str, str] | None
    started: Mapping[str, str] | None
    nccl_library: str | None
    nccl_version: str | None = None
    created: float = 0.0
    alive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A run: processes by pid, NCCL log files, exit code (None: stopped by us)."""

    processes: tuple[SeenProcess, ...]
    logs: tuple[Path, ...]
    exit_code: int | None
    output_tail: str


@contextmanager
def watched_run(
    words: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
) -> Iterator[Watched]:
    """Run ``words`` for ``seconds`` at most; log files live as long as the context.

    Raises ``UserError`` when the program does not exist, ``AutotuneError`` when something of it
    does not stop.
    """
    env = dict(os.environ if environ is None else environ)
    command = list(words)
    while command and "=" in command[0] and command[0].split("=")[0].isidentifier():
        name, _, value = command.pop(0).partition("=")
        env[name] = value
    if not command:
        raise UserError("no program behind the assignments")
    with tempfile.TemporaryDirectory(prefix="autotune-env-") as folder, _adopting() as others:
        env |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING",
            "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p.log",
            # else setproctitle blanks /proc/<pid>/environ of the workers
            "SPT_NOENV": "1",
        }
        output = Path(folder) / "output"
        with output.open("wb") as sink:
            try:
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=sink,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
            seen: dict[int, SeenProcess] = {}
            exit_code: int | None = None
            try:
                _watch(process, seconds, seen, others)
                # what it returns once we have interrupted it is no end of its own
                exit_code = process.poll()
            finally:
                try:
                    _stop(process, others)
                finally:
                    process.poll()
                    _reap(others)
        tail = _tail(output)
        yield Watched(
            processes=tuple(seen.values()),
            logs=(*_logs(Path(folder), seen.values()), *_printed(output)),
            exit_code=exit_code,
            output_tail=tail,
        )


@contextmanager
def _adopting() -> Iterator[frozenset[int]]:
    """Adopt orphans of our tree, and let SIGTERM end it as an interrupt does.

    Yields children of this process that were there before.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    handlers: dict[int, object] = {}

    def ended(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        # in the main thread only; elsewhere the caller's handler stays
        with suppress(ValueError):
            handlers[number] = signal.signal(number, ended)
    try:
        yield before
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _watch(
    process: "subprocess.Popen[bytes]",
    seconds: float,
    seen: dict[int, SeenProcess],
    others: frozenset[int],
) -> None:
    end = time.monotonic() + seconds
    due: dict[int, float] = {}
    while time.monotonic() < end and process.poll() is None:
        now = time.monotonic()
        for member in _members(others):
            if due.get(member.pid, 0.0) > now:
                continue
            # between fork and exec a process shows its parent: look again soon after the first time
            due[member.pid] = now + (_AGAIN_S if member.pid in due else _POLL_S)
            found = look_at(member.pid)
            # the last look that showed something counts: a process that ends shows nothing
            if found is not None and (found.environment is not None or member.pid not in seen):
                seen[member.pid] = found
        time.sleep(_POLL_S)
    living = {member.pid for member in _members(others)}
    for pid, known in seen.items():
        seen[pid] = replace(known, alive=pid in living)


def look_at(pid: int) -> SeenProcess | None:
    """Environment and mapped libnccl of a process; None where it has gone."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        name = " ".join(process.cmdline())[:120] or process.name()
        parent, created = process.ppid(), process.create_time()
    except psutil.Error:
        return None
    started = started_with(pid)
    library = _library(pid)
    return SeenProcess(
        pid=pid,
        parent=parent,
        name=name,
        environment=seen_inside(pid) or started,
        started=started,
        nccl_library=library,
        nccl_version=None if library is None else _version(f"/proc/{pid}/root{library}"),
        created=created,
    )


def _library(pid: int) -> str | None:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.rpartition(" ")[2]
        if "libnccl.so" in path or "libnccl-" in path:
            return path
    return None


_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+(?:\+cuda[\d.]+)?)")


@lru_cache(maxsize=8)
def _version(path: str) -> str | None:
    """The release that a libnccl says it is, from the text in it."""
    try:
        with (
            Path(path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
        ):
            match = _VERSION.search(data)
            return None if match is None else match[1].decode()
    except (OSError, ValueError):
        return None


def _logs(folder: Path, seen: Iterable[SeenProcess]) -> list[Path]:
    """NCCL's logs: where we asked for them, or where a process has set them to go itself."""
    found = sorted(folder.glob("nccl.*.log"))
    for process in seen:
        name = (process.environment or {}).get("NCCL_DEBUG_FILE", "")
        if not name or name.startswith(str(folder)):
            continue
        path = Path(name.replace("%h", os.uname().nodename.split(".")[0]))
        path = Path(str(path).replace("%p", str(process.pid)))
        # an older file of that name is of another run
        if path.is_file() and path.stat().st_mtime >= process.created - 1.0 and path not in found:
            found.append(path)
    return found


def _printed(output: Path) -> list[Path]:
    """The command's output, where NCCL printed into it."""
    with output.open("rb") as file:
        return [output] if b"NCCL INFO " in file.read(_OUTPUT_BYTES) else []


def _tail(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 4000))
        return file.read().decode("utf-8", "replace")


def _stop(process: "subprocess.Popen[bytes]", others: frozenset[int]) -> None:
    """Interrupt, terminate, kill all that descends from us; a second interrupt kills at once."""
    try:
        for number, grace in zip(
            (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), _GRACE_S, strict=True
        ):
            if not _signalled(process, others, number, grace):
                return
    except KeyboardInterrupt:
        print("killing what is left", file=sys.stderr)
        if not _signalled(process, others, signal.SIGKILL, _GRACE_S[-1]):
            raise
    raise AutotuneError(f"processes of pid {process.pid} do not stop, even by SIGKILL")


def _signalled(
    process: "subprocess.Popen[bytes]", others: frozenset[int], number: int, grace: float
) -> bool:
    """Send a signal to all and wait; whether anything still lives."""
    end = time.monotonic() + grace
    for member in _members(others):
        with suppress(psutil.Error):
            member.send_signal(number)
    while time.monotonic() < end:
        process.poll()
        alive = _members(others)
        if not alive:
            return False
        _reap(others | {process.pid})
        psutil.wait_procs(alive, timeout=0.05)
    return bool(_members(others))


def _reap(kept: frozenset[int]) -> None:
    """Collect adopted children that have ended; those of others are theirs to collect."""
    for child in psutil.Process().children():
        with suppress(psutil.Error, ChildProcessError):
            if child.pid not in kept and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _members(others: frozenset[int]) -> list[psutil.Process]:
    """Live processes that descend from us and were not there before."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.pid not in others and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
