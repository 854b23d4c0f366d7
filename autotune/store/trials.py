"""Trials: claimed by one worker, measured, finished or adopted from a dead worker."""

from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from autotune.records import Failure
from autotune.store import codec
from autotune.store.session import Sessions, new_id
from autotune.store.tables import FAILURE, TRIAL
from autotune.store.views import TrialView
from model.spec import Knobs

#: no more columns than are shown: thousands of trials are read to explain one
_VIEWED = (
    *(TRIAL.c[name] for name in TrialView.__dataclass_fields__),
    TRIAL.c.knobs_id,
)


class TrialQueries(Sessions):
    """Trials and who works on them."""

    @cached_property
    def _knobs(self) -> dict[str, Knobs]:
        """Knobs id -> knobs, as decoded once: a running study reads its trials again and again."""
        return {}

    def _view(self, row: Row[Any]) -> TrialView:
        values = row._asdict()
        knobs_id = values.pop("knobs_id")
        if knobs_id not in self._knobs:
            self._knobs[knobs_id] = codec.knobs_from_json(values["knobs"])
        return TrialView(**{**values, "knobs": self._knobs[knobs_id]})

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
        row = insert(TRIAL).values(
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
            taken = select(TRIAL.c.id).where(TRIAL.c.study_id == study_id, TRIAL.c.claim == claim)
            if session.scalar(taken) is not None:
                return None
            try:
                # a refused row ends no more than its own savepoint
                with session.begin_nested():
                    return new_id(session.execute(row))
            except IntegrityError:
                return None

    def set_number(self, trial_id: int, number: int) -> None:
        """Link a claimed trial to Optuna's."""
        with self.write() as session:
            session.execute(update(TRIAL).where(TRIAL.c.id == trial_id).values(number=number))

    def adopt_trial(self, trial_id: int, dead_worker_id: int | None, worker_id: int) -> bool:
        """Take over a running trial of a dead worker; False when another worker was faster."""
        with self.write() as session:
            taken = session.execute(
                update(TRIAL)
                .where(
                    TRIAL.c.id == trial_id,
                    TRIAL.c.state == "running",
                    TRIAL.c.worker_id == dead_worker_id,
                )
                .values(worker_id=worker_id, attempts=TRIAL.c.attempts + 1)
            )
            return bool(taken.rowcount)

    def finish_trial(self, trial_id: int, failure: Failure | None) -> None:
        """Mark a trial complete, or failed with its reason."""
        with self.write() as session:
            now = datetime.now(UTC)
            session.execute(
                update(TRIAL)
                .where(TRIAL.c.id == trial_id)
                .values(
                    state="complete" if failure is None else "failed",
                    ended=now,
                    failure_kind=None if failure is None else failure.kind,
                )
            )
            if failure is not None:
                record = failure.model_dump(mode="json")
                session.execute(
                    insert(FAILURE).values(
                        trial_id=trial_id, at=now, kind=failure.kind, record=record
                    )
                )

    def trials(self, study_id: int) -> list[TrialView]:
        """All trials that have a number, by number."""
        query = (
            select(*_VIEWED)
            .where(TRIAL.c.study_id == study_id, TRIAL.c.number.is_not(None))
            .order_by(TRIAL.c.number)
        )
        with self.reading() as session:
            return [self._view(row) for row in session.execute(query)]

    def trial(self, trial_id: int) -> TrialView:
        """A trial that has a number, by its id."""
        query = select(*_VIEWED).where(TRIAL.c.id == trial_id)
        with self.reading() as session:
            return self._view(session.execute(query).one())

    def trials_of_claim(self, study_id: int, claim: str) -> list[TrialView]:
        """The trial that holds a claim; empty before Optuna gave it a number."""
        query = select(*_VIEWED).where(
            TRIAL.c.study_id == study_id,
            TRIAL.c.claim == claim,
            TRIAL.c.number.is_not(None),
        )
        with self.reading() as session:
            return [self._view(row) for row in session.execute(query)]

    def unnumbered_trials(self, study_id: int) -> list[Row[Any]]:
        """Claims whose worker died before Optuna gave a number."""
        query = select(TRIAL).where(
            TRIAL.c.study_id == study_id, TRIAL.c.number.is_(None), TRIAL.c.state == "running"
        )
        with self.reading() as session:
            return list(session.execute(query))

    def drop_claim(self, trial_id: int) -> None:
        """Remove a claim that never became a trial, so that its work can be taken again."""
        with self.write() as session:
            session.execute(delete(TRIAL).where(TRIAL.c.id == trial_id, TRIAL.c.number.is_(None)))
