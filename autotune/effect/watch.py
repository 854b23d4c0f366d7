"""Starts a command for a while, with NCCL's log on, and looks into each of its processes.

Everything is stopped afterwards: an interrupt first, as a user would, then harder.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.errors import AutotuneError, UserError

_POLL_S = 0.5
#: patience after each signal
_GRACE_S = (15.0, 5.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """One process of the tree; ``environment`` None where /proc shows none (blanked or denied)."""

    pid: int
    parent: int
    name: str
    environment: Mapping[str, str] | None
    nccl_library: str | None


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

    Raises ``UserError`` when the program does not exist.
    """
    env = dict(os.environ if environ is None else environ)
    command = list(words)
    while command and "=" in command[0] and command[0].split("=")[0].isidentifier():
        name, _, value = command.pop(0).partition("=")
        env[name] = value
    if not command:
        raise UserError("no program behind the assignments")
    with tempfile.TemporaryDirectory(prefix="autotune-env-") as folder:
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
                    command, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
            seen: dict[int, SeenProcess] = {}
            try:
                _watch(process, seconds, seen)
            finally:
                _stop(process, seen)
        logs = tuple(sorted(Path(folder).glob("nccl.*.log")))
        tail = output.read_bytes()[-4000:].decode("utf-8", "replace")
        stopped = process.returncode is not None and process.returncode < 0
        yield Watched(
            processes=tuple(seen.values()),
            logs=logs,
            exit_code=None if stopped else process.returncode,
            output_tail=tail,
        )


def _watch(
    process: "subprocess.Popen[bytes]", seconds: float, seen: dict[int, SeenProcess]
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        for pid in _tree(process.pid):
            found = look_at(pid)
            # a later look replaces the first: between fork and exec a process shows its parent's
            if found is not None:
                seen[pid] = found
        time.sleep(_POLL_S)


def _tree(root: int) -> list[int]:
    try:
        parent = psutil.Process(root)
        return [root, *(child.pid for child in parent.children(recursive=True))]
    except psutil.Error:
        return []


def look_at(pid: int) -> SeenProcess | None:
    """Environment and mapped libnccl of a process; None where it has gone."""
    try:
        process = psutil.Process(pid)
        name = " ".join(process.cmdline())[:120] or process.name()
        parent = process.ppid()
    except psutil.Error:
        return None
    return SeenProcess(
        pid=pid,
        parent=parent,
        name=name,
        environment=_environment(pid),
        nccl_library=_library(pid),
    )


def _environment(pid: int) -> dict[str, str] | None:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if not data.strip(b"\0"):
        return None
    pairs = (part.partition(b"=") for part in data.split(b"\0") if b"=" in part)
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for key, _, value in pairs}  # fmt: skip


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


def _stop(process: "subprocess.Popen[bytes]", seen: Mapping[int, SeenProcess]) -> None:
    """Interrupt, terminate, kill: our process group, and children that left it."""
    for number, grace in zip(
        (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), _GRACE_S, strict=True
    ):
        alive = _members(process, seen)
        if not alive:
            break
        for member in alive:
            try:
                member.send_signal(number)
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=grace)
        process.poll()
    else:
        if _members(process, seen):
            raise AutotuneError(f"processes of pid {process.pid} do not stop, even by SIGKILL")
    process.wait()


def _members(
    process: "subprocess.Popen[bytes]", seen: Mapping[int, SeenProcess]
) -> list[psutil.Process]:
    """Live processes of our session; ids seen before count only while they are still in it."""
    found = []
    for pid in {process.pid, *seen, *_tree(process.pid)}:
        try:
            member = psutil.Process(pid)
            if os.getsid(pid) == process.pid and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return found
