"""Our tables. All names start with ``autotune_``: Optuna's tables share the database.

Records are kept whole as JSON; numbers that are searched or summed have a column beside it, so
that summaries of 10,000 repeats read no JSON. Plain tables: mapped classes take longer to import
and to set up than a command that reads takes to answer.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.types import TypeEngine


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC; SQLite forgets time zones, so they are put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


METADATA = MetaData()


def _key() -> Column[int]:
    return Column("id", Integer, primary_key=True)


def _to(name: str, table: str, *, required: bool = True) -> Column[int]:
    """A reference to a row of another table."""
    return Column(name, Integer, ForeignKey(f"{table}.id"), nullable=not required)


def _has(name: str, kind: TypeEngine[Any] | type[TypeEngine[Any]], **options: Any) -> Column[Any]:
    """A column that every row fills."""
    return Column(name, kind, nullable=False, **options)


#: one study: its file as it was, and whether it should go on
STUDY = Table(
    "autotune_study",
    METADATA,
    _key(),
    _has("name", String(255), unique=True),
    _has("created", UtcDateTime),
    _has("text", Text),
    #: shown in messages about the file
    _has("label", Text),
    _has("base_dir", Text),
    Column("machine", JSON),
    #: concurrency (as text) -> workload
    _has("workloads", JSON),
    #: running, stopped, finished or failed
    _has("state", String(16)),
    _has("stop_requested", Boolean, default=False),
    #: verdict and what the final comparison gave
    Column("result", JSON),
)

#: one knobs being measured; ``number`` is Optuna's trial number
TRIAL = Table(
    "autotune_trial",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    #: None between the claim and Optuna's number
    Column("number", Integer),
    #: "<role>:<what>"; unique, so that two workers never take the same work
    _has("claim", String(64)),
    #: baseline, aa, search, replicate or final
    _has("role", String(16)),
    #: why the search proposed it, in one phrase
    _has("origin", String(255), default=""),
    _has("knobs_id", String(16)),
    _has("knobs", JSON),
    Column("group_id", String(16)),
    #: running, complete or failed
    _has("state", String(16)),
    _to("worker_id", "autotune_worker", required=False),
    _has("attempts", Integer, default=1),
    _has("started", UtcDateTime),
    Column("ended", UtcDateTime),
    _to("provenance_id", "autotune_provenance", required=False),
    #: kind of the failure that ended the trial
    Column("failure_kind", String(32)),
    UniqueConstraint("study_id", "claim", name="uq_autotune_trial_claim"),
    Index("ix_autotune_trial_number", "study_id", "number"),
    Index("ix_autotune_trial_knobs", "study_id", "knobs_id"),
)

#: what was expected of a trial at one concurrency, stored before it was measured
PREDICTION = Table(
    "autotune_prediction",
    METADATA,
    _key(),
    _to("trial_id", "autotune_trial"),
    _has("concurrency", Integer),
    _has("stored", UtcDateTime),
    _has("calibration_id", String(64)),
    Column("tokens_per_s", Float),
    _has("record", JSON),
    Index("ix_autotune_prediction_trial", "trial_id", "concurrency"),
)

#: one repeat, committed when it was taken
MEASUREMENT = Table(
    "autotune_measurement",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    _to("trial_id", "autotune_trial"),
    _has("knobs_id", String(16)),
    _has("concurrency", Integer),
    _has("repeat", Integer),
    _has("order", Integer),
    _has("started", UtcDateTime),
    _has("ended", UtcDateTime),
    Column("tokens_per_s", Float),
    Column("ttft_ms", Float),
    Column("tpot_ms", Float),
    Column("accept_length", Float),
    _has("output_check", String(16)),
    Column("failure_kind", String(32)),
    _has("record", JSON),
    UniqueConstraint("trial_id", "concurrency", "repeat", name="uq_autotune_measurement"),
    Index("ix_autotune_measurement_order", "study_id", "order"),
    Index("ix_autotune_measurement_knobs", "study_id", "knobs_id", "concurrency"),
)

#: a failure that has no repeat to stand in (a group that did not start, a dead worker)
FAILURE = Table(
    "autotune_failure",
    METADATA,
    _key(),
    _to("trial_id", "autotune_trial"),
    _has("at", UtcDateTime),
    _has("kind", String(32)),
    _has("record", JSON),
    Index("ix_autotune_failure_trial", "trial_id"),
)

#: where measurements come from; trials with equal provenance share a row
PROVENANCE = Table(
    "autotune_provenance",
    METADATA,
    _key(),
    _has("sha256", String(64)),
    _has("record", JSON),
    UniqueConstraint("sha256", name="uq_autotune_provenance_sha256"),
)

#: fitted constants after some trial, with the calibration they came from
CALIBRATION = Table(
    "autotune_calibration",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    _has("calibration_id", String(64)),
    Column("parent_id", String(64)),
    _has("stored", UtcDateTime),
    _has("record", JSON),
    UniqueConstraint("study_id", "calibration_id", name="uq_autotune_calibration"),
)

#: A/A difference at one concurrency, as a fraction
NOISE_FLOOR = Table(
    "autotune_noise_floor",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    _has("concurrency", Integer),
    _has("stored", UtcDateTime),
    _has("rel_floor", Float),
    _has("num_pairs", Integer),
    UniqueConstraint("study_id", "concurrency", name="uq_autotune_noise_floor"),
)

#: one process that works on a study; tells live from dead ones and counts the time used
WORKER = Table(
    "autotune_worker",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    _has("host", String(255)),
    _has("pid", Integer),
    #: start time of the process, so that a reused pid is not taken for it
    _has("process_started", Float),
    _has("started", UtcDateTime),
    _has("last_seen", UtcDateTime),
    Column("ended", UtcDateTime),
    Index("ix_autotune_worker_study", "study_id"),
)

#: what happened besides repeats: server starts, resumes, stops, warnings
EVENT = Table(
    "autotune_event",
    METADATA,
    _key(),
    _to("study_id", "autotune_study"),
    _has("at", UtcDateTime),
    _has("kind", String(32)),
    _has("detail", JSON),
    Index("ix_autotune_event_kind", "study_id", "kind"),
)
