"""Workers end with their parent, however it ends.

The parent holds the write end of a pipe and never writes to it. When the parent is gone, even by
kill -9, the kernel closes that end: it sends SIGIO to the worker (default action: terminate), which
needs no running Python in it; a watching thread does the same where a kernel lacks asynchronous
pipes. PR_SET_PDEATHSIG is not used: it fires when the *thread* that started the worker ends.
"""

import ctypes
import fcntl
import os
import signal
import threading


def tie_to_parent(fd: int) -> None:
    """End this process when the pipe ``fd`` loses its last writer."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_watch, args=(fd,), daemon=True, name="lifeline").start()


def _watch(fd: int) -> None:
    os.read(fd, 1)
    os._exit(1)


def c_environment() -> dict[str, str]:
    """The process environment as C ``getenv`` sees it, which is what NCCL and gloo read.

    Python's ``os.environ`` is a copy that C code may have diverged from.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    libc.getenv.argtypes = [ctypes.c_char_p]
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    found: dict[str, str] = {}
    index = 0
    while (entry := environ[index]) is not None:
        name = entry.partition(b"=")[0]
        value = libc.getenv(name)
        if value is not None:
            found[os.fsdecode(name)] = os.fsdecode(value)
        index += 1
    return found


def loaded_library(fragment: str) -> str | None:
    """Path of a shared library mapped into this process whose file name holds ``fragment``."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return None
    return next((p for p in sorted(paths) if fragment in os.path.basename(p)), None)
