"""NCCL's graph search: how many ring and tree channels, of which bandwidth, over which hops.

For each bandwidth from a fixed list, highest first, channels are laid through the topology
(``channels.py``); the first bandwidth with a solution is then split into more channels or raised.
Ranks of one node only. Source: NVIDIA/nccl 2.27 to 2.30, src/graph/search.cc (read, facts only).
"""

import math
from functools import lru_cache

from model.nccl import paths
from model.nccl.channels import Candidate, ChannelLayer, Hopeless
from model.nccl.hops import Hops
from model.nccl.paths import DIS, SYS
from model.nccl.topology import NcclTopology
from model.nccl.tuning import BALANCED_TREE, NVLS, RING, TREE, Graph
from model.nccl.versions import MAX_CHANNELS, Release

_GLOBAL_STEPS = 1 << 19
_MAX_NVLS_HEADS = 32
#: what NCCL takes when it finds nothing: one channel in rank order
_FALLBACK_GB_PER_S = 0.1


def search(
    topo: NcclTopology, release: Release, pattern: int, min_channels: int, max_channels: int
) -> Graph:
    """The graph NCCL finds for a pattern (``RING``, ``BALANCED_TREE`` or ``NVLS``).

    Topologies that look alike to the search, by whichever settings, are searched once.
    """
    speeds = release.speeds(topo.min_cc)
    return _search(
        Hops(topo), speeds, release.version >= (2, 29, 2), pattern, min_channels, max_channels
    )


@lru_cache(maxsize=64)
def _search(
    hops: Hops,
    speeds: tuple[float, ...],
    falls_back_apart: bool,
    pattern: int,
    min_channels: int,
    max_channels: int,
) -> Graph:
    layer = _layer(hops)
    found = GraphSearch(layer, speeds, falls_back_apart).run(pattern, min_channels, max_channels)
    hops.forget()
    return Graph(
        pattern=found.pattern,
        num_channels=len(found.orders),
        bw_intra=found.bw_intra,
        bw_inter=found.bw_inter,
        type_intra=paths.PATH_TYPES[found.type_intra],
        type_inter=paths.PATH_TYPES[found.type_inter],
        same_channels=found.same_channels,
        orders=tuple(found.orders),
    )


@lru_cache(maxsize=8)
def _layer(hops: Hops) -> ChannelLayer:
    """One for all searches of a topology: releases and patterns share most attempts."""
    return ChannelLayer(hops)


def search_all(topo: NcclTopology, release: Release) -> tuple[Graph, Graph]:
    """Ring and tree; the tree has as many channels as the ring."""
    ring = search(topo, release, RING, 1, MAX_CHANNELS // 2)
    channels = max(ring.num_channels, 1)
    return ring, search(topo, release, BALANCED_TREE, channels, channels)


class GraphSearch:
    """The demands of one search, lowered and raised in NCCL's order."""

    def __init__(
        self, layer: ChannelLayer, speeds: tuple[float, ...], falls_back_apart: bool
    ) -> None:
        self.layer, self.topo = layer, layer.hops.topo
        self.speeds, self.falls_back_apart = speeds, falls_back_apart
        self.num_gpus = layer.num_gpus

    def run(self, pattern: int, min_channels: int, max_channels: int) -> Candidate:
        topo = self.topo
        best = Candidate(pattern, min_channels, max_channels)
        min_type, max_type = topo.min_type(), topo.max_type()
        try_same = pattern != NVLS
        best.type_intra, best.same_channels = min_type, try_same
        if pattern == NVLS:
            if not topo.nodes["NVS"] or topo.min_cc < 90:
                return best
            # every GPU pulls an equal part
            best.max_channels = best.min_channels = min(_MAX_NVLS_HEADS, self.num_gpus)
        if pattern == RING and topo.split_nvlink() and max_channels >= 2 and min_channels == 1:
            best.min_channels = 2
        speeds = self.speeds
        limit, total = topo.max_bandwidth(), topo.total_bandwidth()
        wide = total
        if self.num_gpus > 1 and pattern != RING:
            wide *= self.num_gpus / (self.num_gpus - 1)
        index = 0
        while index < len(speeds) - 1 and (
            speeds[index] > limit or speeds[index] * best.min_channels > wide
        ):
            index += 1
        trial = Candidate(pattern, best.min_channels, best.max_channels)
        trial.take(best)
        trial.bw_intra = trial.bw_inter = speeds[index]
        self._first_pass(trial, best, speeds, index, min_type, max_type, try_same, total)
        self._second_pass(best, speeds)
        if not best.orders and pattern != NVLS:
            best.orders = [tuple(range(self.num_gpus))]
            best.bw_intra = best.bw_inter = _FALLBACK_GB_PER_S
            best.type_intra = best.type_inter = SYS
            if self.falls_back_apart:
                best.bw_inter, best.type_inter = 0.0, DIS
        return best

    def _first_pass(
        self,
        trial: Candidate,
        best: Candidate,
        speeds: tuple[float, ...],
        index: int,
        min_type: int,
        max_type: int,
        try_same: bool,
        total: float,
    ) -> None:
        """Lower the demands until something is found."""
        topo, patience = self.topo, _Patience()
        while True:
            patience.spend(trial.budget)
            unused = self.layer.foresee(trial, best)
            if unused is None:
                if patience.was_over():
                    return
                unused = self.layer.walk(trial, best)
                if unused == -1 or len(best.orders) * best.bw_inter >= total:
                    return
            amd_far = topo.cpu_vendor == "amd" and trial.type_intra == SYS
            if trial.same_channels and not amd_far:
                trial.same_channels = False
                continue
            trial.same_channels = try_same
            patience.give_back(unused)
            if best.orders:
                patience.ask()
            if topo.min_cc >= 90 and trial.pattern == BALANCED_TREE:
                trial.pattern = TREE
                continue
            trial.pattern = best.pattern
            if trial.type_intra < max_type and (
                not best.orders or trial.type_intra < best.type_intra
            ):
                trial.type_intra += 1
                if trial.type_intra < DIS:
                    continue
            trial.type_intra = min_type
            if index < len(speeds) - 1 and (
                not best.orders or speeds[index + 1] / best.bw_inter > 0.49
            ):
                index += 1
                trial.bw_intra = trial.bw_inter = speeds[index]
                continue
            return

    def _second_pass(self, best: Candidate, speeds: tuple[float, ...]) -> None:
        """Split fast channels in two, then see whether more bandwidth fits."""
        self._duplicate(best)
        trial = Candidate(best.pattern, 0, 0)
        trial.take(best)
        index = 0
        while index < len(speeds) - 1 and speeds[index] > best.bw_inter:
            index += 1
        trial.bw_intra = trial.bw_inter = speeds[index]
        trial.min_channels = len(best.orders)
        unused: int | Hopeless = -1
        # what does not fit at one speed does not fit at a higher one
        while unused != 0 and not isinstance(unused, Hopeless) and index > 0:
            if best.pattern == RING:
                index -= 1
                trial.bw_intra = trial.bw_inter = speeds[index]
            elif (
                best.pattern == NVLS
                and trial.bw_inter == best.bw_inter
                and trial.bw_inter < trial.bw_intra * 2
            ):
                trial.min_channels = trial.max_channels = len(best.orders)
                index -= 1
                trial.bw_inter = speeds[index]
            elif trial.bw_intra == best.bw_intra and trial.bw_intra < trial.bw_inter * 2:
                index -= 1
                trial.bw_intra = speeds[index]
            else:
                return
            unused = self.layer.lay(trial, best)

    def _duplicate(self, best: Candidate) -> None:
        channels = len(best.orders)
        if channels == 0 or best.pattern == NVLS or best.bw_intra < 25.0:
            return
        if self.topo.min_cc > 80 and best.bw_intra < 50.0 and channels > 4:
            return
        doubled = min(channels * 2, best.max_channels)
        share = math.ceil(doubled / channels)
        best.orders = (best.orders * 2)[:doubled]
        best.bw_intra /= share
        best.bw_inter /= share


class _Patience:
    """Steps that NCCL still allows a whole search; where they ran out it keeps the best so far.

    What is asked is answered late: what follows may be unable to change the best anyway, and the
    steps of hopeless attempts are counted only where they decide.
    """

    def __init__(self) -> None:
        self._left = _GLOBAL_STEPS
        self._uncounted: list[Hopeless] = []
        self._asked = (_GLOBAL_STEPS, 0)

    def spend(self, steps: int) -> None:
        """An attempt may take so many."""
        self._left -= steps

    def give_back(self, unused: int | Hopeless) -> None:
        """What an attempt left."""
        if isinstance(unused, Hopeless):
            self._uncounted.append(unused)
        else:
            self._left += unused

    def ask(self) -> None:
        """NCCL looks here whether its steps ran out."""
        self._asked = (self._left, len(self._uncounted))

    def was_over(self) -> bool:
        """Whether they had run out when NCCL last looked: they never grow, so then or before."""
        left, num_uncounted = self._asked
        at_most = [attempt.trial.budget for attempt in self._uncounted[:num_uncounted]]
        for index, attempt in enumerate(self._uncounted[:num_uncounted]):
            if left >= 0 or left + sum(at_most[index:]) < 0:
                break
            left += attempt.steps_left
        return left < 0
