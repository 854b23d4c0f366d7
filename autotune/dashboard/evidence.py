"""What the store holds of each trial, gathered for notes and plots."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.history import History
from autotune.records import Failure, Measurement, OutputCheck, Provenance
from autotune.statistics import Summary, summarise
from autotune.store.store import Store
from autotune.store.views import StudyView, TrialView
from model.spec import CYCLE_TERMS, DECODE_TERMS, Prediction

#: worst first
_CHECKS: tuple[OutputCheck, ...] = ("incorrect", "unverified", "near_tie", "exact")


@dataclass(frozen=True)
class LevelEvidence:
    """One trial at one concurrency."""

    concurrency: int
    predicted: Prediction | None
    #: valid repeats in the order taken, warm-up left out
    repeats: tuple[Measurement, ...]

    @cached_property
    def tokens_per_s(self) -> Summary | None:
        """Median and 95 % interval over repeats."""
        values = [r.tokens_per_s for r in self.repeats if r.tokens_per_s is not None]
        return summarise(values, seed=self.concurrency) if values else None

    @property
    def accept_length(self) -> float | None:
        """Median over repeats, bonus token included."""
        return _median([r.accept_length for r in self.repeats])

    @property
    def cycle_ms(self) -> float | None:
        """Median over repeats."""
        return _median([r.cycle_ms for r in self.repeats])

    @property
    def output_check(self) -> OutputCheck | None:
        """The worst check of the repeats."""
        found = {repeat.output_check for repeat in self.repeats}
        return next((check for check in _CHECKS if check in found), None)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that were predicted or measured, in the model's order."""
        known = set() if self.predicted is None else set(self.predicted.terms_ms)
        for repeat in self.repeats:
            known |= set(repeat.terms_ms)
        order = dict.fromkeys((*CYCLE_TERMS, *DECODE_TERMS))
        return tuple(name for name in (*order, *sorted(known - set(order))) if name in known)

    def term_ms(self, name: str) -> float | None:
        """Median of a term over repeats, ms per cycle."""
        return _median([repeat.terms_ms.get(name) for repeat in self.repeats])


@dataclass(frozen=True)
class TrialEvidence:
    """One trial with everything predicted and measured of it."""

    trial: TrialView
    levels: tuple[LevelEvidence, ...]
    failure: Failure | None
    provenance: Provenance | None


@dataclass(frozen=True)
class StudyEvidence:
    """All trials of a study, by number, and what the study says of itself."""

    view: StudyView
    history: History
    trials: tuple[TrialEvidence, ...]

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Levels of the study, ascending."""
        return tuple(sorted(self.view.workloads))

    def baseline(self, concurrency: int) -> Summary | None:
        """Pooled repeats of the baseline at a level."""
        found = self.history.baseline
        return None if found is None else found.summary(concurrency)


def read_evidence(store: Store, view: StudyView) -> StudyEvidence:
    """Read everything of a study once."""
    history = History.read(store, view.id)
    predictions = store.predictions(view.id)
    failures: dict[int, Failure] = {f.trial_id: f.failure for f in store.failures(view.id)}
    trials = []
    for trial in history.trials:
        valid: dict[int, list[Measurement]] = {}
        for record in store.measurements([trial.id]):
            if record.failure is not None:
                failures.setdefault(trial.id, record.failure)
            elif record.repeat >= 0:
                valid.setdefault(record.concurrency, []).append(record)
        predicted = predictions.get(trial.id, {})
        levels = sorted({*predicted, *valid})
        trials.append(
            TrialEvidence(
                trial=trial,
                levels=tuple(
                    LevelEvidence(level, predicted.get(level), tuple(valid.get(level, ())))
                    for level in levels
                ),
                failure=failures.get(trial.id) if trial.state != "complete" else None,
                provenance=store.provenance(trial.id),
            )
        )
    return StudyEvidence(view, history, tuple(trials))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
