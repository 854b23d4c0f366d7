"""How much of a study's budget is left: trials, server starts, wall time."""

import math

from autotune.history import History
from autotune.schemas import Study
from autotune.store.store import Store
from autotune.store.workers import worked_s

#: pairs of an A/A or final comparison: enough for a two-sided test, if max_repeats allows
_MIN_PAIRS, _PAIRS = 4, 6
#: share of the wall time that baseline and A/A pair may take
_REFERENCE_SHARE = 0.25


class BudgetKeeper:
    """Reads what all workers of a study have used together."""

    def __init__(self, study: Study, store: Store, study_id: int, worker_id: int) -> None:
        self._study, self._store = study, store
        self._study_id, self._worker_id = study_id, worker_id

    def spent(self, history: History) -> str | None:
        """Which part of the budget is used up, or None."""
        budget = self._study.budget
        if history.num_search_trials >= budget.measured_trials:
            return f"budget: {budget.measured_trials} trials are measured"
        left = self.time_left_s()
        if left is not None and left <= self.final_s(history):
            return f"budget: wall time of {budget.wall_time_s:.0f} s is used up"
        return None

    def time_left_s(self) -> float | None:
        """Seconds of the wall time that are left; None when it is unlimited."""
        if self._study.budget.wall_time_s is None:
            return None
        self._store.heartbeat(self._worker_id)
        return self._study.budget.wall_time_s - worked_s(self._store.workers(self._study_id))

    def final_s(self, history: History) -> float:
        """Seconds to keep for the shortest final comparison: every level has one winner."""
        return self.repeat_s(history) * 2 * _MIN_PAIRS * len(self._study.workload.concurrency)

    def repeat_s(self, history: History) -> float:
        """Mean seconds of a repeat, with what lies between two repeats."""
        rows = [row for row in history.repeats if row.failure_kind is None]
        if not rows:
            return 0.0
        return sum((row.ended - row.started).total_seconds() for row in rows) / len(rows)

    def starts_left(self) -> float:
        """Server starts that are left; infinite without a limit."""
        limit = self._study.budget.server_starts
        if limit is None:
            return math.inf
        return limit - self._store.count_events(self._study_id, "open")

    def num_pairs(self) -> int:
        """Pairs of a comparison in turns."""
        return max(_MIN_PAIRS, min(_PAIRS, self._study.measure.max_repeats))

    def reference_pairs(self, num_levels: int) -> int:
        """Pairs of the A/A comparison, once some are taken: at most a quarter of the wall time."""
        wall_s = self._study.budget.wall_time_s
        repeat_s = self.repeat_s(History.read(self._store, self._study_id))
        if wall_s is None or repeat_s <= 0:
            return self.num_pairs()
        affordable = int(_REFERENCE_SHARE * wall_s / (2 * repeat_s * num_levels))
        return max(_MIN_PAIRS, min(self.num_pairs(), affordable))

    def pairs_in_time(self, num_levels: int) -> int:
        """Pairs of the final comparison that the wall time leaves room for."""
        history = History.read(self._store, self._study_id)
        left_s, repeat_s = self.time_left_s(), self.repeat_s(history)
        if left_s is None or repeat_s <= 0:
            return self.num_pairs()
        affordable = int(left_s / (2 * repeat_s * num_levels))
        return max(_MIN_PAIRS, min(self.num_pairs(), affordable))
