"""How many server starts comparisons need, and whether the search may take another."""

from dataclasses import dataclass

from autotune.budget import BudgetKeeper
from autotune.history import History
from autotune.measuring import Bench
from autotune.outcome import leaders
from autotune.schemas import Study
from model.spec import Knobs

#: starts of a comparison whose arms can't share one: A, B, A again
_APART_STARTS = 3


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of one session."""

    study: Study
    baseline: Knobs
    bench: Bench
    budget: BudgetKeeper

    def may_open(self, history: History) -> bool:
        """Whether a start is left beyond those that the final comparison needs, and its time."""
        if not self.in_time(history):
            return False
        limit = self.study.budget.server_starts or 0
        needed = self.final(history)
        # finals of several winners may take half of all starts, the search has the rest
        kept = max(_APART_STARTS, min(needed, limit // 2)) if needed else 1
        return self.budget.starts_left() > kept

    def in_time(self, history: History) -> bool:
        """Whether the wall time has room for a start: what it measures may win, apart."""
        return self.budget.time_to_start(history, max(self.final(history), _APART_STARTS))

    def final(self, history: History) -> int:
        """Starts that comparing the winners so far with the baseline would take."""
        best = {r.knobs.id: r.knobs for r in leaders(history, self.study).values()}
        return _APART_STARTS * sum(not self._shares_start(knobs) for knobs in best.values())

    def of(self, knobs: Knobs) -> int:
        """Starts that comparing ``knobs`` with the baseline takes from here on."""
        if not self._shares_start(knobs):
            return _APART_STARTS
        return int(self.bench.backend.group(knobs) != self.bench.open_group)

    def _shares_start(self, knobs: Knobs) -> bool:
        group_of = self.bench.backend.group
        return group_of(knobs) == group_of(self.baseline)
