"""Lays the channels of NCCL's graph search: depth first, taking bandwidth from every link.

Source: NVIDIA/nccl 2.27 to 2.30, src/graph/search.cc (read, facts only). NCCL bounds its search by
steps; what it finds depends on their number, so steps are counted here exactly as there.
"""

import math
from dataclasses import dataclass, field

from model.nccl import paths
from model.nccl.paths import DIS, INTEL_HOST_BRIDGE_OVERHEAD, LOC, PHB
from model.nccl.topology import NcclTopology, Path, TopoLink, TopoNode
from model.nccl.tuning import BALANCED_TREE, NVLS, RING, SPLIT_TREE, TREE

_STEPS = 1 << 14
_STEPS_SAME_CHANNELS = 1 << 8

_FREE, _PCI_ORDER, _REPLAY = range(3)


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

    ``free`` is what each link has left, GB/s; it is whole again after each attempt.
    """

    def __init__(self, topo: NcclTopology) -> None:
        self.topo = topo
        self.num_gpus = len(topo.gpus)
        self.steps = 0
        self.free: list[float] = []
        self._numbers: dict[TopoLink, int] = {}
        for nodes in topo.nodes.values():
            for node in nodes:
                for link in node.links:
                    self._numbers[link] = len(self.free)
                    self.free.append(link.bandwidth)
        gpus = range(self.num_gpus)
        self.routes = [[self._route(topo.path(a, b), topo.gpus[a]) for b in gpus] for a in gpus]
        #: GPUs after each one, the widest and shortest first; by rank of the start
        self.sorted_next = [self._sorted_next(a) for a in gpus]
        #: which hops are near and wide enough for the trial at hand, and the GPUs they lead to
        self.allowed: list[list[bool]] = []
        self.following: list[list[int]] = []

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
        self._next_channel(trial, best)
        return self.steps

    def _next_channel(self, trial: Candidate, best: Candidate) -> None:
        channel = len(trial.orders)
        last = trial.orders[-1] if trial.orders else ()
        if trial.pattern == NVLS:
            if channel < self.num_gpus:
                self._nvls_head(trial, best, channel)
            return
        if channel == 0:
            self._extend(trial, best, [0], _PCI_ORDER, last)
        else:
            self._extend(trial, best, [last[0]], _REPLAY, last)
        if not trial.same_channels or channel == 0:
            for gpu in range(self.num_gpus):
                self._extend(trial, best, [gpu], _FREE, last)

    def _extend(
        self,
        trial: Candidate,
        best: Candidate,
        order: list[int],
        mode: int,
        last: tuple[int, ...],
    ) -> None:
        """Go on from the last GPU of ``order``; a whole channel goes to ``_complete``."""
        if self.steps <= 0:
            return
        self.steps -= 1
        here, step = order[-1], len(order)
        bandwidth = trial.bw_intra
        if step < self.num_gpus:
            if mode == _PCI_ORDER:
                following = [step]
            elif mode == _REPLAY:
                following = [last[step]]
            else:
                following = self.following[here]
            allowed, routes = self.allowed[here], self.routes[here]
            for gpu in following:
                if gpu in order or not allowed[gpu]:
                    continue
                route = routes[gpu]
                if self._move(route, bandwidth):
                    trial.num_hops += len(route.links)
                    order.append(gpu)
                    self._extend(trial, best, order, mode, last)
                    order.pop()
                    trial.num_hops -= len(route.links)
                    self._move(route, -bandwidth)
        elif trial.pattern == RING and self.num_gpus > 1:
            route = self.routes[here][order[0]]
            if self.allowed[here][order[0]] and self._move(route, bandwidth):
                trial.num_hops += len(route.links)
                self._complete(trial, best, order)
                trial.num_hops -= len(route.links)
                self._move(route, -bandwidth)
        else:
            self._complete(trial, best, order)

    def _complete(self, trial: Candidate, best: Candidate, order: list[int]) -> None:
        if self.steps <= 0:
            return
        self.steps -= 1
        trial.orders.append(tuple(order))
        if self._better(trial, best):
            best.take(trial)
            if len(trial.orders) == trial.max_channels:
                self.steps = -1
        if len(trial.orders) < trial.max_channels:
            self._next_channel(trial, best)
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

    def _move(self, route: _Route, bandwidth: float) -> bool:
        """Subtract from every link; if one lacks it, all is undone and the answer is False."""
        free, overhead = self.free, route.overhead
        for done, (link, pcie) in enumerate(zip(route.links, route.pcie, strict=True)):
            need = bandwidth * overhead if pcie else bandwidth
            left = free[link] - need
            if left < 0.0 and free[link] < need:
                for other, wide in zip(route.links[:done], route.pcie[:done], strict=True):
                    free[other] = _round(
                        free[other] + (bandwidth * overhead if wide else bandwidth)
                    )
                return False
            free[link] = _round(left)
        return True

    def _nvls_head(self, trial: Candidate, best: Candidate, head: int) -> None:
        """All GPUs exchange with the NVLink switch, the head with twice the bandwidth."""
        switch = self.topo.nodes["NVS"][0]
        if self.steps <= 0:
            return
        self.steps -= 1
        taken: list[tuple[_Route, float]] = []
        fits = True
        for inward in (True, False):
            for gpu in self.topo.gpus:
                path = switch.paths["GPU"][gpu.index] if inward else gpu.paths["NVS"][0]
                route = self._route(path, switch if inward else gpu)
                share = trial.bw_intra * (2 if gpu.index == head else 1)
                # NCCL does not compare the type when it counts double
                near = gpu.index == head or route.rank <= trial.type_intra
                fits = fits and near and self._move(route, share)
                if not fits:
                    break
                taken.append((route, share))
            if not fits:
                break
        if fits:
            others = [gpu for gpu in range(self.num_gpus) if gpu != head]
            self._complete(trial, best, [head, *others])
        for route, share in reversed(taken):
            self._move(route, -share)


def _round(value: float) -> float:
    """NCCL keeps three decimals."""
    return math.floor(value * 1000.0 + 0.5) / 1000.0
