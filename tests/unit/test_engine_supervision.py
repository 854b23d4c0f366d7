"""Workers that die, hang or run out of memory become one error; nothing outlives the parent."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engine.supervisor
from engine.api import Engine
from engine.config import Collectives, LaunchConfig, Nccl, SpeculationConfig, TargetSpec
from engine.errors import EngineError
from engine.results import Request

_SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 100_000,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
#: long enough to be caught in the middle
_LONG = [Request(prompt_ids=(1, 2, 3), max_new_tokens=90_000, ignore_eos=True)]
_SHORT = [Request(prompt_ids=(1, 2, 3), max_new_tokens=4, ignore_eos=True)]
_OFF = SpeculationConfig()


@pytest.fixture(scope="module")
def shape_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(_SHAPE))
    return path


@pytest.fixture(scope="module")
def config(shape_json: Path) -> Callable[..., LaunchConfig]:
    def make(**settings: Any) -> LaunchConfig:
        values: dict[str, Any] = {"tp": 2, "max_context": 95_000, "timeout_s": 200.0, **settings}
        target = TargetSpec(shape=str(shape_json), weights="random")
        return LaunchConfig(target=target, **values)

    return make


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_gone(pids: Iterator[int] | tuple[int, ...] | list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [p for p in left if _alive(p)]
        time.sleep(0.05)
    assert not left, f"still running: {left}"


def _while_generating(engine: Engine, act: Callable[[], None]) -> EngineError:
    """Run ``act`` in the middle of a long generate; the error that generate raised."""
    engine.generate(_SHORT, _OFF)
    timer = threading.Timer(1.0, act)
    timer.start()
    with pytest.raises(EngineError) as caught:
        engine.generate(_LONG, _OFF)
    timer.join()
    return caught.value


@pytest.mark.parametrize("backend", ["gloo", "one_shot"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_a_crash_that_names_it(
    config: Callable[..., LaunchConfig], rank: int, backend: str
) -> None:
    with Engine(config(collectives=Collectives(backend=backend))) as engine:
        pids = engine.pids
        error = _while_generating(engine, lambda: os.kill(pids[rank], signal.SIGKILL))
        assert error.kind == "crash"
        assert f"worker of rank {rank} (pid {pids[rank]}) was ended by SIGKILL" in error.message
        _wait_gone(pids)
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.generate(_SHORT, _OFF)


def test_a_stopped_worker_is_a_hang_that_names_it(config: Callable[..., LaunchConfig]) -> None:
    engine = Engine(config())
    pids = engine.pids
    # a started engine; only the watchdog of the next command is to be short
    engine._supervisor.config = engine.config.model_copy(update={"timeout_s": 4.0})
    error = _while_generating(engine, lambda: os.kill(pids[1], signal.SIGSTOP))
    assert error.kind == "hang"
    assert "no sign of life for 4 s" in error.message
    assert f"rank 1 (pid {pids[1]}, stopped)" in error.message
    _wait_gone(pids)


def test_too_large_a_cache_is_out_of_memory_at_start(config: Callable[..., LaunchConfig]) -> None:
    with pytest.raises(EngineError) as caught:
        Engine(config(max_concurrency=10_000_000))
    assert caught.value.kind == "oom"
    assert caught.value.stage == "start"
    assert "ran out of memory" in caught.value.message


def test_a_host_out_of_processes_is_one_line_and_leaves_none_behind(
    config: Callable[..., LaunchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def spawn(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(_popen(*args, **kwargs))
        return started[0]

    _popen = subprocess.Popen
    monkeypatch.setattr(engine.supervisor.subprocess, "Popen", spawn)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError) as caught:
        Engine(config())
    assert (caught.value.kind, caught.value.stage) == ("crash", "start")
    assert caught.value.message.startswith(
        "2 worker processes cannot be started on this host: Resource temporarily unavailable; "
    )
    assert len(started) == 1
    _wait_gone([started[0].pid])
    assert set(os.listdir("/proc/self/fd")) <= before


def test_kernels_on_a_cpu_are_refused(
    config: Callable[..., LaunchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(EngineError, match="ops 'triton' on device 'cpu': kernels need a GPU"):
        Engine(config(ops="triton"))


def test_a_gpu_asked_for_and_not_there_is_one_line(config: Callable[..., LaunchConfig]) -> None:
    import torch

    if torch.cuda.device_count() >= 2:
        pytest.skip("this host has the GPUs")
    with pytest.raises(EngineError, match=r"this host shows .* GPUs; use device: cpu") as caught:
        Engine(config(device="cuda", ops="reference"))
    assert caught.value.kind == "invalid"


def test_a_wrong_request_leaves_the_engine_usable(config: Callable[..., LaunchConfig]) -> None:
    wrong = [
        (Request(prompt_ids=(1,) * 90, max_new_tokens=30), r"90 prompt tokens \+ 30 .* 100 \(the"),
        (Request(prompt_ids=(), max_new_tokens=3), "0 prompt tokens and 3 new tokens"),
        (Request(prompt_ids=(64,), max_new_tokens=3), "token 64 is outside the vocabulary of 64"),
        (Request(prompt_ids=(1,), max_new_tokens=3, temperature=-1.0), "temperature -1.0"),
        (Request(prompt_ids=(1,), max_new_tokens=3, temperature=float("inf")), "temperature inf"),
        (Request(prompt_ids=(1,), max_new_tokens=3, temperature=math.inf), "temperature inf"),
        (Request(prompt_ids=(1,), max_new_tokens=3, seed=-1), "seed -1 must be 0 or more"),
    ]
    chain = SpeculationConfig(method="eagle3", steps=2, topk=1)
    with Engine(config(tp=1, max_context=100)) as engine:
        for request, message in wrong:
            with pytest.raises(EngineError, match=message) as caught:
                engine.generate([request], _OFF)
            assert caught.value.kind == "invalid"
        with pytest.raises(EngineError, match="no draft"):
            engine.generate(_SHORT, chain)
        with pytest.raises(EngineError, match="concurrency 2 must be between 1 and"):
            engine.generate(_SHORT, _OFF, concurrency=2)
        assert len(engine.generate(_SHORT, _OFF).requests[0].token_ids) == 4


def test_workers_see_the_nccl_settings_and_no_inherited_ones(
    config: Callable[..., LaunchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    settings = config(
        nccl=Nccl(proto="LL", min_channels=2, buffsize=1 << 20),
        environment={"NCCL_DEBUG": "INFO"},
    )
    with Engine(settings) as engine:
        found = engine.environment()
        assert [w.pid for w in found] == list(engine.pids)
    for worker in found:
        seen = {k: v for k, v in worker.environment.items() if k.startswith("NCCL_")}
        assert seen == {
            "NCCL_PROTO": "LL",
            "NCCL_MIN_NCHANNELS": "2",
            "NCCL_BUFFSIZE": "1048576",
            "NCCL_DEBUG": "INFO",
            "NCCL_P2P_DISABLE": "1",
        }


_PARENT = """
    import json, sys
    from engine.api import Engine
    from engine.config import LaunchConfig, SpeculationConfig
    from engine.results import Request

    config = LaunchConfig.model_validate_json(sys.argv[1])
    if sys.argv[2] == "thread":
        import threading
        made = []
        starter = threading.Thread(target=lambda: made.append(Engine(config)))
        starter.start(); starter.join()
        engine = made[0]
    else:
        engine = Engine(config)
    with engine:
        print(json.dumps(engine.pids), flush=True)
        long = Request(prompt_ids=(1, 2), max_new_tokens=90_000, ignore_eos=True)
        engine.generate([long], SpeculationConfig())
"""


def _start_parent(config: LaunchConfig, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = textwrap.dedent(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, config.model_dump_json(), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids: list[int] = json.loads(parent.stdout.readline())
    return parent, pids


@pytest.mark.parametrize("backend", ["gloo", "one_shot"])
def test_no_worker_outlives_a_parent_killed_by_kill_9(
    config: Callable[..., LaunchConfig], backend: str
) -> None:
    parent, pids = _start_parent(config(collectives=Collectives(backend=backend)), "main")
    time.sleep(0.5)
    assert all(_alive(p) for p in pids)
    parent.kill()
    parent.communicate()
    _wait_gone(pids)


def test_a_stopped_worker_does_not_outlive_its_parent_once_continued(
    config: Callable[..., LaunchConfig],
) -> None:
    """The kernel's signal is pending while the worker cannot run any Python."""
    parent, pids = _start_parent(config(), "main")
    os.kill(pids[1], signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    os.kill(pids[1], signal.SIGCONT)
    _wait_gone(pids)


def test_ctrl_c_ends_the_parent_and_all_workers(config: Callable[..., LaunchConfig]) -> None:
    parent, pids = _start_parent(config(), "main")
    time.sleep(0.5)
    os.killpg(parent.pid, signal.SIGINT)
    try:
        _, errors = parent.communicate(timeout=30)
    finally:
        parent.kill()
    assert "KeyboardInterrupt" in errors
    _wait_gone(pids)


def test_workers_live_on_when_the_thread_that_started_them_ends(
    config: Callable[..., LaunchConfig],
) -> None:
    parent, pids = _start_parent(config(), "thread")
    time.sleep(1.0)
    assert parent.poll() is None
    assert all(_alive(p) for p in pids)
    parent.kill()
    parent.communicate()
    _wait_gone(pids)
