"""The one exception the engine's callers see."""

import time
from typing import Literal

ErrorKind = Literal["oom", "crash", "hang", "invalid"]


class EngineError(Exception):
    """Why the engine gave no result.

    ``kind``: "invalid" is a mistake in what was asked (the engine, if started, stays usable),
    "oom", "crash" and "hang" are failures. ``stage`` is "start", "generate", "bench" or "close".
    ``log_tail`` holds the last lines the failing worker wrote. ``noticed_s`` is when it was found,
    on ``time.monotonic``'s clock: before the engine ended any worker because of it.
    """

    def __init__(self, kind: ErrorKind, stage: str, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.stage = stage
        self.message = message
        self.log_tail = log_tail
        self.noticed_s = time.monotonic()

    def __reduce__(self) -> tuple[object, ...]:
        return (EngineError, (self.kind, self.stage, self.message, self.log_tail))


def invalid(message: str, stage: str = "start") -> EngineError:
    """A mistake by the user: one clear line."""
    return EngineError("invalid", stage, message)
