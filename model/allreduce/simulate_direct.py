"""One-shot and two-shot kernels, discrete-event: every rank reads (or writes) every other.

Reads are immune to posted-write collapse; ``push`` shows what happens when peers write instead.
"""

from collections.abc import Mapping, Sequence

import simpy

from model.allreduce.constants import MOST, PREFIX
from model.allreduce.design import check_ranks, check_size
from model.allreduce.hops import Hop, hop_between, link_rates
from model.allreduce.simulate import Links, PostedWrites, Process
from model.machine import Machine


def simulate_direct(
    machine: Machine,
    num_ranks: int,
    size_bytes: int,
    kind: str,
    constants: Mapping[str, float],
    arrivals_us: Sequence[float],
    push: bool = False,
) -> tuple[float, ...]:
    """When each rank is done, us. One-shot moves the whole vector to every peer after one barrier;
    two-shot moves 1/n of it twice with a barrier between. A last barrier ends both.

    Raises ``ValueError`` for an unknown kind, too many ranks or a size below 1 byte.
    """
    check_ranks(machine, num_ranks)
    check_size(size_bytes)
    if kind not in ("one_shot", "two_shot"):
        raise ValueError(f"kernel {kind!r} is unknown; known: one_shot, two_shot")
    if len(arrivals_us) != num_ranks:
        raise ValueError(f"{len(arrivals_us)} arrival times for {num_ranks} ranks: one each (us)")
    run = _Direct(machine, num_ranks, constants, push)
    ready = [at + constants[PREFIX + "direct_fixed_us"] for at in arrivals_us]
    shots = [float(size_bytes)] if kind == "one_shot" else [size_bytes / num_ranks] * 2
    for shot_bytes in shots:
        ready = run.move(run.barrier(ready), shot_bytes)
    return tuple(run.barrier(ready))


class _Direct:
    """Barriers and all-to-all moves between ranks on one machine."""

    def __init__(
        self, machine: Machine, num_ranks: int, constants: Mapping[str, float], push: bool
    ) -> None:
        self.machine, self.num_ranks, self.constants, self.push = (
            machine,
            num_ranks,
            constants,
            push,
        )
        self.hops = {
            (a, b): hop_between(machine, a, b, "SYS", num_ranks)
            for a in range(num_ranks)
            for b in range(num_ranks)
            if a != b
        }

    def barrier(self, ready: Sequence[float]) -> list[float]:
        """When every rank has seen the flags of all others, from when each one raised its own."""

        def flag_us(hop: Hop) -> float:
            return hop.path_us + self.constants[f"{PREFIX}handoff_{hop.transport}_us"]

        return [
            max(
                [ready[rank]]
                + [
                    ready[peer] + flag_us(self.hops[peer, rank])
                    for peer in range(self.num_ranks)
                    if peer != rank
                ]
            )
            for rank in range(self.num_ranks)
        ]

    def move(self, ready: Sequence[float], num_bytes: float) -> list[float]:
        """When every rank has got ``num_bytes`` from (or written them to) each other rank."""
        env = simpy.Environment()
        links = Links(link_rates(self.machine))
        writes = PostedWrites(self.machine.p2p.posted_write_collapse_sources if self.push else None)
        done = list(ready)

        def flow(hop: Hop, at: float, rank: int) -> Process:
            yield env.timeout(at)
            tokens = writes.enter(hop)
            on = [link for leg in hop.legs for link in leg.links]
            links.enter(on)
            # let all flows of this moment register before shares and the rule look at them
            yield env.timeout(0)
            work = []
            for link in on:
                read = min(self.constants[PREFIX + "direct_read"], MOST[PREFIX + "direct_read"])
                rate = links.rate_gb_per_s[link] * read
                collapsed = self.machine.p2p.posted_write_collapse_gb_per_s
                if collapsed is not None and writes.collapsed(link[0]):
                    rate = min(rate, collapsed)
                work.append((link, num_bytes * 1e-3 / rate))
            yield env.timeout(links.time_us(work))
            writes.leave(tokens)
            links.leave(on)
            done[rank] = max(done[rank], env.now)

        for distance in range(1, self.num_ranks):
            for rank in range(self.num_ranks):
                peer = (rank + distance) % self.num_ranks
                hop = self.hops[rank, peer] if self.push else self.hops[peer, rank]
                env.process(flow(hop, ready[rank], rank))
        env.run()
        return done
