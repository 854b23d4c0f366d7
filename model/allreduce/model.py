"""The all-reduce of one machine: NCCL's choice and the topology turned into predicted times.

model = AllreduceModel(machine, 8, "nccl", NcclSettings(), "2.29.2", constants)
model.time_us(np.array([14336, 43008]), graphed=True)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from model.allreduce.analytic import eager_us, time_us
from model.allreduce.constants import ALL_SPECS
from model.allreduce.design import Design, Plan, direct_design, gloo_design, nccl_design
from model.fit import ConstantSpec
from model.identity import ById
from model.machine import Machine
from model.nccl.communicator import communicator_for
from model.nccl.paths import PATH_TYPES
from model.nccl.selector import Selector
from model.nccl.settings import NcclSettings

Array = npt.NDArray[np.float64]
BACKENDS = ("nccl", "gloo", "one_shot", "two_shot")


def constants() -> list[ConstantSpec]:
    """All constants of the all-reduce model: name, unit, prior and its source."""
    return list(ALL_SPECS)


def prior_constants() -> dict[str, float]:
    """Prior medians by name: what an uncalibrated prediction uses."""
    return {spec.name: spec.prior for spec in ALL_SPECS}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How NCCL runs on a machine: plans per size, ring orders, peer level."""

    selector: Selector
    orders: tuple[tuple[int, ...], ...]
    p2p_level: str | None

    def plan(self, size_bytes: int) -> Plan:
        """Algorithm, protocol, channels and threads of one size."""
        plan = self._plans.get(size_bytes)
        if plan is None:
            choice = self.selector.choose(size_bytes)
            plan = self._plans[size_bytes] = Plan(
                algo=choice.algo,
                proto=choice.proto,
                channels=choice.channels,
                threads=choice.threads,
            )
        return plan

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        """Those asked for so far, by size."""
        return {}


def nccl_setup(
    machine: Machine, num_ranks: int, settings: NcclSettings, version: str | None
) -> Setup:
    """NCCL's communicator on ``machine``; ``version`` None takes the machine's own.

    Raises ``ValueError`` for an unknown version or one that nobody states.
    """
    version = version if version is not None else machine.software.nccl_version
    if version is None:
        raise ValueError(
            f"machine {machine.name}: software.nccl_version is null; give the NCCL version"
        )
    comm = communicator_for(machine, num_ranks, settings, version)
    rank = settings.p2p_rank()
    return Setup(
        selector=Selector(comm),
        orders=tuple(comm.ring.orders) or (tuple(range(num_ranks)),),
        p2p_level=None if rank is None else PATH_TYPES[rank],
    )


def allreduce_design(
    machine: Machine,
    num_ranks: int,
    backend: str,
    settings: NcclSettings,
    version: str | None,
    sizes_bytes: Sequence[int],
) -> Design:
    """Rows for ``sizes_bytes``: what the times depend on, constants apart.

    Raises ``ValueError`` for an unknown backend, too few or too many ranks, sizes below 1 byte.
    """
    if backend not in BACKENDS:
        raise ValueError(f"collectives.backend {backend!r} unknown; known: {', '.join(BACKENDS)}")
    sizes = [_whole(size) for size in sizes_bytes]
    if backend == "gloo":
        return gloo_design(num_ranks, sizes)
    if machine.gpu is None:
        raise ValueError(f"machine {machine.name} has no GPU: only gloo can carry an all-reduce")
    if backend != "nccl":
        return direct_design(machine, num_ranks, sizes, backend)
    same = _same(ById(machine))
    rows = [_nccl_design(same, num_ranks, settings, version, size) for size in sizes]
    return Design.concat(rows)


@dataclass(frozen=True, kw_only=False)
class AllreduceModel:
    """Times of one backend under one setting; ``constants`` by name (a superset is fine)."""

    machine: Machine
    num_ranks: int
    backend: str
    settings: NcclSettings
    version: str | None
    constants: Mapping[str, float]

    def design(self, size_bytes: npt.ArrayLike) -> Design:
        """Rows for these sizes (bytes of the whole vector)."""
        sizes = np.atleast_1d(np.asarray(size_bytes))
        return allreduce_design(
            self.machine, self.num_ranks, self.backend, self.settings, self.version, sizes.tolist()
        )

    def time_us(self, size_bytes: npt.ArrayLike, graphed: bool) -> Array:
        """Median time [N] for sizes [N] in bytes: captured in a graph, or called eagerly."""
        inside = time_us(self.design(size_bytes), self.constants)
        return inside if graphed else eager_us(inside, self.constants)


class _Same:
    """A machine as a cache key: equal when fingerprint, rates and peer rules are."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        topology = tuple((k.a, k.b, k.gb_per_s, k.latency_us) for k in machine.topology.links)
        self.key = (machine.name, machine.fingerprint, machine.cpu, machine.p2p, topology)
        self.key = (*self.key, machine.software.nccl_version)  # type: ignore[assignment]

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.key == other.key


@lru_cache(maxsize=64)
def _same(machine: ById[Machine]) -> _Same:
    return _Same(machine.value)


@lru_cache(maxsize=65536)
def _nccl_design(
    same: _Same, num_ranks: int, settings: NcclSettings, version: str | None, size: int
) -> Design:
    setup = nccl_setup(same.machine, num_ranks, settings, version)
    return nccl_design(
        same.machine,
        num_ranks,
        [size],
        [setup.plan(size)],
        setup.orders,
        setup.p2p_level,
        settings.buffsize_bytes,
    )


def _whole(size: float) -> int:
    if not (np.isfinite(size) and size >= 1 and float(size).is_integer()):
        raise ValueError(f"size_bytes {size} must be a whole number of bytes, at least 1")
    return int(size)
