"""The communicator NCCL would set up on a machine: graphs, channels, transport, settings.

Source of the channel counts: NVIDIA/nccl 2.27 to 2.30, src/graph/connect.cc, src/transport/nvls.cc
(read, facts only).
"""

from dataclasses import dataclass
from functools import lru_cache

from model.identity import ById
from model.machine import Machine
from model.nccl.paths import LOC
from model.nccl.search import search, search_all
from model.nccl.settings import NcclSettings
from model.nccl.topology import NcclTopology, P2pRule, topology_of
from model.nccl.tuning import NVLS, Communicator, Graph
from model.nccl.versions import MAX_CHANNELS, Release, release_for

#: channels of NVLink SHARP within one node, Hopper and Blackwell
_NVLS_CHANNELS_SM90, _NVLS_CHANNELS_SM100 = 16, 24


def p2p_rule(settings: NcclSettings, *, possible: bool = True) -> P2pRule:
    """Peer access as the settings and the driver (``possible``) leave it."""
    return P2pRule(level=settings.p2p_rank(), possible=possible, shm=not settings.shm_disable)


def final_channels(
    release: Release,
    ring: Graph,
    tree: Graph,
    settings: NcclSettings,
    *,
    num_nodes: int,
    min_cc: int,
    nvls_channels: int,
) -> int:
    """Channels of the communicator ("N coll channels") from the searched graphs.

    Every searched channel is doubled; then the most is applied, then the least.
    """
    channels = min(MAX_CHANNELS, 2 * min(ring.num_channels, tree.num_channels))
    if min_cc >= 90 and num_nodes > 1 and ring.bw_intra > 45.0 and channels < 16:
        channels *= 2
    least, most = settings.channel_limits()
    channels = max(min(channels, most), least)
    return max(channels, nvls_channels) if release.nvls_raises_channels else channels


def nvls_channels_for(settings: NcclSettings, min_cc: int) -> int:
    """Channels of NVLink SHARP within one node, after NCCL_MIN_CTAS and NCCL_MAX_CTAS."""
    channels = _NVLS_CHANNELS_SM100 if min_cc >= 100 else _NVLS_CHANNELS_SM90
    most = settings.max_ctas if settings.max_ctas and settings.max_ctas > 0 else MAX_CHANNELS
    least = settings.min_ctas if settings.min_ctas and settings.min_ctas > 0 else 1
    return max(min(least, most), min(most, channels))


def transport_of(topo: NcclTopology, ring: Graph, rule: P2pRule) -> str:
    """How ring neighbours reach each other: "P2P", "SHM" or "mixed"."""
    hops = {
        (order[i], order[(i + 1) % len(order)]) for order in ring.orders for i in range(len(order))
    }
    kinds = {"P2P" if topo.p2p(a, b, rule) else "SHM" for a, b in hops if a != b}
    return kinds.pop() if len(kinds) == 1 else "mixed"


@dataclass(frozen=True, slots=True)
class SearchedGraphs:
    """What the search found for the GPUs of a host; settings of channels do not matter to it."""

    num_ranks: int
    min_cc: int
    cpu_vendor: str
    ring: Graph
    tree: Graph
    nvls: Graph | None
    transport: str


def searched_graphs(
    topo: NcclTopology, release: Release, rule: P2pRule, *, multicast: bool
) -> SearchedGraphs:
    """Ring, tree and, with NVLink ``multicast``, NVLS graph of all GPUs of a topology."""
    ring, tree = search_all(topo, release)
    nvls: Graph | None = None
    enough = len(topo.gpus) >= release.nvls_min_gpus and topo.nodes["NVS"]
    if multicast and enough and rule.level != LOC:
        found = search(topo, release, NVLS, 1, MAX_CHANNELS)
        nvls = found if found.num_channels else None
    return SearchedGraphs(
        num_ranks=len(topo.gpus),
        min_cc=topo.min_cc,
        cpu_vendor=topo.cpu_vendor,
        ring=ring,
        tree=tree,
        nvls=nvls,
        transport=transport_of(topo, ring, rule),
    )


def communicator_on(
    graphs: SearchedGraphs, settings: NcclSettings, release: Release
) -> Communicator:
    """The communicator of one node with these graphs and settings."""
    nvls = graphs.nvls if settings.nvls_enable != 0 else None
    nvls_channels = 0 if nvls is None else nvls_channels_for(settings, graphs.min_cc)
    return Communicator(
        release=release,
        num_ranks=graphs.num_ranks,
        num_nodes=1,
        min_cc=graphs.min_cc,
        max_cc=graphs.min_cc,
        cpu_vendor=graphs.cpu_vendor,
        ring=graphs.ring,
        tree=graphs.tree,
        nvls=nvls,
        num_channels=final_channels(
            release,
            graphs.ring,
            graphs.tree,
            settings,
            num_nodes=1,
            min_cc=graphs.min_cc,
            nvls_channels=nvls_channels,
        ),
        nvls_channels=nvls_channels,
        settings=settings,
        transport=graphs.transport,
    )


def communicator_for(
    machine: Machine,
    num_ranks: int,
    settings: NcclSettings,
    version: str,
    *,
    multicast: bool = False,
) -> Communicator:
    """What NCCL ``version`` sets up for the first ``num_ranks`` GPUs of a machine.

    A machine file does not say whether its GPUs offer NVLink multicast: pass ``multicast``. NICs
    are left out: NCCL prefers one over host memory only where it is nearer and faster. Raises
    ``ValueError`` for an unknown version, too few GPUs, an unknown socket link, and when only the
    network would be left. The search result is cached by the machine's fingerprint.
    """
    forced = NcclSettings(p2p_disable=True) if machine.p2p.forced_through_host else settings
    level = forced.p2p_rank()
    release = release_for(version)
    rule = P2pRule(level, possible=machine.p2p.possible, shm=not settings.shm_disable)
    graphs = _cached(_key(ById(machine)), num_ranks, release, rule, multicast)
    return communicator_on(graphs, settings, release)


class _Key:
    """A machine, hashed and compared by what the search sees of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        cpu = machine.cpu
        links = tuple(link.model_dump_json() for link in machine.topology.links)
        self.seen = (machine.fingerprint, cpu.vendor, cpu.generation, links)

    def __hash__(self) -> int:
        return hash(self.seen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.seen == other.seen


@lru_cache(maxsize=64)
def _key(machine: ById[Machine]) -> _Key:
    return _Key(machine.value)


@lru_cache(maxsize=256)
def _cached(
    key: _Key, num_ranks: int, release: Release, rule: P2pRule, multicast: bool
) -> SearchedGraphs:
    topo = topology_of(key.machine, num_ranks, rule)
    return searched_graphs(topo, release, rule, multicast=multicast)
