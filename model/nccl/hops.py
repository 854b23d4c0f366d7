"""The hops between GPUs as one attempt of NCCL's graph search sees them, and what they take.

Source: NVIDIA/nccl 2.27 to 2.30, src/graph/search.cc (read, facts only). NCCL rounds to
thousandths of a GB/s after each step and its demands are whole thousandths, so whole numbers
decide as it does.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from model.nccl.channel_bound import ChannelBound, fewest_hops
from model.nccl.paths import DIS, INTEL_HOST_BRIDGE_OVERHEAD, PHB
from model.nccl.topology import NcclTopology, Path, TopoLink, TopoNode
from model.nccl.tuning import BALANCED_TREE, RING, SPLIT_TREE, TREE

_TREES = (BALANCED_TREE, TREE, SPLIT_TREE)


@dataclass(frozen=True, slots=True)
class Route:
    """A path: link number -> whether it pays a host bridge's overhead there."""

    links: Mapping[int, bool]
    rank: int
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a walk takes from the links.

    What all links have left is one integer: a field of bits a link, its highest bit set. Taking is
    one subtraction; a link that lacks what is taken clears its highest bit.
    """

    #: by GPU left and GPU entered
    takes: Sequence[Sequence[int]]
    #: the highest bits of all fields, and all links whole
    guards: int
    whole: int
    #: equal for plans under which a walk takes the same course
    course: Hashable
    #: (GPU, first GPU, visited, left) -> steps of a search that laid nothing
    barren: dict[tuple[int, ...], int] = field(repr=False)


class HopSet:
    """The hops that are near and wide enough for some attempts, and what they take."""

    def __init__(
        self,
        routes: Sequence[Sequence[Route | None]],
        following: tuple[tuple[int, ...], ...],
        closed: bool,
        rates: Sequence[int],
    ) -> None:
        self.routes, self.following, self.closed = routes, following, closed
        self._rates = rates
        links = [[None if route is None else route.links for route in row] for row in routes]
        lengths = [[None if hop is None else len(hop) for hop in row] for row in links]
        self.bound = ChannelBound(links, closed, rates)
        #: no channel crosses fewer links
        self.fewest_hops = fewest_hops(lengths, closed)
        #: link -> the hops over it, and whether they pay the overhead there
        self._users: dict[int, list[tuple[int, int, bool]]] = {}
        for a, row in enumerate(links):
            for b, hop in enumerate(row):
                for link, pays in () if hop is None else hop.items():
                    self._users.setdefault(link, []).append((a, b, pays))
        self.barren: dict[Hashable, dict[tuple[int, ...], int]] = {}

    @cached_property
    def _in_one_channel(self) -> dict[int, tuple[int, int]]:
        """Link -> hops at the plain and at the wide amount of one channel at most."""
        found = {}
        for link, users in self._users.items():
            # each GPU is left once
            by_gpu = {a: False for a, *_ in users}
            for a, _, pays in users:
                by_gpu[a] |= pays
            num_wide = sum(by_gpu.values())
            found[link] = (len(by_gpu) - num_wide, num_wide)
        return found

    def plan(self, plain: int, wide: int, most_channels: int) -> Plan:
        """The walk of channels that take so many thousandths of a GB/s."""
        common = math.gcd(plain, wide)
        fields = []
        for link, users in self._users.items():
            kinds = {pays for *_, pays in users}
            # where all that is taken from a link is a multiple, how often it can be says it all
            unit = common if len(kinds) == 2 else wide if True in kinds else plain
            amounts = (plain // unit, wide // unit)
            num_plain, num_wide = self._in_one_channel[link]
            # more than all channels and one that fails can take is as good as endless
            useful = (most_channels + 1) * (num_plain * amounts[0] + num_wide * amounts[1])
            capacity = min(self._rates[link] // unit, useful)
            if len(kinds) == 2:
                capacity = _attainable(capacity, *amounts)
            fields.append((amounts, capacity))
        widest = max((max(capacity, amounts[1]) for amounts, capacity in fields), default=0)
        size = widest.bit_length() + 1
        kind = (size, tuple(amounts for amounts, _ in fields))
        count = len(self.routes)
        takes = [[0] * count for _ in range(count)]
        guards = whole = 0
        for index, (users, (amounts, capacity)) in enumerate(
            zip(self._users.values(), fields, strict=True)
        ):
            place = index * size
            guards |= 1 << (place + size - 1)
            whole |= capacity << place
            for a, b, pays in users:
                takes[a][b] += amounts[pays] << place
        return Plan(
            takes=takes,
            guards=guards,
            whole=guards | whole,
            course=(id(self), kind, whole),
            barren=self.barren.setdefault(kind, {}),
        )


class Demand:
    """Channels of one bandwidth over the hops of one set."""

    def __init__(self, hops: HopSet, plain: int, wide: int) -> None:
        self.hops = hops
        self._plain, self._wide = plain, wide
        #: no more fit the links, however long NCCL searches
        self.most_channels = hops.bound.most_channels(plain, wide)

    @cached_property
    def plan(self) -> Plan:
        """Its walk; made late, since most demands are seen to be hopeless."""
        return self.hops.plan(self._plain, self._wide, self.most_channels)


class Hops:
    """The hops of one topology; equal for topologies that look alike to the search."""

    def __init__(self, topo: NcclTopology) -> None:
        self.topo = topo
        self.num_gpus = len(topo.gpus)
        #: thousandths of a GB/s, by link
        self.rates: list[int] = []
        self._numbers: dict[TopoLink, int] = {}
        for nodes in topo.nodes.values():
            for node in nodes:
                for link in node.links:
                    self._numbers[link] = len(self.rates)
                    self.rates.append(thousandths(link.bandwidth))
        gpus = range(self.num_gpus)
        self.routes = [[self.route(topo.path(a, b), topo.gpus[a]) for b in gpus] for a in gpus]
        #: to and from each GPU in turn, where there is an NVLink switch
        self.switch_routes: list[list[Route]] = []
        for switch in topo.nodes["NVS"][:1]:
            self.switch_routes += [
                [self.route(switch.paths["GPU"][gpu.index], switch) for gpu in topo.gpus],
                [self.route(gpu.paths["NVS"][0], gpu) for gpu in topo.gpus],
            ]
        self._seen = (
            topo.cpu_vendor, topo.min_cc, topo.total_bandwidth(), tuple(self.rates),
            *((tuple(r.links.items()), r.rank, r.bandwidth) for row in self.routes for r in row),
            *((tuple(r.links.items()), r.rank) for row in self.switch_routes for r in row),
        )  # fmt: skip
        #: number of links of each hop
        self.lengths = [[len(route.links) for route in row] for row in self.routes]
        #: GPUs after each one, the widest and shortest first
        self._sorted_next = [self._order_after(a) for a in gpus]
        self._sets: dict[Hashable, HopSet] = {}
        self._demands: dict[tuple[float, int, int], Demand] = {}

    def __hash__(self) -> int:
        return hash(self._seen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hops) and self._seen == other._seen

    def forget(self) -> None:
        """Let go of where walks led nowhere; what attempts came to stays known."""
        for hops in self._sets.values():
            hops.barren.clear()

    def route(self, path: Path, start: TopoNode) -> Route:
        """A path of the topology by link numbers; none goes twice over a link."""
        intel = path.rank == PHB and start.kind == "GPU" and self.topo.cpu_vendor == "intel"
        pays = intel and any(link.target.kind == "CPU" for link in path.links)
        links = {self._numbers[link]: pays and link.kind == "PCI" for link in path.links}
        assert len(links) == len(path.links)
        return Route(links, path.rank, path.bandwidth)

    def _order_after(self, here: int) -> list[int]:
        count = self.num_gpus
        keys = []
        for offset in range(1, count):
            gpu = (here + offset) % count
            route = self.routes[here][gpu]
            if route.links:
                keys.append((-int(route.bandwidth), len(route.links), offset, gpu))
        return [gpu for *_, gpu in sorted(keys)]

    def _candidates(self, pattern: int, here: int) -> list[int]:
        """GPUs to try after one; by an NVLink switch only the neighbours."""
        count, following = self.num_gpus, self._sorted_next[here]
        if not self.topo.nodes["NVS"]:
            return following
        after, before = (here + 1) % count, (here - 1) % count
        if pattern == RING:
            first = [after, before]
        elif pattern in (BALANCED_TREE, SPLIT_TREE):
            first = [before, after]
        else:
            first = [after]
        if after == before:
            first = first[:1]
        # each goes to the front, so the last one named comes first
        return [gpu for gpu in reversed(first) if gpu in following]

    def demand(self, pattern: int, bandwidth: float, farthest: int) -> Demand:
        """Of channels of ``bandwidth`` GB/s over paths no farther than the rank ``farthest``."""
        key = (bandwidth, farthest, pattern)
        if key not in self._demands:
            self._demands[key] = self._demand(pattern, bandwidth, farthest)
        return self._demands[key]

    def _demand(self, pattern: int, bandwidth: float, farthest: int) -> Demand:
        limit = min(farthest, DIS - 1)
        both_ways = pattern in _TREES
        gpus = range(self.num_gpus)
        routes: list[list[Route | None]] = [
            [
                route
                if route.links
                and route.rank <= limit
                and (not both_ways or self.routes[b][a].rank <= farthest)
                and route.bandwidth >= bandwidth
                else None
                for b, route in enumerate(row)
            ]
            for a, row in enumerate(self.routes)
        ]
        following = tuple(
            tuple(gpu for gpu in self._candidates(pattern, a) if routes[a][gpu] is not None)
            for a in gpus
        )
        closed = pattern == RING and self.num_gpus > 1
        allowed = tuple(sum(1 << b for b in gpus if row[b] is not None) for row in routes)
        key = (allowed, following, closed)
        if key not in self._sets:
            self._sets[key] = HopSet(routes, following, closed, self.rates)
        plain = thousandths(bandwidth)
        return Demand(self._sets[key], plain, thousandths(bandwidth * INTEL_HOST_BRIDGE_OVERHEAD))


def _attainable(capacity: int, plain: int, wide: int) -> int:
    """The most of a capacity that takings of the two amounts can add up to."""
    return max(
        capacity - (capacity - times * wide) % plain for times in range(capacity // wide + 1)
    )


def thousandths(value: float) -> int:
    """NCCL keeps three decimals."""
    return math.floor(value * 1000.0 + 0.5)
