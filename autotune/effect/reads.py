"""Which worker's NCCL read which variable, as its log says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.nccl_log_types import EnvRead, NcclLog, ProcessLog
from model.nccl.paths import OLD_LEVELS, PATH_RANK, SYS
from model.nccl.settings import c_integer

#: variables that NCCL never prints in the form "set by environment"
SILENT = frozenset(
    {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_DEBUG_TIMESTAMP_FORMAT",
     "NCCL_DEBUG_TIMESTAMP_LEVELS", "NCCL_CONF_FILE", "NCCL_SET_THREAD_NAME", "NCCL_NO_CACHE",
     "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_PROXY_PROFILE", "NCCL_RAS_ADDR", "NCCL_CUDA_PATH",
     "NCCL_WARN_ENABLE_DEBUG_INFO"}
)  # fmt: skip
_NUMBER = re.compile(r"\s*[+-]?(?:0[xX][0-9a-fA-F]+|\d+)\s*")
#: words that NCCL_P2P_LEVEL takes, in this spelling only
P2P_LEVELS = tuple(name for name, rank in PATH_RANK.items() if rank <= SYS)
#: variables whose words NCCL compares without regard to case
_CASELESS = frozenset({"NCCL_ALGO", "NCCL_PROTO"})


def workers(log: NcclLog) -> tuple[ProcessLog, ...]:
    """Processes that made a communicator; all, where the log shows none.

    Where some show their rank, others without one are fragments that prove nothing.
    """
    made = tuple(process for process in log.processes if process.comms)
    whole = tuple(process for process in made if process.ranks)
    return whole or made or log.processes


def label(process: ProcessLog) -> str:
    """ "rank 3 (pid 412)": its rank in its largest communicator."""
    main = max(
        (comm for comm in process.comms if comm.rank is not None),
        key=lambda comm: comm.num_ranks or 0,
        default=None,
    )
    who = "a process" if main is None else f"rank {main.rank}"
    return f"{who} (pid {process.pid})" if process.pid is not None else who


def same_value(name: str, asked: str, read: str) -> bool:
    """Whether NCCL makes the same of both texts."""
    if asked == read:
        return True
    if name in _CASELESS:
        return asked.lower() == read.lower()
    if name == "NCCL_P2P_LEVEL" and asked[:1].isdigit():
        # an old number: NCCL prints the word that it stands for
        return read == OLD_LEVELS[min(c_integer(asked), len(OLD_LEVELS) - 1)]
    if name == "NCCL_TUNER_PLUGIN" and read.endswith(".so"):
        return asked == read or f"libnccl-tuner-{asked}.so" == read.rpartition("/")[2]
    # "16MiB" is 16 to NCCL, and nobody means that
    numbers = _NUMBER.fullmatch(asked) and _NUMBER.fullmatch(read)
    return bool(numbers) and c_integer(asked) == c_integer(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """One variable over all workers."""

    name: str
    found: tuple[tuple[ProcessLog, EnvRead], ...]
    missing: tuple[ProcessLog, ...]

    @property
    def value(self) -> str | None:
        """What was read; the values of all ranks where they differ; None where nobody read it."""
        values = list(dict.fromkeys(read.value for _, read in self.found))
        return " / ".join(values) if values else None

    @property
    def evidence(self) -> tuple[str, ...]:
        """The line of each worker."""
        return tuple(str(read.evidence) for _, read in self.found)

    def differs(self, asked: str, read: str) -> bool:
        """Whether NCCL makes something else of what it read."""
        return not same_value(self.name, asked, read)

    def other_than(self, asked: str) -> tuple[tuple[ProcessLog, EnvRead], ...]:
        """Workers that read another value."""
        return tuple(
            (process, read)
            for process, read in self.found
            if not same_value(self.name, asked, read.value)
        )


def reads_of(log: NcclLog, name: str) -> Reads:
    """Who read ``name``; the last reading of each worker counts."""
    found, missing = [], []
    for process in workers(log):
        mine = [read for read in process.env if read.name == name]
        if mine:
            found.append((process, mine[-1]))
        else:
            missing.append(process)
    return Reads(name=name, found=tuple(found), missing=tuple(missing))


def env_logged(process: ProcessLog) -> bool | None:
    """Whether the ENV subsystem was on: True by its lines, None where nothing tells.

    INIT and ENV are the default; lines of GRAPH or TUNING show that NCCL_DEBUG_SUBSYS was set, and
    then ENV may have been left out.
    """
    if process.env:
        return True
    chosen = bool(process.choices) or any(comm.graphs or comm.model for comm in process.comms)
    return None if chosen or not process.comms else True


def environment_read(log: NcclLog) -> dict[str, str]:
    """Variables that any worker read, first come first."""
    found: dict[str, str] = {}
    for process in workers(log):
        for name, value in process.environment.items():
            found.setdefault(name, value)
    return found


def unread(log: NcclLog, expected: Mapping[str, str]) -> Sequence[str]:
    """Asked variables that no worker read."""
    return [name for name in expected if not reads_of(log, name).found]
