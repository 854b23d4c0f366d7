"""Tensor parallelism in ``bench/engine.py``: two GPUs over NCCL, or two ranks that share one."""

from collections.abc import Callable
from typing import Any

from bench.engine_rows import GRAPHS, K3, OFF, config, measure, plain_rows, requests
from bench.engine_tiny import tiny_config, tiny_requests, tiny_rows
from engine.api import Engine
from engine.config import LaunchConfig, SpeculationConfig
from engine.errors import EngineError
from engine.results import Request

Emit = Callable[..., None]

CHAIN = SpeculationConfig(method="eagle3", steps=3, topk=1)
TREE = SpeculationConfig(method="eagle3", steps=5, topk=2, draft_tokens=12)
#: two GPUs whose NCCL goes through host memory, the stand-in for a PCIe host
THROUGH_HOST: dict[str, Any] = {"tp": 2, "environment": {"NCCL_P2P_DISABLE": "1"}}
#: the same with our own all-reduce: small messages in one kernel each
ONE_SHOT: dict[str, Any] = THROUGH_HOST | {
    "collectives": {"backend": "one_shot"},
    # should ranks wait for one another for ever
    "timeout_s": 40.0,
}
#: two ranks on GPU 0: their tensors go through the host, which no graph can capture
SHARED: dict[str, Any] = {
    "tp": 2,
    "devices": [0, 0],
    "collectives": {"backend": "gloo"},
    "cuda_graph": {},
}
#: as ``SHARED``, but small messages through pinned memory, which graphs can capture
SHARED_ONE_SHOT: dict[str, Any] = SHARED | {
    "collectives": {"backend": "one_shot"},
    "cuda_graph": GRAPHS | {"prefill": False},
}


def two_gpus(emit: Emit, name: str) -> bool:
    """Whether there are two; says so if not."""
    import torch

    found = torch.cuda.device_count()
    if found < 2:
        emit(row="left out", name=name, error=f"needs 2 GPUs, this machine shows {found}")
    return found >= 2


def stage_tp2(emit: Emit) -> None:
    """Two GPUs through host memory: NCCL, and our kernel."""
    _plain(emit, "8 layers, 2 GPUs, P2P off", THROUGH_HOST)
    _plain(emit, "8 layers, 2 GPUs, one-shot", ONE_SHOT)


def stage_tp2nvlink(emit: Emit) -> None:
    """Two GPUs over NVLink."""
    _plain(emit, "8 layers, 2 GPUs, NVLink", {"tp": 2})


def stage_tp2ll(emit: Emit) -> None:
    """Through host memory with NCCL told what its own choice is not: LL on 16 channels."""
    nccl = {"algo": "ring", "proto": "LL", "min_channels": 16, "max_channels": 16}
    _plain(emit, "8 layers, 2 GPUs, P2P off, LL x16", THROUGH_HOST | {"nccl": nccl})


def _plain(emit: Emit, name: str, changes: dict[str, Any]) -> None:
    if not two_gpus(emit, name):
        return
    try:
        plain_rows(emit, 8, (1, 4, 16), 3, name, **changes)
    except EngineError as error:
        _failure(emit, name, error)


def _failure(emit: Emit, name: str, error: EngineError) -> None:
    """One way failed; the others are still worth measuring."""
    emit(row="failure", name=name, error=error.message[:500], log=error.log_tail[-3000:])


def stage_tp2spec(emit: Emit) -> None:
    """Two GPUs through host memory: EAGLE-3 cycles of a slice, then the tiny model's outputs.

    The verify's graph off is the story's case: NCCL launched by the host, kernel after kernel.
    """
    if not two_gpus(emit, "speculation on 2 GPUs"):
        return
    eager = {"cuda_graph": GRAPHS | {"verify": False}}
    for name, changes, repeats in (
        ("P2P off", THROUGH_HOST, 3),
        ("P2P off, verify eager", THROUGH_HOST | eager, 2),
        ("one-shot", ONE_SHOT, 3),
    ):
        name = f"8 layers, 2 GPUs, {name}"
        try:
            with Engine(config(8, 1, draft={"weights": "random"}, **changes)) as engine:
                row = measure(engine, 1, K3, repeats)
            emit(row="eagle3 k=3", name=name, layers=8, **row)
        except EngineError as error:
            _failure(emit, name, error)
    tiny_rows(emit, "tiny, 2 GPUs, P2P off", THROUGH_HOST)


def stage_tp2tiny(emit: Emit) -> None:
    """The tiny model's outputs and speeds with our all-reduce."""
    if two_gpus(emit, "tiny, 2 GPUs, one-shot"):
        tiny_rows(emit, "tiny, 2 GPUs, one-shot", ONE_SHOT)


def stage_tp2_one_gpu(emit: Emit) -> None:
    """Sharded kernels are right: in fp32 two ranks on one GPU say what one rank says."""
    asks = tiny_requests(6, 64, 48)
    alone, wrong = tiny_config(dtype="float32", cuda_graph=GRAPHS), 0
    for name, changes in (("tiny", SHARED), ("tiny, one-shot", SHARED_ONE_SHOT)):
        shared = tiny_config(dtype="float32", **changes)
        wrong += _compare(emit, name, alone, shared, asks, (OFF, CHAIN, TREE))
    some = requests(3, 24, 1)
    small = {"max_context": 1024, "dtype": "float32"}
    wrong += _compare(
        emit, "2 layers", config(2, 3, **small), config(2, 3, **small, **SHARED), some, (OFF,)
    )
    if wrong:
        raise EngineError("crash", "bench", f"{wrong} outputs of two ranks differ from one rank's")


def _compare(
    emit: Emit,
    name: str,
    alone: LaunchConfig,
    shared: LaunchConfig,
    asks: list[Request],
    kinds: tuple[SpeculationConfig, ...],
) -> int:
    with Engine(alone) as engine:
        wanted = [r.token_ids for r in engine.generate(asks, OFF, concurrency=1).requests]
    wrong = 0
    with Engine(shared) as engine:
        for spec in kinds:
            run = engine.generate(asks, spec, concurrency=3)
            same = sum(r.token_ids == w for r, w in zip(run.requests, wanted, strict=True))
            wrong += len(asks) - same
            kind = "off" if spec is OFF else f"{spec.steps}/{spec.topk}/{spec.num_tokens}"
            emit(
                row="two ranks",
                name=f"{name}, fp32, one GPU, {kind}",
                batch=3,
                same_outputs=f"{same}/{len(asks)}",
                accept_length=run.counters.accept_length,
                cycle_ms=run.cycle_ms,
                path=run.path,
            )
    return wrong
