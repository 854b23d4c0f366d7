"""Who works on what: every trial is one claim, taken once, and inherited from dead workers."""

from collections.abc import Callable
from datetime import UTC, datetime

from autotune.history import History
from autotune.ledger import Ledger
from autotune.schemas import Study
from autotune.store.store import Store
from autotune.store.views import TrialView
from autotune.store.workers import is_alive
from autotune.trial_values import objective_values
from model.spec import Knobs


class Claims:
    """Claims of one worker on the trials of one study."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        study_id: int,
        worker_id: int,
        group_of: Callable[[Knobs], str],
    ) -> None:
        self._store, self._ledger = store, ledger
        self._study_id, self._worker_id, self._group_of = study_id, worker_id, group_of

    def take(self, claim: str, role: str, origin: str, knobs: Knobs) -> TrialView | None:
        """Take a piece of work, or give back ours that is under way or done.

        None when a living worker has it.
        """
        trial_id = self._store.claim_trial(
            study_id=self._study_id,
            claim=claim,
            role=role,
            origin=origin,
            knobs=knobs,
            group_id=self._group_of(knobs),
            worker_id=self._worker_id,
        )
        if trial_id is None:
            return self._existing(claim)
        attributes = {
            "role": role,
            "origin": origin,
            "knobs_id": knobs.id,
            "label": knobs.label(),
            "worker": self._worker_id,
        }
        self._store.set_number(trial_id, self._ledger.begin(knobs, attributes))
        return self.trial(trial_id)

    def _existing(self, claim: str) -> TrialView | None:
        """A claimed trial that is done, ours, or of a dead worker (which makes it ours)."""
        for trial in self._store.trials_of_claim(self._study_id, claim):
            if trial.state != "running" or trial.worker_id == self._worker_id:
                return trial
            if self.is_orphan(trial) and self._store.adopt_trial(
                trial.id, trial.worker_id, self._worker_id
            ):
                return self.trial(trial.id)
        return None

    def trial(self, trial_id: int) -> TrialView:
        """A trial of the study by its id."""
        return self._store.trial(trial_id)

    def is_orphan(self, trial: TrialView) -> bool:
        """Whether the worker of a trial ended without finishing it."""
        workers = {worker.id: worker for worker in self._store.workers(self._study_id)}
        if trial.worker_id == self._worker_id:
            return False
        worker = workers.get(trial.worker_id or -1)
        return worker is None or not is_alive(worker, datetime.now(UTC))

    def tidy(self, study: Study) -> None:
        """Bring both sides together after a worker died between two of its writes."""
        dead = self._dead_workers()
        for row in self._store.unnumbered_trials(self._study_id):
            if row.worker_id in dead:
                self._store.drop_claim(row.id)
        history = History.read(self._store, self._study_id)
        for trial in history.trials:
            if trial.state == "complete":
                values = objective_values(history, study, trial.id)
                self._ledger.finish(trial.number, values)
            elif trial.state == "failed":
                self._ledger.finish(trial.number, None)
        known = {trial.number for trial in history.trials}
        for number, worker in self._ledger.running().items():
            if number not in known and worker in dead:
                self._ledger.finish(number, None, failure="its worker died before it began")

    def _dead_workers(self) -> set[int]:
        now = datetime.now(UTC)
        workers = self._store.workers(self._study_id)
        return {w.id for w in workers if w.id != self._worker_id and not is_alive(w, now)}
