"""Health of a backend's devices around repeats, without asking the driver twice in a row."""

import math
import time
from collections.abc import Callable

from autotune.records import Health

#: seconds for which a reading holds: asking takes longer than a short repeat
_FRESH_S = 1.0


class RecentHealth:
    """Reads ``take`` (nvidia-smi takes tens of ms a GPU) and keeps the last reading."""

    def __init__(self, take: Callable[[], tuple[Health, ...]]) -> None:
        self._take = take
        self._last: tuple[Health, ...] = ()
        self._read_s = -math.inf

    def now(self) -> tuple[Health, ...]:
        """A reading of this moment."""
        self._last = self._take()
        self._read_s = time.monotonic()
        return self._last

    def recent(self) -> tuple[Health, ...]:
        """The last reading while it is fresh, else a new one."""
        fresh = time.monotonic() - self._read_s < _FRESH_S
        return self._last if fresh else self.now()
