"""The engine backend on a GPU when things go wrong: hangs, memory that runs out, what is freed."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from contract_harness import context_of, knobs, study_of, workload_of
from gpu_faults import (
    holders,
    lets_go,
    only_free,
    own_context,
    settles_at,
    spin_on_signal,
    used_mib,
)

from autotune.backends.base import Backend, BackendFailure
from autotune.backends.registry import create_backend
from autotune.schemas import Study
from engine.api import Engine
from engine.config import LaunchConfig
from engine.errors import EngineError
from engine.results import Request
from model.spec import Knobs

pytestmark = pytest.mark.gpu

GRAPHS = {f"cuda_graph.{name}": False for name in ("decode", "draft", "verify", "extend")}
PLAIN = Knobs.of({**knobs(1, "nccl").values(), **GRAPHS})
CHAIN = Knobs.of({**knobs(1, "nccl", method="eagle3", steps=3, topk=1).values(), **GRAPHS})
TREE = Knobs.of(
    {**knobs(1, "nccl", method="eagle3", steps=3, topk=2, draft_tokens=8).values(), **GRAPHS}
)
SPACE: dict[str, object] = {"parallel.tp": [1], **{name: [False] for name in GRAPHS}}


def study(checkpoint: Path, **args: object) -> Study:
    """fp32, so that output must be equal before and after; nothing to compile."""
    args = {"device": "cuda", "dtype": "float32", "ops": "reference", "timeout_s": 120, **args}
    return study_of("engine", args, checkpoint, SPACE)


def backend_of(study: Study, folder: Path) -> Backend:
    return create_backend("engine", context_of(study, folder))


def living_workers() -> list[int]:
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "engine.worker" in " ".join(child.cmdline())
    ]


def soon_hung(backend: Backend, timeout_s: float = 3.0) -> None:
    """Shorten the watchdog of a started engine: starting takes longer than a test of it should."""
    supervisor = backend._engine._supervisor  # type: ignore[attr-defined]
    supervisor.config = supervisor.config.model_copy(update={"timeout_s": timeout_s})


@pytest.mark.parametrize("each", [CHAIN], ids=["chain"])
def test_a_kernel_that_never_ends_is_a_hang_and_everything_is_freed(
    each: Knobs, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spin_on_signal(tmp_path, monkeypatch)
    own_context()
    before_mib = used_mib()
    backend = backend_of(study(checkpoint), tmp_path)
    backend.open(backend.group(each))
    load = workload_of(study(checkpoint))
    assert backend.measure(each, load, 0).failure is None
    (pid,) = (rank.pid for rank in backend.provenance().ranks)
    assert (found := holders()) is None or pid in found
    soon_hung(backend)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    began_s = time.monotonic()
    measured = backend.measure(each, load, 1)
    took_s = time.monotonic() - began_s
    assert measured.failure is not None
    assert measured.failure.kind == "hang", measured.failure
    assert f"pid {pid}" in measured.failure.message
    # the watchdog ended it, not the kernel's own end
    assert took_s < 20
    assert not living_workers()
    assert lets_go([pid], before_mib), f"{used_mib():.0f} MiB in use, {before_mib:.0f} before"
    again = backend.measure(each, load, 2)
    assert again.failure is None, again.failure
    assert again.output_check == "exact"
    (pid,) = (rank.pid for rank in backend.provenance().ranks)
    backend.close()
    assert lets_go([pid], before_mib), f"{used_mib():.0f} MiB in use, {before_mib:.0f} before"


def test_measured_memory_is_what_the_driver_counts_and_is_judged(
    checkpoint: Path, tmp_path: Path
) -> None:
    own_context()
    asked = study(checkpoint)
    before_mib = used_mib()
    backend = backend_of(asked, tmp_path)
    backend.open(backend.group(CHAIN))
    measured = backend.measure(CHAIN, workload_of(asked), 0)
    grown_gib = (used_mib() - before_mib) / 1024
    backend.close()
    assert measured.memory_gib is not None
    # the allocator keeps blocks it has no use for: the driver counts those too
    assert 0.7 * grown_gib < measured.memory_gib <= grown_gib + 0.1
    # a CUDA context alone takes hundreds of MiB
    assert measured.memory_gib > 0.2
    tight = Study.model_validate(
        asked.model_dump(mode="json")
        | {"constraints": {"lossless": True, "max_memory_gib": measured.memory_gib / 2}}
    )
    backend = backend_of(tight, tmp_path)
    backend.open(backend.group(CHAIN))
    refused = backend.measure(CHAIN, workload_of(tight), 0)
    backend.close()
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.stage) == ("oom", "check")
    assert "constraints.max_memory_gib" in refused.failure.message
    assert refused.tokens_per_s is not None


@pytest.mark.parametrize(
    ("free_mib", "target"),
    [
        pytest.param(3000, "slice", id="weights-do-not-fit"),
        pytest.param(150, "tiny", id="no-room-for-a-context"),
    ],
)
def test_a_start_that_does_not_fit_is_oom_and_the_next_one_works(
    free_mib: float, target: str, checkpoint: Path, tmp_path: Path
) -> None:
    own_context()
    small = study(checkpoint)
    asked = small
    if target == "slice":
        # 8 layers of 30B-A3B: about 10 GB in bf16
        shape = {"shape": "qwen3-30b-a3b", "weights": "random", "layers": 8}
        asked = Study.model_validate(
            small.model_dump(mode="json")
            | {"target": shape, "draft": {"weights": "random", "shape": "eagle3"}}
            | {"backend": {"kind": "engine", "args": {"device": "cuda", "timeout_s": 120}}}
        )
    before_mib = used_mib()
    backend = backend_of(asked, tmp_path)
    with only_free(free_mib), pytest.raises(BackendFailure) as failed:
        backend.open(backend.group(PLAIN))
    failure = failed.value.failure
    assert (failure.kind, failure.stage) == ("oom", "start"), failure
    assert "\n" not in failure.message
    assert not living_workers()
    backend.close()
    assert settles_at(before_mib)
    fits = backend_of(small, tmp_path)
    fits.open(fits.group(PLAIN))
    assert fits.measure(PLAIN, workload_of(small), 0).failure is None
    fits.close()


def test_memory_that_runs_out_between_repeats_never_reads_as_a_crash(
    checkpoint: Path, tmp_path: Path
) -> None:
    own_context()
    asked = study(checkpoint)
    backend = backend_of(asked, tmp_path)
    backend.open(backend.group(PLAIN))
    load = workload_of(asked)
    assert backend.measure(PLAIN, load, 0).failure is None
    with only_free(4):
        # new buffers are needed
        measured = backend.measure(TREE, load, 0)
    if measured.failure is not None:
        assert measured.failure.kind == "oom", measured.failure
    assert backend.measure(TREE, load, 1).output_check == "exact"
    backend.close()


def test_ranks_that_wait_for_a_stopped_peer_are_a_hang_also_when_they_share_a_gpu(
    checkpoint: Path,
) -> None:
    own_context()
    before_mib = used_mib()
    config = LaunchConfig.model_validate(
        {"target": {"path": str(checkpoint)}, "device": "cuda", "tp": 2, "devices": [0, 0],
         "collectives": {"backend": "gloo"}, "max_context": 64, "ops": "reference"}
    )  # fmt: skip
    ask = Request(prompt_ids=(5, 6, 7), max_new_tokens=8, ignore_eos=True)
    with Engine(config) as engine:
        engine.generate([ask])
        supervisor = engine._supervisor
        supervisor.config = config.model_copy(update={"timeout_s": 3.0})
        first, second = engine.pids
        os.kill(second, signal.SIGSTOP)
        with pytest.raises(EngineError) as hung:
            engine.generate([ask])
    assert hung.value.kind == "hang"
    assert f"pid {second}, stopped" in hung.value.message
    assert not {first, second} & set(psutil.pids())
    assert lets_go([first, second], before_mib)


def test_a_collective_whose_peer_stopped_is_a_hang_and_everything_is_freed(
    checkpoint: Path, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("a collective needs 2 GPUs")
    own_context()
    before_mib = used_mib()
    each = Knobs.of({**PLAIN.values(), "parallel.tp": 2})
    asked = study_of(
        "engine",
        {"device": "cuda", "dtype": "float32", "timeout_s": 120},
        checkpoint,
        {**SPACE, "parallel.tp": [2]},
    )
    backend = backend_of(asked, tmp_path)
    backend.open(backend.group(each))
    load = workload_of(asked)
    assert backend.measure(each, load, 0).failure is None
    soon_hung(backend)
    pids = [rank.pid for rank in backend.provenance().ranks]
    os.kill(pids[1], signal.SIGSTOP)
    measured = backend.measure(each, load, 1)
    assert measured.failure is not None
    assert measured.failure.kind == "hang", measured.failure
    assert f"pid {pids[1]}, stopped" in measured.failure.message
    assert not living_workers()
    assert lets_go(pids, before_mib)
    assert backend.measure(each, load, 2).failure is None
    backend.close()
