"""How much of a study's budget is left: trials, server starts, wall time."""

import math
from collections.abc import Sequence

from autotune.history import History
from autotune.measuring import Bench
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
        #: this session's bench, once there is one: seconds on this machine's clock
        self.bench: Bench | None = None

    def spent(self, history: History, final_starts: int = 0) -> str | None:
        """Which part of the budget is used up, or None.

        ``final_starts``: server starts that the final comparison needs.
        """
        budget = self._study.budget
        if history.num_search_trials >= budget.measured_trials:
            return f"budget: {budget.measured_trials} trials are measured"
        left = self.time_left_s()
        # a study that measured nothing but its baseline says nothing: one trial comes first
        kept_s = 0.0
        if history.num_finished:
            kept_s = self.final_s(history, final_starts) + self.trial_s(history)
        if left is not None and left <= kept_s:
            return self.time_used_up()
        return None

    def time_used_up(self) -> str:
        """Why a study ends for want of wall time."""
        return f"budget: wall time of {self._study.budget.wall_time_s:.0f} s is used up"

    def time_to_start(self, history: History, final_starts: int) -> bool:
        """Whether a trial with a start leaves the final comparison its time.

        ``final_starts``: server starts that the comparison would need with that trial's knobs.
        """
        left_s = self.time_left_s()
        if left_s is None or not history.num_finished:
            return True
        needed_s = self.final_s(history, final_starts) + self.trial_s(history)
        return left_s > needed_s + self._start_s

    @property
    def _start_s(self) -> float:
        return (self.bench.start_s() if self.bench is not None else None) or 0.0

    def time_left_s(self) -> float | None:
        """Seconds of the wall time that are left; None when it is unlimited."""
        if self._study.budget.wall_time_s is None:
            return None
        self._store.heartbeat(self._worker_id)
        return self._study.budget.wall_time_s - worked_s(self._store.workers(self._study_id))

    def trial_s(self, history: History) -> float:
        """Seconds of the shortest trial, without a start."""
        return self._study.measure.min_repeats * self._round_s(history, self._levels)

    def final_s(self, history: History, starts: int = 0) -> float:
        """Seconds to keep for the shortest final comparison: every level has one winner."""
        return self.pairs_s(history, _MIN_PAIRS, self._levels, starts)

    def pairs_s(
        self, history: History, num_pairs: int, levels: Sequence[int], starts: int = 0
    ) -> float:
        """Seconds of ``num_pairs`` pairs at ``levels`` with that many server starts."""
        return 2 * num_pairs * self._round_s(history, levels) + starts * self._start_s

    @property
    def _levels(self) -> tuple[int, ...]:
        return tuple(self._study.workload.concurrency)

    def _round_s(self, history: History, levels: Sequence[int]) -> float:
        """Seconds of one repeat at each of ``levels``."""
        return sum(self.repeat_s(history, level) for level in levels)

    def repeat_s(self, history: History, level: int) -> float:
        """Mean seconds of a repeat at a level: of this session, else of what is stored."""
        measured = None if self.bench is None else self.bench.repeat_s(level)
        if measured is not None:
            return measured
        rows = [r for r in history.repeats if r.failure_kind is None and r.concurrency == level]
        if not rows:
            return 0.0
        return sum((row.ended - row.started).total_seconds() for row in rows) / len(rows)

    def too_short(self, history: History) -> str | None:
        """What to do when the wall time leaves no room for the search, after the references."""
        left, final_s = self.time_left_s(), self.final_s(history)
        wall_s, trial_s = self._study.budget.wall_time_s, self.trial_s(history)
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

    def reference_pairs(self) -> int:
        """Pairs of the A/A comparison, once some are taken: at most a quarter of the wall time."""
        wall_s = self._study.budget.wall_time_s
        round_s = self._round_s(History.read(self._store, self._study_id), self._levels)
        if wall_s is None or round_s <= 0:
            return self.num_pairs()
        affordable = int(_REFERENCE_SHARE * wall_s / (2 * round_s))
        return max(_MIN_PAIRS, min(self.num_pairs(), affordable))

    def pairs_in_time(self, levels: Sequence[int], starts: int, share: float = 1.0) -> int:
        """Pairs of a final comparison that a ``share`` of what is left allows; 0: too few."""
        history, left_s = History.read(self._store, self._study_id), self.time_left_s()
        if left_s is None:
            return self.num_pairs()
        for num_pairs in range(self.num_pairs(), _MIN_PAIRS - 1, -1):
            if self.pairs_s(history, num_pairs, levels, starts) <= left_s * share:
                return num_pairs
        return 0

    def out_of_time(self, levels: Sequence[int], kept_s: float = 0.0) -> bool:
        """Whether one more repeat at each of ``levels`` would eat into the last ``kept_s``."""
        left_s = self.time_left_s()
        if left_s is None:
            return False
        # asked before every repeat: the history is read only where this session measured nothing
        timed = self.bench is not None and all(self.bench.repeat_s(level) for level in levels)
        history = History((), ()) if timed else History.read(self._store, self._study_id)
        return left_s - self._round_s(history, levels) < kept_s
