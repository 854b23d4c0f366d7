"""What a study has measured so far, by knobs: the search and the reports read this."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from autotune.statistics import Summary, summarise
from autotune.store.views import RepeatView, TrialView
from model.spec import Knobs

if TYPE_CHECKING:
    from autotune.store.store import Store

#: roles whose repeats describe the knobs; "final" arms are compared with each other only
POOLED_ROLES = ("baseline", "aa", "search", "replicate", "final")


@dataclass(frozen=True)
class KnobsResult:
    """All valid repeats of one knobs, over its trials."""

    knobs: Knobs
    trials: tuple[TrialView, ...]
    #: concurrency -> repeats in the order taken, warm-up and failures left out
    repeats: dict[int, tuple[RepeatView, ...]]

    @cached_property
    def _summaries(self) -> dict[tuple[str, int], Summary]:
        return {}

    def summary(self, concurrency: int, metric: str = "tokens_per_s") -> Summary | None:
        """Median and interval of a metric; None when nothing valid was measured."""
        key = (metric, concurrency)
        if key not in self._summaries:
            values = self.values(concurrency, metric)
            if not values:
                return None
            self._summaries[key] = _summary(tuple(values), concurrency)
        return self._summaries[key]

    def values(self, concurrency: int, metric: str = "tokens_per_s") -> list[float]:
        """Valid repeats of a metric in the order taken."""
        found = (repeat.metric(metric) for repeat in self.repeats.get(concurrency, ()))
        return [value for value in found if value is not None]

    def complete(self, levels: Sequence[int]) -> bool:
        """Whether every level has a valid repeat and some trial of it succeeded."""
        ended = any(trial.state == "complete" for trial in self.trials)
        return ended and all(self.values(level) for level in levels)

    @property
    def failed(self) -> bool:
        """Whether every finished trial of it failed."""
        states = [trial.state for trial in self.trials if trial.state != "running"]
        return bool(states) and all(state == "failed" for state in states)

    def output_check(self, concurrency: int) -> str:
        """The worst output check of its repeats."""
        found = {repeat.output_check for repeat in self.repeats.get(concurrency, ())}
        for check in ("incorrect", "unverified", "near_tie", "exact"):
            if check in found:
                return check
        return "unverified"


@dataclass(frozen=True)
class History:
    """A snapshot of a study's trials and repeats."""

    trials: tuple[TrialView, ...]
    repeats: tuple[RepeatView, ...]

    @classmethod
    def read(cls, store: "Store", study_id: int) -> "History":
        """Read the newest state of a study."""
        return cls(trials=tuple(store.trials(study_id)), repeats=tuple(store.repeats(study_id)))

    @cached_property
    def repeats_of(self) -> dict[int, tuple[RepeatView, ...]]:
        """trial id -> its repeats, warm-up included."""
        found: dict[int, list[RepeatView]] = {}
        for repeat in self.repeats:
            found.setdefault(repeat.trial_id, []).append(repeat)
        return {trial_id: tuple(rows) for trial_id, rows in found.items()}

    @cached_property
    def by_knobs(self) -> dict[str, KnobsResult]:
        """knobs id -> everything measured of it, in order of first trial."""
        trials: dict[str, list[TrialView]] = {}
        for trial in self.trials:
            trials.setdefault(trial.knobs.id, []).append(trial)
        return {
            knobs_id: KnobsResult(
                knobs=group[0].knobs, trials=tuple(group), repeats=self._pooled(group)
            )
            for knobs_id, group in trials.items()
        }

    def _pooled(self, trials: Sequence[TrialView]) -> dict[int, tuple[RepeatView, ...]]:
        found: dict[int, list[RepeatView]] = {}
        for trial in trials:
            # a trial that failed, wrong output above all, speaks for nothing
            if trial.state == "failed" or trial.role not in POOLED_ROLES:
                continue
            for repeat in self.repeats_of.get(trial.id, ()):
                if repeat.repeat >= 0 and repeat.failure_kind is None:
                    found.setdefault(repeat.concurrency, []).append(repeat)
        return {
            level: tuple(sorted(rows, key=lambda row: row.order)) for level, rows in found.items()
        }

    def of_role(self, role: str) -> tuple[TrialView, ...]:
        """Trials of a role, by number."""
        return tuple(trial for trial in self.trials if trial.role == role)

    @cached_property
    def baseline(self) -> KnobsResult | None:
        """Results of the baseline's knobs; None before it is measured."""
        for trial in self.of_role("baseline"):
            return self.by_knobs[trial.knobs.id]
        return None

    def result_of(self, trial_id: int) -> KnobsResult:
        """Everything measured of the knobs of a trial."""
        trial = next(trial for trial in self.trials if trial.id == trial_id)
        return self.by_knobs[trial.knobs.id]

    @property
    def num_search_trials(self) -> int:
        """Trials that count against ``budget.measured_trials``."""
        return sum(trial.role in ("search", "replicate") for trial in self.trials)

    @property
    def num_finished(self) -> int:
        """Of those, the ones that are done."""
        mine = (trial for trial in self.trials if trial.role in ("search", "replicate"))
        return sum(trial.state != "running" for trial in mine)

    def trial_values(
        self, trial_id: int, concurrency: int, metric: str = "tokens_per_s"
    ) -> list[float]:
        """A metric of the valid repeats of one trial, in the order taken."""
        rows = self.repeats_of.get(trial_id, ())
        values = (
            row.metric(metric) for row in rows if row.repeat >= 0 and row.concurrency == concurrency
        )
        return [value for value in values if value is not None]


@lru_cache(maxsize=4096)
def _summary(values: tuple[float, ...], seed: int) -> Summary:
    """A search asks for the intervals of everything measured before each trial."""
    return summarise(values, seed=seed)
