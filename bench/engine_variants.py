"""Stage ``variants48``: how the whole model's step depends on the launch policy and on routing.

One process builds the model once; a variant changes how its kernels are launched (or makes every
step take the same experts), captures anew and is timed, one after the other. GPU time a step, from
events around the graphs.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.engine_profile import runner_here
from bench.engine_rows import OFF, requests
from engine.policy import Policies
from engine.runner import Runner

Emit = Callable[..., None]
NEW, TURNS = 129, 3

#: name -> environment of the policy, and whether every step repeats one token's routing
VARIANTS: dict[str, tuple[dict[str, str], bool]] = {
    "default": ({}, False),
    "nothing early": ({"AUTOTUNE_PDL": "0"}, False),
    "split, nothing early": ({"AUTOTUNE_PDL": "0", "AUTOTUNE_ROUTER": "split"}, False),
    "default, one token": ({}, True),
    "nothing early, one token": ({"AUTOTUNE_PDL": "0"}, True),
}


@contextmanager
def _variant(runner: Runner, environment: dict[str, str], one_token: bool) -> Iterator[None]:
    """Within this block the runner's model runs as the variant says; graphs are made anew."""
    model, resident = runner.executor.model, runner.executor.resident
    assert resident is not None
    embed_VH = model.weights.embed_VH
    kept_VH = embed_VH.clone() if one_token else None
    before = {name: os.environ.get(name) for name in ("AUTOTUNE_PDL", "AUTOTUNE_ROUTER")}
    os.environ.update(environment)
    model.policies = Policies(alone=True)
    if one_token:
        embed_VH.copy_(embed_VH[:1].clone())
    resident.forget()
    try:
        yield
    finally:
        if kept_VH is not None:
            embed_VH.copy_(kept_VH)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@torch.inference_mode()
def stage_variants48(emit: Emit) -> None:
    """One and four sequences."""
    runner = runner_here(48, 4)
    for batch in (1, 4):
        found: dict[str, list[float]] = {name: [] for name in VARIANTS}
        experts: dict[str, Any] = {}
        for name, (environment, one_token) in VARIANTS.items():
            with _variant(runner, environment, one_token):
                for seed in range(TURNS + 1):
                    asks = requests(batch, NEW, seed)
                    run = runner.run(asks, OFF, concurrency=batch)
                    if seed:
                        found[name].append(run.segments_ms["decode"])
                    experts[name] = run.distinct_experts
        for name, times in found.items():
            emit(
                row="variant",
                name=f"48 layers, {name}",
                batch=batch,
                busy_ms=statistics.median(times),
                spread=(max(times) - min(times)) / statistics.median(times),
                distinct_experts=experts[name],
            )
