"""What NCCL runs for an all-reduce of a given size: algorithm, protocol, channels, threads.

The lowest time of NCCL's own table wins, ties going to the first in the order tree, ring, nvls and
LL, LL128, Simple; then channels and threads shrink with the size, and the scheduler cuts the
message into cells. Source: NVIDIA/nccl 2.27 to 2.30, src/enqueue.cc (read, facts only).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from model.nccl import versions as v
from model.nccl.communicator import communicator_for as communicator_for
from model.nccl.settings import PROTOCOLS
from model.nccl.tuning import (
    Algorithm,
    Communicator,
    Protocol,
    Table,
    f32,
    thread_thresholds,
    tuning_table,
)

_ORDER: tuple[Algorithm, ...] = ("tree", "ring", "nvls")
_PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
#: an all-reduce moves each byte twice; LL sends flags with the data and gets twice that weight
_TRAFFIC_PER_BYTE = 2
_LL_TRAFFIC = 4
#: no time of NCCL's table is above this, us
_NEVER = 3.6e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What NCCL runs for one size. ``channels`` are used, numbered 0 to ``channels - 1``.

    ``model_time_us`` is the time NCCL's table gives, a means of choosing, not a prediction.
    """

    algo: Algorithm
    proto: Protocol
    channels: int
    threads: int
    model_time_us: float


class _Clock(NamedTuple):
    """An enabled combination and NCCL's own latency and bandwidth (GB/s) of it, as C floats."""

    algo: Algorithm
    proto: Protocol
    latency_us: float
    bandwidth: float


@dataclass(frozen=True)
class Selector:
    """NCCL's choice per size for one communicator."""

    comm: Communicator

    @cached_property
    def table(self) -> Table:
        """Latency, bandwidth and thread limit per (algo, proto)."""
        return tuning_table(self.comm)

    @cached_property
    def _thresholds(self) -> dict[tuple[str, str], int]:
        return thread_thresholds(self.comm)

    def model_time_us(self, algo: str, proto: str, size_bytes: int) -> float | None:
        """NCCL's table time, us; None where the combination is disabled."""
        clock = self._clocks.get((algo, proto))
        return None if clock is None else self._time_us(clock, size_bytes)

    @cached_property
    def _clocks(self) -> "dict[tuple[str, str], _Clock]":
        """What is enabled, in NCCL's order: of equal times the first wins."""
        return {
            (algo, proto): _Clock(algo, proto, f32(entry.latency_us), f32(entry.bandwidth))
            for algo in _ORDER
            for proto in _PROTOCOLS
            if (entry := self.table[algo, proto]).bandwidth != 0
        }

    def _time_us(self, clock: "_Clock", size_bytes: int) -> float:
        bandwidth, latency = clock.bandwidth, clock.latency_us
        if clock.algo == "tree":
            step = (size_bytes >> 6).bit_length() - 1
            row = v.TREE_CORRECTION[PROTOCOLS.index(clock.proto)]
            if 0 <= step < len(row):
                bandwidth = f32(bandwidth * f32(row[step]))
        comm = self.comm
        share = size_bytes // (comm.num_channels * comm.num_ranks)
        if comm.num_nodes > 1 and share >= 64 and (clock.algo, clock.proto) == ("ring", "Simple"):
            latency = f32(latency * (1.9 if comm.min_cc < 80 else 1.4))
        return f32(latency + f32(f32(size_bytes) / f32(1000 * bandwidth)))

    def choose(self, size_bytes: int) -> Choice:
        """The choice for a message of ``size_bytes`` (bytes of the whole vector).

        Raises ``ValueError`` for a size below 1 and where the settings leave nothing to run.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes {size_bytes} must be at least 1 byte")
        choice = self._choices.get(size_bytes)
        if choice is None:
            choice = self._choices[size_bytes] = self._choose(int(size_bytes))
        return choice

    def switch_points(self, low: int, high: int) -> list[tuple[int, Choice]]:
        """Powers of two in low..high (bytes) at which algorithm or protocol change, the first
        size included."""
        points: list[tuple[int, Choice]] = []
        size = low
        while size <= high:
            choice = self.choose(size)
            last = points[-1][1] if points else None
            if last is None or (last.algo, last.proto) != (choice.algo, choice.proto):
                points.append((size, choice))
            size *= 2
        return points

    @cached_property
    def _choices(self) -> dict[int, Choice]:
        """Choices made so far, by size."""
        return {}

    def _choose(self, size_bytes: int) -> Choice:
        algo, proto, time = self._best(size_bytes)
        channels, threads = self._size_to_threads(algo, proto, size_bytes)
        comm = self.comm
        most = comm.nvls_channels if algo == "nvls" else comm.num_channels
        used = scheduled_channels(comm, size_bytes, proto, channels, most)
        return Choice(algo=algo, proto=proto, channels=used, threads=threads, model_time_us=time)

    def _best(self, size_bytes: int) -> tuple[Algorithm, Protocol, float]:
        best: _Clock | None = None
        least = _NEVER
        for clock in self._clocks.values():
            time = self._time_us(clock, size_bytes)
            if time < least:
                best, least = clock, time
        if best is None:
            settings = self.comm.settings
            raise ValueError(
                f"NCCL has nothing to run for an all-reduce of {size_bytes} bytes with "
                f"NCCL_ALGO={settings.algo} and NCCL_PROTO={settings.proto}: it fails with "
                f"'no algorithm/protocol available'"
            )
        return best.algo, best.proto, least

    def _size_to_threads(self, algo: str, proto: str, size_bytes: int) -> tuple[int, int]:
        """Channels and threads before scheduling."""
        comm = self.comm
        threads = self.table[algo, proto].max_threads
        if algo == "nvls":
            return comm.nvls_channels, threads
        channels = comm.num_channels
        threshold = self._thresholds[algo, proto]
        while size_bytes < channels * threads * threshold and channels >= 2:
            channels -= 1
        while size_bytes < channels * threads * threshold and threads % 128 == 0:
            threads //= 2
        if proto == "Simple":
            # the split kernel synchronises in warps of its own
            threads += v.WARP if algo == "ring" else 4 * v.WARP
        threads = max(threads // v.WARP, 3) * v.WARP
        return channels, v.MAX_THREADS if algo == "tree" else threads


def scheduled_channels(
    comm: Communicator, size_bytes: int, proto: str, channels: int, most: int
) -> int:
    """Channels that get work when a lone message is cut into cells for up to ``channels``.

    ``most`` is the number of channels that exist for this kind of algorithm.
    """
    least = comm.release.min_traffic_bytes
    weight = _LL_TRAFFIC if proto == "LL" else 1
    traffic = max(least, size_bytes * _TRAFFIC_PER_BYTE * weight)
    channels = min(channels, most)
    if comm.release.min_traffic_per_channel:
        per_channel = max(least, traffic // channels)
    else:
        per_channel = _up(traffic // channels, 16) * 16
    per_byte = _TRAFFIC_PER_BYTE * weight
    cell = _up(_up(least, per_byte), 16) * 16
    cells = _up(size_bytes, cell)
    cells_per_channel = min(cells, _up(per_channel, cell * per_byte))
    first = cells if most == 1 else cells_per_channel
    middle, last = divmod(cells - first, cells_per_channel)
    count = 1 + middle + (last != 0)
    if most < count:
        # more than exist: spread what is left over the channels between
        middle = most - 2
        last = 1
        count = 2 + middle
    return count


def _up(value: int, unit: int) -> int:
    return -(-value // unit)
