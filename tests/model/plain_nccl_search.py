"""NCCL's graph search without memory or foresight: every step is taken, bandwidths are floats.

Slow, and only for rings and trees: what ``model.nccl.search`` must agree with.
"""

import math
from dataclasses import dataclass, field, replace

from model.nccl.paths import DIS, INTEL_HOST_BRIDGE_OVERHEAD, LOC, PHB, SYS
from model.nccl.topology import NcclTopology, Path, TopoLink
from model.nccl.tuning import BALANCED_TREE, RING, TREE
from model.nccl.versions import Release


@dataclass
class Plan:
    """Channels and their demands."""

    pattern: int
    least: int
    most: int
    bandwidth: float = 0.0
    farthest: int = LOC
    same: bool = True
    hops: int = 0
    orders: list[tuple[int, ...]] = field(default_factory=list)

    def copied(self) -> "Plan":
        return replace(self, orders=list(self.orders))


class PlainSearch:
    """One ring or tree search of the GPUs of one host."""

    def __init__(self, topo: NcclTopology) -> None:
        self.topo, self.count = topo, len(topo.gpus)
        self.left = {
            link: link.bandwidth
            for nodes in topo.nodes.values()
            for node in nodes
            for link in node.links
        }
        self.steps = 0

    def follow(self, path: Path, trial: Plan, sign: int) -> bool:
        """Take (or with -1 give back) the bandwidth of a hop; False: nothing was taken."""
        if path.rank >= DIS or not path.links or path.bandwidth < trial.bandwidth:
            return False
        if sign > 0 and path.rank > trial.farthest:
            return False
        bridged = path.rank == PHB and self.topo.cpu_vendor == "intel"
        bridged &= any(link.target.kind == "CPU" for link in path.links)

        def change(link: TopoLink, by: int) -> None:
            share = INTEL_HOST_BRIDGE_OVERHEAD if bridged and link.kind == "PCI" else 1.0
            left = self.left[link] - by * trial.bandwidth * share
            self.left[link] = math.floor(left * 1000 + 0.5) / 1000

        for index, link in enumerate(path.links):
            change(link, sign)
            if sign > 0 and self.left[link] < 0:
                for taken in path.links[: index + 1]:
                    change(taken, -1)
                return False
        trial.hops += sign * len(path.links)
        return True

    def hop(self, a: int, b: int, trial: Plan, sign: int = 1) -> bool:
        if trial.pattern in (BALANCED_TREE, TREE) and sign > 0:
            back = self.topo.path(b, a)
            if back.rank > trial.farthest:
                return False
        return self.follow(self.topo.path(a, b), trial, sign)

    def nexts(self, here: int) -> list[int]:
        keys = []
        for offset in range(1, self.count):
            gpu = (here + offset) % self.count
            path = self.topo.path(here, gpu)
            if path.links:
                keys.append((-int(path.bandwidth), len(path.links), offset, gpu))
        return [gpu for *_, gpu in sorted(keys)]

    def attempt(self, trial: Plan, best: Plan) -> int:
        self.steps = 1 << 8 if trial.same else 1 << 14
        trial.orders = []
        self.channel(trial, best)
        return self.steps

    def channel(self, trial: Plan, best: Plan) -> None:
        if trial.orders:
            self.gpu(trial, best, [trial.orders[-1][0]], list(trial.orders[-1]))
        else:
            self.gpu(trial, best, [0], list(range(self.count)))
        if not trial.same or not trial.orders:
            for gpu in range(self.count):
                self.gpu(trial, best, [gpu], None)

    def gpu(self, trial: Plan, best: Plan, order: list[int], given: list[int] | None) -> None:
        if self.steps <= 0:
            return
        self.steps -= 1
        here, step = order[-1], len(order)
        if step < self.count:
            for gpu in self.nexts(here) if given is None else [given[step]]:
                if gpu not in order and self.hop(here, gpu, trial):
                    self.gpu(trial, best, [*order, gpu], given)
                    self.hop(here, gpu, trial, -1)
        elif trial.pattern != RING or self.count == 1:
            self.whole(trial, best, order)
        elif self.hop(here, order[0], trial):
            self.whole(trial, best, order)
            self.hop(here, order[0], trial, -1)

    def whole(self, trial: Plan, best: Plan, order: list[int]) -> None:
        if self.steps <= 0:
            return
        self.steps -= 1
        trial.orders.append(tuple(order))
        if self.better(trial, best):
            best.__dict__.update(trial.copied().__dict__)
            if len(trial.orders) == trial.most:
                self.steps = -1
        if len(trial.orders) < trial.most:
            self.channel(trial, best)
        trial.orders.pop()

    @staticmethod
    def better(trial: Plan, best: Plan) -> bool:
        if len(trial.orders) < trial.least:
            return False
        total, old = len(trial.orders) * trial.bandwidth, len(best.orders) * best.bandwidth
        if total != old:
            return total > old
        return trial.pattern == best.pattern and trial.hops < best.hops

    def run(self, release: Release, pattern: int, least: int, most: int) -> Plan:
        topo, speeds = self.topo, release.speeds(self.topo.min_cc)
        best = Plan(pattern, least, most, farthest=topo.min_type())
        if pattern == RING and topo.split_nvlink() and most >= 2 and least == 1:
            best.least = 2
        total = topo.total_bandwidth()
        wide = total * (self.count / (self.count - 1) if pattern != RING else 1)
        index = 0
        while index < len(speeds) - 1 and (
            speeds[index] > topo.max_bandwidth() or speeds[index] * best.least > wide
        ):
            index += 1
        trial = best.copied()
        trial.bandwidth = speeds[index]
        self.lower(trial, best, speeds, index, total)
        self.raise_again(best, speeds)
        if not best.orders:
            best.orders, best.bandwidth, best.farthest = [tuple(range(self.count))], 0.1, SYS
        return best

    def lower(
        self, trial: Plan, best: Plan, speeds: tuple[float, ...], index: int, total: float
    ) -> None:
        topo, patience = self.topo, 1 << 19
        while True:
            patience -= 1 << 8 if trial.same else 1 << 14
            steps = self.attempt(trial, best)
            if steps == -1 or len(best.orders) * best.bandwidth >= total:
                return
            if trial.same and not (topo.cpu_vendor == "amd" and trial.farthest == SYS):
                trial.same = False
                continue
            trial.same = True
            patience += steps
            if patience < 0 and best.orders:
                return
            if topo.min_cc >= 90 and trial.pattern == BALANCED_TREE:
                trial.pattern = TREE
                continue
            trial.pattern = best.pattern
            nearer = not best.orders or trial.farthest < best.farthest
            if trial.farthest < topo.max_type() and nearer:
                trial.farthest += 1
                continue
            trial.farthest = topo.min_type()
            if index == len(speeds) - 1 or (
                best.orders and speeds[index + 1] / best.bandwidth <= 0.49
            ):
                return
            index += 1
            trial.bandwidth = speeds[index]

    def raise_again(self, best: Plan, speeds: tuple[float, ...]) -> None:
        channels = len(best.orders)
        slow = best.bandwidth < 25 or (
            self.topo.min_cc > 80 and best.bandwidth < 50 and channels > 4
        )
        if channels and not slow:
            doubled = min(channels * 2, best.most)
            best.orders = (best.orders * 2)[:doubled]
            best.bandwidth /= math.ceil(doubled / channels)
        trial = best.copied()
        index = next((i for i, s in enumerate(speeds[:-1]) if s <= best.bandwidth), len(speeds) - 1)
        trial.bandwidth, trial.least = speeds[index], len(best.orders)
        steps, between = -1, trial.bandwidth
        while steps != 0 and index > 0:
            # a tree's bandwidth between hosts stays, and inside it may be up to twice that
            if best.pattern != RING and not (
                trial.bandwidth == best.bandwidth and trial.bandwidth < 2 * between
            ):
                return
            index -= 1
            trial.bandwidth = speeds[index]
            steps = self.attempt(trial, best)
