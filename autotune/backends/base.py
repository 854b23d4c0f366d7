"""What every backend is: a context that starts something, measures knobs in it, and cleans up.

The loop asks ``group(knobs)`` what a restart separates, opens one group, measures every knobs of
that group inside it, and closes. A repeat that gave no number is a ``Measurement`` whose
``failure`` says why; only ``open`` raises, because without it nothing can be measured at all.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import BaseModel, ValidationError

from autotune.errors import UserError
from autotune.records import Failure, Health, Measurement, Provenance
from model.spec import Knobs, Scalar, Workload

if TYPE_CHECKING:
    from autotune.schemas import Study
    from model.machine import Machine
    from model.predictor import Predictor

#: order and trial of a measurement that the loop has not placed yet
UNPLACED = -1


@dataclass(frozen=True, slots=True)
class Group:
    """What must be restarted together: knobs of equal groups share one ``open``.

    ``settings`` are (dotted knob name, value) pairs, sorted by name.
    """

    settings: tuple[tuple[str, Scalar | None], ...]

    @classmethod
    def of(cls, settings: Mapping[str, Scalar | None]) -> "Group":
        """Build from dotted names in any order."""
        return cls(tuple(sorted(settings.items())))

    @property
    def id(self) -> str:
        """Canonical id: 12 hex digits of the hash of the settings."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def label(self) -> str:
        """Short text: the settings that are not left to a library."""
        chosen = [f"{n}={v}" for n, v in self.settings if v not in (None, "auto", False)]
        return ", ".join(chosen) or "defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """Everything a backend may need from the study that uses it."""

    study: "Study"
    #: folder of the study file; relative paths in the study start here
    study_dir: Path
    machine: "Machine | None"
    #: None when the study has no model of its target; then ``sim`` cannot be used
    predictor: "Predictor | None"
    #: where worker logs go; created when needed
    log_dir: Path


class BackendFailure(Exception):  # noqa: N818 - the vocabulary's word is failure
    """``open`` could not start its group; ``failure`` is what gets stored for every trial of it.

    ``seen``: the devices while it lasted, before anything was ended; empty when nothing was read.
    """

    def __init__(self, failure: Failure, seen: tuple[Health, ...] = ()) -> None:
        super().__init__(f"{failure.kind} at {failure.stage}: {failure.message}")
        self.failure = failure
        self.seen = seen


@runtime_checkable
class Backend(Protocol):
    """A place where knobs are measured. Opened groups never nest; ``close`` may be called twice."""

    name: str

    def group(self, knobs: Knobs) -> Group:
        """Which group these knobs need."""
        ...

    def open(self, group: Group) -> None:
        """Start the group; a group that is open is closed first. Raises ``BackendFailure``."""
        ...

    def measure(self, knobs: Knobs, workload: Workload, repeat: int) -> Measurement:
        """Take one repeat inside the open group; failures are values.

        Trial and order are ``UNPLACED``: the loop fills them. Raises ``RuntimeError`` when no
        group, or the group of other knobs, is open (a fault of the caller, not of the knobs).
        """
        ...

    def provenance(self) -> Provenance:
        """What tells whether two measurements are comparable; allowed at any time."""
        ...

    def close(self) -> None:
        """Stop everything that ``open`` started: processes, ports, device memory."""
        ...


def argument_problems(error: ValidationError, schema: type[BaseModel]) -> UserError:
    """One line for each problem of ``backend.args``: the key, the value, what is known there."""
    problems = []
    for problem in error.errors():
        key = ".".join(("backend.args", *(str(part) for part in problem["loc"])))
        if problem["type"] == "extra_forbidden":
            names = schema.model_fields if len(problem["loc"]) == 1 else ()
            known = f"; known: {', '.join(names)}" if names else ""
            problems.append(f"{key}: unknown argument{known}")
        else:
            text = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{key}: {text} (got {problem['input']!r})")
    return UserError.of_problems(problems)


def require_open(backend: Backend, opened: Group | None, knobs: Knobs) -> None:
    """Raise ``RuntimeError`` unless the group of ``knobs`` is the open one."""
    if opened is None:
        raise RuntimeError(f"backend {backend.name}: measure() before open()")
    wanted = backend.group(knobs)
    if wanted != opened:
        raise RuntimeError(
            f"backend {backend.name}: group {opened.label()!r} is open, "
            f"but these knobs need {wanted.label()!r}; open it first"
        )


def failed_measurement(
    knobs: Knobs,
    workload: Workload,
    repeat: int,
    failure: Failure,
    *,
    started: datetime,
    ended: datetime | None = None,
    health_before: tuple[Health, ...] = (),
    health_after: tuple[Health, ...] = (),
) -> Measurement:
    """A repeat that gave no number; every absent value names the failure as its reason."""
    reason = f"{failure.kind} at {failure.stage}"
    absent = (
        "tokens_per_s",
        "ttft_ms",
        "tpot_ms",
        "cycle_ms",
        "accept_length",
        "acceptance",
        "distinct_experts",
        "memory_gib",
    )
    return Measurement(
        trial=UNPLACED,
        knobs_id=knobs.id,
        concurrency=workload.concurrency,
        repeat=repeat,
        order=UNPLACED,
        started=started,
        ended=ended or datetime.now(UTC),
        unknown=dict.fromkeys(absent, reason),
        health_before=health_before,
        health_after=health_after,
        failure=failure,
    )


def over_memory(memory_gib: float | None, limit_gib: float | None) -> Failure | None:
    """The failure of a repeat that took more GPU memory than the study allows, or None."""
    if memory_gib is None or limit_gib is None or memory_gib <= limit_gib:
        return None
    message = (
        f"took {memory_gib:.2f} GiB of a GPU, constraints.max_memory_gib allows {limit_gib:g} GiB"
    )
    return Failure(kind="oom", stage="check", message=message)


def tail(text: str, max_lines: int = 40, max_chars: int = 4000) -> str:
    """The last lines of a log, bounded so that a failure stays a small record."""
    return "\n".join(text.splitlines()[-max_lines:])[-max_chars:]
