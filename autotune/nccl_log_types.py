"""What NCCL's own log says, as values: each with the file and line that says it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: C numbers in logs of 2.20 to 2.23
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a log says something; lines count from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class EnvRead:
    """A variable that NCCL read: its environment, or a configuration file loaded into it."""

    name: str
    value: str
    evidence: Evidence
    #: equal lines of other processes that Ray left out
    num_folded: int = 0


@dataclass(frozen=True, slots=True)
class GraphSearch:
    """One result of the graph search. ``bw`` in GB/s per channel, types are NCCL's path names."""

    pattern: int
    cross_nic: int
    num_channels: int
    bw_intra: float
    bw_inter: float
    type_intra: str
    type_inter: str
    same_channels: bool
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Transport:
    """How one rank reaches another ("P2P/CUMEM", "SHM/direct/direct"), on how many channels."""

    source: int
    target: int
    via: str
    num_channels: int
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class EnabledRow:
    """What NCCL_ALGO and NCCL_PROTO left on for one collective; LL128 may be 2, "decide"."""

    function: str
    protocols: Mapping[str, int]
    algorithms: Mapping[str, int]
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """NCCL's own latency (us) and bandwidth (GB/s, 0 = never chosen), as printed."""

    function: str
    algo: str
    proto: str
    latency_us: float
    bandwidth: float
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """What ran for one size; equal lines are counted. ``channel_low`` above 0: a grouped call.

    Logs before 2.24 give no channels (-1). ``algo`` is "SYMMETRIC" for a symmetric-memory kernel
    (``proto`` is then its name). ``comm`` is an index into the process's communicators, None when
    the log does not show any; it is a guess where ``ambiguous``.
    """

    function: str
    size_bytes: int
    algo: str
    proto: str
    channel_low: int
    channel_high: int
    count: int
    comm: int | None
    ambiguous: bool
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class LogWarning:
    """A warning or a remark of interest, with how often it came."""

    text: str
    count: int
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CommLog:
    """One communicator as one rank saw it; None where the log does not say."""

    comm: str | None
    comm_id: str | None
    #: the same on every rank of a communicator, also where a split one has no id of its own
    group: str | None = None
    rank: int | None
    num_ranks: int | None
    num_nodes: int | None
    cuda_dev: int | None
    bus_id: str | None
    #: "Init COMPLETE" was logged
    complete: bool
    coll_channels: int | None
    nvls_channels: int | None
    p2p_channels: int | None
    #: ranks in ring order, per channel; only rank 0 prints them
    rings: tuple[tuple[int, ...], ...]
    #: (previous, next) rank per channel
    ring_neighbours: tuple[tuple[int, int], ...]
    #: up and down ranks per channel, as printed
    trees: tuple[str, ...]
    graphs: tuple[GraphSearch, ...]
    transports: tuple[Transport, ...]
    enabled: tuple[EnabledRow, ...]
    model: tuple[ModelEntry, ...]
    max_threads: Mapping[tuple[str, str], int]
    thread_thresholds: str | None
    #: NCCL's printed topology, one line each
    topology: tuple[str, ...]
    tuner: str | None
    evidence: Evidence

    def graph(self, *patterns: int) -> GraphSearch | None:
        """The first search result of any of the patterns: 4 ring, 1 to 3 tree, 5 NVLS.

        CollNet, where it is on, repeats pattern 3 after the tree.
        """
        return next((graph for graph in self.graphs if graph.pattern in patterns), None)

    def entry(self, algo: str, proto: str, function: str = "AllReduce") -> ModelEntry | None:
        """The model table's entry, names as in the log ("Ring", "LL")."""
        for entry in self.model:
            if (entry.function, entry.algo, entry.proto) == (function, algo, proto):
                return entry
        return None

    @property
    def transport(self) -> str | None:
        """ "P2P", "SHM", "NET" or "mixed": the kinds of connections; None where none is logged."""
        kinds = {transport.via.split("/")[0] for transport in self.transports}
        if not kinds:
            return None
        return kinds.pop() if len(kinds) == 1 else "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """One process (a rank, as a rule). ``pid`` is None for lines without NCCL's prefix."""

    host: str | None
    pid: int | None
    version: str | None
    env: tuple[EnvRead, ...]
    comms: tuple[CommLog, ...]
    choices: tuple[LoggedChoice, ...]
    warnings: tuple[LogWarning, ...]
    #: equal lines of other processes that Ray left out ("[repeated 7x across cluster]")
    num_folded: int = 0

    @property
    def informative(self) -> bool:
        """Whether NCCL_DEBUG=INFO was on: more than a version or warnings."""
        return bool(self.comms or self.env or self.choices)

    @property
    def environment(self) -> dict[str, str]:
        """Variables as NCCL read them; the last reading counts."""
        return {read.name: read.value for read in self.env}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this process in its communicators, in order."""
        return tuple(comm.rank for comm in self.comms if comm.rank is not None)


@dataclass(frozen=True, slots=True)
class NcclLog:
    """Everything of interest in one or more log files."""

    files: tuple[str, ...]
    num_lines: int
    num_bytes: int
    processes: tuple[ProcessLog, ...] = field(default=())
    #: of a line "NCCL version ..." that no process signed
    bare_version: str | None = None
    #: what could not be read
    notes: tuple[str, ...] = ()

    @property
    def num_folded(self) -> int:
        """Lines of some process that Ray left out since another printed the same."""
        return sum(process.num_folded for process in self.processes)

    @property
    def versions(self) -> tuple[str, ...]:
        """NCCL versions that occur, without the CUDA suffix, in order."""
        found: dict[str, None] = {}
        if self.bare_version is not None and not self.processes:
            found[self.bare_version.split("+")[0]] = None
        for process in self.processes:
            if process.version is not None:
                found[process.version.split("+")[0]] = None
        return tuple(found)

    def by_rank(self, rank: int) -> Iterator[tuple[ProcessLog, CommLog]]:
        """Processes and communicators that hold a rank."""
        for process in self.processes:
            for comm in process.comms:
                if comm.rank == rank:
                    yield process, comm

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; evidence as "file:line"."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain


def _plain(value: object) -> Any:
    if isinstance(value, Evidence):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {
            "/".join(key) if isinstance(key, tuple) else str(key): _plain(item)
            for key, item in value.items()
        }
    names = getattr(type(value), "__dataclass_fields__", None)
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    return value
