"""Measures two configurations in turns until the answer is clear or the budget is used up.

Every repeat is stored at once, in trials of role "compare" that no search or report pools. The
order inside each pair is drawn by coin, which makes the test exact (``autotune.signflip``). Arms
that need different starts are started anew for every visit: starts differ from one another, so a
visit, not a repeat, is the unit.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import ValidationError

from autotune.compare_arms import Arm
from autotune.comparison import Comparison, Decision, pair_order
from autotune.health_rules import HealthFinding, watch_repeats
from autotune.ledger import Ledger
from autotune.measuring import Bench, StopRequestedError
from autotune.outcome import goal_of
from autotune.plan import Plan
from autotune.records import Failure, Measurement
from autotune.statistics import Summary, summarise
from autotune.store.store import Store
from autotune.store.views import StudyView, TrialView
from model.spec import Knobs

#: one more try of a repeat after these, twice in all
_PASSING = ("crash", "hang", "unhealthy_host")
_MAX_RETRIES = 2
#: margin where the study has no noise floor, and the widest that a floor may make it
DEFAULT_MARGIN, _MAX_MARGIN = 0.01, 0.02


@dataclass(frozen=True, kw_only=True)
class CompareBudget:
    """When to give up deciding."""

    max_pairs: int
    wall_time_s: float | None


@dataclass(frozen=True, kw_only=True)
class LevelComparison:
    """One concurrency."""

    concurrency: int
    decision: Decision
    first: Summary
    second: Summary
    #: A/A difference of the study at this level, as a fraction
    noise_floor: float | None
    #: both arms are the same knobs: an A/A test
    same_knobs: bool


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The answer of a comparison, as far as it came."""

    study: str
    metric: str
    first: Arm
    second: Arm
    levels: tuple[LevelComparison, ...]
    #: trial numbers that hold the repeats, by arm
    trials: Mapping[str, tuple[int, ...]]
    num_starts: int
    seconds: float
    #: why it ended
    ended: str
    failure: Failure | None = None
    failed_arm: str | None = None
    findings: tuple[HealthFinding, ...] = ()


@dataclass
class _Side:
    arm: Arm
    #: knobs id -> trial that holds its repeats
    trials: dict[str, TrialView] = field(default_factory=dict)
    taken: dict[tuple[str, int], int] = field(default_factory=dict)
    measured: list[Measurement] = field(default_factory=list)
    #: knobs whose provenance is stored
    proved: set[str] = field(default_factory=set)


class CompareRun:
    """One comparison in one study."""

    def __init__(
        self,
        plan: Plan,
        view: StudyView,
        store: Store,
        bench: Bench,
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._view, self._store = plan, view, store
        self._bench, self._note = bench, note
        self._ledger = Ledger(store.url, plan.study, plan.space, plan.baseline)
        self._goal = goal_of(plan.study)
        self._retries = 0

    def run(
        self,
        first: Arm,
        second: Arm,
        levels: tuple[int, ...],
        budget: CompareBudget,
        margin: float | None,
        seed: int,
    ) -> Compared:
        """Measure until every level is decided or the budget is used up."""
        started = time.monotonic()
        floors = self._store.noise_floors(self._view.id)
        sides = (_Side(first), _Side(second))
        comparisons = {
            level: Comparison(
                budget.max_pairs,
                margin or _margin(floors[level].rel_floor if level in floors else None),
            )
            for level in levels
        }
        open_levels = list(levels)
        failure: Failure | None = None
        failed: str | None = None
        ended = "every level is decided"
        pair_s: list[float] = []
        self._claim(sides, levels)
        try:
            for number in range(budget.max_pairs):
                left_s = _left_s(budget, started)
                if pair_s and left_s is not None and left_s < statistics.fmean(pair_s):
                    ended = f"wall time of {budget.wall_time_s:.0f} s is used up"
                    break
                begun = time.monotonic()
                speeds: tuple[dict[int, float], dict[int, float]] = ({}, {})
                for index in pair_order(seed, number):
                    found = self._visit(sides[index], sides[1 - index], open_levels)
                    if isinstance(found, Failure):
                        failure, failed = found, "AB"[index]
                        break
                    speeds[index].update(found)
                if failure is not None:
                    ended = f"{failed} gave no number"
                    break
                pair_s.append(time.monotonic() - begun)
                open_levels = [
                    level
                    for level in open_levels
                    if not comparisons[level].add(speeds[0][level], speeds[1][level])
                ]
                self._tell(number + 1, comparisons, budget, pair_s)
                if not open_levels:
                    break
            undecided = [lv for lv, c in comparisons.items() if c.first and not _decided(c)]
            if undecided and not open_levels:
                ended = f"{budget.max_pairs} pairs are measured"
        except StopRequestedError as stop:
            ended = f"stopped: {stop}"
        for comparison in comparisons.values():
            comparison.finish()
        self._finish(sides, failure, failed)
        found_levels = tuple(
            self._level(level, comparison, sides)
            for level, comparison in comparisons.items()
            if comparison.first
        )
        records = [record for side in sides for record in side.measured]
        return Compared(
            study=self._view.name,
            metric=self._goal.name,
            first=first,
            second=second,
            levels=found_levels,
            trials={
                name: tuple(trial.number for trial in side.trials.values())
                for name, side in zip("AB", sides, strict=True)
            },
            num_starts=self._bench.num_opens,
            seconds=time.monotonic() - started,
            ended=ended,
            failure=failure,
            failed_arm=failed,
            findings=tuple(watch_repeats(sorted(records, key=lambda record: record.order))),
        )

    # measuring

    def _visit(self, side: _Side, other: _Side, levels: list[int]) -> dict[int, float] | Failure:
        """One arm's share of a pair: level -> speed, more is better."""
        found = {}
        fresh = False
        for level in levels:
            knobs = side.arm.knobs[level]
            apart = not self._share(knobs, other.arm.knobs[level])
            if apart and not fresh:
                # another start each time: two visits in a row must not share one
                self._bench.open_group = None
                fresh = True
            values = []
            for _ in range(self._plan.study.measure.min_repeats if apart else 1):
                record = self._repeat(side, knobs, level)
                if isinstance(record, Failure):
                    return record
                values.append(record)
            found[level] = statistics.median(values)
            if knobs.id not in side.proved:
                # while its own start is open
                side.proved.add(knobs.id)
                provenance = self._bench.backend.provenance()
                self._store.set_provenance(side.trials[knobs.id].id, provenance)
        return found

    def _repeat(self, side: _Side, knobs: Knobs, level: int) -> float | Failure:
        """A repeat's metric, turned so that more is better; one that failed by chance is redone."""
        while True:
            failure = self._open(knobs)
            if failure is None:
                key = (knobs.id, level)
                number = side.taken.get(key, 0)
                side.taken[key] = number + 1
                record = self._bench.take(side.trials[knobs.id], level, number)
                side.measured.append(record)
                failure = record.failure
                value = getattr(record, self._goal.name)
                if failure is None and value is not None and math.isfinite(value) and value > 0:
                    return float(value) if self._goal.maximize else 1.0 / float(value)
                failure = failure or Failure(
                    kind="invalid", stage="measure", message=f"the repeat has no {self._goal.name}"
                )
            if failure.kind not in _PASSING or self._retries >= _MAX_RETRIES:
                return failure
            self._retries += 1
            self._note(f"  {failure.kind} at {failure.stage}: {failure.message}; tried again")

    def _open(self, knobs: Knobs) -> Failure | None:
        """Start what the knobs need; knobs of a file may be none that this backend can run."""
        try:
            return self._bench.ensure_open(knobs)
        except ValueError as error:
            return Failure(kind="invalid", stage="open", message=one_line(error))

    def _share(self, first: Knobs, second: Knobs) -> bool:
        group_of = self._bench.backend.group
        return group_of(first) == group_of(second)

    # trials

    def _claim(self, sides: tuple[_Side, _Side], levels: tuple[int, ...]) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        for name, side in zip("AB", sides, strict=True):
            for knobs in {
                side.arm.knobs[level].id: side.arm.knobs[level] for level in levels
            }.values():
                origin = f"compare {stamp}: {name} = {side.arm.name}"
                trial_id = self._store.claim_trial(
                    study_id=self._view.id,
                    claim=f"compare:{stamp}:{name}:{knobs.id}",
                    role="compare",
                    origin=origin,
                    knobs=knobs,
                    group_id=self._bench.backend.group(knobs).id,
                    worker_id=None,
                )
                assert trial_id is not None
                attributes = {
                    "role": "compare",
                    "origin": origin,
                    "knobs_id": knobs.id,
                    "label": knobs.label(),
                }
                self._store.set_number(trial_id, self._ledger.begin(knobs, attributes))
                side.trials[knobs.id] = next(
                    t for t in self._store.trials(self._view.id) if t.id == trial_id
                )

    def _finish(
        self, sides: tuple[_Side, _Side], failure: Failure | None, failed: str | None
    ) -> None:
        for name, side in zip("AB", sides, strict=True):
            for trial in side.trials.values():
                self._store.finish_trial(trial.id, failure if name == failed else None)
                # no objective: a comparison may measure some levels only, and teaches no search
                self._ledger.finish(trial.number, None, compared=True)

    # telling

    def _level(
        self, level: int, comparison: Comparison, sides: tuple[_Side, _Side]
    ) -> LevelComparison:
        floors = self._store.noise_floors(self._view.id)
        arms = (comparison.first, comparison.second)
        turned = arms if self._goal.maximize else tuple([1.0 / v for v in arm] for arm in arms)
        return LevelComparison(
            concurrency=level,
            decision=comparison.decision(),
            first=summarise(turned[0]),
            second=summarise(turned[1]),
            noise_floor=floors[level].rel_floor if level in floors else None,
            same_knobs=sides[0].arm.knobs[level].id == sides[1].arm.knobs[level].id,
        )

    def _tell(
        self,
        num_pairs: int,
        comparisons: Mapping[int, Comparison],
        budget: CompareBudget,
        pair_s: list[float],
    ) -> None:
        parts = []
        for level, comparison in comparisons.items():
            if not comparison.first:
                continue
            decision = comparison.decision()
            ratio = decision.ratio
            shown = f"A/B {ratio.median:.3f}"
            if math.isfinite(ratio.high):
                shown += f" ({ratio.low:.3f}–{ratio.high:.3f})"
            parts.append(f"c={level}: {shown} {decision.verdict}")
        mean_s = statistics.fmean(pair_s)
        most_s = mean_s * (budget.max_pairs - num_pairs)
        self._note(
            f"  pair {num_pairs}/{budget.max_pairs} ({mean_s:.1f} s each, at most {most_s:.0f} s "
            f"more): {'; '.join(parts)}"
        )


def one_line(error: ValueError) -> str:
    """What is wrong, without pydantic's frame around it."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        return f"{where}: {said}" if where else said
    return str(error).splitlines()[0]


def _margin(floor: float | None) -> float:
    """Differences that count as none: the study's noise floor, unless that is wide or absent."""
    return DEFAULT_MARGIN if floor is None or floor <= 0 else min(floor, _MAX_MARGIN)


def _left_s(budget: CompareBudget, started: float) -> float | None:
    if budget.wall_time_s is None:
        return None
    return budget.wall_time_s - (time.monotonic() - started)


def _decided(comparison: Comparison) -> bool:
    return comparison.decision().verdict != "undecided"
