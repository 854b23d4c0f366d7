"""A hang is stored with what the devices did while it lasted, not after its end."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from contract_harness import context_of, knobs, study_of, workload_of

from autotune import health_watch
from autotune.backends.registry import create_backend
from autotune.health_rules import watch_repeats
from autotune.health_watch import HealthWatch, explained
from autotune.records import Failure, Health

PLAIN = knobs(1, "gloo")
HANG = Failure(kind="hang", stage="measure", message="no sign of life for 300 s")


def gpus(power_w: float, used: float = 100.0) -> tuple[Health, ...]:
    return tuple(
        Health(device=f"gpu{i}", power_w=power_w, power_limit_w=600.0, utilization_percent=used)
        for i in range(2)
    )


def workers_alive() -> bool:
    return any(
        child.status() != psutil.STATUS_ZOMBIE and "engine.worker" in " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
    )


def test_a_hang_keeps_the_reading_from_before_its_workers_were_killed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of("engine", {"device": "cpu", "timeout_s": 200}, checkpoint)
    backend = create_backend("engine", context_of(study, tmp_path))
    backend.open(backend.group(PLAIN))
    load = workload_of(study)
    assert backend.measure(PLAIN, load, 0).failure is None
    # kernels wait at idle power as long as there is a worker, and idle after it
    monkeypatch.setattr(
        "autotune.backends.engine_backend.snapshot",
        lambda device: gpus(92.0) if workers_alive() else gpus(30.0, used=0.0),
    )
    monkeypatch.setattr(health_watch, "_MOST_S", 0.3)
    supervisor = backend._engine._supervisor  # type: ignore[attr-defined]
    supervisor.config = supervisor.config.model_copy(update={"timeout_s": 3.0})
    os.kill(backend.provenance().ranks[0].pid, signal.SIGSTOP)
    measured = backend.measure(PLAIN, load, 1)
    backend.close()
    assert measured.failure is not None
    assert measured.failure.kind == "hang"
    assert measured.health_after == gpus(92.0)
    assert "gpu0 100 % at 92 W" in measured.failure.message
    (found,) = watch_repeats([measured])
    assert (found.id, found.severity) == ("log-spin", "error")


@pytest.mark.parametrize(
    ("failure", "seen", "added"),
    [
        pytest.param(HANG, gpus(92.0), "waits for a peer", id="spinning"),
        pytest.param(HANG, gpus(450.0), None, id="working"),
        pytest.param(HANG, gpus(92.0)[:1], None, id="one-gpu-has-no-peer"),
        pytest.param(HANG, (), None, id="nothing-read"),
        pytest.param(
            HANG.model_copy(update={"kind": "crash"}), gpus(92.0), None, id="another-failure"
        ),
    ],
)
def test_only_a_peer_wait_explains_a_hang(
    failure: Failure, seen: tuple[Health, ...], added: str | None
) -> None:
    message = explained(failure, seen).message
    assert message == failure.message if added is None else added in message


def test_short_work_is_never_disturbed_and_a_late_reading_does_not_count() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def take() -> tuple[Health, ...]:
        begun.set()
        go_on.wait(10)
        return gpus(92.0)

    with HealthWatch(take, timeout_s=60.0) as short:
        pass
    assert not begun.is_set()
    assert short.before(time.monotonic()) == ()
    with HealthWatch(take, timeout_s=0.2) as long:
        assert begun.wait(10)
    # the work ended while that reading was taken: it says nothing about the work
    go_on.set()
    time.sleep(0.2)
    assert long.before(time.monotonic()) == ()


def test_a_reading_of_devices_whose_workers_are_being_ended_does_not_count() -> None:
    idle = threading.Event()
    with HealthWatch(
        lambda: gpus(30.0, used=0.0) if idle.is_set() else gpus(92.0), timeout_s=0.1
    ) as watch:
        assert reads(watch, gpus(92.0))
        noticed_s = time.monotonic()
        idle.set()
        assert reads(watch, gpus(30.0, used=0.0))
    assert watch.before(noticed_s) == gpus(92.0)


def reads(watch: HealthWatch, what: tuple[Health, ...]) -> bool:
    until_s = time.monotonic() + 10
    while watch.before(time.monotonic()) != what and time.monotonic() < until_s:
        time.sleep(0.01)
    return watch.before(time.monotonic()) == what
