"""Collects the facts of one NCCL log line into processes and communicators.

Line forms of NCCL 2.18 to 2.32. A line that does not match its form exactly is passed over: logs
may be cut, interleaved or damaged anywhere.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autotune import nccl_log_types as t
from autotune.nccl_log_comm import CommBuilder
from autotune.nccl_log_types import Evidence

_INIT = re.compile(
    r"(?:comm (0x[0-9a-f]+|\(nil\)) )rank (\d+) nranks (\d+) cudaDev (\d+)"
    r"(?: nvmlDev \d+)? busId ([0-9a-f]+)"
    r"(?: parent (0x[0-9a-f]+)(?: (?:split|child)Count (\d+))? color (-?\d+))?"
    r"(?:.*?commId (0x[0-9a-f]+))?.*?- Init (START|COMPLETE)"
)
_NODES = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) nRanks (\d+) nNodes (\d+)")
#: NCCL_IB_HCA and names of interfaces and plugins are told without "by environment"
_ENV = re.compile(r"(NCCL_\w+) set (?:by environment )?to\b ?(.*)")
_RESET = re.compile(r"Comm config \w+ reset to (NCCL_\w+)=(\S+)")
_PATTERN = re.compile(
    r"Pattern (\d+), crossNic (\d+), nChannels (\d+), bw ([\d.]+)/([\d.]+), type (\w+)/(\w+), "
    r"sameChannels ([01])"
)
_VIA = re.compile(
    r"Channel (\d+)(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (\S.*)"
)
_RING_ORDER = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)$")
_RING = re.compile(r"Ring (\d+) : (-?\d+) -> (-?\d+) -> (-?\d+)")
_CHANNELS = re.compile(
    r"(\d+) coll channels,(?: \d+ collnet channels,)? (\d+) nvls channels, (\d+) p2p channels"
)
_THRESHOLDS = re.compile(r"threadThresholds (\d+/\d+/\d+ \| \d+/\d+/\d+ .*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+\S*)")
_CHOICE = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)"
    r"(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
_SYMMETRIC = re.compile(r"(\w+) \[Symmetric\]: (\d+) Bytes -> Kernel (\S+) nchannels (\d+)")
_PAIR = re.compile(r"(-?[\d.]+)/ *(-?[\d.]+)$")
#: 2.28 and newer, 2.22 to 2.27, 2.19 to 2.21
_TUNER = re.compile(
    r"Successfully loaded external tuner plugin (\S+)|"
    r"TUNER/Plugin: Using tuner plugin (\S+)|Using tuner plugin: '([^']+)'"
)
_REMARK = re.compile(
    r"Could not find a path|User asked for|^Invalid (?:NCCL|value)|P2P is disabled between|"
    r"Comm config m|could not read .*max_link|Disabling LL128|falling back|Skipping .*kernel|"
    r"CTAS \d+ is too|is larger than (?:maxCTAs|#channels)"
)
MAX_WARNINGS = 500


@dataclass
class ProcessBuilder:
    """Fills up to a ``ProcessLog``; every thread initialises one communicator at a time."""

    host: str | None
    pid: int | None
    version: str | None = None
    env: dict[tuple[str, str], t.EnvRead] = field(default_factory=dict)
    comms: list[CommBuilder] = field(default_factory=list)
    open: dict[int, CommBuilder] = field(default_factory=dict)
    choices: dict[tuple[str, int, str, str, int, int, int | None], tuple[int, bool, Evidence]] = (
        field(default_factory=dict)
    )
    warnings: dict[str, tuple[int, Evidence]] = field(default_factory=dict)
    num_folded: int = 0
    #: equal lines of other processes that the message being read stands for
    folding: int = 0

    def is_another(self, text: str, file: str) -> bool:
        """Whether an init line in another file makes it another process: a second rank of one
        communicator under the same host and id (containers, or hosts of one name)."""
        match = _INIT.search(text)
        if match is None or match[9] is None:
            return False
        return any(
            comm.comm_id == match[9] and comm.rank != int(match[2]) and comm.evidence.file != file
            for comm in self.comms
        )

    def current(self, tid: int, evidence: Evidence) -> CommBuilder:
        """The communicator this thread is working on; a new one where the log was cut before."""
        comm = self.open.get(tid)
        if comm is None:
            comm = self.comms[-1] if self.comms else None
        if comm is None:
            comm = CommBuilder(evidence)
            self.comms.append(comm)
            self.open[tid] = comm
        return comm

    def warn(self, text: str, evidence: Evidence) -> None:
        """Count a warning; beyond ``MAX_WARNINGS`` different ones the rest is dropped."""
        text = text.strip()
        known = self.warnings.get(text)
        if known is not None:
            self.warnings[text] = (known[0] + 1, known[1])
        elif len(self.warnings) < MAX_WARNINGS:
            self.warnings[text] = (1, evidence)

    def choice(self, tail: str, count: int, evidence: Evidence) -> None:
        """A "Bytes ->" line that occurred ``count`` times."""
        symmetric = _SYMMETRIC.match(tail)
        if symmetric is not None:
            function, size, kernel, channels = symmetric.groups()
            found = (function, int(size), "SYMMETRIC", kernel, 0, int(channels) - 1)
        else:
            match = _CHOICE.match(tail)
            if match is None:
                return
            named, size, algo, proto, low, high = match.groups()
            algo, proto = _name(algo, t.ALGORITHMS), _name(proto, t.PROTOCOLS)
            first, last = (-1, -1) if low is None else (int(low), int(high))
            found = (named or "unknown", int(size), algo, proto, first, last)
        comm, ambiguous = self._choosing_comm()
        key = (*found, comm)
        before = self.choices.get(key)
        if before is None:
            self.choices[key] = (count, ambiguous, evidence)
        else:
            self.choices[key] = (before[0] + count, before[1], before[2])

    def _choosing_comm(self) -> tuple[int | None, bool]:
        """Only rank 0 logs choices: the newest communicator in which this process is rank 0."""
        fitting = [i for i, c in enumerate(self.comms) if c.rank == 0 and (c.num_ranks or 2) > 1]
        if not fitting:
            return (0, False) if len(self.comms) == 1 else (None, bool(self.comms))
        return fitting[-1], len(fitting) > 1

    def _init(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _INIT.search(tail)
        if match is None:
            return
        pointer, rank, num_ranks, device, bus, parent, split, colour, comm_id, phase = (
            match.groups()
        )
        comm = next((c for c in reversed(self.comms) if c.comm == pointer), None)
        if phase == "START" or comm is None:
            open_comm = self.open.get(tid)
            fresh = open_comm is not None and open_comm.comm is None and phase == "COMPLETE"
            if fresh and open_comm is not None:
                # the beginning was cut off: these lines belong to this communicator
                comm = open_comm
            elif comm is None or (phase == "START" and comm.complete):
                comm = CommBuilder(evidence)
                self.comms.append(comm)
        comm.comm, comm.comm_id = pointer, comm_id or comm.comm_id
        if parent is not None and comm.split is None:
            comm.split = self._split(parent, split, colour, comm)
        comm.rank, comm.num_ranks = int(rank), int(num_ranks)
        comm.cuda_dev, comm.bus_id = int(device), bus
        comm.complete = comm.complete or phase == "COMPLETE"
        self.open[tid] = comm

    def _split(
        self, parent: str, number: str | None, colour: str, comm: CommBuilder
    ) -> tuple[str, str, str] | None:
        """What names a split communicator on every rank; None where its parent is not logged."""
        source = next((c for c in reversed(self.comms) if c.comm == parent and c is not comm), None)
        if source is None or source.group is None:
            return None
        if number is None:
            # logs before 2.22 do not count the splits of a parent
            siblings = [c for c in self.comms if c.split and c.split[0] == source.group]
            number = str(len(siblings))
        return source.group, number, colour

    def _comm_line(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _NODES.match(tail)
        if match is None:
            # 2.18 names no function before "comm"
            self._init(tid, tail, evidence)
            return
        comm = self.current(tid, evidence)
        comm.comm = comm.comm or match[1]
        if comm.comm == match[1]:
            comm.rank, comm.num_ranks = int(match[2]), int(match[3])
            comm.num_nodes = int(match[4])

    def _read(self, tail: str, evidence: Evidence) -> None:
        match = _ENV.match(tail)
        if match is None:
            return
        name, value = match[1], match[2].rstrip()
        if re.fullmatch(r"-?\d+\.", value):
            value = value[:-1]
        self._found(name, value, evidence)

    def _found(self, name: str, value: str, evidence: Evidence) -> None:
        known = self.env.get((name, value))
        if known is None:
            self.env[name, value] = t.EnvRead(name, value, evidence, self.folding)
        elif self.folding:
            self.env[name, value] = replace(known, num_folded=known.num_folded + self.folding)

    def _pattern(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _PATTERN.match(tail)
        if match is None:
            return
        pattern, cross, channels, intra, inter, type_intra, type_inter, same = match.groups()
        try:
            graph = t.GraphSearch(
                int(pattern), int(cross), int(channels), float(intra), float(inter),
                type_intra, type_inter, same == "1", evidence,
            )  # fmt: skip
        except ValueError:
            return
        self.current(tid, evidence).graphs.append(graph)

    def _channel(self, tid: int, tail: str, evidence: Evidence) -> None:
        comm = self.current(tid, evidence)
        match = _VIA.match(tail)
        if match is not None:
            source, target = int(match[2]), int(match[3])
            key = (source, target, match[4].strip())
            comm.transports.setdefault(key, (set(), evidence))[0].add(int(match[1]))
            return
        match = _RING_ORDER.match(tail.rstrip())
        if match is not None:
            comm.rings[int(match[1])] = tuple(map(int, match[3].split()))

    def _ring(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _RING.match(tail)
        if match is not None:
            neighbours = (int(match[2]), int(match[4]))
            self.current(tid, evidence).ring_neighbours[int(match[1])] = neighbours

    def _trees(self, tid: int, tail: str, evidence: Evidence) -> None:
        comm = self.current(tid, evidence)
        comm.trees = dict.fromkeys(re.findall(r"\[\d+\] -?\d+/-?\d+/-?\d+->-?\d+->-?\d+", tail))

    def _channels(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _CHANNELS.match(tail)
        if match is not None:
            comm = self.current(tid, evidence)
            comm.coll_channels, comm.nvls_channels = int(match[1]), int(match[2])
            comm.p2p_channels = int(match[3])

    def _thresholds(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _THRESHOLDS.match(tail)
        if match is not None:
            self.current(tid, evidence).thread_thresholds = match[1].strip()

    def _version_line(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _VERSION.match(tail)
        if match is not None and self.version is None:
            self.version = match[1]

    def _plugin(self, tid: int, tail: str, evidence: Evidence) -> None:
        match = _TUNER.match(tail)
        if match is not None:
            self.current(tid, evidence).tuner = match[1] or match[2] or match[3]

    def _tuner_line(self, tid: int, tail: str, evidence: Evidence) -> None:
        self._plugin(tid, tail, evidence)
        self._read(tail.removeprefix("TUNER/Plugin: "), evidence)

    def _topology(self, tid: int, tail: str, evidence: Evidence) -> None:
        comm = self.current(tid, evidence)
        if tail.startswith("=== System"):
            comm.topology, comm.topology_open = [tail.rstrip()], True
        elif tail.startswith("======"):
            comm.topology_open = False
        elif comm.topology_open and len(comm.topology) < 4096:
            comm.topology.append(tail.rstrip())

    def _table(self, tid: int, tail: str, evidence: Evidence) -> None:
        """A row of the model table: "AllReduce |" with lat/bw, or its heads."""
        if "|" not in tail:
            return
        comm = self.current(tid, evidence)
        label, *cells = (cell.strip() for cell in tail.split("|"))
        if label == "Algorithm":
            comm.block = tuple(cell for cell in cells if cell)
            return
        pairs = [(a, p) for a in comm.block for p in ("LL", "LL128", "Simple")]
        for (algo, proto), cell in zip(pairs, cells, strict=False):
            if label == "Max NThreads":
                if cell.isdigit():
                    comm.max_threads[algo, proto] = int(cell)
                continue
            match = _PAIR.match(cell)
            try:
                numbers = None if match is None else (float(match[1]), float(match[2]))
            except ValueError:
                numbers = None
            if numbers is not None:
                entry = t.ModelEntry(label, algo, proto, *numbers, evidence)
                comm.model[label, algo, proto] = entry

    def build(self) -> t.ProcessLog:
        """The finished, frozen form."""
        return t.ProcessLog(
            host=self.host,
            pid=self.pid,
            version=self.version,
            env=tuple(self.env.values()),
            comms=tuple(comm.build() for comm in self.comms),
            choices=tuple(
                t.LoggedChoice(*key[:6], count, key[6], ambiguous, evidence)
                for key, (count, ambiguous, evidence) in self.choices.items()
            ),
            warnings=tuple(
                t.LogWarning(text, count, evidence)
                for text, (count, evidence) in self.warnings.items()
            ),
            num_folded=self.num_folded,
        )


def _name(text: str, names: tuple[str, ...]) -> str:
    """Older logs give numbers."""
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    return text.upper()


Handler = Callable[[ProcessBuilder, int, str, Evidence], None]


def _remark(process: ProcessBuilder, tid: int, tail: str, evidence: Evidence) -> None:
    if (match := _RESET.match(tail)) is not None:
        process._found(match[1], match[2], evidence)
    if _REMARK.search(tail):
        process.warn(tail, evidence)


#: by the first word of a message; the rest is told apart by its first character
HANDLERS: dict[str, Handler] = {
    "Pattern": ProcessBuilder._pattern,
    "Channel": ProcessBuilder._channel,
    "Ring": ProcessBuilder._ring,
    "Trees": ProcessBuilder._trees,
    "threadThresholds": ProcessBuilder._thresholds,
    "NCCL": ProcessBuilder._version_line,
    "comm": ProcessBuilder._comm_line,
    "Successfully": ProcessBuilder._plugin,
    "Using": ProcessBuilder._plugin,
    "TUNER/Plugin:": ProcessBuilder._tuner_line,
    "===": ProcessBuilder._topology,
    **dict.fromkeys(
        ("Could", "User", "Invalid", "P2P", "Comm", "Topology", "Disabling", "Skipping",
         "minCTAs", "maxCTAs"),
        _remark,
    ),
}  # fmt: skip
_TABLE_WORDS = (
    "Algorithm", "Max", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce",
)  # fmt: skip


def by_first_character(process: ProcessBuilder, tid: int, tail: str, evidence: Evidence) -> None:
    """Messages whose first word varies: variables, counts, table rows, topology, init."""
    text = tail.lstrip()
    if text.startswith("NCCL_"):
        process._read(text, evidence)
        _remark(process, tid, text, evidence)
    elif tail[:1].isdigit():
        process._channels(tid, tail, evidence)
    elif "- Init " in tail:
        process._init(tid, tail, evidence)
    elif "|" in text and text.startswith(_TABLE_WORDS):
        process._table(tid, text, evidence)
    elif text.startswith(("+ ", "CPU/", "=====")):
        process._topology(tid, tail, evidence)
