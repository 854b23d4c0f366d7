"""The communicators of a log, each once, with the settings they were made under."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autotune.effect.by_size import DEFAULT_SIZES, Scene
from autotune.effect.reads import workers
from autotune.effect.scene import scene_of_log
from autotune.nccl_log_types import CommLog, NcclLog, ProcessLog
from model.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A communicator with the settings it was made under."""

    process: ProcessLog
    comm: CommLog
    scene: Scene | str
    environment: Mapping[str, str]
    sizes: tuple[int, ...]


def stages_of(log: NcclLog, machine: Machine | None, sizes: tuple[int, ...]) -> Iterator[Stage]:
    """One stage per communicator, from the rank that logs the choices (else any).

    ``sizes`` (bytes) replace those that the log shows.
    """
    seen: set[str] = set()
    processes = sorted(workers(log), key=lambda p: (not p.choices, min(p.ranks, default=1 << 30)))
    for process in processes:
        for index, comm in enumerate(process.comms):
            key = comm.group or f"{process.host}:{process.pid}:{comm.comm}"
            if key in seen or (comm.num_ranks or 0) < 2:
                continue
            seen.add(key)
            comm = _with_all_connections(log, comm)
            own = sorted(
                {c.size_bytes for c in process.choices
                 if c.comm == index and c.function in ("AllReduce", "unknown")}
            )  # fmt: skip
            yield Stage(
                process=process,
                comm=comm,
                scene=scene_of_log(log, process, comm, machine),
                environment=process.environment,
                sizes=sizes or tuple(own) or DEFAULT_SIZES,
            )


def _with_all_connections(log: NcclLog, comm: CommLog) -> CommLog:
    """``comm`` with the connections that its other ranks print: one rank sees its own only."""
    if comm.group is None:
        return comm
    all_of_them = {
        (transport.source, transport.target, transport.via): transport
        for process in log.processes
        for mate in process.comms
        if mate.group == comm.group
        for transport in mate.transports
    }
    return replace(comm, transports=tuple(all_of_them.values()))
