"""All-reduce times for the step model: knobs -> NCCL's plan per size -> ``model.allreduce``.

Settings only matter through what NCCL then runs, so rows are kept per plan: knobs whose plans agree
at every size in play share one time (and are one class, which is what makes large spaces cheap and
tells which settings are inert). Suffixes: D constant vectors, N rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.allreduce.analytic import eager_us, time_us
from model.allreduce.constants import ALL_SPECS, PREFIX
from model.allreduce.design import Design, nccl_design
from model.allreduce.model import BACKENDS, Setup, allreduce_design, nccl_setup
from model.constants import Constant
from model.machine import Machine
from model.nccl.settings import NcclSettings
from model.spec import Knobs

Array = NDArray[Any]

#: NCCL of a machine file that names none
ASSUMED_NCCL_VERSION = "2.28.9"
_MOST_CALLS = 256
#: sizes, bytes, at which two settings are compared when nobody says which sizes are in play
PROBE_SIZES = tuple(2**k for k in range(10, 25))


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """Communication settings of some knobs."""

    backend: str
    tp: int
    algo: str = "auto"
    proto: str = "auto"
    min_channels: int | None = None
    max_channels: int | None = None
    buffsize_bytes: int | None = None
    nthreads: int | None = None
    p2p_level: str = "auto"

    @classmethod
    def of(cls, knobs: Knobs) -> "CollectiveKey":
        """The communication part of these knobs."""
        return cls(
            knobs.collectives_backend,
            knobs.tp,
            knobs.nccl_algo,
            knobs.nccl_proto,
            knobs.nccl_min_channels,
            knobs.nccl_max_channels,
            knobs.nccl_buffsize_bytes,
            knobs.nccl_nthreads,
            knobs.nccl_p2p_level,
        )

    @property
    def settings(self) -> NcclSettings:
        """The NCCL environment these knobs set."""
        return NcclSettings(
            algo=None if self.algo == "auto" else self.algo,
            proto=None if self.proto == "auto" else self.proto,
            min_channels=self.min_channels,
            max_channels=self.max_channels,
            nthreads=self.nthreads,
            buffsize_bytes=self.buffsize_bytes,
            p2p_level=None if self.p2p_level == "auto" else self.p2p_level,
        )


@dataclass(frozen=True)
class Route:
    """Who reduces over what, settings resolved."""

    backend: str
    ranks: int
    settings: NcclSettings

    @cached_property
    def _hash(self) -> int:
        return hash((self.backend, self.ranks, self.settings))

    def __hash__(self) -> int:
        return self._hash


def allreduce_constants(machine: Machine) -> tuple[Constant, ...]:
    """The all-reduce model's constants that matter on this machine, at their priors."""
    gloo = PREFIX + "gloo_"
    on_cpu = machine.gpu is None
    kept = [
        spec
        for spec in ALL_SPECS
        if spec.name.startswith(gloo) == on_cpu or spec.name == PREFIX + "call_us"
    ]
    return tuple(
        Constant(
            name=spec.name,
            value=spec.prior,
            unit=spec.unit,
            prior=spec.prior,
            prior_sd=spec.prior_log_sd,
            scale="log",
            source=spec.source,
            most=spec.most,
        )
        for spec in kept
    )


class CollectiveTimes:
    """All-reduce times on one machine for many settings, sizes and constant vectors."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._version = machine.software.nccl_version or ASSUMED_NCCL_VERSION
        self._setups: dict[Route, Setup | str] = {}
        self._problems: dict[CollectiveKey, str | None] = {}
        self._row_of: dict[tuple[object, ...], int] = {}
        self._signatures: dict[tuple[CollectiveKey, tuple[int, ...]], tuple[int, ...]] = {}
        self._designs: list[Design] = []
        self._calls: dict[object, tuple[list[tuple[Array, Design]], int, Array]] = {}

    def problem(self, key: CollectiveKey) -> str | None:
        """Why these settings cannot run here, or None."""
        if key not in self._problems:
            self._problems[key] = self._find_problem(key)
        return self._problems[key]

    def usable(self, key: CollectiveKey) -> CollectiveKey:
        """These settings, or the plain ones of this machine where these cannot run."""
        if self.problem(key) is None:
            return key
        if self._machine.gpu is None:
            return CollectiveKey("gloo", key.tp)
        return CollectiveKey("nccl", min(key.tp, self._machine.num_gpus))

    def _find_problem(self, key: CollectiveKey) -> str | None:
        if key.tp == 1:
            return None
        if self._machine.gpu is None and key.backend != "gloo":
            return f"collectives.backend {key.backend!r} needs GPUs; ranks on CPUs use gloo"
        if self._machine.gpu is not None and key.tp > self._machine.num_gpus:
            return f"parallel.tp {key.tp} is above the {self._machine.num_gpus} GPUs of the machine"
        try:
            for size in (PROBE_SIZES[0], PROBE_SIZES[-1]):
                self._indices(_route(key), [size])
        except ValueError as error:
            return str(error)
        return None

    def classes(self, keys: Sequence[CollectiveKey], sizes: Sequence[int]) -> list[int]:
        """Equal numbers for keys whose all-reduces are alike at all ``sizes``; -1: cannot run."""
        seen: dict[tuple[int, ...], int] = {}
        numbers = []
        wanted = tuple(sizes)
        for key in keys:
            if self.problem(key) is not None:
                numbers.append(-1)
                continue
            if (key, wanted) not in self._signatures:
                rows = () if key.tp == 1 else tuple(self._indices(_route(key), wanted))
                self._signatures[key, wanted] = (key.tp, *rows)
            numbers.append(seen.setdefault(self._signatures[key, wanted], len(seen)))
        return numbers

    def table_us(
        self,
        keys: Sequence[CollectiveKey],
        sizes: Sequence[float] | Array,
        c: Mapping[str, Array],
    ) -> Array:
        """Stand-alone device time of an all-reduce for each (key, size), us: [D, N]; 0 alone."""
        routes = [_route(key) if key.tp > 1 else None for key in keys]
        return self._times(routes, [int(s) for s in sizes], c)

    def observed_us(
        self,
        routes: Sequence[Route],
        sizes: Sequence[int],
        graphed: Sequence[bool],
        c: Mapping[str, Array],
    ) -> Array:
        """Time of benchmark rows, us: [D, N]; eager rows are bound by the host's call."""
        inside = self._times(list(routes), list(sizes), c)
        result: Array = np.where(np.array(graphed), inside, eager_us(inside, c))
        return result

    def floor_us(self, tp: Array, size_bytes: Array) -> Array:
        """Physical bound: each rank sends and receives 2 (n - 1) / n of the bytes over its link."""
        rates = [
            link.gb_per_s
            for link in self._machine.topology.links
            if link.kind in ("pcie", "nvlink")
            and (link.a.startswith("gpu") or link.b.startswith("gpu"))
        ]
        rate = (max(rates) if rates else 100.0) * 1e3
        bound: Array = 2 * (tp - 1) / tp * size_bytes / rate
        return bound

    def _times(
        self, routes: Sequence[Route | None], sizes: Sequence[int], c: Mapping[str, Array]
    ) -> Array:
        call = (tuple(routes), tuple(sizes))
        if call not in self._calls:
            if len(self._calls) > _MOST_CALLS:
                self._calls.clear()
            self._calls[call] = self._rows(routes, sizes)
        parts, used, inverse = self._calls[call]
        num_draws = len(c[PREFIX + "call_us"])
        table = np.zeros((num_draws, used))
        for rows, design in parts:
            table[:, rows] = time_us(design, c)
        result: Array = table[:, inverse]
        return result

    def _rows(
        self, routes: Sequence[Route | None], sizes: Sequence[int]
    ) -> tuple[list[tuple[Array, Design]], int, Array]:
        """(distinct collectives by backend with their entries, number of entries, entry by row).

        An entry without a collective is a lone rank.
        """
        places: dict[Route, list[int]] = {}
        for n, route in enumerate(routes):
            if route is not None:
                places.setdefault(route, []).append(n)
        index = np.full(len(routes), -1)
        for route, rows_of_route in places.items():
            index[rows_of_route] = self._indices(route, [sizes[n] for n in rows_of_route])
        used, inverse = np.unique(index, return_inverse=True)
        start = int((used < 0).sum())
        parts = []
        if used.size > start:
            design = self._all().take(used[start:])
            for kind in BACKENDS:
                rows = np.flatnonzero(getattr(design, kind))
                if rows.size:
                    parts.append((start + rows, design.take(rows)))
        return parts, int(used.size), inverse

    def _all(self) -> Design:
        if len(self._designs) > 1:
            self._designs = [Design.concat(self._designs)]
        return self._designs[0]

    def _indices(self, route: Route, sizes: Sequence[int]) -> list[int]:
        """Rows of these collectives; settings with the same plan share rows."""
        at_least = [max(size, 1) for size in sizes]
        if route.backend == "nccl":
            setup = self._setup(route)
            level = route.settings.p2p_rank()
            plans = [setup.plan(size) for size in at_least]
            buffers = [route.settings.buffsize_bytes if p.proto == "Simple" else 0 for p in plans]
            keys = [
                (route.ranks, setup.orders, level, buffer, plan, size)
                for plan, buffer, size in zip(plans, buffers, at_least, strict=True)
            ]
        else:
            keys = [(route.backend, route.ranks, size) for size in at_least]  # type: ignore[misc]
        new = {key: n for n, key in enumerate(keys) if key not in self._row_of}
        if new:
            self._designs.append(self._design(route, [at_least[n] for n in new.values()]))
            for key in new:
                self._row_of[key] = len(self._row_of)
        return [self._row_of[key] for key in keys]

    def _design(self, route: Route, sizes: list[int]) -> Design:
        if route.backend != "nccl":
            return allreduce_design(
                self._machine, route.ranks, route.backend, route.settings, self._version, sizes
            )
        setup = self._setup(route)
        plans = [setup.plan(size) for size in sizes]
        buffsize = route.settings.buffsize_bytes
        return nccl_design(
            self._machine, route.ranks, sizes, plans, setup.orders, setup.p2p_level, buffsize
        )

    def _setup(self, route: Route) -> Setup:
        if route not in self._setups:
            try:
                self._setups[route] = nccl_setup(
                    self._machine, route.ranks, route.settings, self._version
                )
            except ValueError as error:
                self._setups[route] = str(error)
        setup = self._setups[route]
        if isinstance(setup, str):
            raise ValueError(setup)
        return setup


def in_step_us(table_DN: Array, tp_N: Array, c: Mapping[str, Array]) -> Array:
    """Inside a step: the stand-alone time scaled, plus waiting for the last rank."""
    late = c["skew_us"] * np.log2(np.maximum(tp_N, 1.0))
    inside: Array = table_DN * c["allreduce_factor"] + late
    return np.where(tp_N > 1, inside, 0.0)


@lru_cache(maxsize=65536)
def _route(key: CollectiveKey) -> Route:
    settings = key.settings if key.backend == "nccl" else NcclSettings()
    return Route(key.backend, key.tp, settings)
