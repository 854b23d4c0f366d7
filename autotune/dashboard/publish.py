"""Writes notes and plots of our studies into Optuna's attributes, where the dashboard looks."""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
import plotly.graph_objects as go
from optuna.storages import RDBStorage
from optuna_dashboard import get_note, save_note, save_plotly_graph_object

from autotune.dashboard.evidence import StudyEvidence, read_evidence
from autotune.dashboard.figures import figures
from autotune.dashboard.notes import merged, study_note, trial_note
from autotune.errors import AutotuneError
from autotune.outcome import Outcome, conclude
from autotune.store.store import Store
from autotune.store.views import StudyView
from autotune.study_file import parse_study

#: importances say nothing about fewer trials
_LEAST_FOR_IMPORTANCES = 4


@dataclass(frozen=True, slots=True)
class _NoteTarget:
    """What ``save_note`` needs to know of a trial; a real ``Trial`` would be one that runs."""

    storage: RDBStorage
    study: optuna.Study
    _trial_id: int


@dataclass
class Publisher:
    """Keeps the dashboard's notes and plots of some studies up to date."""

    store: Store
    storage: RDBStorage
    #: figure or state that was written last, by study and id
    _written: dict[tuple[int, str], str] = field(default_factory=dict)

    def publish(self, view: StudyView) -> int:
        """Write what changed since the last time; the number of notes and plots written.

        Raises ``AutotuneError`` when Optuna's side of the study is missing.
        """
        try:
            study = optuna.load_study(study_name=view.name, storage=self.storage)
        except KeyError:
            raise AutotuneError(
                f"study {view.name!r} has no Optuna trials yet; start it (`autotune study resume "
                f"{view.name}`), then open the dashboard"
            ) from None
        evidence = read_evidence(self.store, view)
        written = self._notes(study, evidence)
        for name, figure in self._figures(study, evidence):
            digest = hashlib.sha256(str(figure.to_json()).encode()).hexdigest()
            if self._written.get((view.id, name)) != digest:
                save_plotly_graph_object(study, figure, graph_object_id=name)
                self._written[view.id, name] = digest
                written += 1
        return written

    def _notes(self, study: optuna.Study, evidence: StudyEvidence) -> int:
        ids = {trial.number: trial._trial_id for trial in study.get_trials(deepcopy=False)}
        written = 0
        for trial in evidence.trials:
            trial_id = ids.get(trial.trial.number)
            if trial_id is None:
                continue
            target: Any = _NoteTarget(self.storage, study, trial_id)
            written += _save(target, trial_note(trial, evidence))
        return written + _save(study, study_note(evidence, self._outcome(evidence)))

    def _outcome(self, evidence: StudyEvidence) -> Outcome | None:
        view = evidence.view
        # a study file of another version must not hide its notes
        with contextlib.suppress(AutotuneError):
            loaded = parse_study(view.text, view.label, view.base_dir, view.name)
            return conclude(self.store, view.id, loaded.study, f"study is {view.state}")
        return None

    def _figures(
        self, study: optuna.Study, evidence: StudyEvidence
    ) -> Iterator[tuple[str, go.Figure]]:
        yield from figures(evidence).items()
        importances = importance_figure(study)
        if importances is not None:
            yield "5.knob-importances", importances


def importance_figure(study: optuna.Study) -> go.Figure | None:
    """Share of the first objective's variance that each knob explains (PED-ANOVA).

    None with too few trials, or when no knob varied.
    """
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len({tuple(sorted(map(str, t.params.items()))) for t in complete}) < _LEAST_FOR_IMPORTANCES:
        return None
    maximize = study.directions[0] == optuna.study.StudyDirection.MAXIMIZE
    try:
        with warnings.catch_warnings():
            # it tells us to turn the sign, which we do
            warnings.simplefilter("ignore", UserWarning)
            shares = optuna.importance.get_param_importances(
                study,
                evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                target=lambda trial: -trial.values[0] if maximize else trial.values[0],
            )
    except (ValueError, RuntimeError):
        # all values alike: nothing to explain
        return None
    named = sorted(shares.items(), key=lambda item: item[1])
    if not named:
        return None
    names = study.metric_names or ["objective"]
    figure = go.Figure(go.Bar(x=[v for _, v in named], y=[n for n, _ in named], orientation="h"))
    figure.update_traces(marker_color="#0072B2", hovertemplate="%{y}: %{x:.2f}")
    figure.update_layout(
        title={"text": f"Knob importances for {names[0]} ({len(complete)} trials, PED-ANOVA)"},
        xaxis={"title": {"text": "share of explained variance among good trials"}},
        template="plotly_white",
        height=max(320, 80 + 28 * len(named)),
        margin={"l": 180},
    )
    return figure


def _save(target: Any, note: str) -> int:
    """Store a note unless it is there already; words of the reader's own stay."""
    text = merged(note, get_note(target))
    if text is None:
        return 0
    save_note(target, text)
    return 1
