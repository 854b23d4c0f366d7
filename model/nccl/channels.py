"""Lays the channels of NCCL's graph search: depth first, taking bandwidth from every link.

Source: NVIDIA/nccl 2.27 to 2.30, src/graph/search.cc (read, facts only). NCCL bounds its search by
steps; what it finds depends on their number, so steps are counted here exactly as there. A part of
the search that laid nothing is not walked again from the same state: its steps are subtracted. An
attempt that cannot lay anything is not walked at all; its steps are counted if anybody asks.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from model.nccl import paths
from model.nccl.hops import Demand, Hops, thousandths
from model.nccl.paths import LOC
from model.nccl.tuning import NVLS

_STEPS = 1 << 14
_STEPS_SAME_CHANNELS = 1 << 8


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
        """Become equal to another."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))
        self.orders = list(other.orders)

    @property
    def total(self) -> float:
        """GB/s of all channels."""
        return len(self.orders) * self.bw_intra

    def would_beat(self, best: "Candidate", num_channels: int, num_hops: int) -> bool:
        """Whether this one, with so many channels and hops, is better than ``best``."""
        if num_channels < self.min_channels:
            return False
        total = num_channels * self.bw_intra
        if total != best.total:
            return total > best.total
        return self.pattern == best.pattern and num_hops < best.num_hops

    @property
    def budget(self) -> int:
        """Steps that NCCL allows for one attempt."""
        return _STEPS_SAME_CHANNELS if self.same_channels else _STEPS


class Hopeless:
    """An attempt that cannot be better than the best; how many steps it takes is not counted."""

    def __init__(self, layer: "ChannelLayer", trial: Candidate, demand: Demand) -> None:
        self.trial = replace(trial)
        self._layer, self._demand = layer, demand

    @cached_property
    def steps_left(self) -> int:
        """Counted now, as NCCL takes them."""
        # nothing is better than this
        best = Candidate(self.trial.pattern, 1, 1, bw_intra=math.inf, orders=[()])
        return self._layer.walk_on(self._demand, self.trial, best)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The most channels that an attempt laid, their fewest hops, and the steps it left."""

    num_channels: int
    num_hops: int
    steps_left: int


class ChannelLayer:
    """Lays channels in one topology and keeps what it learnt between attempts."""

    def __init__(self, hops: Hops) -> None:
        self.hops = hops
        self.num_gpus = hops.num_gpus
        #: attempts walked, not told by their links or by another attempt
        self.num_walked = 0
        self._walked: dict[Hashable, _Outcome] = {}

    def lay(self, trial: Candidate, best: Candidate) -> int | Hopeless:
        """Lay channels with the demands of ``trial``; better results go to ``best``.

        Returns the steps left, 0 when they ran out and -1 for a perfect result.
        """
        unused = self.foresee(trial, best)
        return self.walk(trial, best) if unused is None else unused

    def foresee(self, trial: Candidate, best: Candidate) -> int | Hopeless | None:
        """The steps an attempt leaves where it is known to be no better; None: walk it."""
        if trial.pattern == NVLS:
            return None
        demand = self.hops.demand(trial.pattern, trial.bw_intra, trial.type_intra)
        most = min(trial.max_channels, demand.most_channels)
        if not trial.would_beat(best, most, trial.num_hops + most * demand.hops.fewest_hops):
            return Hopeless(self, trial, demand)
        known = self._walked.get(self._course(demand, trial))
        if known is None:
            return None
        hops = trial.num_hops + known.num_hops
        if trial.would_beat(best, known.num_channels, hops):
            return None
        return known.steps_left

    def walk(self, trial: Candidate, best: Candidate) -> int:
        """Lay channels step by step; as ``lay``."""
        if trial.pattern == NVLS:
            trial.orders = []
            return _NvlsWalk(self, trial, best).run()
        demand = self.hops.demand(trial.pattern, trial.bw_intra, trial.type_intra)
        return self.walk_on(demand, trial, best)

    def walk_on(self, demand: Demand, trial: Candidate, best: Candidate) -> int:
        """Lay channels of a demand."""
        self.num_walked += 1
        trial.orders = []
        walk = _Walk(self.hops, demand, trial, best)
        walk.run()
        # an attempt that ended at a perfect result would have gone on without it
        if walk.steps >= 0:
            outcome = _Outcome(walk.most_laid, walk.fewest_hops, walk.steps)
            self._walked[self._course(demand, trial)] = outcome
        return walk.steps

    @staticmethod
    def _course(demand: Demand, trial: Candidate) -> Hashable:
        return demand.plan.course, trial.same_channels, trial.min_channels, trial.max_channels


class _Walk:
    """One attempt, channel after channel, from each GPU in any order."""

    def __init__(self, hops: Hops, demand: Demand, trial: Candidate, best: Candidate) -> None:
        self.trial, self.best = trial, best
        self.num_gpus = hops.num_gpus
        self.steps = trial.budget
        #: channels laid so far, those given up included
        self.num_laid = 0
        self.most_laid = self.fewest_hops = 0
        # hops count on from where they are: NCCL does not reset them for the second pass
        self._first_hops = trial.num_hops
        self._closed = demand.hops.closed
        self._lengths = hops.lengths
        plan = demand.plan
        self._following = demand.hops.following
        self._takes, self._guards, self._whole = plan.takes, plan.guards, plan.whole
        self._barren = plan.barren
        #: the channel at hand
        self._order: list[int] = []

    def run(self) -> int:
        """Returns the steps left, 0 when they ran out and -1 for a perfect result."""
        self._next_channel(self._whole)
        return self.steps

    def _next_channel(self, left: int) -> None:
        laid = self.trial.orders
        if laid:
            self._follow(laid[-1], left)
        else:
            self._follow(range(self.num_gpus), left)
        if not self.trial.same_channels or not laid:
            for gpu in range(self.num_gpus):
                if self.steps <= 0:
                    return
                self._order = [gpu]
                self._explore(gpu, 1 << gpu, left)

    def _follow(self, order: "range | tuple[int, ...]", left: int) -> None:
        """Try one given order: NCCL's numbering, or that of the channel before."""
        guards = self._guards
        for place, gpu in enumerate(order):
            if place:
                before = order[place - 1]
                left -= self._takes[before][gpu]
                if not self._takes[before][gpu] or left & guards != guards:
                    return
            if self.steps <= 0:
                return
            self.steps -= 1
        self._close(list(order), left)

    def _explore(self, here: int, visited: int, left: int) -> None:
        """Go on from ``here`` in any order, unless it is known to lead nowhere."""
        steps, order = self.steps, self._order
        key = (here, order[0], visited, left)
        known = self._barren.get(key)
        if known is not None:
            self.steps = max(0, steps - known)
            return
        laid = self.num_laid
        self.steps = steps - 1
        if len(order) == self.num_gpus:
            self._close(order, left)
        else:
            takes, guards = self._takes[here], self._guards
            for gpu in self._following[here]:
                if visited >> gpu & 1:
                    continue
                rest = left - takes[gpu]
                if rest & guards == guards:
                    if self.steps <= 0:
                        return
                    order.append(gpu)
                    self._explore(gpu, visited | 1 << gpu, rest)
                    order.pop()
        if self.num_laid == laid and self.steps > 0:
            self._barren[key] = steps - self.steps

    def _close(self, order: list[int], left: int) -> None:
        """All GPUs are in the channel; a ring's last hop goes home."""
        if self._closed:
            last, first = order[-1], order[0]
            left -= self._takes[last][first]
            if not self._takes[last][first] or left & self._guards != self._guards:
                return
        self._complete(order, left)

    def _complete(self, order: list[int], left: int) -> None:
        """A whole channel: keep it if it is the best, and lay another after it."""
        if self.steps <= 0:
            return
        self.steps -= 1
        self.num_laid += 1
        trial, lengths = self.trial, self._lengths
        hops = sum(lengths[a][b] for a, b in pairwise(order))
        if self._closed:
            hops += lengths[order[-1]][order[0]]
        trial.num_hops += hops
        trial.orders.append(tuple(order))
        channels = len(trial.orders)
        if channels > self.most_laid:
            self.most_laid, self.fewest_hops = channels, trial.num_hops - self._first_hops
        elif channels == self.most_laid:
            self.fewest_hops = min(self.fewest_hops, trial.num_hops - self._first_hops)
        if trial.would_beat(self.best, channels, trial.num_hops):
            self.best.take(trial)
            if channels == trial.max_channels:
                self.steps = -1
        if channels < trial.max_channels:
            self._next_channel(left)
            self._order = order
        trial.orders.pop()
        trial.num_hops -= hops


class _NvlsWalk:
    """One attempt of NVLink SHARP: all GPUs exchange with the NVLink switch, each head once."""

    def __init__(self, layer: ChannelLayer, trial: Candidate, best: Candidate) -> None:
        self.trial, self.best = trial, best
        self.num_gpus = layer.num_gpus
        self.steps = trial.budget
        self._routes = layer.hops.switch_routes
        self._rates = layer.hops.rates

    def run(self) -> int:
        """Returns the steps left, 0 when they ran out and -1 for a perfect result."""
        self._head(0, list(self._rates))
        return self.steps

    def _head(self, head: int, left: list[int]) -> None:
        """The head takes part with twice the bandwidth."""
        if self.steps <= 0:
            return
        self.steps -= 1
        trial = self.trial
        for routes in self._routes:
            for gpu, route in enumerate(routes):
                need = thousandths(trial.bw_intra * (2 if gpu == head else 1))
                for link in route.links:
                    left[link] -= need
                    if left[link] < 0:
                        return
                # NCCL does not compare the type when it counts double
                if gpu != head and route.rank > trial.type_intra:
                    return
        if self.steps <= 0:
            return
        self.steps -= 1
        best = self.best
        trial.orders.append((head, *(gpu for gpu in range(self.num_gpus) if gpu != head)))
        channels = len(trial.orders)
        if channels >= trial.min_channels and (
            (channels > len(best.orders) and channels <= self.num_gpus)
            or channels * trial.bw_inter > len(best.orders) * best.bw_inter
        ):
            best.take(trial)
            if channels == trial.max_channels:
                self.steps = -1
        if channels < min(trial.max_channels, self.num_gpus):
            self._head(channels, left)
        trial.orders.pop()
