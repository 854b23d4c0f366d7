"""A cycle as a discrete-event simulation: host threads, device streams, collectives.

Every rank has a host process that launches kernels (or one graph) and a device process that runs
them in order; a collective starts when the last rank reaches it. Eager phases become launch-bound
by themselves, ranks that are late make the others wait, and nothing of that is put in by formula.
The analytic step (``model.step``) is the limit of this without jitter; a test says so.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

Process = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel, or a collective when ``size_bytes`` is not None; times in us."""

    term: str
    device_us: float
    host_us: float
    size_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Ops in stream order; captured ones are launched by one call of ``graph_launch_us``."""

    name: str
    ops: tuple[Op, ...]
    graphed: bool
    graph_launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """How launches vary: a factor for the whole run, one for each rank, one for each launch."""

    slow_share: float
    slow_ratio: float
    #: relative standard deviation of a rank's speed in one run
    rank_sd: float
    #: relative standard deviation of single launches
    launch_sd: float
    #: relative standard deviation of a kernel's device time between ranks
    kernel_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleResult:
    """One simulated cycle, us. ``terms_us`` is rank 0's timeline and adds up to ``total_us``."""

    total_us: float
    terms_us: Mapping[str, float]
    #: per rank, time its stream waited in collectives for later ranks
    wait_us: tuple[float, ...]
    slow_host: bool


@dataclass
class CollectiveCache:
    """Times of collectives by size: identical ones are simulated once and reused.

    ``simulate`` gives the time of one all-reduce of a size, us; with ``enabled`` False it runs for
    every collective again (the result must not change).
    """

    simulate: Callable[[float], float]
    enabled: bool = True
    times: dict[float, float] = field(default_factory=dict)
    num_simulated: int = 0

    def time_us(self, size_bytes: float) -> float:
        """Time of one all-reduce."""
        if self.enabled and size_bytes in self.times:
            return self.times[size_bytes]
        self.num_simulated += 1
        self.times[size_bytes] = self.simulate(size_bytes)
        return self.times[size_bytes]


def simulate_cycle(
    phases: Sequence[Phase],
    num_ranks: int,
    host: HostModel,
    seed: int,
    collectives: CollectiveCache | None = None,
    gap_us: float = 0.0,
) -> CycleResult:
    """Run the phases once. Each phase ends with every stream drained (the host reads a result)."""
    rng = np.random.default_rng(seed)
    slow = bool(rng.random() < host.slow_share)
    run = host.slow_ratio if slow else 1.0
    speed = run * np.maximum(1.0 + host.rank_sd * rng.standard_normal(num_ranks), 0.2)
    env = simpy.Environment()
    state = _State(env, num_ranks, collectives)
    for phase in phases:
        barriers = _Barriers(state)
        segments = _segments(phase)
        jitter = 1.0 + host.kernel_sd * rng.standard_normal((num_ranks, len(segments)))
        spent = np.array([op.device_us for op in segments]) * np.maximum(jitter, 0.2)
        launches = np.array([op.host_us for op in segments])
        streams = []
        for rank in range(num_ranks):
            launched: _Queue | float = phase.graph_launch_us
            if not phase.graphed:
                noise = np.maximum(1.0 + host.launch_sd * rng.standard_normal(len(segments)), 0.1)
                launched = _Queue(env)
                env.process(_host(env, launched, (launches * noise * speed[rank]).tolist()))
            body = _stream(state, rank, segments, spent[rank].tolist(), barriers, launched)
            streams.append(env.process(body))
        env.run(simpy.AllOf(env, streams))
    terms = dict(state.terms)
    if gap_us:
        terms["host_gap"] = terms.get("host_gap", 0.0) + gap_us
    return CycleResult(
        total_us=env.now + gap_us,
        terms_us=terms,
        wait_us=tuple(state.wait),
        slow_host=slow,
    )


@dataclass(frozen=True, slots=True)
class _Segment:
    """What a stream does between two decisions: one kernel, several joined ones, a collective."""

    #: (term, share of the time)
    shares: tuple[tuple[str, float], ...]
    device_us: float
    host_us: float
    size_bytes: float | None


class _State:
    """Clock, rank 0's terms, and waits of one simulation."""

    def __init__(self, env: simpy.Environment, ranks: int, cache: CollectiveCache | None) -> None:
        self.env, self.num_ranks, self.cache = env, ranks, cache
        self.terms: dict[str, float] = {}
        self.wait = [0.0] * ranks

    def collective_us(self, segment: _Segment) -> float:
        """Duration of a collective: simulated when there is a simulator, else as given."""
        if self.cache is None or segment.size_bytes is None:
            return segment.device_us
        return self.cache.time_us(segment.size_bytes)


class _Barriers:
    """Collectives of one phase: the last rank to arrive starts each."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._arrived: dict[int, int] = {}
        self._done: dict[int, simpy.Event] = {}

    def join(self, index: int, segment: _Segment) -> simpy.Event:
        """Arrive at collective ``index``; fires, with its duration, when it has completed."""
        env = self._state.env
        done = self._done.setdefault(index, env.event())
        self._arrived[index] = self._arrived.get(index, 0) + 1
        if self._arrived[index] == self._state.num_ranks:
            env.process(self._complete(done, self._state.collective_us(segment)))
        return done

    def _complete(self, done: simpy.Event, duration_us: float) -> Process:
        yield self._state.env.timeout(duration_us)
        done.succeed(duration_us)


class _Queue:
    """Launched kernels of one rank that its stream has not taken yet."""

    __slots__ = ("_env", "_waiter", "launched")

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._waiter: simpy.Event | None = None
        self.launched = 0

    def put(self) -> None:
        """One more kernel is launched."""
        self.launched += 1
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter.succeed()

    def wait(self) -> simpy.Event:
        """Fires at the next launch."""
        self._waiter = self._env.event()
        return self._waiter


def _host(env: simpy.Environment, queue: _Queue, launches_us: list[float]) -> Process:
    """Launch the kernels of one rank one by one."""
    for cost in launches_us:
        yield env.timeout(cost)
        queue.put()


def _stream(
    state: _State,
    rank: int,
    segments: Sequence[_Segment],
    spent_us: list[float],
    barriers: _Barriers,
    launched: _Queue | float,
) -> Process:
    """Run segments in order: each once it is launched, or all after one graph launch (a float)."""
    env = state.env
    last = env.now
    queue = None
    if isinstance(launched, _Queue):
        queue = launched
    else:
        yield env.timeout(launched)
    for index, segment in enumerate(segments):
        if queue is not None and queue.launched <= index:
            yield queue.wait()
        if segment.size_bytes is None:
            yield env.timeout(spent_us[index])
        else:
            arrived = env.now
            duration = yield barriers.join(index, segment)
            state.wait[rank] += env.now - arrived - duration
        if rank == 0:
            for term, share in segment.shares:
                state.terms[term] = state.terms.get(term, 0.0) + share * (env.now - last)
        last = env.now


def _segments(phase: Phase) -> list[_Segment]:
    """One segment per kernel; in a captured phase the kernels between collectives are joined."""
    segments: list[_Segment] = []
    run: list[Op] = []
    for op in phase.ops:
        if op.size_bytes is None and phase.graphed:
            run.append(op)
            continue
        segments += _joined(run)
        run = []
        segments.append(_Segment(((op.term, 1.0),), op.device_us, op.host_us, op.size_bytes))
    return segments + _joined(run)


def _joined(run: Sequence[Op]) -> list[_Segment]:
    total = sum(op.device_us for op in run)
    if not run:
        return []
    by_term: dict[str, float] = {}
    for op in run:
        by_term[op.term] = by_term.get(op.term, 0.0) + op.device_us
    shares = tuple(
        (term, us / total if total else 1.0 / len(by_term)) for term, us in by_term.items()
    )
    return [_Segment(shares, total, 0.0, None)]
