"""Trials: claimed by one worker, measured, finished or adopted from a dead worker."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, select, update
from sqlalchemy.exc import IntegrityError

from autotune.records import Failure
from autotune.store import codec
from autotune.store.session import Sessions
from autotune.store.tables import FailureRow, TrialRow
from autotune.store.views import TrialView
from model.spec import Knobs

#: columns, not mapped objects: thousands of trials are read to explain one
_VIEWED = tuple(getattr(TrialRow, name) for name in TrialView.__dataclass_fields__)


class TrialQueries(Sessions):
    """Trials and who works on them."""

    def claim_trial(
        self,
        *,
        study_id: int,
        claim: str,
        role: str,
        origin: str,
        knobs: Knobs,
        group_id: str | None,
        worker_id: int | None,
    ) -> int | None:
        """Take a piece of work; its trial id, or None when another worker has it already."""
        row = TrialRow(
            study_id=study_id,
            claim=claim,
            role=role,
            origin=origin[:255],
            knobs_id=knobs.id,
            knobs=codec.knobs_to_json(knobs),
            group_id=group_id,
            state="running",
            worker_id=worker_id,
            started=datetime.now(UTC),
        )
        with self.write() as session:
            taken = select(TrialRow.id).where(
                TrialRow.study_id == study_id, TrialRow.claim == claim
            )
            if session.scalar(taken) is not None:
                return None
            session.add(row)
            try:
                session.flush()
            except IntegrityError:
                session.rollback()
                return None
            return row.id

    def set_number(self, trial_id: int, number: int) -> None:
        """Link a claimed trial to Optuna's."""
        with self.write() as session:
            session.execute(update(TrialRow).where(TrialRow.id == trial_id).values(number=number))

    def adopt_trial(self, trial_id: int, dead_worker_id: int | None, worker_id: int) -> bool:
        """Take over a running trial of a dead worker; False when another worker was faster."""
        with self.write() as session:
            taken = session.execute(
                update(TrialRow)
                .where(
                    TrialRow.id == trial_id,
                    TrialRow.state == "running",
                    TrialRow.worker_id == dead_worker_id,
                )
                .values(worker_id=worker_id, attempts=TrialRow.attempts + 1)
            )
            return bool(getattr(taken, "rowcount", 0))

    def finish_trial(self, trial_id: int, failure: Failure | None) -> None:
        """Mark a trial complete, or failed with its reason."""
        with self.write() as session:
            now = datetime.now(UTC)
            session.execute(
                update(TrialRow)
                .where(TrialRow.id == trial_id)
                .values(
                    state="complete" if failure is None else "failed",
                    ended=now,
                    failure_kind=None if failure is None else failure.kind,
                )
            )
            if failure is not None:
                record = failure.model_dump(mode="json")
                session.add(FailureRow(trial_id=trial_id, at=now, kind=failure.kind, record=record))

    def trials(self, study_id: int) -> list[TrialView]:
        """All trials that have a number, by number."""
        query = (
            select(*_VIEWED)
            .where(TrialRow.study_id == study_id, TrialRow.number.is_not(None))
            .order_by(TrialRow.number)
        )
        with self.reading() as session:
            return [_trial_view(row) for row in session.execute(query)]

    def trials_of_claim(self, study_id: int, claim: str) -> list[TrialView]:
        """The trial that holds a claim; empty before Optuna gave it a number."""
        query = select(*_VIEWED).where(
            TrialRow.study_id == study_id,
            TrialRow.claim == claim,
            TrialRow.number.is_not(None),
        )
        with self.reading() as session:
            return [_trial_view(row) for row in session.execute(query)]

    def unnumbered_trials(self, study_id: int) -> list[TrialRow]:
        """Claims whose worker died before Optuna gave a number."""
        query = select(TrialRow).where(
            TrialRow.study_id == study_id, TrialRow.number.is_(None), TrialRow.state == "running"
        )
        with self.reading() as session:
            rows = list(session.scalars(query))
            session.expunge_all()
            return rows

    def drop_claim(self, trial_id: int) -> None:
        """Remove a claim that never became a trial, so that its work can be taken again."""
        with self.write() as session:
            row = session.get(TrialRow, trial_id)
            if row is not None and row.number is None:
                session.delete(row)


def _trial_view(row: Row[Any]) -> TrialView:
    values = row._asdict()
    return TrialView(**{**values, "knobs": codec.knobs_from_json(values["knobs"])})
