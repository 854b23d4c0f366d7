"""All-reduce times for the step model, from whichever all-reduce model fits the backend.

A ``CollectiveKey`` is what the knobs ask of the communication library. The linear form here serves
CPU ranks (gloo); NCCL and the one-shot and two-shot kernels on GPUs come from ``model.allreduce``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.constants import Constant
from model.machine import Machine
from model.spec import Knobs

Array = NDArray[Any]


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


def linear_constants(machine: Machine) -> tuple[Constant, ...]:
    """Latency and bandwidth of a linear all-reduce, from the machine's own rows when it has them.

    time = latency * (n - 1) + 2 (n - 1) / n * bytes / bandwidth.
    """
    rows = [r for r in machine.measured.allreduce if r.mode == "eager" and r.backend == "gloo"]
    alpha, bandwidth, sd, source = 120.0, 1.0, 0.9, "judged; wide (gloo over loopback)"
    if len(rows) >= 2:
        hops = np.array([r.num_ranks - 1 for r in rows], float)
        wire = np.array([2 * (r.num_ranks - 1) / r.num_ranks * r.size_bytes for r in rows])
        time = np.array([r.time_us for r in rows])
        design = np.stack([hops, wire], axis=1) / time[:, None]
        fit = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
        alpha = float(max(fit[0], 0.05 * time.min() / hops[0]))
        bandwidth = float(1e-3 / max(fit[1], 1e-7))
        sd, source = 0.3, "fitted to this machine's probe rows"
    return tuple(
        Constant(name=n, value=v, unit=u, prior=v, prior_sd=sd, scale="log", source=source)
        for n, v, u in (
            ("linear_allreduce_us", alpha, "us per rank beyond the first"),
            ("linear_allreduce_gb_per_s", bandwidth, "GB/s per rank"),
        )
    )


class CollectiveTimes:
    """All-reduce times on one machine for many keys, sizes and constant vectors."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def table_us(
        self,
        keys: Sequence[CollectiveKey],
        sizes: Sequence[float] | Array,
        graphed: Sequence[bool],
        c: Mapping[str, Array],
    ) -> Array:
        """Stand-alone time of an all-reduce of each (key, size, graphed), us: [D, len(keys)].

        0 for one rank.
        """
        tp = np.array([key.tp for key in keys], dtype=float)
        size = np.asarray(sizes, dtype=float)
        wire_us = 2 * (tp - 1) / tp * size / (c["linear_allreduce_gb_per_s"] * 1e3)
        out: Array = (tp - 1) * c["linear_allreduce_us"] + wire_us
        return out

    def classes(self, keys: Sequence[CollectiveKey]) -> list[int]:
        """Equal numbers for keys whose times are equal at every size."""
        seen: dict[tuple[str, int], int] = {}
        return [seen.setdefault((key.backend, key.tp), len(seen)) for key in keys]

    def floor_us(self, tp: Array, size_bytes: Array) -> Array:
        """Physical bound: each rank sends and receives 2 (n - 1) / n of the bytes over its link."""
        links = [
            link.gb_per_s
            for link in self._machine.topology.links
            if link.kind in ("pcie", "nvlink")
            and (link.a.startswith("gpu") or link.b.startswith("gpu"))
        ]
        rate = (max(links) if links else 100.0) * 1e3
        bound: Array = 2 * (tp - 1) / tp * size_bytes / rate
        return bound


def in_step_us(table_DU: Array, tp_U: Array, c: Mapping[str, Array]) -> Array:
    """Inside a step: the stand-alone time scaled, plus waiting for the last rank."""
    late = c["skew_us"] * np.log2(np.maximum(tp_U, 1.0))
    inside: Array = table_DU * c["allreduce_factor"] + late
    return np.where(tp_U > 1, inside, 0.0)
