"""How many channels a topology's links carry at most: a bound that no search can pass.

A channel visits all GPUs once, so it leaves and enters each of them, and it crosses every cut.
Whatever fits the links fits these sums; the bound may be too high, never too low.
"""

from collections.abc import Mapping, Sequence

#: more than NCCL ever asks for
_ANY = 1 << 16

#: link -> whether the hop pays a host bridge's overhead there, by GPU left and GPU entered; None
#: where a hop is not allowed
HopLinks = Sequence[Sequence[Mapping[int, bool] | None]]
#: what one channel takes from a link at least: so often the plain amount, so often the wide one
_Taken = tuple[int, int]


class ChannelBound:
    """The bound for one set of hops; ``closed`` channels return to their first GPU."""

    def __init__(self, hops: HopLinks, closed: bool, rates: Sequence[int]) -> None:
        count = len(hops)
        self._rates, self._closed, self._count = rates, closed, count
        joined = [sum(1 << b for b, hop in enumerate(row) if hop is not None) for row in hops]
        self._joined = count == 1 or _joins_all(joined, closed)
        #: what a channel takes from links at least, by all reasons to take it
        self._taken: list[tuple[int, _Taken]] = []
        #: for leaving and entering: by GPU, the links that decide how often, and the cheapest hop
        self._times: list[list[dict[int, bool]]] = []
        if count == 1 or not self._joined:
            return
        self._taken += _at_cuts(hops, joined, closed)
        by_entered = list(zip(*hops, strict=True))
        for side in (hops, by_entered):
            ways = [[hop for hop in row if hop is not None] for row in side]
            self._taken += _by_all(ways, count if closed else count - 1)
            self._times.append([self._narrowest(row) for row in ways])

    def _narrowest(self, ways: Sequence[Mapping[int, bool]]) -> dict[int, bool]:
        """A hop counts at its narrowest link, a link at its cheapest hop."""
        found: dict[int, bool] = {}
        for hop in ways:
            link = min(hop, key=lambda link: (self._rates[link], not hop[link], link))
            found[link] = found.get(link, True) and hop[link]
        return found

    def most_channels(self, plain: int, wide: int) -> int:
        """Upper bound of the channels that fit, each taking ``plain``, or ``wide`` where it pays
        a host bridge's overhead, from the links of its hops. In the unit of the rates."""
        if self._count == 1:
            # such channels take nothing
            return _ANY
        if not self._joined:
            return 0
        rates, most = self._rates, _ANY
        for link, (num_plain, num_wide) in self._taken:
            most = min(most, rates[link] // (num_plain * plain + num_wide * wide))
        for side in self._times:
            times = [
                sum(rates[link] // (wide if pays else plain) for link, pays in gpu.items())
                for gpu in side
            ]
            if self._closed:
                most = min(most, *times)
            else:
                # each open channel leaves all GPUs but its last
                while sum(min(t, most) for t in times) < most * (self._count - 1):
                    most = min(most - 1, sum(times) // (self._count - 1))
        return most


def _by_all(
    ways: Sequence[Sequence[Mapping[int, bool]]], num_hops: int
) -> list[tuple[int, _Taken]]:
    """What hops take when each GPU takes its cheapest and the channel spares the dearest."""
    pays: dict[int, list[bool]] = {}
    for hops in ways:
        for link in hops[0] if hops else ():
            if all(link in hop for hop in hops):
                pays.setdefault(link, []).append(all(hop[link] for hop in hops))
    found = []
    for link, gpus in pays.items():
        # GPUs that are not listed take nothing
        taken = sorted(gpus)[: num_hops - len(ways) + len(gpus)]
        if taken:
            found.append((link, (len(taken) - sum(taken), sum(taken))))
    return found


def _at_cuts(hops: HopLinks, joined: Sequence[int], closed: bool) -> list[tuple[int, _Taken]]:
    """What a channel takes from links that it can't do without."""
    users: dict[int, list[tuple[int, int, bool]]] = {}
    for a, row in enumerate(hops):
        for b, hop in enumerate(row):
            for link, pays in hop.items() if hop is not None else ():
                users.setdefault(link, []).append((a, b, pays))
    found = []
    for link, over in users.items():
        without = list(joined)
        for a, b, _ in over:
            without[a] &= ~(1 << b)
        if not _joins_all(without, closed):
            wide = all(pays for *_, pays in over)
            found.append((link, (int(not wide), int(wide))))
    return found


def _joins_all(joined: Sequence[int], closed: bool) -> bool:
    """Whether hops lead from some GPU (closed: from each) to all others."""
    everyone = (1 << len(joined)) - 1
    seen, root = 0, 0
    while seen != everyone:
        # whoever reaches all is found last
        root = (~seen & everyone).bit_length() - 1
        seen |= _reached(joined, root)
    if _reached(joined, root) != everyone:
        return False
    if not closed:
        return True
    back = [0] * len(joined)
    for a, row in enumerate(joined):
        for b in range(len(joined)):
            back[b] |= (row >> b & 1) << a
    return _reached(back, root) == everyone


def _reached(joined: Sequence[int], start: int) -> int:
    seen = front = 1 << start
    while front:
        here = front.bit_length() - 1
        new = joined[here] & ~seen
        seen |= new
        front = (front ^ (1 << here)) | new
    return seen


def fewest_hops(lengths: Sequence[Sequence[int | None]], closed: bool) -> int:
    """Lower bound of the links that one channel crosses; 0 where not all GPUs are joined.

    ``lengths`` are links by GPU left and GPU entered, None where a hop is not allowed. A channel
    without its longest hop spans all GPUs, so it is no shorter than the shortest tree that does;
    and some hop of a closed one is as long as the longest branch of that tree.
    """
    count = len(lengths)

    def near(a: int, b: int) -> int:
        return min(lengths[a][b] or _ANY, lengths[b][a] or _ANY)

    branches = []
    reach = {gpu: near(0, gpu) for gpu in range(1, count)}
    while reach:
        gpu = min(reach, key=lambda gpu: reach[gpu])
        branches.append(reach.pop(gpu))
        if branches[-1] == _ANY:
            return 0
        for other in reach:
            reach[other] = min(reach[other], near(gpu, other))
    return sum(branches) + (max(branches, default=0) if closed else 0)
