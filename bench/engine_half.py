"""Stage ``half`` of ``bench/engine.py``: one of two ranks alone on one GPU, nobody to wait for.

The rank holds half of every sharded weight and its sums stay its own: what two GPUs compute in a
step, without what they exchange. Added to the all-reduces measured on two GPUs it tells what a
change of kernels does there, where only one GPU is at hand.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.engine_rows import LONG, OFF, WARM, config, requests
from engine.build import build, resident, resolve
from engine.runner import Runner

Emit = Callable[..., None]
BATCHES, REPEATS = (1, 4, 16), 3


class Half:
    """Rank 0 of two whose peer says nothing."""

    rank, tp = 0, 2

    def all_reduce(self, x: torch.Tensor) -> None:
        """Nothing is added."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The peer's part is like this one."""
        return torch.stack((x, x))

    gather = all_gather

    def broadcast(self, x: torch.Tensor) -> None:
        """Nobody listens."""

    broadcast_host = broadcast


@torch.inference_mode()
def half_runner(layers: int, batch: int) -> Runner:
    """Rank 0's engine in this process."""
    launch = config(layers, batch, tp=2)
    executor, head = build(launch, resolve(launch), Half(), torch.device("cuda", 0))
    executor.resident = resident(executor, head, launch)
    return Runner(executor, head, slots=batch, eos_ids=())


@torch.inference_mode()
def run_once(batch: int, new: int) -> Any:
    """One run of a shallow rank: what a warm-up compiles."""
    return half_runner(2, batch).run(requests(batch, new, 1), OFF, concurrency=batch)


@torch.inference_mode()
def stage_half(emit: Emit) -> None:
    """A step of one rank of two, 8 layers, by batch size."""
    runner = half_runner(8, max(BATCHES))
    for batch in BATCHES:
        runner.run(requests(batch, WARM, 0), OFF, concurrency=batch)
        runs = [
            runner.run(requests(batch, LONG, seed), OFF, concurrency=batch)
            for seed in range(1, REPEATS + 1)
        ]
        steps_ms = [run.cycle_ms for run in runs]
        emit(
            row="half",
            name="8 layers, one rank of two, nothing exchanged",
            layers=8,
            batch=batch,
            cycle_ms=statistics.median(steps_ms),
            all_ms=steps_ms,
            phases_ms={name: round(ms, 4) for name, ms in runs[-1].phases_ms.items()},
            distinct_experts=runs[-1].distinct_experts,
            path=runs[-1].path,
            graphs=dict(runs[-1].graphs),
        )
