"""Puts an explanation together: everything that ``autotune explain`` shows, as values."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.explain.acceptance import AcceptanceReport, acceptance_report
from autotune.explain.importance import Importance, importances
from autotune.explain.inert import inert_knobs
from autotune.explain.levers import Headroom, Lever, headroom, levers
from autotune.explain.plans import NcclBound, nccl_bound
from autotune.explain.subject import StudyContext, Subject, pooled_counts
from autotune.explain.terms import TermRow, term_rows
from model.draws import interval
from model.spec import Inert, Interval, Knobs, Prediction, Scalar, Workload
from model.whatif import break_even, speedups


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakeven:
    """What speculation needs to pay here; times in ms, measured values where there are any."""

    plain_step_ms: float
    cycle_ms: float
    verify_ms: float
    accept_length: float
    accept_length_needed: float
    #: the verify may take this long at this accept length; negative: never
    verify_ms_allowed: float
    #: "measured" or "predicted", of the plain step and of the cycle
    plain_source: str
    cycle_source: str
    #: by the medians
    pays: bool
    #: tokens/s over plain decoding's, with what both predictions share cancelled
    margin: Interval
    #: chance that it pays, by the model and what was measured
    probability: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything about one subject."""

    subject: Subject
    prediction: Prediction
    #: "before it was measured" or "now"
    predicted_when: str
    rows: tuple[TermRow, ...]
    acceptance: AcceptanceReport | None
    breakeven: Breakeven | None
    nccl: NcclBound | None
    helping: tuple[Lever, ...]
    not_helping: tuple[Lever, ...]
    headroom: tuple[Headroom, ...]
    inert: tuple[Inert, ...]
    importances: tuple[Importance, ...]
    notes: tuple[str, ...]

    @property
    def disagreements(self) -> tuple[TermRow, ...]:
        """Rows where measurement and prediction differ beyond both uncertainties."""
        return tuple(row for row in self.rows if row.disagreement is not None)

    def row(self, name: str) -> TermRow | None:
        """The row of a term."""
        return next((row for row in self.rows if row.name == name), None)


def explain(subject: Subject) -> Explanation:
    """Explain a subject; pure but for reads of the study's own measurements.

    Raises ``ValueError`` where the model cannot predict the knobs.
    """
    predictor, knobs, workload = subject.predictor, subject.knobs, subject.workload
    now = predictor.predict(knobs, workload)
    prediction = subject.stored or now
    rows = term_rows(subject.repeats, prediction)
    context = subject.context
    space = None if context is None else _space(context)
    by_knobs = {} if context is None else measured_speeds(context, workload.concurrency)
    term = ("verify" if knobs.method != "off" else "decode") + ".allreduce"
    bound = nccl_bound(
        predictor,
        knobs,
        workload,
        now_ms=prediction.terms_ms[term],
        measured_cycle_ms=_measured(rows, "cycle"),
        measured_ms=_measured(rows, term),
    )
    best = None if bound is None or bound.best.id == knobs.id else bound.best
    own = by_knobs.get(knobs.id)
    helping, not_helping = levers(
        predictor,
        knobs,
        workload,
        best,
        {k: v[:2] for k, v in by_knobs.items()},
        None if own is None else own[1],
        space,
    )
    inert = inert_knobs(predictor, knobs, workload, space)
    return Explanation(
        subject=subject,
        prediction=prediction,
        predicted_when="now" if subject.stored is None else "before it was measured",
        rows=rows,
        acceptance=_acceptance(subject),
        breakeven=_breakeven(subject, rows),
        nccl=bound,
        helping=helping,
        not_helping=not_helping,
        headroom=headroom(rows, on_gpu=predictor.machine.gpu is not None),
        inert=inert,
        importances=()
        if context is None or space is None
        else _importances(context, by_knobs, inert, workload, space),
        notes=_notes(subject, prediction),
    )


def _space(context: StudyContext) -> dict[str, tuple[Scalar | None, ...]]:
    return {name: tuple(values) for name, values in context.study.space.items()}


def measured_speeds(context: StudyContext, concurrency: int) -> dict[str, tuple[int, float, Knobs]]:
    """knobs id -> (trial, median tokens/s, knobs) of what a study measured at a level."""
    # a study file is explained without the database
    from sqlalchemy import select

    from autotune.store.tables import MEASUREMENT

    query = select(
        MEASUREMENT.c.trial_id, MEASUREMENT.c.knobs_id, MEASUREMENT.c.tokens_per_s
    ).where(
        MEASUREMENT.c.study_id == context.view.id,
        MEASUREMENT.c.concurrency == concurrency,
        MEASUREMENT.c.repeat >= 0,
        MEASUREMENT.c.failure_kind.is_(None),
        MEASUREMENT.c.tokens_per_s.is_not(None),
    )
    trials = {trial.id: trial for trial in context.trials if trial.state != "failed"}
    values: dict[str, list[float]] = {}
    first: dict[str, tuple[int, Knobs]] = {}
    with context.store.reading() as session:
        # the stored id of the knobs: a hash a trial would take longer than all else here
        for trial_id, knobs_id, speed in session.execute(query):
            trial = trials.get(trial_id)
            if trial is None or speed is None:
                continue
            values.setdefault(knobs_id, []).append(speed)
            first.setdefault(knobs_id, (trial.number, trial.knobs))
    return {
        knobs_id: (first[knobs_id][0], statistics.median(speeds), first[knobs_id][1])
        for knobs_id, speeds in values.items()
    }


def _importances(
    context: StudyContext,
    by_knobs: Mapping[str, tuple[int, float, Knobs]],
    inert: Sequence[Inert],
    workload: Workload,
    space: Mapping[str, Sequence[Scalar | None]],
) -> tuple[Importance, ...]:
    floors = context.store.noise_floors(context.view.id)
    floor = floors.get(workload.concurrency)
    return importances(
        [(knobs, speed) for _, speed, knobs in by_knobs.values()],
        {item.knob: item.reason for item in inert},
        0.0 if floor is None else floor.rel_floor,
        space,
    )


def _acceptance(subject: Subject) -> AcceptanceReport | None:
    knobs = subject.knobs
    if knobs.method == "off":
        return None
    counts = [r.acceptance for r in subject.repeats if r.acceptance is not None]
    counts = [one for one in counts if one.num_verifies > 0]
    by_depth: Sequence[float] = ()
    verifies = 0
    if counts:
        # greedy repeats of the same prompts accept the same tokens: one of them counts
        tree = (knobs.steps, knobs.topk, knobs.draft_tokens)
        alike = len({one.accepted_by_depth for one in counts}) == 1
        pooled = pooled_counts(tree, counts[:1] if alike else counts)
        by_depth, verifies = pooled.accepted_by_depth, pooled.num_verifies
    return acceptance_report(knobs, by_depth, verifies, subject.prior, subject.predictor.acceptance)


def _breakeven(subject: Subject, rows: Sequence[TermRow]) -> Breakeven | None:
    knobs, workload = subject.knobs, subject.workload
    if knobs.method == "off":
        return None
    predicted = break_even(subject.predictor, knobs, workload)
    steps = [r.cycle_ms for r in subject.baseline_repeats if r.cycle_ms is not None]
    plain_ms = statistics.median(steps) if steps else predicted.plain_step_ms
    cycle = _measured(rows, "cycle")
    length = _measured(rows, "accept length")
    cycle_ms = cycle if cycle is not None else predicted.cycle_ms
    accept = length if length is not None else predicted.accept_length.median
    parts = [
        row.measured.median if row.measured is not None else row.predicted.median
        for row in rows
        if row.name.startswith("verify.") and (row.measured or row.predicted) and row.predicted
    ]
    verify = sum(parts)
    needed = cycle_ms / plain_ms
    drawn = speedups(
        subject.predictor,
        knobs,
        workload,
        plain_step_ms=plain_ms if steps else None,
        cycle_ms=cycle,
        accept_length=length,
    )
    return Breakeven(
        plain_step_ms=plain_ms,
        cycle_ms=cycle_ms,
        verify_ms=verify,
        accept_length=accept,
        accept_length_needed=needed,
        verify_ms_allowed=accept * plain_ms - (cycle_ms - verify),
        plain_source="measured" if steps else "predicted",
        cycle_source="measured" if cycle is not None else "predicted",
        pays=accept > needed,
        margin=interval(drawn),
        probability=float((drawn > 1.0).mean()),
    )


def _notes(subject: Subject, prediction: Prediction) -> tuple[str, ...]:
    notes = list(subject.notes)
    if not subject.repeats:
        notes.append("nothing measured here: every time is a prediction")
    elif len(subject.repeats) == 1:
        notes.append("one repeat only: no interval, so no disagreement can be claimed")
    if subject.repeats and not any(r.terms_ms for r in subject.repeats):
        notes.append("the backend told no terms: only cycle, accept length and speed are measured")
    checks = {r.output_check for r in subject.repeats}
    if "incorrect" in checks:
        notes.append("the output of these knobs is INCORRECT: their speed means nothing")
    elif checks == {"unverified"}:
        notes.append("the output was never verified against the baseline's")
    if not prediction.feasible:
        notes.append(f"the model says it does not fit: {prediction.infeasible_reason}")
    return tuple(notes)


def _measured(rows: Sequence[TermRow], name: str) -> float | None:
    for row in rows:
        if row.name == name and row.measured is not None:
            return row.measured.median
    return None


def _value(rows: Sequence[TermRow], name: str) -> float | None:
    for row in rows:
        if row.name == name:
            if row.measured is not None:
                return row.measured.median
            return None if row.predicted is None else row.predicted.median
    return None
