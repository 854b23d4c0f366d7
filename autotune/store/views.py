"""What the store gives back: frozen values, detached from any session."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.records import Failure
from model.spec import Knobs, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """A stored study."""

    id: int
    name: str
    created: datetime
    text: str
    label: str
    base_dir: Path
    machine: dict[str, Any] | None
    workloads: dict[int, Workload]
    #: running, stopped, finished or failed
    state: str
    stop_requested: bool
    result: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A stored trial without its repeats."""

    id: int
    study_id: int
    number: int
    role: str
    origin: str
    knobs: Knobs
    group_id: str | None
    state: str
    worker_id: int | None
    attempts: int
    started: datetime
    ended: datetime | None
    failure_kind: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatView:
    """The numbers of one stored repeat; warm-up repeats are negative."""

    trial_id: int
    knobs_id: str
    concurrency: int
    repeat: int
    order: int
    started: datetime
    ended: datetime
    tokens_per_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    accept_length: float | None
    output_check: str
    failure_kind: str | None

    def metric(self, name: str) -> float | None:
        """tokens_per_s, ttft_ms or tpot_ms."""
        value = {
            "tokens_per_s": self.tokens_per_s,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
        }[name]
        return None if self.failure_kind is not None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A process that works, or worked, on a study."""

    id: int
    host: str
    pid: int
    process_started: float
    started: datetime
    last_seen: datetime
    ended: datetime | None


@dataclass(frozen=True, slots=True)
class StoredFailure:
    """A failure of a trial and where it was kept."""

    trial_id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """A/A difference at one concurrency, as a fraction of the value."""

    concurrency: int
    rel_floor: float
    num_pairs: int
