"""What a user may name as A and B of a comparison, resolved to knobs by concurrency."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.explain.config_subject import best_study_name, launch_knobs
from autotune.explain.subject import is_file
from autotune.history import History
from autotune.outcome import conclude
from autotune.schemas import Study
from autotune.store.store import Store
from autotune.store.views import StudyView, TrialView
from autotune.study_file import parse_study
from autotune.yaml_source import read_yaml
from model.spec import Knobs

#: words for knobs of a study
_WORDS = ("baseline", "best")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison."""

    #: as the user named it
    name: str
    #: concurrency -> knobs measured there
    knobs: Mapping[int, Knobs]

    def label(self) -> str:
        """The name with what it stands for."""
        labels = list(dict.fromkeys(knobs.label() for knobs in self.knobs.values()))
        return f"{self.name}: {' | '.join(labels)}"


def home_study(store: Store, name: str | None, whats: tuple[str, str]) -> StudyView:
    """The study whose backend and workload measure: the one asked for, named by a file, or newest.

    Raises ``UserError`` when there is none.
    """
    if name is not None:
        return store.study(name)
    for what in whats:
        if is_file(what):
            data = read_yaml(_existing(what)).data
            named = best_study_name(data)
            if named is None and isinstance(data, dict) and "space" in data:
                named = str(data.get("name"))
            if named is not None and store.find_study(named) is not None:
                return store.study(named)
    views = store.studies()
    if not views:
        raise UserError("the database holds no study to compare in; start one, or give --database")
    return views[-1]


def resolve_arm(store: Store, view: StudyView, study: Study, what: str) -> Arm:
    """Knobs of ``what`` at every level of the study.

    ``what``: trial number, knobs id (or its beginning), ``baseline``, ``best``, a best-config YAML,
    a launch config, or a study file whose study is in the database. Raises ``UserError``.
    """
    levels = study.workload.concurrency
    if is_file(what):
        return Arm(what, _of_file(store, Path(_existing(what)), levels))
    history = History.read(store, view.id)
    if what == "best":
        return Arm(what, _best(store, view, study))
    if what == "baseline":
        if history.baseline is None:
            raise UserError(f"study {view.name} has measured no baseline yet")
        return Arm(what, dict.fromkeys(levels, history.baseline.knobs))
    trial = _trial(history, view.name, what)
    return Arm(f"trial {trial.number}", dict.fromkeys(levels, trial.knobs))


def _trial(history: History, study: str, what: str) -> TrialView:
    if what.isdigit() and len(what) < 12:
        for trial in history.trials:
            if trial.number == int(what):
                return trial
    matches = {t.knobs.id: t for t in reversed(history.trials) if t.knobs.id.startswith(what)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if len(matches) > 1:
        raise UserError(f"knobs id {what!r} is ambiguous: {', '.join(sorted(matches))}")
    last = f"trials 0 to {history.trials[-1].number}" if history.trials else "no trials yet"
    raise UserError(
        f"{what!r} is no trial, knobs id, file or one of {', '.join(_WORDS)}; study {study} has "
        f"{last}"
    )


def _best(store: Store, view: StudyView, study: Study) -> dict[int, Knobs]:
    outcome = conclude(store, view.id, study, "")
    found = {level.concurrency: level.knobs for level in outcome.levels}
    if not found:
        raise UserError(f"study {view.name} has no measured best configuration yet")
    return found


def _of_file(store: Store, path: Path, levels: tuple[int, ...]) -> dict[int, Knobs]:
    data = read_yaml(path).data
    if isinstance(data, dict) and "space" in data and "budget" in data:
        view = store.find_study(str(data.get("name")))
        if view is None:
            raise UserError(
                f"{path}: its study {data.get('name')!r} is not in the database; run it first, or "
                f"name a best-config YAML or a trial"
            )
        own = parse_study(view.text, view.label, view.base_dir, view.name).study
        return _best(store, view, own)
    schedule = launch_knobs(data, path)
    found = {}
    for level in levels:
        # an entry serves every load up to its own
        fitting = [limit for limit in schedule if limit >= level]
        if fitting:
            found[level] = schedule[min(fitting)]
    if not found:
        raise UserError(
            f"{path}: serves up to {max(schedule)} requests at once, and the study's levels are "
            f"{', '.join(map(str, levels))}"
        )
    return found


def _existing(what: str) -> Path:
    path = Path(what)
    if not path.is_file():
        raise UserError(f"no file {what}; give a trial, a knobs id, {', '.join(_WORDS)} or a YAML")
    return path
