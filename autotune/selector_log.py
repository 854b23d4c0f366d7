"""The communicator behind a log: what the selector needs, taken from NCCL's own lines.

The compute capability, which a log never says, is an assumption to be tried: it must give the
log's own latency/bandwidth table, the log's own graphs, and whole NVLinks.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from autotune.nccl_log_types import CommLog, GraphSearch, NcclLog
from model.nccl.communicator import final_channels, p2p_rule
from model.nccl.paths import PATH_RANK, nvlink_gb_per_s
from model.nccl.search import search_all
from model.nccl.selector import Selector
from model.nccl.settings import PROTOCOLS, NcclSettings
from model.nccl.topology import P2pRule, topology_from_log
from model.nccl.tuning import RING, Communicator, Graph
from model.nccl.versions import Release

_TREES = (1, 2, 3)
_NVLS = 5
_NVLINK = re.compile(r"\+ NVL\[([\d.]+)\]")


@dataclass(frozen=True, slots=True)
class LoggedCommunicator:
    """A logged communicator under one assumed compute capability, and how far they agree."""

    comm: Communicator
    channels_by_rule: int
    table_entries: int
    #: (algo, proto, logged, selector's)
    table_misses: tuple[tuple[str, str, str, str], ...]
    search_equal: bool | None

    nvlink_fits: bool

    @property
    def misses(self) -> int:
        return len(self.table_misses) + (self.search_equal is False) + (not self.nvlink_fits)

    @classmethod
    def of(
        cls,
        log: NcclLog,
        comm: CommLog,
        settings: NcclSettings,
        release: Release,
        capability: int,
    ) -> "LoggedCommunicator":
        """Raises ``ValueError`` when the log lacks the graphs or the number of ranks."""
        ring, tree = _graph(log, comm, (RING,)), _graph(log, comm, _TREES)
        if ring is None or tree is None or comm.num_ranks is None:
            raise ValueError("the graphs or ranks of the communicator are not logged")
        nvls_channels = comm.nvls_channels or 0
        nvls = _graph(log, comm, (_NVLS,)) if nvls_channels else None
        num_nodes = comm.num_nodes or 1
        by_rule = final_channels(
            release, ring, tree, settings,
            num_nodes=num_nodes, min_cc=capability, nvls_channels=nvls_channels,
        )  # fmt: skip
        built = Communicator(
            release=release,
            num_ranks=comm.num_ranks,
            num_nodes=num_nodes,
            min_cc=capability,
            max_cc=capability,
            cpu_vendor=_vendor(comm),
            ring=ring,
            tree=tree,
            nvls=nvls,
            num_channels=comm.coll_channels or by_rule,
            nvls_channels=nvls_channels,
            settings=settings,
            transport=comm.transport or "mixed",
        )
        entries, misses = _table_misses(Selector(built), comm)
        fits = _nvlink_fits(comm, capability)
        found = None
        if num_nodes == 1 and fits and not misses:
            found = _searched(comm, settings, release, capability, ring, tree)
        return cls(built, by_rule, entries, misses, found, fits)


def _table_misses(
    selector: Selector, comm: CommLog
) -> tuple[int, tuple[tuple[str, str, str, str], ...]]:
    """Printed entries of the all-reduce row, and those that the selector prints differently."""
    misses = []
    count = 0
    for algo in ("Tree", "Ring", "NVLS"):
        for proto in PROTOCOLS:
            logged = comm.entry(algo, proto)
            if logged is None or (algo == "NVLS" and selector.comm.nvls is None):
                continue
            count += 1
            ours = selector.table[algo.lower(), proto]
            theirs = f"{logged.latency_us:.1f}/{logged.bandwidth:.1f}"
            mine = f"{ours.latency_us:.1f}/{ours.bandwidth:.1f}"
            if mine != theirs:
                misses.append((algo, proto, theirs, mine))
    return count, tuple(misses)


def _nvlink_fits(comm: CommLog, capability: int) -> bool:
    """Whether the printed NVLink rates are whole links of this GPU generation."""
    one = nvlink_gb_per_s(capability)
    for line in comm.topology:
        for rate in map(float, _NVLINK.findall(line)):
            # printed with one decimal
            if abs(rate - max(1, round(rate / one)) * one) > 0.06:
                return False
    return True


def _searched(
    comm: CommLog,
    settings: NcclSettings,
    release: Release,
    capability: int,
    ring: Graph,
    tree: Graph,
) -> bool | None:
    """Whether the search on the printed topology gives the printed graphs."""
    if not comm.topology or "NCCL_GRAPH_FILE" in settings.unmodelled:
        return None
    rule = p2p_rule(settings)
    found = _search_logged(comm.topology, _search_class(capability), rule, release)
    if found is None or len(found[0].orders[0]) != comm.num_ranks:
        return None
    return all(_summary(a) == _summary(b) for a, b in zip(found, (ring, tree), strict=True))


def _search_class(capability: int) -> int:
    """Capabilities between which the search makes no difference share one."""
    if capability >= 100:
        return 100
    return 90 if capability >= 90 else 89 if capability > 80 else 80


@lru_cache(maxsize=64)
def _search_logged(
    lines: tuple[str, ...], capability: int, rule: P2pRule, release: Release
) -> tuple[Graph, Graph] | None:
    try:
        return search_all(topology_from_log(lines, capability, rule), release)
    except ValueError:
        # damaged lines, or GPUs that only the network joins
        return None


def _summary(graph: Graph) -> tuple[int, int, float, str, bool]:
    bandwidth = round(graph.bw_intra, 3)
    pattern, channels = graph.pattern, graph.num_channels
    return pattern, channels, bandwidth, graph.type_intra, graph.same_channels


def _graph(log: NcclLog, comm: CommLog, patterns: tuple[int, ...]) -> Graph | None:
    """The graph all ranks agree on: the least of what each found."""
    mates = [comm]
    if comm.comm_id is not None:
        mates = [c for p in log.processes for c in p.comms if c.comm_id == comm.comm_id]
    found = [graph for mate in mates if (graph := mate.graph(*patterns)) is not None]
    own = comm.graph(*patterns)
    if own is None:
        return None
    return Graph(
        pattern=max(graph.pattern for graph in found),
        num_channels=min(graph.num_channels for graph in found),
        bw_intra=min(graph.bw_intra for graph in found),
        bw_inter=min(graph.bw_inter for graph in found),
        type_intra=_farthest(found, "type_intra"),
        type_inter=_farthest(found, "type_inter"),
        same_channels=all(graph.same_channels for graph in found),
        cross_nic=max(graph.cross_nic for graph in found),
    )


def _farthest(graphs: list[GraphSearch], name: str) -> str:
    names: list[str] = [getattr(graph, name) for graph in graphs]
    return max(names, key=lambda word: PATH_RANK.get(word, len(PATH_RANK)))


def _vendor(comm: CommLog) -> str:
    """Processor maker from "CPU/0-0 (arch/vendor/model)" of the printed topology."""
    for line in comm.topology:
        if line.startswith("CPU/") and "(" in line:
            words = line.split("(")[1].rstrip(") ").split("/")
            return {"1": "intel", "2": "amd"}.get(words[1], "other") if len(words) > 1 else "other"
    return "other"
