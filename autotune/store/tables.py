"""Our tables. All names start with ``autotune_``: Optuna's tables share the database.

Records are kept whole as JSON; numbers that are searched or summed have a column beside it, so
that summaries of 10,000 repeats read no JSON.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


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


class Table(DeclarativeBase):
    """Base of our tables."""

    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: JSON()}  # noqa: RUF012


class StudyRow(Table):
    """One study: its file as it was, and whether it should go on."""

    __tablename__ = "autotune_study"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    created: Mapped[datetime]
    text: Mapped[str] = mapped_column(Text)
    #: shown in messages about the file
    label: Mapped[str] = mapped_column(Text)
    base_dir: Mapped[str] = mapped_column(Text)
    machine: Mapped[dict[str, Any] | None]
    #: concurrency (as text) -> workload
    workloads: Mapped[dict[str, Any]]
    #: running, stopped, finished or failed
    state: Mapped[str] = mapped_column(String(16))
    stop_requested: Mapped[bool] = mapped_column(default=False)
    #: verdict and what the final comparison gave
    result: Mapped[dict[str, Any] | None]


class TrialRow(Table):
    """One knobs being measured; ``number`` is Optuna's trial number."""

    __tablename__ = "autotune_trial"
    __table_args__ = (
        UniqueConstraint("study_id", "claim", name="uq_autotune_trial_claim"),
        Index("ix_autotune_trial_number", "study_id", "number"),
        Index("ix_autotune_trial_knobs", "study_id", "knobs_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    #: None between the claim and Optuna's number
    number: Mapped[int | None]
    #: "<role>:<what>"; unique, so that two workers never take the same work
    claim: Mapped[str] = mapped_column(String(64))
    #: baseline, aa, search, replicate or final
    role: Mapped[str] = mapped_column(String(16))
    #: why the search proposed it, in one phrase
    origin: Mapped[str] = mapped_column(String(255), default="")
    knobs_id: Mapped[str] = mapped_column(String(16))
    knobs: Mapped[dict[str, Any]]
    group_id: Mapped[str | None] = mapped_column(String(16))
    #: running, complete or failed
    state: Mapped[str] = mapped_column(String(16))
    worker_id: Mapped[int | None] = mapped_column(ForeignKey("autotune_worker.id"))
    attempts: Mapped[int] = mapped_column(default=1)
    started: Mapped[datetime]
    ended: Mapped[datetime | None]
    provenance_id: Mapped[int | None] = mapped_column(ForeignKey("autotune_provenance.id"))
    #: kind of the failure that ended the trial
    failure_kind: Mapped[str | None] = mapped_column(String(32))


class PredictionRow(Table):
    """What was expected of a trial at one concurrency, stored before it was measured."""

    __tablename__ = "autotune_prediction"
    __table_args__ = (Index("ix_autotune_prediction_trial", "trial_id", "concurrency"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("autotune_trial.id"))
    concurrency: Mapped[int]
    stored: Mapped[datetime]
    calibration_id: Mapped[str] = mapped_column(String(64))
    tokens_per_s: Mapped[float | None]
    record: Mapped[dict[str, Any]]


class MeasurementRow(Table):
    """One repeat, committed when it was taken."""

    __tablename__ = "autotune_measurement"
    __table_args__ = (
        UniqueConstraint("trial_id", "concurrency", "repeat", name="uq_autotune_measurement"),
        Index("ix_autotune_measurement_order", "study_id", "order"),
        Index("ix_autotune_measurement_knobs", "study_id", "knobs_id", "concurrency"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    trial_id: Mapped[int] = mapped_column(ForeignKey("autotune_trial.id"))
    knobs_id: Mapped[str] = mapped_column(String(16))
    concurrency: Mapped[int]
    repeat: Mapped[int]
    order: Mapped[int]
    started: Mapped[datetime]
    ended: Mapped[datetime]
    tokens_per_s: Mapped[float | None]
    ttft_ms: Mapped[float | None]
    tpot_ms: Mapped[float | None]
    accept_length: Mapped[float | None]
    output_check: Mapped[str] = mapped_column(String(16))
    failure_kind: Mapped[str | None] = mapped_column(String(32))
    record: Mapped[dict[str, Any]]


class FailureRow(Table):
    """A failure that has no repeat to stand in (a group that did not start, a dead worker)."""

    __tablename__ = "autotune_failure"
    __table_args__ = (Index("ix_autotune_failure_trial", "trial_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("autotune_trial.id"))
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(32))
    record: Mapped[dict[str, Any]]


class ProvenanceRow(Table):
    """Where measurements come from; trials with equal provenance share a row."""

    __tablename__ = "autotune_provenance"
    __table_args__ = (UniqueConstraint("sha256", name="uq_autotune_provenance_sha256"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(String(64))
    record: Mapped[dict[str, Any]]


class CalibrationRow(Table):
    """Fitted constants after some trial, with the calibration they came from."""

    __tablename__ = "autotune_calibration"
    __table_args__ = (
        UniqueConstraint("study_id", "calibration_id", name="uq_autotune_calibration"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    calibration_id: Mapped[str] = mapped_column(String(64))
    parent_id: Mapped[str | None] = mapped_column(String(64))
    stored: Mapped[datetime]
    record: Mapped[dict[str, Any]]


class NoiseFloorRow(Table):
    """A/A difference at one concurrency, as a fraction."""

    __tablename__ = "autotune_noise_floor"
    __table_args__ = (UniqueConstraint("study_id", "concurrency", name="uq_autotune_noise_floor"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    concurrency: Mapped[int]
    stored: Mapped[datetime]
    rel_floor: Mapped[float]
    num_pairs: Mapped[int]


class WorkerRow(Table):
    """One process that works on a study; tells live from dead ones and counts the time used."""

    __tablename__ = "autotune_worker"
    __table_args__ = (Index("ix_autotune_worker_study", "study_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    #: start time of the process, so that a reused pid is not taken for it
    process_started: Mapped[float]
    started: Mapped[datetime]
    last_seen: Mapped[datetime]
    ended: Mapped[datetime | None]


class EventRow(Table):
    """What happened besides repeats: server starts, resumes, stops, warnings."""

    __tablename__ = "autotune_event"
    __table_args__ = (Index("ix_autotune_event_kind", "study_id", "kind"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("autotune_study.id"))
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(32))
    detail: Mapped[dict[str, Any]]
