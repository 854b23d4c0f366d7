"""Health of the devices while something runs: what a hang looked like before its end.

A hang in a peer wait shows as full utilisation at idle power, and only as long as the kernels wait:
once the workers are killed the GPUs idle. A thread reads now and then; what counts is the newest
reading that was complete when the hang was noticed, not one of devices whose workers just ended.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from autotune.health_rules import spins
from autotune.records import Failure, Health

#: readings while a worker is silent, before its time is up
_PER_TIMEOUT = 3
#: no oftener: reading costs a process (nvidia-smi)
_LEAST_S, _MOST_S = 0.5, 20.0
#: readings kept: as many may be taken while workers are being ended
_KEPT = 64


class HealthWatch:
    """Reads ``take`` in a thread, first after one period; short work is never disturbed."""

    def __init__(self, take: Callable[[], tuple[Health, ...]], timeout_s: float) -> None:
        self._take = take
        self._period_s = min(max(timeout_s / _PER_TIMEOUT, min(_LEAST_S, timeout_s / 2)), _MOST_S)
        self._ended = threading.Event()
        #: (when it was complete on time.monotonic's clock, reading), oldest first
        self._readings: tuple[tuple[float, tuple[Health, ...]], ...] = ()

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        threading.Thread(
            target=self._run, args=(self._ended,), name="health-watch", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # not joined: a reading in flight may hang with the driver
        self._ended.set()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self._period_s):
            readings = self._take()
            if not ended.is_set():
                # replaced whole: the other thread reads it meanwhile
                self._readings = (*self._readings[-_KEPT:], (time.monotonic(), readings))

    def before(self, noticed_s: float) -> tuple[Health, ...]:
        """The newest reading complete by ``noticed_s`` (``time.monotonic``); empty if none was."""
        complete = [reading for taken_s, reading in self._readings if taken_s <= noticed_s]
        return complete[-1] if complete else ()


def explained(failure: Failure, seen: tuple[Health, ...]) -> Failure:
    """A hang with what the devices did while it lasted; any other failure as it is."""
    if failure.kind != "hang":
        return failure
    waiting = [
        health
        for health in seen
        if health.utilization_percent is not None
        and health.power_w is not None
        and spins(health.utilization_percent, health.power_w, health.power_limit_w)
    ]
    if len(seen) < 2 or not waiting:
        return failure
    shown = ", ".join(
        f"{health.device} {health.utilization_percent:.0f} % at {health.power_w:.0f} W"
        for health in waiting
    )
    message = (
        f"{failure.message}; before it was ended the GPUs were busy at idle power ({shown}): a "
        "kernel waits for a peer (`autotune doctor` for IOMMU and ACS; NCCL_P2P_DISABLE=1 tells "
        "the causes apart)"
    )
    return failure.model_copy(update={"message": message})
