"""Everything that a report shows, gathered once from the database and the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.dashboard.evidence import LevelEvidence, StudyEvidence, TrialEvidence, read_evidence
from autotune.errors import AutotuneError
from autotune.explain.explanation import Explanation, explain
from autotune.explain.importance import Importance
from autotune.explain.levers import Headroom, Lever
from autotune.explain.stored import open_study, trial_subject
from autotune.health_rules import HealthFinding, watch_repeats
from autotune.outcome import LevelOutcome, Outcome, conclude
from autotune.records import Failure, Provenance
from autotune.reporting.settings import Setting, judged_settings
from autotune.schemas import Study
from autotune.store.store import Store
from autotune.store.views import NoiseFloor, StudyView
from autotune.study_file import parse_study


@dataclass(frozen=True, kw_only=True)
class FailedTrial:
    """A trial that gave no number."""

    number: int
    label: str
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class LevelReport:
    """One concurrency: what won and where its time goes."""

    outcome: LevelOutcome
    #: repeats and prediction of the best knobs' main trial
    evidence: LevelEvidence | None
    explanation: Explanation | None

    @property
    def concurrency(self) -> int:
        """Requests at once."""
        return self.outcome.concurrency


@dataclass(frozen=True, kw_only=True)
class Report:
    """A study's report."""

    view: StudyView
    study: Study
    outcome: Outcome
    evidence: StudyEvidence
    levels: tuple[LevelReport, ...]
    noise_floors: Mapping[int, NoiseFloor]
    settings: tuple[Setting, ...]
    failures: tuple[FailedTrial, ...]
    findings: tuple[HealthFinding, ...]
    importances: tuple[Importance, ...]
    #: the level that the importances speak of
    importance_level: int | None
    compared: tuple[Mapping[str, Any], ...]
    provenance: Provenance | None
    database: str

    @property
    def helping(self) -> tuple[tuple[int, Lever], ...]:
        """(concurrency, lever) of what the model expects to help, best first per level."""
        return tuple(
            (level.concurrency, lever)
            for level in self.levels
            if level.explanation is not None
            for lever in level.explanation.helping
        )

    @property
    def headroom(self) -> tuple[tuple[int, Headroom], ...]:
        """(concurrency, headroom) of the terms farthest from their bound."""
        return tuple(
            (level.concurrency, item)
            for level in self.levels
            if level.explanation is not None
            for item in level.explanation.headroom
        )


def gather(store: Store, view: StudyView) -> Report:
    """Read everything of a study; parts that the model can't explain are left out."""
    study = parse_study(view.text, view.label, view.base_dir, view.name).study
    outcome = conclude(store, view.id, study, f"study is {view.state}")
    evidence = read_evidence(store, view)
    by_number = {trial.trial.number: trial for trial in evidence.trials}
    explanations = _explanations(store, view, outcome)
    levels = tuple(
        LevelReport(
            outcome=level,
            evidence=_level_evidence(evidence.trials, level),
            explanation=explanations.get(level.concurrency),
        )
        for level in outcome.levels
    )
    provenance = next(
        (
            by_number[level.trial].provenance
            for level in outcome.levels
            if level.trial in by_number and by_number[level.trial].provenance is not None
        ),
        None,
    )
    records = [r for t in evidence.trials for level in t.levels for r in level.repeats]
    first = next((level for level in levels if level.explanation is not None), None)
    return Report(
        view=view,
        study=study,
        outcome=outcome,
        evidence=evidence,
        levels=levels,
        noise_floors=store.noise_floors(view.id),
        settings=judged_settings(
            [(level.outcome.knobs, _inert(level.evidence)) for level in levels], provenance
        ),
        failures=tuple(
            FailedTrial(
                number=trial.trial.number,
                label=trial.trial.knobs.label(),
                failure=trial.failure,
            )
            for trial in evidence.trials
            if trial.failure is not None and trial.trial.state == "failed"
        ),
        findings=tuple(watch_repeats(sorted(records, key=lambda record: record.order))),
        importances=() if first is None or first.explanation is None
        else first.explanation.importances,
        importance_level=None if first is None else first.concurrency,
        compared=tuple(store.event_details(view.id, "compare")),
        provenance=provenance,
        database=store.engine.url.render_as_string(hide_password=True),
    )  # fmt: skip


def _explanations(store: Store, view: StudyView, outcome: Outcome) -> dict[int, Explanation]:
    """Concurrency -> explanation of the best knobs there."""
    try:
        context = open_study(store, view.name)
    except AutotuneError:
        # a study without a machine has no model; its numbers stand without it
        return {}
    found = {}
    for level in outcome.levels:
        trial = context.trial(str(level.trial))
        try:
            found[level.concurrency] = explain(trial_subject(context, trial, level.concurrency))
        except ValueError:
            continue
    return found


def _level_evidence(trials: Sequence[TrialEvidence], level: LevelOutcome) -> LevelEvidence | None:
    for trial in trials:
        if trial.trial.number == level.trial:
            return next((e for e in trial.levels if e.concurrency == level.concurrency), None)
    return None


def _inert(evidence: LevelEvidence | None) -> dict[str, str]:
    """Knob -> why the model says that it cannot matter."""
    if evidence is None or evidence.predicted is None:
        return {}
    return {item.knob: item.reason for item in evidence.predicted.inert}
