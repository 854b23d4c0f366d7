"""Puts a diff together: what differs, what it is worth, what was measured, the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.diff.differences import Difference, Gap, differences, gaps
from autotune.diff.measured import Measured, measured
from autotune.diff.run import Run
from autotune.diff.verdict import Verdict, judge
from autotune.diff.worth import Model, Worth, joint, model_of, price
from autotune.digits import extent, significant
from autotune.explain.terms import disagreement
from autotune.statistics import Summary, summarise
from model.predictor import Predictor
from model.spec import Interval, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
    """One side's step (or cycle) beside its prediction, ms."""

    side: str
    measured: Summary
    predicted: Interval

    @property
    def odd(self) -> bool:
        """Whether the measurement leaves the predicted interval."""
        return disagreement(self.measured, self.predicted) is not None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything about two runs."""

    a: Run
    b: Run
    differences: tuple[Difference, ...]
    gaps: tuple[Gap, ...]
    worths: tuple[Worth, ...]
    measured: Measured | None
    why_not_measured: str
    #: tokens/s of B over A predicted from all settings and the load; None without a model
    predicted: Interval | None
    steps: tuple[StepCheck, ...]
    model: Model | None
    why_no_model: str
    verdict: Verdict


def compare(
    a: Run, b: Run, *, predictor: Predictor | None = None, concurrency: int | None = None
) -> Comparison:
    """Compare two runs at one load. ``predictor``: for runs that bring no model."""
    found, why = measured(a, b, concurrency)
    level = found.concurrency if found is not None else concurrency
    missing = gaps(a, b)
    differing = differences(a, b)
    model, why_no_model = model_of(a, b, predictor, level, _defaults(predictor, a, b))
    worths = price(differing, model, why_no_model)
    predicted: Interval | None = None
    steps: tuple[StepCheck, ...] = ()
    if model is not None:
        model = replace(model, workload_b=replace(model.workload_b, concurrency=_level(model)))
        predicted, _ = joint(model)
        steps = _steps(a, b, model, level)
    return Comparison(
        a=a,
        b=b,
        differences=differing,
        gaps=missing,
        worths=worths,
        measured=found,
        why_not_measured=why,
        predicted=predicted,
        steps=steps,
        model=model,
        why_no_model=why_no_model,
        verdict=judge(a, b, found, why, worths, predicted, missing, _odd(steps)),
    )


def _steps(a: Run, b: Run, model: Model, level: int | None) -> tuple[StepCheck, ...]:
    found = []
    for side, run, knobs, load in (
        ("A", a, model.knobs_a, model.workload_a),
        ("B", b, model.knobs_b, model.workload_b),
    ):
        series = run.at(level) or run.at(None)
        if series is not None and series.cycle_ms:
            found.append(
                StepCheck(
                    side=side,
                    measured=summarise(series.cycle_ms),
                    predicted=model.predictor.predict(knobs, load).cycle_ms,
                )
            )
    return tuple(found)


def _odd(steps: tuple[StepCheck, ...]) -> str:
    """Which side's step is not what the model expects of its settings, one sentence or nothing."""
    odd = [check for check in steps if check.odd]
    if len(odd) != 1 or len(steps) != 2:
        return ""
    (check,) = odd
    side = "longer" if check.measured.median > check.predicted.median else "shorter"
    return (
        f"The odd side is {check.side}: its step is {side} than its settings can explain, "
        f"{significant(check.measured.median)} ms against "
        f"{extent(check.predicted.low, check.predicted.high)} predicted."
    )


def _level(model: Model) -> int:
    """Both sides are compared at one load."""
    return model.workload_a.concurrency


def _defaults(predictor: Predictor | None, a: Run, b: Run) -> Mapping[str, Scalar | None]:
    """Knobs that no server log names, as a server has them."""
    source = predictor
    for run in (a, b):
        if source is None and run.context is not None:
            source = run.context.predictor
    on_gpu = source is None or source.machine.gpu is not None
    return {"parallel.tp": 1, "collectives.backend": "nccl" if on_gpu else "gloo"}
