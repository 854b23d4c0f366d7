"""Lays the channels of NCCL's graph search: depth first, taking bandwidth from every link.

Source: NVIDIA/nccl 2.27 to 2.30, src/graph/search.cc (read, facts only). NCCL bounds its search by
steps; what it finds depends on their number, so steps are counted here exactly as there. A part of
the search that laid nothing is not walked again from the same state: its steps are subtracted.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from model.nccl import paths
from model.nccl.paths import DIS, INTEL_HOST_BRIDGE_OVERHEAD, LOC, PHB
from model.nccl.topology import NcclTopology, Path, TopoLink, TopoNode
from model.nccl.tuning import BALANCED_TREE, NVLS, RING, SPLIT_TREE, TREE

_STEPS = 1 << 14
_STEPS_SAME_CHANNELS = 1 << 8

_FREE, _PCI_ORDER, _REPLAY = range(3)
#: bits for what a link has left, its highest bit apart: up to 8,388 GB/s in thousandths
_FIELD = 24


@dataclass(slots=True)
class Candidate:
    """A graph being laid or the best so far."""

    pattern: int
    min_channels: int
    max_channels: int
    bw_intra: float = 0.0
    bw_inter: float = 0.0
    type_intra: int = LOC
    type_inter: int = paths.PIX
    same_channels: bool = False
    num_hops: int = 0
    orders: list[tuple[int, ...]] = field(default_factory=list)

    def take(self, other: "Candidate") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))
        self.orders = list(other.orders)

    @property
    def total(self) -> float:
        return len(self.orders) * self.bw_intra


@dataclass(frozen=True, slots=True)
class _Route:
    """A path as link numbers; ``pcie`` marks links that pay a host bridge's overhead."""

    links: tuple[int, ...]
    pcie: tuple[bool, ...]
    overhead: float
    rank: int
    bandwidth: float


class ChannelLayer:
    """Lays channels in one topology.

    What all links have left is one integer: a field of ``_FIELD`` bits a link, its highest bit
    set. Taking is one subtraction; a link that lacks what is taken clears its highest bit. NCCL
    rounds to thousandths of a GB/s after each step and its demands are whole thousandths, so whole
    numbers decide as it does.
    """

    def __init__(self, topo: NcclTopology) -> None:
        self.topo = topo
        self.num_gpus = len(topo.gpus)
        self.steps = 0
        #: what one count of a link's field means, thousandths of a GB/s, and the field's first bit
        self._unit: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._completed = 0
        #: per demands: (GPU, first GPU, visited, left) -> steps of a search that laid nothing
        self._barren: dict[Hashable, dict[tuple[int, ...], int]] = {}
        self._known: dict[tuple[int, ...], int] = {}
        #: attempts by all that decides their course -> bandwidth, best total, steps left
        self._walked: dict[Hashable, tuple[float, float, int]] = {}
        self._rates: list[int] = []
        self._numbers: dict[TopoLink, int] = {}
        for nodes in topo.nodes.values():
            for node in nodes:
                for link in node.links:
                    self._numbers[link] = len(self._rates)
                    self._rates.append(_thousandths(link.bandwidth))
        gpus = range(self.num_gpus)
        self.routes = [[self._route(topo.path(a, b), topo.gpus[a]) for b in gpus] for a in gpus]
        #: GPUs after each one, the widest and shortest first; by rank of the start
        self.sorted_next = [self._sorted_next(a) for a in gpus]
        #: which hops are near and wide enough for the trial at hand, and the GPUs they lead to
        self.allowed: list[list[bool]] = []
        self.following: list[list[int]] = []
        #: what each hop takes for the trial at hand, its number of links, and all highest bits
        self._takes: list[list[int]] = []
        self._hops = [[len(route.links) for route in row] for row in self.routes]
        self._guards = 0

    def _route(self, path: Path, start: TopoNode) -> _Route:
        overhead = 1.0
        intel = path.rank == PHB and start.kind == "GPU" and self.topo.cpu_vendor == "intel"
        if intel and any(link.target.kind == "CPU" for link in path.links):
            overhead = INTEL_HOST_BRIDGE_OVERHEAD
        return _Route(
            tuple(self._numbers[link] for link in path.links),
            tuple(link.kind == "PCI" for link in path.links),
            overhead,
            path.rank,
            path.bandwidth,
        )

    def _sorted_next(self, here: int) -> list[int]:
        count = self.num_gpus
        keys = []
        for offset in range(1, count):
            gpu = (here + offset) % count
            route = self.routes[here][gpu]
            if route.links:
                keys.append((-int(route.bandwidth), len(route.links), offset, gpu))
        return [gpu for *_, gpu in sorted(keys)]

    @staticmethod
    def budget(trial: Candidate) -> int:
        """Steps that NCCL allows for one attempt."""
        return _STEPS_SAME_CHANNELS if trial.same_channels else _STEPS

    def lay(self, trial: Candidate, best: Candidate) -> int:
        """Lay channels with the demands of ``trial``; better results go to ``best``.

        Returns the steps left: 0 when they ran out, -1 for a perfect result.
        """
        self.steps = self.budget(trial)
        # hops count on from where they are: NCCL does not reset them for the second pass
        trial.orders = []
        tree = trial.pattern in (BALANCED_TREE, TREE, SPLIT_TREE)
        most = trial.type_intra
        self.allowed = [
            [
                bool(route.links)
                and route.rank <= most
                and route.rank < DIS
                and (not tree or self.routes[b][a].rank <= most)
                and route.bandwidth >= trial.bw_intra
                for b, route in enumerate(row)
            ]
            for a, row in enumerate(self.routes)
        ]
        self.following = [
            [gpu for gpu in self._candidates(trial, a) if self.allowed[a][gpu]]
            for a in range(self.num_gpus)
        ]
        left, demands = self._pack(trial)
        walk = (
            demands, left, trial.pattern, trial.same_channels,
            trial.min_channels, trial.max_channels,
        )  # fmt: skip
        # the same walk with less bandwidth lays as many channels, so it cannot be better
        faster, total, steps = self._walked.get(walk, (0.0, 0.0, 0))
        if trial.bw_intra < faster and best.total >= total:
            self.steps = steps
            return steps
        self._next_channel(trial, best, left)
        if trial.pattern != NVLS and self.steps >= 0:
            self._walked[walk] = (trial.bw_intra, best.total, self.steps)
        return self.steps

    def _needs(self, route: _Route, bandwidth: float) -> list[tuple[int, int]]:
        """(link, thousandths of a GB/s) that a channel of this bandwidth takes."""
        narrow, wide = _thousandths(bandwidth), _thousandths(bandwidth * route.overhead)
        pairs = zip(route.links, route.pcie, strict=True)
        return [(link, wide if pcie else narrow) for link, pcie in pairs]

    def _pack(self, trial: Candidate) -> tuple[int, Hashable]:
        """All links whole, as one integer, and what tells attempts with equal demands."""
        needs = [[self._needs(route, trial.bw_intra) for route in row] for row in self.routes]
        self._unit = dict.fromkeys(range(len(self._rates)), 1)
        alike = False
        if trial.pattern != NVLS:
            amounts: dict[int, set[int]] = {}
            for a, row in enumerate(needs):
                for b, pairs in enumerate(row):
                    for link, need in pairs if self.allowed[a][b] else ():
                        amounts.setdefault(link, set()).add(need)
            # where all hops take the same from a link, how often it can be taken says it all
            alike = all(len(found) == 1 for found in amounts.values())
            self._unit = {link: min(found) if alike else 1 for link, found in amounts.items()}
        self._place = {link: index * _FIELD for index, link in enumerate(self._unit)}
        self._guards = sum(1 << (place + _FIELD - 1) for place in self._place.values())
        self._takes = [
            [self._packed(pairs) if self.allowed[a][b] else 0 for b, pairs in enumerate(row)]
            for a, row in enumerate(needs)
        ]
        demands = (
            trial.pattern == RING,
            None if alike else trial.bw_intra,
            tuple(map(tuple, self.allowed)),
            tuple(map(tuple, self.following)),
        )
        self._known = self._barren.setdefault(demands, {})
        whole = [(link, self._rates[link]) for link in self._unit]
        return self._guards + self._packed(whole), demands

    def _packed(self, pairs: Iterable[tuple[int, int]]) -> int:
        return sum((amount // self._unit[link]) << self._place[link] for link, amount in pairs)

    def _next_channel(self, trial: Candidate, best: Candidate, left: int) -> None:
        channel = len(trial.orders)
        last = trial.orders[-1] if trial.orders else ()
        if trial.pattern == NVLS:
            if channel < self.num_gpus:
                self._nvls_head(trial, best, channel, left)
            return
        if channel == 0:
            self._extend(trial, best, [0], 1, left, _PCI_ORDER, last)
        else:
            self._extend(trial, best, [last[0]], 1 << last[0], left, _REPLAY, last)
        if not trial.same_channels or channel == 0:
            for gpu in range(self.num_gpus):
                self._explore(trial, best, [gpu], 1 << gpu, left)

    def _explore(
        self, trial: Candidate, best: Candidate, order: list[int], visited: int, left: int
    ) -> None:
        """Go on in any order, unless it is known to lead nowhere from here."""
        if self.steps <= 0:
            return
        key = (order[-1], order[0], visited, left)
        known = self._known.get(key)
        if known is not None:
            self.steps = max(0, self.steps - known)
            return
        steps, completed = self.steps, self._completed
        self._extend(trial, best, order, visited, left, _FREE, ())
        if self._completed == completed and self.steps > 0:
            self._known[key] = steps - self.steps

    def _extend(
        self,
        trial: Candidate,
        best: Candidate,
        order: list[int],
        visited: int,
        left: int,
        mode: int,
        last: tuple[int, ...],
    ) -> None:
        """Go on from the last GPU of ``order``; a whole channel goes to ``_complete``."""
        if self.steps <= 0:
            return
        self.steps -= 1
        here, step, guards = order[-1], len(order), self._guards
        allowed, takes, hops = self.allowed[here], self._takes[here], self._hops[here]
        if step < self.num_gpus:
            if mode == _PCI_ORDER:
                following = [step]
            elif mode == _REPLAY:
                following = [last[step]]
            else:
                following = self.following[here]
            for gpu in following:
                if visited >> gpu & 1 or not allowed[gpu]:
                    continue
                rest = left - takes[gpu]
                if rest & guards == guards:
                    trial.num_hops += hops[gpu]
                    order.append(gpu)
                    if mode == _FREE:
                        self._explore(trial, best, order, visited | 1 << gpu, rest)
                    else:
                        self._extend(trial, best, order, visited | 1 << gpu, rest, mode, last)
                    order.pop()
                    trial.num_hops -= hops[gpu]
        elif trial.pattern == RING and self.num_gpus > 1:
            first = order[0]
            rest = left - takes[first]
            if allowed[first] and rest & guards == guards:
                trial.num_hops += hops[first]
                self._complete(trial, best, order, rest)
                trial.num_hops -= hops[first]
        else:
            self._complete(trial, best, order, left)

    def _complete(self, trial: Candidate, best: Candidate, order: list[int], left: int) -> None:
        if self.steps <= 0:
            return
        self.steps -= 1
        self._completed += 1
        trial.orders.append(tuple(order))
        if self._better(trial, best):
            best.take(trial)
            if len(trial.orders) == trial.max_channels:
                self.steps = -1
        if len(trial.orders) < trial.max_channels:
            self._next_channel(trial, best, left)
        trial.orders.pop()

    def _better(self, trial: Candidate, best: Candidate) -> bool:
        channels = len(trial.orders)
        if channels < trial.min_channels:
            return False
        if trial.pattern == NVLS:
            more = channels > len(best.orders) and channels <= self.num_gpus
            return more or channels * trial.bw_inter > len(best.orders) * best.bw_inter
        if trial.total != best.total:
            return trial.total > best.total
        return trial.pattern == best.pattern and trial.num_hops < best.num_hops

    def _candidates(self, trial: Candidate, here: int) -> list[int]:
        """GPUs to try after one; by an NVLink switch only the neighbours."""
        count, following = self.num_gpus, self.sorted_next[here]
        if not self.topo.nodes["NVS"]:
            return following
        after, before = (here + 1) % count, (here - 1) % count
        if trial.pattern == RING:
            first = [after, before]
        elif trial.pattern in (BALANCED_TREE, SPLIT_TREE):
            first = [before, after]
        else:
            first = [after]
        if after == before:
            first = first[:1]
        # each goes to the front, so the last one named comes first
        return [gpu for gpu in reversed(first) if gpu in following]

    def _nvls_head(self, trial: Candidate, best: Candidate, head: int, left: int) -> None:
        """All GPUs exchange with the NVLink switch, the head with twice the bandwidth."""
        switch = self.topo.nodes["NVS"][0]
        if self.steps <= 0:
            return
        self.steps -= 1
        for inward in (True, False):
            for gpu in self.topo.gpus:
                path = switch.paths["GPU"][gpu.index] if inward else gpu.paths["NVS"][0]
                route = self._route(path, switch if inward else gpu)
                share = trial.bw_intra * (2 if gpu.index == head else 1)
                left -= self._packed(self._needs(route, share))
                # NCCL does not compare the type when it counts double
                near = gpu.index == head or route.rank <= trial.type_intra
                if not near or left & self._guards != self._guards:
                    return
        others = [gpu for gpu in range(self.num_gpus) if gpu != head]
        self._complete(trial, best, [head, *others], left)


def _thousandths(value: float) -> int:
    """NCCL keeps three decimals."""
    return math.floor(value * 1000.0 + 0.5)
