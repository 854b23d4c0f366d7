"""One rank: a process started by ``engine.supervisor`` with its environment already in place.

Run as ``python -m engine.worker --connection FD --lifeline FD --memory FD``. Its environment (NCCL,
OMP) is set by exec, before anything here is imported, so libraries read it through C getenv as if a
shell had exported it. Torch is imported only after the first message.
"""

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine.config import LaunchConfig, SpeculationConfig
from engine.errors import EngineError
from engine.lifeline import c_environment, loaded_library, tie_to_parent
from engine.messages import (
    AllreduceBench,
    Beat,
    Close,
    Environment,
    Failed,
    Generate,
    Rendezvous,
    Reply,
    Start,
)
from engine.results import AllreduceTime, WorkerEnvironment

if TYPE_CHECKING:
    import torch

    from engine.collectives import Group
    from engine.device_memory import Meter
    from engine.executor import Executor

_BEAT_S = 1.0
_WARMUP = 5
#: how torch, CUDA, cuBLAS and the CPU allocator say it; only the first has an exception of its own
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate")


class Worker:
    """A started rank."""

    def __init__(
        self, connection: Connection, config: LaunchConfig, rank: int, memory_fd: int
    ) -> None:
        import torch

        from engine import runner
        from engine.build import build, resident, resolve

        self.connection, self.config, self.rank = connection, config, rank
        self._beat_s = perf_counter()
        torch.set_num_threads(config.host.threads)
        self.device, self.meter = _device(config, rank)
        shapes = resolve(config)
        self.group = self._join(memory_fd)
        executor, draft_model = build(config, shapes, self.group, self.device, self.beat)
        self.executor: Executor = executor
        if self.device.type == "cuda":
            executor.resident = resident(executor, draft_model, config)
        self.runner: runner.Runner | None = None
        if rank == 0:
            self.runner = runner.Runner(
                executor,
                draft_model,
                slots=config.max_concurrency,
                eos_ids=shapes.target.eos_ids,
                beat=self.beat,
            )

    def _join(self, memory_fd: int) -> "Group":
        """Meet the other ranks at a port that rank 0 was given by the kernel: no race for it."""
        from engine.collectives import create_group, serve_store

        config = self.config
        store, port = None, 0
        meets = config.device == "cuda" or config.collectives_backend != "one_shot"
        if self.rank == 0 and config.tp > 1 and meets:
            store, port = serve_store(config.tp, config.timeout_s)
        if self.rank == 0:
            self.connection.send(Rendezvous(port))
        else:
            port = self.connection.recv().port
        return create_group(
            config.collectives_backend,
            rank=self.rank,
            tp=config.tp,
            store=store,
            store_port=port,
            memory_fd=memory_fd,
            # the parent's watchdog speaks first: it sees which rank is stuck
            timeout_s=2 * config.timeout_s + 10,
            device=self.device,
            shares_gpu=config.shares_gpu,
        )

    def beat(self) -> None:
        """Tell the parent that work goes on, at most once a second."""
        if perf_counter() - self._beat_s > _BEAT_S:
            self._beat_s = perf_counter()
            self.connection.send(Beat())

    def handle(self, message: object) -> object:
        """Run one command; returns the reply's value."""
        if isinstance(message, Generate):
            return self._generate(message)
        if isinstance(message, Environment):
            return _environment(self.rank, self.device)
        assert isinstance(message, AllreduceBench)
        return self._allreduce_bench(message)

    def _generate(self, message: Generate) -> object:
        if self.meter is not None:
            _reset_peak()
        if self.runner is None:
            self.executor.follow()
            return self._peak_memory_bytes()
        run = self.runner.run(
            list(message.requests),
            SpeculationConfig.model_validate_json(message.speculation_json),
            concurrency=message.concurrency,
            margins=message.margins,
            timed=message.timed,
        )
        return replace(run, peak_memory_bytes=self._peak_memory_bytes())

    def _peak_memory_bytes(self) -> int | None:
        """Most memory of its GPU that this rank needed since the last reset; None on a CPU."""
        import torch

        if self.meter is None:
            return None
        allocated = torch.cuda.max_memory_allocated(self.device)
        return self.meter.peak_bytes(allocated, torch.cuda.memory_reserved(self.device))

    def _allreduce_bench(self, message: AllreduceBench) -> tuple[AllreduceTime, ...]:
        import torch

        dtype: torch.dtype = getattr(torch, self.config.dtype)
        results = []
        for size in message.sizes_bytes:
            count = max(size // dtype.itemsize, 1)
            x = torch.zeros(count, dtype=dtype, device=self.device)
            reduce = partial(self.group.all_reduce, x)
            times = [self._time_us(reduce) for _ in range(_WARMUP + message.repeats)][_WARMUP:]
            median = sorted(times)[len(times) // 2]
            results.append(AllreduceTime(size_bytes=size, median_us=median, times_us=tuple(times)))
            self.beat()
        return tuple(results)

    def _time_us(self, call: Callable[[], None]) -> float:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start_s = perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - start_s) * 1e6


def _reset_peak() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()


def _device(config: LaunchConfig, rank: int) -> "tuple[torch.device, Meter | None]":
    import torch

    from engine.device_memory import Meter
    from engine.errors import invalid
    from engine.placement import bind, gpu_numa_node

    node, meter = None, None
    if config.device == "cuda":
        found, index = torch.cuda.device_count(), config.device_of(rank)
        if found <= index:
            wanted = f"tp {config.tp}" if config.devices is None else f"devices {config.devices}"
            raise invalid(
                f"device 'cuda' with {wanted}: this host shows {found} GPUs; "
                "use device: cpu or a smaller tp"
            )
        properties: Any = torch.cuda.get_device_properties(index)
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
            f"{properties.pci_device_id:02x}.0"
        )
        # before the context exists, which is part of what this rank takes
        meter = Meter(address)
        torch.cuda.set_device(index)
        node = gpu_numa_node(address)
    if config.host.numa_bind:
        bind(rank, config.tp, node)
    on_gpu = config.device == "cuda"
    device = torch.device("cuda", config.device_of(rank)) if on_gpu else torch.device("cpu")
    return device, meter


def _environment(rank: int, device: "torch.device") -> WorkerEnvironment:
    import os

    import torch

    version = None
    if device.type == "cuda":
        parts: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        version = ".".join(str(p) for p in parts)
    return WorkerEnvironment(
        rank=rank,
        pid=os.getpid(),
        environment=c_environment(),
        nccl_library=loaded_library("libnccl"),
        nccl_version=version,
    )


def classify(error: BaseException, stage: str, rank: int) -> Failed:
    """What an exception in a worker means to the caller."""
    if isinstance(error, EngineError):
        fatal = stage == "start"
        return Failed(error.kind, error.stage, error.message, fatal, secondary=False)
    text = " ".join(str(error).split()) or type(error).__name__
    name = type(error).__name__
    if isinstance(error, MemoryError) or any(w in text for w in _OUT_OF_MEMORY):
        return Failed("oom", stage, f"rank {rank} ran out of memory: {text}", True, False)
    if isinstance(error, ValueError) and stage == "start":
        return Failed("invalid", stage, text, True, False)
    peer = name in ("DistBackendError", "DistNetworkError", "DistStoreError", "TimeoutError")
    peer = peer or any(w in text for w in ("gloo", "NCCL", "Connection closed by peer"))
    return Failed("crash", stage, f"rank {rank}: {name}: {text}", True, peer)


def serve(connection: Connection, memory_fd: int) -> None:
    """Start, then run commands until told to close or the parent is gone."""
    stage, rank = "start", -1
    try:
        start = connection.recv()
        assert isinstance(start, Start)
        rank = start.rank
        config = LaunchConfig.model_validate_json(start.config_json)
        import torch

        with torch.inference_mode():
            worker = Worker(connection, config, rank, memory_fd)
            connection.send(Reply(None))
            while not isinstance(message := connection.recv(), Close):
                stage = "bench" if isinstance(message, AllreduceBench) else "generate"
                try:
                    connection.send(Reply(worker.handle(message)))
                except EngineError as error:
                    connection.send(classify(error, stage, rank))
    except EOFError:
        return
    # the one place where a worker's failure is recorded for the parent
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        connection.send(classify(error, stage, rank))
        sys.exit(1)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    for name in ("connection", "lifeline", "memory"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    # Ctrl-C reaches the whole foreground group; the parent decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tie_to_parent(args.lifeline)
    serve(Connection(args.connection), args.memory)


if __name__ == "__main__":
    main()
