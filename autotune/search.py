"""What to measure next: the screening start, then expected improvement, with leaders replicated.

The design follows reference/speculation.md 2.3: start at the model's best and at the best with each
subsystem switched the other way; then expected improvement of the calibrated model corrected by a
Gaussian process on its residual; now and then what Optuna's TPE asks for, which knows nothing of
the model; every third trial measures a leader again. Only possible, unmeasured knobs are proposed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.columns import Columns, Mask
from autotune.history import History, KnobsResult
from autotune.residual import Belief, believe, encode
from autotune.space import Params, Space
from model.spec import Knobs

Array = NDArray[np.float64]

#: candidates that are ranked; larger spaces are sampled
POOL_LIMIT = 20_000
MAX_SCREENING = 8
#: share of the trials after screening that replicate a leader / follow TPE: one in so many
_REPLICATE_EVERY = 3
_TPE_EVERY = 5
_NUM_LEADERS = 4
#: a restart is worth this much more expected gain when its cost is unknown
_DEFAULT_RESTART_PENALTY = 1.5


@dataclass(frozen=True)
class Proposal:
    """Knobs to measure, and why."""

    knobs: Knobs
    role: Literal["search", "replicate"]
    #: one phrase for the log and the dashboard
    origin: str


@dataclass(frozen=True)
class Forecast:
    """Predicted speed of the candidates at each concurrency; N candidates.

    1 / TPOT is proportional to tok/s, so the same numbers rank both.
    """

    #: concurrency -> median of ln(tok/s), [N]
    log_speed: dict[int, Array]
    #: concurrency -> standard deviation of ln(tok/s), [N]
    log_sd: dict[int, Array]
    #: candidates that fit in memory and keep the constraints, [N] bool
    feasible: NDArray[np.bool_]
    #: predicted GiB of a GPU, the most over the levels, [N]; None where it is not predicted
    memory_gib: Array | None = None
    #: constraints.max_memory_gib
    limit_gib: float | None = None


@dataclass(frozen=True)
class Goal:
    """The metric that decides, and which way."""

    name: str
    maximize: bool

    def log_gain(self, value: float) -> float:
        """ln of the value, turned so that more is better."""
        return math.log(value) if self.maximize else -math.log(value)


class Forecaster(Protocol):
    """Whatever predicts many knobs at once; None where there is no model of the target."""

    def forecast(self, knobs: Sequence[Knobs]) -> Forecast | None: ...

    def why_not(self, knobs: Knobs) -> str | None:
        """Why knobs that a forecast calls infeasible can't run, or None."""
        ...


@dataclass
class Search:
    """Proposes knobs of a space for the levels of a study; every decision is seeded."""

    space: Space
    baseline: Knobs
    levels: tuple[int, ...]
    weights: dict[int, float]
    seed: int
    metric: Goal
    forecaster: Forecaster
    #: Optuna's TPE as a source of raw parameters
    suggest: Callable[[], Params]
    #: group id that knobs need
    group_of: Callable[[Knobs], str]
    pool: list[Knobs] = field(init=False)
    features: Array = field(init=False)
    #: unmeasured candidates that the last proposal left out: memory or constraints
    num_infeasible: int = field(default=0, init=False)
    _why_infeasible: str = field(default="", init=False)
    _columns: Columns = field(init=False)
    _row: dict[str, int] = field(init=False)
    _groups: NDArray[np.str_] = field(init=False)

    def __post_init__(self) -> None:
        pool = self.space.sample(POOL_LIMIT, self.seed)
        if self.space.size > POOL_LIMIT:
            known = {knobs.id for knobs in pool}
            near = self.space.neighbours(self.space.nearest(self.baseline.values()))
            for knobs in near:
                if knobs.id not in known and len(pool) < 2 * POOL_LIMIT:
                    known.add(knobs.id)
                    pool.append(knobs)
        self.pool = pool
        self.features = encode(pool)
        self._columns = Columns(pool)
        self._row = {knobs.id: row for row, knobs in enumerate(pool)}
        self._groups = np.array([self.group_of(knobs) for knobs in pool])

    def propose(
        self,
        history: History,
        open_group: str | None,
        *,
        may_open: bool = True,
        cost_ratio: float | None = None,
    ) -> Proposal | None:
        """The next knobs; None when nothing is left to measure.

        ``open_group`` needs no restart; with ``may_open`` False only its knobs are proposed.
        ``cost_ratio`` is (start + trial) / trial time, how much dearer a restart makes a trial.
        """
        measured = set(history.by_knobs)
        usable = self._usable(measured, open_group, may_open)
        done = history.num_search_trials
        if not usable.any():
            return None
        if done and done % _REPLICATE_EVERY == 0 and self._screened(history):
            leader = self._leader(history, open_group, may_open)
            if leader is not None:
                return Proposal(leader, "replicate", "replicates a leader")
        forecast = self.forecaster.forecast(self.pool)
        if forecast is not None:
            refused = usable & ~forecast.feasible
            self._note_infeasible(forecast, refused)
            usable &= forecast.feasible
            if not usable.any():
                self._note_reason(forecast, refused)
                return None
        screening = self._screening(forecast, usable, history)
        if screening is not None:
            return screening
        if done % _TPE_EVERY == _TPE_EVERY - 1 or (forecast is None and done < MAX_SCREENING):
            proposal = self._from_tpe(usable)
            if proposal is not None:
                return proposal
        return self._by_improvement(history, forecast, usable, open_group, cost_ratio)

    def exhausted(self) -> str:
        """Why nothing more was proposed."""
        if self.num_infeasible == 0:
            return "every possible configuration within the budget is measured"
        return f"nothing is left to measure: {self.num_infeasible} {self._why_infeasible}"

    def _note_infeasible(self, forecast: Forecast, refused: NDArray[np.bool_]) -> None:
        """Remember how many candidates memory rules out, and what would let one in."""
        self.num_infeasible = int(refused.sum())
        if self.num_infeasible == 0:
            return
        least = ""
        if forecast.memory_gib is not None:
            least = f"; the least needs {forecast.memory_gib[refused].min():.2f} GiB of a GPU"
        within = "the GPU's memory"
        if forecast.limit_gib is not None:
            within = f"constraints.max_memory_gib {forecast.limit_gib:g}"
        several = "configuration is" if self.num_infeasible == 1 else "configurations are"
        self._why_infeasible = (
            f"{several} predicted not to fit {within}{least} (`autotune predict` tells each)"
        )

    def _note_reason(self, forecast: Forecast, refused: NDArray[np.bool_]) -> None:
        """Say what else than memory stands in the way, where that is what rules them out."""
        if forecast.memory_gib is None:
            return
        least = int(np.argmin(np.where(refused, forecast.memory_gib, np.inf)))
        reason = self.forecaster.why_not(self.pool[least])
        if reason is None or "GiB per GPU" in reason:
            return
        several = "configuration" if self.num_infeasible == 1 else "configurations"
        self._why_infeasible = (
            f"{several} can't run here, such as {self.pool[least].label()}: {reason} "
            f"(`autotune predict` tells each)"
        )

    def _usable(
        self, measured: Iterable[str], open_group: str | None, may_open: bool
    ) -> NDArray[np.bool_]:
        usable = np.ones(len(self.pool), dtype=bool)
        usable[[self._row[knobs_id] for knobs_id in measured if knobs_id in self._row]] = False
        if not may_open:
            usable &= self._groups == open_group
        return usable

    def _screened(self, history: History) -> bool:
        return history.num_search_trials >= min(MAX_SCREENING, len(self.pool))

    def _screening(
        self, forecast: Forecast | None, usable: NDArray[np.bool_], history: History
    ) -> Proposal | None:
        """The model's best, then the best with each switch the other way, knobs by knobs."""
        done = sum(trial.origin.startswith("screening") for trial in history.of_role("search"))
        if forecast is None or done >= MAX_SCREENING:
            return None
        score = self._mean_log(forecast.log_speed)
        plans = [("screening: the model's best", score)]
        allowed = np.where(forecast.feasible, score, -np.inf)
        top = self.pool[int(np.argmax(allowed))]
        for name, fits in _switches(top, self._columns):
            if fits.any():
                plans.append((f"screening: {name}", np.where(fits, score, -np.inf)))
        finished = {trial.origin for trial in history.of_role("search")}
        for origin, masked in plans[:MAX_SCREENING]:
            if origin in finished:
                continue
            # the best of this kind may be measured already: then this question is answered
            best = int(np.argmax(np.where(forecast.feasible, masked, -np.inf)))
            if math.isfinite(masked[best]) and usable[best]:
                return Proposal(self.pool[best], "search", origin)
        return None

    def _from_tpe(self, usable: NDArray[np.bool_]) -> Proposal | None:
        """The possible, unmeasured knobs most like what TPE asks for."""
        raw = self.suggest()
        wanted = self.space.nearest(raw)
        row = self._row.get(wanted.id)
        if row is not None and usable[row]:
            return Proposal(wanted, "search", "Optuna TPE")
        rows = np.flatnonzero(usable)
        differing = self._columns.num_differing(wanted.values())[rows]
        nearest = self.pool[int(rows[int(np.argmin(differing))])]
        return Proposal(nearest, "search", "Optuna TPE, nearest possible and unmeasured")

    def _by_improvement(
        self,
        history: History,
        forecast: Forecast | None,
        usable: NDArray[np.bool_],
        open_group: str | None,
        cost_ratio: float | None,
    ) -> Proposal:
        """Largest expected improvement, summed over levels, per unit of cost."""
        gain = np.zeros(len(self.pool))
        for level in self.levels:
            belief, best = self._belief(history, forecast, level)
            gain += self.weights[level] * belief.expected_improvement(best)
        penalty = cost_ratio if cost_ratio is not None else _DEFAULT_RESTART_PENALTY
        if open_group is not None and penalty > 1:
            gain = np.where(self._groups == open_group, gain, gain / penalty)
        chosen = int(np.argmax(np.where(usable, gain, -np.inf)))
        return Proposal(self.pool[chosen], "search", "expected improvement")

    def _belief(
        self, history: History, forecast: Forecast | None, level: int
    ) -> tuple[Belief, float]:
        """Belief about every candidate at a level, and the best measured ln(tok/s) there."""
        rows, values, errors = [], [], []
        for knobs_id, result in history.by_knobs.items():
            summary = result.summary(level, self.metric.name)
            if summary is None or knobs_id not in self._row:
                continue
            rows.append(self._row[knobs_id])
            values.append(self.metric.log_gain(summary.median))
            error = summary.rel_half_width / 1.96
            errors.append(error if math.isfinite(error) else 0.03)
        belief = believe(
            self.features,
            rows,
            np.asarray(values),
            np.asarray(errors),
            None if forecast is None else forecast.log_speed[level],
            None if forecast is None else forecast.log_sd[level],
        )
        best = max(values, default=-math.inf)
        return belief, best if math.isfinite(best) else float(belief.mean.min())

    def _leader(self, history: History, open_group: str | None, may_open: bool) -> Knobs | None:
        """Of the best measured knobs, the one with the fewest trials so far."""
        found = [
            result
            for result in history.by_knobs.values()
            if result.complete(self.levels)
            and result.knobs != self.baseline
            and (may_open or self.group_of(result.knobs) == open_group)
        ]
        leaders = sorted(found, key=self._measured_score, reverse=True)[:_NUM_LEADERS]
        if not leaders:
            return None
        return min(leaders, key=lambda result: len(result.trials)).knobs

    def _measured_score(self, result: KnobsResult) -> float:
        total = 0.0
        for level in self.levels:
            summary = result.summary(level, self.metric.name)
            assert summary is not None
            total += self.weights[level] * self.metric.log_gain(summary.median)
        return total

    def _mean_log(self, log_speed: dict[int, Array]) -> Array:
        total = np.zeros(len(self.pool))
        for level in self.levels:
            total += self.weights[level] * log_speed[level]
        return total


def _switches(top: Knobs, columns: Columns) -> list[tuple[str, Mask]]:
    """Each subsystem of ``top`` turned the other way: a name and which candidates do it."""
    found: list[tuple[str, Mask]] = []
    speculative = ~columns.equal("speculation.method", "off")
    if top.method != "off":
        chain = top.topk == 1
        chains = columns.equal("speculation.topk", 1)
        found.append(("a tree" if chain else "a chain", speculative & (chains != chain)))
        for delta in (1, -1):
            steps = columns.equal("speculation.steps", top.steps + delta)
            found.append((f"steps {delta:+d}", speculative & steps))
    else:
        found.append(("speculation on", speculative))
    carrier = columns.equal("collectives.backend", top.collectives_backend)
    found.append(("another all-reduce", ~carrier))
    for name, value in top.values().items():
        if isinstance(value, bool):
            found.append((f"{name} {str(not value).lower()}", ~columns.equal(name, value)))
    for name, value in top.extra:
        if not isinstance(value, bool):
            found.append((f"another {name}", ~columns.equal(name, value)))
    nccl = [name for name in columns.names if name.startswith("nccl.")]
    idle = np.ones(len(carrier), dtype=bool)
    for name in nccl:
        idle &= columns.equal_any(name, (None, "auto"))
    if any(top.values().get(name) not in (None, "auto") for name in nccl):
        found.append(("NCCL left to itself", idle))
    else:
        found.append(("an NCCL setting", ~idle))
    return found
