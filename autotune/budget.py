"""How much of a study's budget is left: trials, server starts, wall time."""

import math
from collections.abc import Callable

from autotune.history import History
from autotune.schemas import Study
from autotune.store.store import Store
from autotune.store.workers import worked_s

#: pairs of an A/A or final comparison: enough for a two-sided test, if max_repeats allows
_MIN_PAIRS, _PAIRS = 4, 6
#: share of the wall time that baseline and A/A pair may take
_REFERENCE_SHARE = 0.25
#: trials that make a search: the screening and a few more
_WORTHWHILE_TRIALS = 8


class BudgetKeeper:
    """Reads what all workers of a study have used together."""

    def __init__(self, study: Study, store: Store, study_id: int, worker_id: int) -> None:
        self._study, self._store = study, store
        self._study_id, self._worker_id = study_id, worker_id
        #: seconds that a repeat takes on this machine's clock, once this session knows
        self.session_repeat_s: Callable[[], float | None] = lambda: None

    def spent(self, history: History) -> str | None:
        """Which part of the budget is used up, or None."""
        budget = self._study.budget
        if history.num_search_trials >= budget.measured_trials:
            return f"budget: {budget.measured_trials} trials are measured"
        left = self.time_left_s()
        # a study that measured nothing but its baseline says nothing: one trial comes first
        kept_s = self.final_s(history) if history.num_finished else 0.0
        if left is not None and left <= kept_s:
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
        """Mean seconds of a repeat."""
        measured = self.session_repeat_s()
        if measured is not None:
            return measured
        rows = [row for row in history.repeats if row.failure_kind is None]
        if not rows:
            return 0.0
        return sum((row.ended - row.started).total_seconds() for row in rows) / len(rows)

    def too_short(self, history: History) -> str | None:
        """What to do when the wall time leaves no room for the search, after the references."""
        left, final_s = self.time_left_s(), self.final_s(history)
        wall_s = self._study.budget.wall_time_s
        trial_s = self._study.measure.min_repeats * self.repeat_s(history)
        trial_s *= len(self._study.workload.concurrency)
        if left is None or wall_s is None or left > final_s + trial_s:
            return None
        needed_s = wall_s - left + final_s + _WORTHWHILE_TRIALS * trial_s
        return (
            f"the baseline left {max(left, 0):.0f} s of the wall time of {wall_s:.0f} s, and the "
            f"final comparison needs about {final_s:.0f} s: one trial is measured at most; "
            f"budget.wall_time: {math.ceil(needed_s / 10) * 10}s would leave room for "
            f"{_WORTHWHILE_TRIALS}"
        )

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
