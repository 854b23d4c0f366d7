"""Optuna's side of a study: its tables in the same database, one Optuna trial per trial of ours.

The dashboard, importances and TPE read what stands here. Parameters are flat (a knob that is
inactive has its canonical value), so that no conditional space is needed.
"""

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autotune.errors import UserError
from autotune.schemas import Study
from autotune.space import Space
from autotune.store.database import BUSY_TIMEOUT_S, clear_errors, explain, shown
from model.spec import Knobs, Scalar

optuna.logging.set_verbosity(optuna.logging.WARNING)

_OPEN_ATTEMPTS = 5


class Ledger:
    """The Optuna study that mirrors one study of ours."""

    def __init__(self, url: str, study: Study, space: Space, baseline: Knobs) -> None:
        """Open or create; safe when several workers do it at once."""
        self._storage = _open_storage(url)
        self.distributions = _distributions(space, baseline)
        self.objectives = objective_names(study)
        self._study = optuna.create_study(
            study_name=study.name,
            storage=self._storage,
            directions=[direction for _, direction in self.objectives],
            load_if_exists=True,
        )
        self._seed = study.seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._study.set_metric_names([name for name, _ in self.objectives])

    def begin(self, knobs: Knobs, attributes: Mapping[str, Any]) -> int:
        """A running Optuna trial for ``knobs``; its number.

        Knobs outside the space (``contains``) have no parameters there; such a trial must be
        finished without values, or Optuna would find no common space any more.
        """
        inside = self.contains(knobs)
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=self.params(knobs) if inside else {},
            distributions=self.distributions if inside else {},
            user_attrs=dict(attributes),
        )
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        trial_id = self._storage.create_new_trial(study_id, template_trial=template)
        return int(self._storage.get_trial(trial_id).number)

    def finish(self, number: int, values: Sequence[float] | None, **attributes: Any) -> None:
        """Give the objectives of a trial, or mark it failed (None); a finished trial is left."""
        trial = self._trial(number)
        if trial is None or trial.state.is_finished():
            return
        for key, value in attributes.items():
            self._storage.set_trial_user_attr(trial._trial_id, key, value)
        if values is None:
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, list(values))

    def suggest(self) -> dict[str, Scalar | None]:
        """What Optuna's TPE would try next; may be impossible or measured already.

        Asked of a copy in memory: asking the stored study would leave a trial behind.
        """
        trials = self._study.get_trials(deepcopy=False)
        scratch = optuna.create_study(
            directions=[direction for _, direction in self.objectives],
            sampler=optuna.samplers.TPESampler(
                seed=self._seed + len(trials),
                multivariate=True,
                constant_liar=True,
                n_startup_trials=4,
            ),
        )
        scratch.add_trials([trial for trial in trials if trial.state != TrialState.WAITING])
        return dict(scratch.ask(self.distributions).params)

    def params(self, knobs: Knobs) -> dict[str, Scalar | None]:
        """Optuna's parameters of ``knobs``."""
        values = knobs.values()
        return {name: values.get(name) for name in self.distributions}

    def contains(self, knobs: Knobs) -> bool:
        """Whether Optuna's space of the study holds ``knobs``."""
        for name, value in self.params(knobs).items():
            distribution = self.distributions[name]
            if isinstance(distribution, CategoricalDistribution):
                if not any(type(c) is type(value) and c == value for c in distribution.choices):
                    return False
            elif type(value) is not int or not distribution._contains(value):
                return False
        return True

    def running(self) -> dict[int, int]:
        """Running trials: number -> id of the worker that began it."""
        return {
            trial.number: int(trial.user_attrs.get("worker", -1))
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        }

    def _trial(self, number: int) -> optuna.trial.FrozenTrial | None:
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number == number:
                return trial
        return None


def objective_names(study: Study) -> list[tuple[str, StudyDirection]]:
    """Names and directions of the objectives as Optuna sees them."""
    directions = {"maximize": StudyDirection.MAXIMIZE, "minimize": StudyDirection.MINIMIZE}
    if study.objective.weights is not None:
        return [("weighted gain over baseline", StudyDirection.MAXIMIZE)]
    return [
        (f"{metric} at concurrency {level}", directions[direction])
        for metric, direction in study.objective.metrics
        for level in study.workload.concurrency
    ]


def _distributions(space: Space, baseline: Knobs) -> dict[str, BaseDistribution]:
    """A range per knob of integers, else its canonical values (the baseline's included)."""
    found: dict[str, BaseDistribution] = {}
    base = baseline.values()
    for name, choices in space.choices().items():
        values = list(choices)
        own = base.get(name)
        if not any(type(own) is type(value) and own == value for value in values):
            values.insert(0, own)
        numbers = [value for value in values if type(value) is int]
        if len(numbers) == len(values):
            found[name] = IntDistribution(min(numbers), max(numbers))
        else:
            found[name] = CategoricalDistribution(values)
    return found


@contextlib.contextmanager
def ledger_errors(url: URL) -> Iterator[None]:
    """Turn what the database does to Optuna into one line: it wraps some of a driver's errors."""
    try:
        with clear_errors(url):
            yield
    except OptunaError as error:
        cause = error.__cause__ or error.__context__
        if not isinstance(cause, DBAPIError):
            raise
        raise explain(cause.orig or cause, url) from error


def forget(url: str, name: str) -> None:
    """Remove the Optuna study ``name`` where there is one."""
    with contextlib.suppress(KeyError):
        optuna.delete_study(study_name=name, storage=_open_storage(url))


def _open_storage(url: str) -> RDBStorage:
    """Optuna's storage; two workers that create its tables at once disturb each other, so retry."""
    options: dict[str, Any] = {"pool_pre_ping": True}
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        options = {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
    for attempt in range(_OPEN_ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except RuntimeError as error:
            raise UserError(
                f"database {shown(parsed)}: its Optuna tables are of another Optuna than the "
                f"{optuna.__version__} installed here; install the one that wrote them, or use "
                f"another --database"
            ) from error
        except SQLAlchemyError as error:
            if attempt == _OPEN_ATTEMPTS - 1:
                raise explain(getattr(error, "orig", None) or error, parsed) from error
            time.sleep(0.5 * (attempt + 1))
    raise AssertionError("unreachable")
