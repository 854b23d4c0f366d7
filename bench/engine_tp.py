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
#: two ranks on GPU 0: their tensors go through the host, which no graph can capture
SHARED: dict[str, Any] = {
    "tp": 2,
    "devices": [0, 0],
    "collectives": {"backend": "gloo"},
    "cuda_graph": {},
}


def two_gpus(emit: Emit, name: str) -> bool:
    """Whether there are two; says so if not."""
    import torch

    found = torch.cuda.device_count()
    if found < 2:
        emit(row="left out", name=name, error=f"needs 2 GPUs, this machine shows {found}")
    return found >= 2


def stage_tp2(emit: Emit) -> None:
    """Two GPUs: over NVLink, and through host memory."""
    if not two_gpus(emit, "8 layers, 2 GPUs"):
        return
    for name, changes in (
        ("8 layers, 2 GPUs, P2P off", THROUGH_HOST),
        ("8 layers, 2 GPUs, NVLink", {"tp": 2}),
    ):
        try:
            plain_rows(emit, 8, (1, 4, 16), 3, name, **changes)
        except EngineError as error:
            # the other link is still worth measuring
            emit(row="failure", name=name, error=error.message[:500], log=error.log_tail[-3000:])


def stage_tp2spec(emit: Emit) -> None:
    """Two GPUs through host memory: the tiny model's outputs and an EAGLE-3 cycle of a slice."""
    if not two_gpus(emit, "speculation on 2 GPUs"):
        return
    with Engine(config(8, 4, draft={"weights": "random"}, **THROUGH_HOST)) as engine:
        row = measure(engine, 1, K3, 3)
        emit(row="eagle3 k=3", name="8 layers, 2 GPUs, P2P off", layers=8, **row)
    tiny_rows(emit, "tiny, 2 GPUs, P2P off", THROUGH_HOST)


def stage_tp2_one_gpu(emit: Emit) -> None:
    """Sharded kernels are right: in fp32 two ranks on one GPU say what one rank says."""
    asks = tiny_requests(6, 64, 48)
    alone, shared = tiny_config(dtype="float32", cuda_graph=GRAPHS), {"dtype": "float32", **SHARED}
    wrong = _compare(emit, "tiny", alone, tiny_config(**shared), asks, (OFF, CHAIN, TREE))
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
