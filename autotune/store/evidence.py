"""What trials produce: predictions, repeats, failures, provenance."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import Insert, func, insert, select, update

from autotune.errors import AutotuneError
from autotune.records import Failure, Measurement, Provenance
from autotune.store import codec
from autotune.store.session import Sessions, new_id
from autotune.store.tables import (
    FAILURE,
    MEASUREMENT,
    PREDICTION,
    PROVENANCE,
    TRIAL,
)
from autotune.store.views import RepeatView, StoredFailure
from model.spec import Prediction

T = TypeVar("T")

#: a repeat that was measured is worth waiting for a lock, seconds
_PATIENCE_S = 300.0


class EvidenceQueries(Sessions):
    """Everything measured or predicted, linked to its trial."""

    def add_prediction(self, trial_id: int, prediction: Prediction) -> None:
        """Keep what is expected of a trial at one concurrency."""
        with self.write() as session:
            session.execute(
                insert(PREDICTION).values(
                    trial_id=trial_id,
                    concurrency=prediction.workload.concurrency,
                    stored=datetime.now(UTC),
                    calibration_id=prediction.calibration_id,
                    tokens_per_s=prediction.tokens_per_s.median,
                    record=codec.prediction_to_json(prediction),
                )
            )

    def predictions(self, study_id: int) -> dict[int, dict[int, Prediction]]:
        """trial id -> concurrency -> what was predicted first."""
        query = (
            select(PREDICTION, TRIAL.c.knobs)
            .join(TRIAL, TRIAL.c.id == PREDICTION.c.trial_id)
            .where(TRIAL.c.study_id == study_id)
            .order_by(PREDICTION.c.id)
        )
        found: dict[int, dict[int, Prediction]] = {}
        with self.reading() as session:
            for row in session.execute(query):
                levels = found.setdefault(row.trial_id, {})
                if row.concurrency not in levels:
                    prediction = codec.prediction_from_json(
                        codec.knobs_from_json(row.knobs), row.record
                    )
                    levels[row.concurrency] = prediction
        return found

    def predicted_levels(self, trial_id: int) -> set[int]:
        """Concurrencies of a trial that have a prediction."""
        query = select(PREDICTION.c.concurrency).where(PREDICTION.c.trial_id == trial_id)
        with self.reading() as session:
            return set(session.scalars(query))

    def add_measurement(
        self, study_id: int, trial_id: int, measurement: Measurement
    ) -> Measurement:
        """Commit a repeat, placed in the study's order; waits long for a locked database."""

        def commit() -> Measurement:
            with self.write() as session:
                last = select(func.max(MEASUREMENT.c.order)).where(
                    MEASUREMENT.c.study_id == study_id
                )
                newest = session.scalar(last)
                placed = measurement.model_copy(
                    update={"order": 0 if newest is None else newest + 1}
                )
                session.execute(_measurement_row(study_id, trial_id, placed))
                return placed

        return _patiently(commit)

    def repeats(self, study_id: int) -> list[RepeatView]:
        """The numbers of every repeat in the order taken, warm-up included; reads no JSON."""
        columns = [MEASUREMENT.c[name] for name in RepeatView.__dataclass_fields__]
        query = (
            select(*columns).where(MEASUREMENT.c.study_id == study_id).order_by(MEASUREMENT.c.order)
        )
        with self.reading() as session:
            return [RepeatView(**row._mapping) for row in session.execute(query)]

    def measurements(self, trial_ids: Sequence[int]) -> list[Measurement]:
        """Whole records of the repeats of some trials, in the order taken."""
        query = (
            select(MEASUREMENT.c.record)
            .where(MEASUREMENT.c.trial_id.in_(trial_ids))
            .order_by(MEASUREMENT.c.order)
        )
        with self.reading() as session:
            return [Measurement.model_validate(record) for record in session.scalars(query)]

    def failures(self, study_id: int) -> list[StoredFailure]:
        """Why trials failed, in the order it happened."""
        query = (
            select(FAILURE)
            .join(TRIAL, TRIAL.c.id == FAILURE.c.trial_id)
            .where(TRIAL.c.study_id == study_id)
            .order_by(FAILURE.c.id)
        )
        with self.reading() as session:
            return [
                StoredFailure(row.trial_id, Failure.model_validate(row.record))
                for row in session.execute(query)
            ]

    def set_provenance(self, trial_id: int, provenance: Provenance) -> None:
        """Link a trial to its provenance; equal provenance is stored once."""
        record = provenance.model_dump(mode="json")
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        with self.write() as session:
            query = select(PROVENANCE.c.id).where(PROVENANCE.c.sha256 == digest)
            found = session.scalar(query)
            if found is None:
                row = insert(PROVENANCE).values(sha256=digest, record=record)
                found = new_id(session.execute(row))
            session.execute(update(TRIAL).where(TRIAL.c.id == trial_id).values(provenance_id=found))

    def provenance(self, trial_id: int) -> Provenance | None:
        """Where the repeats of a trial come from."""
        query = (
            select(PROVENANCE.c.record)
            .join(TRIAL, TRIAL.c.provenance_id == PROVENANCE.c.id)
            .where(TRIAL.c.id == trial_id)
        )
        with self.reading() as session:
            record = session.scalar(query)
            return None if record is None else Provenance.model_validate(record)


def _patiently(commit: Callable[[], T]) -> T:
    """Try again while the database is locked, so that no measured repeat is lost."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return commit()
        except AutotuneError as error:
            if "is locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _measurement_row(study_id: int, trial_id: int, measurement: Measurement) -> Insert:
    failure = measurement.failure
    return insert(MEASUREMENT).values(
        study_id=study_id,
        trial_id=trial_id,
        knobs_id=measurement.knobs_id,
        concurrency=measurement.concurrency,
        repeat=measurement.repeat,
        order=measurement.order,
        started=measurement.started,
        ended=measurement.ended,
        tokens_per_s=measurement.tokens_per_s,
        ttft_ms=measurement.ttft_ms,
        tpot_ms=measurement.tpot_ms,
        accept_length=measurement.accept_length,
        output_check=measurement.output_check,
        failure_kind=None if failure is None else failure.kind,
        record=measurement.model_dump(mode="json"),
    )
