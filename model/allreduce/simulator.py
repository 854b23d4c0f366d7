"""The all-reduces of one machine as a function for a larger simulation, simulated once each.

A collective's result depends on its size and on how late each rank is relative to the first, and
on nothing else; so it is kept under that key. The cache changes no result, only the time it takes.
"""

from collections.abc import Mapping, Sequence

from model.allreduce.constants import PREFIX
from model.allreduce.hops import hop_between, ring_hops
from model.allreduce.model import BACKENDS, nccl_setup
from model.allreduce.simulate import Collective, simulate
from model.allreduce.simulate_direct import simulate_direct
from model.machine import Machine
from model.nccl.settings import NcclSettings


class AllreduceSimulator:
    """Finish times of all-reduces; deterministic, and the same with ``cache`` on or off."""

    def __init__(
        self,
        machine: Machine,
        num_ranks: int,
        backend: str,
        settings: NcclSettings,
        version: str | None,
        constants: Mapping[str, float],
        cache: bool = True,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(
                f"collectives.backend {backend!r} unknown; known: {', '.join(BACKENDS)}"
            )
        self.machine, self.num_ranks, self.backend = machine, num_ranks, backend
        self.constants = dict(constants)
        self._cache: dict[tuple[int, tuple[float, ...]], tuple[float, ...]] | None = (
            {} if cache else None
        )
        self._setup = None
        if backend == "nccl":
            self._setup = nccl_setup(machine, num_ranks, settings, version)
            level = self._setup.p2p_level
            self._rings = tuple(ring_hops(machine, o, level) for o in self._setup.orders)
            self._back = tuple(
                tuple(hop_between(machine, h.target, h.source, level, num_ranks) for h in ring)
                for ring in self._rings
            )

    def finish_us(self, size_bytes: int, arrivals_us: Sequence[float]) -> tuple[float, ...]:
        """When each rank is done if rank r arrives at ``arrivals_us[r]``, us (same clock)."""
        first = min(arrivals_us)
        late = tuple(at - first for at in arrivals_us)
        key = (size_bytes, late)
        found = None if self._cache is None else self._cache.get(key)
        if found is None:
            found = self._simulate(size_bytes, late)
            if self._cache is not None:
                self._cache[key] = found
        return tuple(first + done for done in found)

    def duration_us(self, size_bytes: int) -> float:
        """Time of one collective that all ranks start together, us."""
        return max(self.finish_us(size_bytes, (0.0,) * self.num_ranks))

    def _simulate(self, size_bytes: int, late: tuple[float, ...]) -> tuple[float, ...]:
        if self.backend == "gloo":
            return self._gloo(size_bytes, late)
        if self._setup is None:
            return simulate_direct(
                self.machine, self.num_ranks, size_bytes, self.backend, self.constants, late
            )
        collective = Collective(
            num_ranks=self.num_ranks,
            size_bytes=size_bytes,
            plan=self._setup.plan(size_bytes),
            rings=self._rings,
            back=self._back,
        )
        return simulate(self.machine, collective, self.constants, late)

    def _gloo(self, size_bytes: int, late: tuple[float, ...]) -> tuple[float, ...]:
        """A ring without shared links: each step waits for the slower of self and neighbour."""
        c, n = self.constants, self.num_ranks
        hop = c[PREFIX + "gloo_hop_us"] + size_bytes / n * 1e-3 / c[PREFIX + "gloo_gb_per_s"]
        at = [start + c[PREFIX + "gloo_fixed_us"] for start in late]
        for _ in range(2 * (n - 1)):
            at = [max(at[rank], at[rank - 1]) + hop for rank in range(n)]
        return tuple(at)
