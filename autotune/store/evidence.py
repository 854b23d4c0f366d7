"""What trials produce: predictions, repeats, failures, provenance."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import func, select, update

from autotune.errors import AutotuneError
from autotune.records import Failure, Measurement, Provenance
from autotune.store import codec
from autotune.store.session import Sessions
from autotune.store.tables import (
    FailureRow,
    MeasurementRow,
    PredictionRow,
    ProvenanceRow,
    TrialRow,
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
            session.add(
                PredictionRow(
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
            select(PredictionRow, TrialRow.knobs)
            .join(TrialRow, TrialRow.id == PredictionRow.trial_id)
            .where(TrialRow.study_id == study_id)
            .order_by(PredictionRow.id)
        )
        found: dict[int, dict[int, Prediction]] = {}
        with self.reading() as session:
            for row, knobs in session.execute(query):
                levels = found.setdefault(row.trial_id, {})
                if row.concurrency not in levels:
                    prediction = codec.prediction_from_json(
                        codec.knobs_from_json(knobs), row.record
                    )
                    levels[row.concurrency] = prediction
        return found

    def add_measurement(
        self, study_id: int, trial_id: int, measurement: Measurement
    ) -> Measurement:
        """Commit a repeat, placed in the study's order; waits long for a locked database."""

        def commit() -> Measurement:
            with self.write() as session:
                last = select(func.max(MeasurementRow.order)).where(
                    MeasurementRow.study_id == study_id
                )
                newest = session.scalar(last)
                placed = measurement.model_copy(
                    update={"order": 0 if newest is None else newest + 1}
                )
                session.add(_measurement_row(study_id, trial_id, placed))
                return placed

        return _patiently(commit)

    def repeats(self, study_id: int) -> list[RepeatView]:
        """The numbers of every repeat in the order taken, warm-up included; reads no JSON."""
        columns = [getattr(MeasurementRow, name) for name in RepeatView.__dataclass_fields__]
        query = (
            select(*columns)
            .where(MeasurementRow.study_id == study_id)
            .order_by(MeasurementRow.order)
        )
        with self.reading() as session:
            return [RepeatView(**row._mapping) for row in session.execute(query)]

    def measurements(self, trial_ids: Sequence[int]) -> list[Measurement]:
        """Whole records of the repeats of some trials, in the order taken."""
        query = (
            select(MeasurementRow.record)
            .where(MeasurementRow.trial_id.in_(trial_ids))
            .order_by(MeasurementRow.order)
        )
        with self.reading() as session:
            return [Measurement.model_validate(record) for record in session.scalars(query)]

    def failures(self, study_id: int) -> list[StoredFailure]:
        """Why trials failed, in the order it happened."""
        query = (
            select(FailureRow)
            .join(TrialRow, TrialRow.id == FailureRow.trial_id)
            .where(TrialRow.study_id == study_id)
            .order_by(FailureRow.id)
        )
        with self.reading() as session:
            return [
                StoredFailure(row.trial_id, Failure.model_validate(row.record))
                for row in session.scalars(query)
            ]

    def set_provenance(self, trial_id: int, provenance: Provenance) -> None:
        """Link a trial to its provenance; equal provenance is stored once."""
        record = provenance.model_dump(mode="json")
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        with self.write() as session:
            query = select(ProvenanceRow.id).where(ProvenanceRow.sha256 == digest)
            found = session.scalar(query)
            if found is None:
                row = ProvenanceRow(sha256=digest, record=record)
                session.add(row)
                session.flush()
                found = row.id
            session.execute(
                update(TrialRow).where(TrialRow.id == trial_id).values(provenance_id=found)
            )

    def provenance(self, trial_id: int) -> Provenance | None:
        """Where the repeats of a trial come from."""
        query = (
            select(ProvenanceRow.record)
            .join(TrialRow, TrialRow.provenance_id == ProvenanceRow.id)
            .where(TrialRow.id == trial_id)
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


def _measurement_row(study_id: int, trial_id: int, measurement: Measurement) -> MeasurementRow:
    failure = measurement.failure
    return MeasurementRow(
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
